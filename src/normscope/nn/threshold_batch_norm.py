"""Threshold-dependent batch norm (tdBN): batch norm over all time steps, scaled to the firing threshold.

    gain="forward"   y = weight * alpha * v_threshold * (x - mean) / sqrt(var + eps) + bias     weight starts at 1
    gain="weight"    y = weight * (x - mean) / sqrt(var + eps) + bias       weight starts at alpha * v_threshold

Mean and biased variance of each channel run over time steps, samples and positions, so that in training no step can
be computed before the last one is known; running statistics follow as in batch norm, and evaluation by them goes step
by step. alpha is 1, or 1 / sqrt(2) on each branch of a residual sum. (Some texts write the threshold as lambda, which
in the paper is the learned weight.)

The first form is the paper's, the second SpikingJelly's. They start as one function and train apart: the gradient of
the first's weight is alpha * v_threshold times that of the second's, and weight decay pulls on other numbers. Zheng et
al. 2021, https://arxiv.org/abs/2011.05280.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import init

from normscope.errors import BadInput
from normscope.nn.time_steps import threshold_gain
from normscope.nn.timed_batch_norm import TimedBatchNorm, timed_spec
from normscope.spec import NormSpec

GAINS = ("forward", "weight")


class _ThresholdBatchNorm(TimedBatchNorm):
    """What the three share; they differ in the number of axes they take."""

    _family, _same_steps = "td_batch_norm", False
    v_threshold, alpha, gain = 1.0, 1.0, "forward"

    def __init__(
        self,
        num_features: int,
        v_threshold: float = 1.0,
        alpha: float = 1.0,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        gain: str = "forward",
        layout: str = "t b c ...",
        steps: int | None = None,
        bias: bool = True,
        float32_statistics: bool = True,
    ) -> None:
        name = type(self).__name__
        threshold_gain(name, v_threshold, alpha)
        if gain not in GAINS or (gain == "weight" and not affine):
            raise BadInput(
                f"{name} applies alpha * v_threshold in the 'forward', or starts its 'weight' there, which needs "
                f"affine=True; got gain={gain!r}, affine={affine!r}. Leave gain at 'forward'."
            )
        shared: dict[str, Any] = {
            "layout": layout,
            "steps": steps,
            "bias": bias,
            "float32_statistics": float32_statistics,
        }
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **shared)
        self.v_threshold, self.alpha, self.gain = v_threshold, alpha, gain
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1 or alpha * v_threshold, bias 0; running statistics as new."""
        super().reset_parameters()
        if self.gain == "weight" and isinstance(self.weight, Tensor):
            init.constant_(self.weight, float(self.alpha * self.v_threshold))

    def step(self, input: Tensor) -> Tensor:
        """One time step (N, C, ...), by stored statistics.

        Raises BadInput in training, where the statistics are those of all steps.
        """
        if self.training or self.running_mean is None:
            raise BadInput(
                f"{type(self).__name__} normalizes by the statistics of all time steps here, which one step alone does "
                "not have. Call it on the whole sequence, or eval() with running statistics."
            )
        return self._one_step(input)

    def _computed(self) -> tuple[NormSpec, Tensor | None, Tensor | None]:
        return self._spec(False), self.weight, self.bias  # whether steps are called samples changes no number

    def _spec(self, split: bool) -> NormSpec:
        gain = 1.0 if self.gain == "weight" else float(self.alpha * self.v_threshold)
        return timed_spec(self._family, *self._numbers(), *self._pattern(split), self._rank, gain)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        steps = {"steps": self.steps} if self._joined else {}
        return self._said(
            track_running_stats=self.track_running_stats,
            v_threshold=self.v_threshold,
            alpha=self.alpha,
            gain=self.gain,
            layout=self.layout,
            **steps,
        )


class ThresholdBatchNorm1d(_ThresholdBatchNorm):
    """tdBN of inputs (T, N, C) or (T, N, C, L).

    Arguments: num_features; v_threshold=1.0, of the neurons that follow; alpha=1.0; eps=1e-5; momentum=0.1 (None: the
    plain average of all batches); affine=True; track_running_stats=True; device, dtype; and by name
        gain: ``"forward"`` or ``"weight"``, see the head of this file.
        layout: ``"t b c ..."``, ``"b t c ..."``, or ``"(t b) c ..."`` for (T * N, C, ...), with ``steps`` = T.
        bias=True; float32_statistics=True: running statistics stay float32 in a half module.
    Shapes: parameters and statistics (C,). Input and output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where the input has another number of axes or channels, where training sees one value
    a channel, and where an argument is none of the above.

    >>> import torch
    >>> norm = ThresholdBatchNorm1d(1, v_threshold=0.5)
    >>> norm(torch.tensor([[[1.0]], [[3.0]]])).flatten(), norm.running_mean
    (tensor([-0.5000,  0.5000], grad_fn=...), tensor([0.2000]))
    >>> norm.eval().step(torch.tensor([[0.2]])).item()
    0.0
    """

    _positions = (0, 1)


class ThresholdBatchNorm2d(_ThresholdBatchNorm):
    """tdBN of inputs (T, N, C, H, W).

    Arguments, shapes and errors as `ThresholdBatchNorm1d`.

    >>> import torch
    >>> norm = ThresholdBatchNorm2d(3, alpha=2**-0.5, layout="(t b) c ...", steps=4)
    >>> norm(torch.randn(8, 3, 5, 5)).shape, round(norm.spec.gain, 4)
    (torch.Size([8, 3, 5, 5]), 0.7071)
    """

    _positions = (2, 2)


class ThresholdBatchNorm3d(_ThresholdBatchNorm):
    """tdBN of inputs (T, N, C, D, H, W).

    Arguments, shapes and errors as `ThresholdBatchNorm1d`.

    >>> ThresholdBatchNorm3d(2, 0.5, gain="weight").weight.tolist()
    [0.5, 0.5]
    """

    _positions = (3, 3)
