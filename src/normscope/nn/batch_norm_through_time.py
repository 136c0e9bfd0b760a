"""Batch norm through time (BNTT): every time step has statistics, running statistics and a gain of its own.

    y[t] = weight[t] * (x[t] - mean[t]) / sqrt(var[t] + eps)

mean[t] and the biased var[t] run over the samples and positions of step t; running statistics follow step by step as
in batch norm, and evaluation normalizes by them. There is no bias, and eps is 1e-4, as in the paper. No step needs
another, so training and inference go step by step. Kim and Panda 2021, https://arxiv.org/abs/2010.01729.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.nn.remembered import remembered
from normscope.nn.timed_batch_norm import TimedBatchNorm
from normscope.nn.tracked import by_batch_or_stored
from normscope.spec import NormSpec, families


class _BatchNormThroughTime(TimedBatchNorm):
    """What the three share; they differ in the number of axes they take."""

    _family = "batch_norm_through_time"
    steps: int

    def __init__(
        self,
        steps: int,
        num_features: int,
        eps: float = 1e-4,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        layout: str = "t b c ...",
        bias: bool = False,
        float32_statistics: bool = True,
    ) -> None:
        shared: dict[str, Any] = {
            "layout": layout,
            "steps": steps,
            "bias": bias,
            "float32_statistics": float32_statistics,
        }
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **shared)
        for name in ("weight", "bias", "running_mean", "running_var"):
            held = getattr(self, name)
            if held is not None:
                empty = torch.empty(self.steps, num_features, device=held.device, dtype=held.dtype)
                setattr(self, name, nn.Parameter(empty) if isinstance(held, nn.Parameter) else empty)
        self.reset_parameters()

    def step(self, input: Tensor, number: int) -> Tensor:
        """Time step ``number``, counted from 0, alone: (N, C, ...). In training its statistics follow.

        The counter of batches moves with step 0.
        """
        if type(number) is not int or not 0 <= number < self.steps:
            raise BadInput(
                f"{type(self).__name__} has {self.steps} time steps, counted from 0; got number={number!r}. Start "
                "again at 0 with every sequence."
            )
        counter = self.num_batches_tracked
        one = _OneStep(self, number)
        y = by_batch_or_stored(one, input, self._one_step_spec(), one.weight, one.bias, None, "zero")
        if number == 0 and counter is not None and self.training and self.track_running_stats:
            counter.add_(1)
        return y

    def _one_step_spec(self) -> NormSpec:
        low, high = self._positions
        return _step_spec(*self._numbers(), (2 + low, None if high is None else 2 + high))

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        said = self._said(
            track_running_stats=self.track_running_stats, bias=self.bias is not None, layout=self.layout
        )
        return f"{self.steps}, {said}"


class _OneStep:
    """The parameters and statistics of one step, as views: what moves in them moves in the layer."""

    def __init__(self, layer: _BatchNormThroughTime, number: int) -> None:
        self.training, self.track_running_stats = layer.training, layer.track_running_stats
        self.momentum = layer.momentum
        counter = layer.num_batches_tracked
        self.num_batches_tracked = None
        if counter is not None:  # steps after 0 find it moved already
            self.num_batches_tracked = counter.clone() if number == 0 else (counter - 1).clamp(min=0)
        for name in ("weight", "bias", "running_mean", "running_var"):
            held = getattr(layer, name)
            setattr(self, name, None if held is None else held[number])

    weight: Tensor | None
    bias: Tensor | None


@remembered
def _step_spec(
    eps: float, momentum: float | None, weight: bool, bias: bool, running: bool, ndim: tuple[int, int | None]
) -> NormSpec:
    return families.batch_norm(
        eps=eps, momentum=momentum, weight=weight, bias=bias, running=running, ndim=ndim
    )


class BatchNormThroughTime1d(_BatchNormThroughTime):
    """BNTT of inputs (T, N, C) or (T, N, C, L).

    Arguments: steps, the number T; num_features; eps=1e-4; momentum=0.1 (None: the plain average of all batches);
    affine=True; track_running_stats=True; device, dtype; and by name
        layout: ``"t b c ..."``, ``"b t c ..."``, or ``"(t b) c ..."`` for (T * N, C, ...).
        bias=False; float32_statistics=True: running statistics stay float32 in a half module.
    Shapes: parameters and statistics (T, C). Input and output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where the input has another number of axes, channels or steps, where training sees
    one value a channel and step, and where an argument is none of the above.

    >>> import torch
    >>> norm = BatchNormThroughTime1d(2, 1)
    >>> norm(torch.tensor([[[1.0], [3.0]], [[10.0], [30.0]]])).flatten(1).round(decimals=3)
    tensor([[-1.,  1.],
            [-1.,  1.]], grad_fn=...)
    >>> norm.running_mean.flatten().tolist()
    [0.20000000298023224, 2.0]
    """

    _positions = (0, 1)


class BatchNormThroughTime2d(_BatchNormThroughTime):
    """BNTT of inputs (T, N, C, H, W).

    Arguments, shapes and errors as `BatchNormThroughTime1d`.

    >>> print(BatchNormThroughTime2d(4, 3).spec.stats)
    t b c ... -> t c
    """

    _positions = (2, 2)


class BatchNormThroughTime3d(_BatchNormThroughTime):
    """BNTT of inputs (T, N, C, D, H, W).

    Arguments, shapes and errors as `BatchNormThroughTime1d`.

    >>> BatchNormThroughTime3d(4, 3).running_var.shape
    torch.Size([4, 3])
    """

    _positions = (3, 3)
