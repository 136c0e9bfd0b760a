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
from normscope.nn.arguments import sizes
from normscope.nn.batch_state import BatchState
from normscope.nn.masking import Lengths, masked_leaf
from normscope.nn.remembered import remembered
from normscope.nn.time_steps import TimeSteps, threshold_gain
from normscope.nn.torch_tools import Proxy
from normscope.nn.tracked import by_batch_or_stored
from normscope.spec import NormSpec, families

GAINS = ("forward", "weight")


class _ThresholdBatchNorm(TimeSteps, BatchState):
    """What the three share; they differ in the number of axes they take."""

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
        sizes(name, "num_features", num_features, "Give the number of channels.")
        threshold_gain(name, v_threshold, alpha)
        if gain not in GAINS or (gain == "weight" and not affine):
            raise BadInput(
                f"{name} applies alpha * v_threshold in the 'forward', or starts its 'weight' there, which needs "
                f"affine=True; got gain={gain!r}, affine={affine!r}. Leave gain at 'forward'."
            )
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            bias=bias,
            float32_statistics=float32_statistics,
        )
        self.v_threshold, self.alpha, self.gain = v_threshold, alpha, gain
        self._set_layout(layout, steps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1 or alpha * v_threshold, bias 0; running statistics as new."""
        super().reset_parameters()
        if self.gain == "weight" and isinstance(self.weight, Tensor):
            init.constant_(self.weight, float(self.alpha * self.v_threshold))

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Tensor:
        """The statistics of all steps in training, the stored ones in evaluation. Masks: see `normscope.nn.masking`;
        lengths count time steps.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        self._check_axes(input, self.num_features)
        counts = self._counts(input, mask, lengths)
        return by_batch_or_stored(self, input, self._spec(False), self.weight, self.bias, counts, fill)

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

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return self._spec(self._joined)

    def _spec(self, split: bool) -> NormSpec:
        """With steps and samples in one axis and ``split`` False they are called samples, which changes no number."""
        momentum = self.momentum
        if momentum is None and self.num_batches_tracked is None:  # nothing counts the batches: nothing moves
            momentum = 0.0
        return _spec(
            1.0 if self.gain == "weight" else float(self.alpha * self.v_threshold),
            float(self.eps),
            None if momentum is None else float(momentum),
            self.weight is not None,
            self.bias is not None,
            self.running_mean is not None,
            self.layout if split or not self._joined else "b c ...",
            self.steps if split else None,
            self._rank,
        )

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


@remembered
def _spec(
    gain: float,
    eps: float,
    momentum: float | None,
    weight: bool,
    bias: bool,
    running: bool,
    layout: str,
    steps: int | None,
    ndim: tuple[int, int | None],
) -> NormSpec:
    return families.td_batch_norm(
        gain,
        eps=eps,
        momentum=momentum,
        weight=weight,
        bias=bias,
        running=running,
        layout=layout,
        steps=steps,
        ndim=ndim,
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
