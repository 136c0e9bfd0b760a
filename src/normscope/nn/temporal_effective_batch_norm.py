"""Temporal effective batch norm (TEBN): batch norm over all time steps, each step then scaled by a learned factor.

    y[t] = scale[t] * (weight * (x[t] - mean) / sqrt(var + eps) + bias)

Mean and biased variance of each channel run over time steps, samples and positions, so that in training no step can be
computed before the last one is known; running statistics follow as in batch norm, and evaluation normalizes by them.
The factors start at 1. Duan et al. 2022, Temporal Effective Batch Normalization in Spiking Neural Networks, NeurIPS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normscope.nn.timed_batch_norm import TimedBatchNorm
from normscope.spec import NormSpec


class _TemporalEffectiveBatchNorm(TimedBatchNorm):
    """What the three share; they differ in the number of axes they take."""

    _family = "temporal_effective_batch_norm"
    steps: int
    scale: Tensor

    def __init__(
        self,
        steps: int,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        layout: str = "t b c ...",
        bias: bool = True,
        float32_statistics: bool = True,
    ) -> None:
        shared: dict[str, Any] = {
            "layout": layout,
            "steps": steps,
            "bias": bias,
            "float32_statistics": float32_statistics,
        }
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **shared)
        self.scale = nn.Parameter(torch.empty(self.steps, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale and weight 1, bias 0; running statistics as new."""
        super().reset_parameters()
        if "scale" in self._parameters:
            nn.init.ones_(self.scale)

    def by_step(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of every step and channel, (T, C), as the specification has them."""
        scale = self.scale[:, None]
        weight = scale.expand(-1, self.num_features) if self.weight is None else scale * self.weight
        return weight, None if self.bias is None else scale * self.bias

    def _computed(self) -> tuple[NormSpec, Tensor | None, Tensor | None]:
        return self._spec(True), *self.by_step()

    def _numbers(self) -> tuple[float, float | None, bool, bool, bool]:
        eps, momentum, _, bias, running = super()._numbers()
        return eps, momentum, True, bias, running

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        said = self._said(track_running_stats=self.track_running_stats, layout=self.layout)
        return f"{self.steps}, {said}"


class TemporalEffectiveBatchNorm1d(_TemporalEffectiveBatchNorm):
    """TEBN of inputs (T, N, C) or (T, N, C, L).

    Arguments: steps, the number T; num_features; eps=1e-5; momentum=0.1 (None: the plain average of all batches);
    affine=True; track_running_stats=True; device, dtype; and by name
        layout: ``"t b c ..."``, ``"b t c ..."``, or ``"(t b) c ..."`` for (T * N, C, ...).
        bias=True; float32_statistics=True: running statistics stay float32 in a half module.
    Shapes: scale (T,), weight, bias and statistics (C,). Input and output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where the input has another number of axes, channels or steps, where training sees
    one value a channel, and where an argument is none of the above.

    >>> import torch
    >>> norm = TemporalEffectiveBatchNorm1d(2, 1)
    >>> with torch.no_grad():
    ...     norm.scale[1] = 10.0
    >>> norm(torch.tensor([[[1.0]], [[3.0]]])).flatten().round(decimals=3)
    tensor([-1., 10.], grad_fn=...)
    """

    _positions = (0, 1)


class TemporalEffectiveBatchNorm2d(_TemporalEffectiveBatchNorm):
    """TEBN of inputs (T, N, C, H, W).

    Arguments, shapes and errors as `TemporalEffectiveBatchNorm1d`.

    >>> norm = TemporalEffectiveBatchNorm2d(4, 3)
    >>> norm.spec.stats, norm.spec.weight
    ('t b c ... -> c', 't c')
    """

    _positions = (2, 2)


class TemporalEffectiveBatchNorm3d(_TemporalEffectiveBatchNorm):
    """TEBN of inputs (T, N, C, D, H, W).

    Arguments, shapes and errors as `TemporalEffectiveBatchNorm1d`.

    >>> [name for name, _ in TemporalEffectiveBatchNorm3d(4, 3).named_parameters()]
    ['weight', 'bias', 'scale']
    """

    _positions = (3, 3)
