"""Threshold-dependent layer, group and RMS norm: norms of each sample, scaled to the firing threshold.

    y = weight * alpha * v_threshold * (x - mean) / sqrt(var + eps) + bias

Our extensions, by analogy with tdBN (`normscope.nn.threshold_batch_norm`): no paper defines them. var is the biased
variance of a sample over its channels and positions (group norm: over each group of channels; RMS norm: mean 0, and
the mean square in place of var), the weight and bias of each channel.

With ``per_step=True`` every time step has statistics of its own: a step needs no other one, so training and inference
go step by step. With ``per_step=False`` they run over all steps: more numbers a set, but no step can be computed before
the last one is known (not causal), and `step` refuses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import positive_eps, sizes
from normscope.nn.masking import Lengths, masked_leaf, normalize_valid, not_packed
from normscope.nn.optional_bias import OptionalBias
from normscope.nn.remembered import remembered
from normscope.nn.time_steps import TimeSteps, threshold_gain
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec, families


class _ThresholdNorm(TimeSteps, Unscriptable, OptionalBias):
    """What the three share; they differ in their statistics."""

    weight: Tensor | None
    bias: Tensor | None
    _kind: str
    num_groups = 1

    def __init__(
        self,
        num_channels: int,
        v_threshold: float = 1.0,
        alpha: float = 1.0,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        per_step: bool = True,
        layout: str = "t b c ...",
        steps: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        (self.num_channels,) = sizes(name, "num_channels", num_channels, "Give the number of channels.")
        threshold_gain(name, v_threshold, alpha)
        self.v_threshold, self.alpha = v_threshold, alpha
        self.eps = positive_eps(name, eps)
        self.per_step = per_step
        self._set_layout(layout, steps)
        self._set_affine(self.num_channels, affine, bias, device, dtype)
        self.reset_parameters()

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Lengths | None = None, fill: str = "zero"
    ) -> Tensor:
        """Statistics of each sample, in training as in evaluation. Masks: see `normscope.nn.masking`; lengths count
        time steps.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        not_packed(self, input, fill)
        self._check_axes(input, self.num_channels)
        spec = self._spec(not self.per_step)
        counts = self._counts(input, mask, lengths)
        if counts is None:
            return normalize(input, spec, self.weight, self.bias)
        return normalize_valid(input, spec, self.weight, self.bias, counts, fill)

    def step(self, input: Tensor) -> Tensor:
        """One time step (N, C, ...), in training as in evaluation.

        Raises BadInput where the statistics run over all steps (``per_step=False``).
        """
        if not self.per_step:
            raise BadInput(
                f"{type(self).__name__} with per_step=False normalizes by the statistics of all time steps, which one "
                "step alone does not have. Call it on the whole sequence, or make it with per_step=True."
            )
        return self._one_step(input)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return self._spec(True)

    def _spec(self, split: bool) -> NormSpec:
        """``split``: as `TimeSteps._pattern` takes it."""
        layout, steps = self._pattern(split)
        return _spec(
            self._kind,
            self.num_groups,
            float(self.alpha * self.v_threshold),
            self.per_step and "t" in layout,
            float(self.eps),
            self.weight is not None,
            self.bias is not None,
            layout,
            steps,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        groups = f"{self.num_groups}, " if self._kind == "group" else ""
        steps = f", steps={self.steps}" if self._joined else ""
        return (
            f"{groups}{self.num_channels}, v_threshold={self.v_threshold}, alpha={self.alpha}, eps={self.eps}, "
            f"affine={self.affine}, bias={self.bias is not None}, per_step={self.per_step}, "
            f"layout={self.layout!r}{steps}"
        )


@remembered
def _spec(
    kind: str,
    groups: int,
    gain: float,
    per_step: bool,
    eps: float,
    weight: bool,
    bias: bool,
    layout: str,
    steps: int | None,
) -> NormSpec:
    common: dict[str, Any] = {
        "per_step": per_step,
        "eps": eps,
        "weight": weight,
        "layout": layout,
        "steps": steps,
    }
    if kind == "group":
        spec = families.td_group_norm(groups, gain, bias=bias, **common)
    elif kind == "rms":
        spec = families.td_rms_norm(gain, **common)
    else:
        spec = families.td_layer_norm(gain, bias=bias, **common)
    return spec.replace(ndim=(2 if layout.startswith(("(", "b c")) else 3, None))


class ThresholdLayerNorm(_ThresholdNorm):
    """Threshold-dependent layer norm (tdLN) over the channels and positions of each sample: ours, no paper's.

    Arguments: num_channels; v_threshold=1.0, of the neurons that follow; alpha=1.0; eps=1e-5; affine=True, whether
    there are parameters; bias=True, whether a bias is among them; device, dtype; and by name
        per_step: statistics of each time step (True), or over all (False, not causal).
        layout: ``"t b c ..."``, ``"b t c ..."``, or ``"(t b) c ..."`` for (T * N, C, ...), with ``steps`` = T.
    Shapes: input (T, N, C, ...) of any number of positions, parameters (C,). Input and output float16, bfloat16,
    float32 or float64.

    Raises BadInput (a ValueError) where the input has fewer axes or other channels, and where an argument is none of
    the above.

    >>> import torch
    >>> norm = ThresholdLayerNorm(2, v_threshold=0.5)
    >>> norm(torch.tensor([[[1.0, 3.0]], [[2.0, 2.0]]])).flatten(1)
    tensor([[-0.5000,  0.5000],
            [ 0.0000,  0.0000]], grad_fn=...)
    >>> norm.spec.properties().causal, ThresholdLayerNorm(2, per_step=False).spec.properties().causal
    (True, False)
    """

    _kind = "layer"


class ThresholdGroupNorm(_ThresholdNorm):
    """Threshold-dependent group norm: each group of a sample's channels by its own statistics. Ours, no paper's.

    Arguments: num_groups; then those of `ThresholdLayerNorm`, whose shapes and errors it has too. Raises BadInput where
    num_channels is no multiple of num_groups.

    >>> import torch
    >>> ThresholdGroupNorm(2, 4, 0.5)(torch.tensor([[[1.0, 3.0, 10.0, 30.0]]])).flatten().round(decimals=3)
    tensor([-0.5000,  0.5000, -0.5000,  0.5000], grad_fn=...)
    """

    _kind = "group"

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        v_threshold: float = 1.0,
        alpha: float = 1.0,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        per_step: bool = True,
        layout: str = "t b c ...",
        steps: int | None = None,
    ) -> None:
        over: dict[str, Any] = {"per_step": per_step, "layout": layout, "steps": steps}
        super().__init__(num_channels, v_threshold, alpha, eps, affine, bias, device, dtype, **over)
        (self.num_groups,) = sizes("ThresholdGroupNorm", "num_groups", num_groups, "Write num_groups=8.")
        if num_channels % num_groups:
            raise BadInput(
                f"ThresholdGroupNorm has groups of equally many channels; got num_groups={num_groups}, "
                f"num_channels={num_channels}. Take a divisor."
            )


class ThresholdRMSNorm(_ThresholdNorm):
    """Threshold-dependent RMS norm: each sample by the root of its mean square. Ours, no paper's.

    Arguments: those of `ThresholdLayerNorm` without the bias; shapes and errors are the same.

    >>> import torch
    >>> ThresholdRMSNorm(2, 0.5, eps=1e-12)(torch.tensor([[[3.0, 4.0]]])).round(decimals=4)
    tensor([[[0.4243, 0.5657]]], grad_fn=...)
    """

    _kind = "rms"

    def __init__(
        self,
        num_channels: int,
        v_threshold: float = 1.0,
        alpha: float = 1.0,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        per_step: bool = True,
        layout: str = "t b c ...",
        steps: int | None = None,
    ) -> None:
        over: dict[str, Any] = {"per_step": per_step, "layout": layout, "steps": steps}
        super().__init__(num_channels, v_threshold, alpha, eps, affine, False, device, dtype, **over)
