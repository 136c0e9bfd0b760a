"""A linear layer or convolution beside a norm, and the arithmetic on its weight and bias, in float64.

Every weight is looked at in one form, (groups, in, out, places): of a linear layer (out, in) and of a convolution
(out, in / groups, *kernel) the axes are exchanged, of a transposed convolution (in, out / groups, *kernel) they stand
so. Per group then

    y' = a y + b       W' = W a_out       bias' = a bias + b            (the norm behind the map)
    x  = a x' + b      W' = W a_in        bias' = bias + sum W b        (the norm before it)
    y' = y - mean(y)   W' = W - mean_out  bias' = bias - mean(bias)     (the centering of a norm behind it)
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from torch import Tensor

Values = MutableMapping[str, Tensor]
"""parameters by name, in float64; what is written here is rounded once, at the end"""


@dataclass(frozen=True)
class LinearMap:
    """Names of what a linear layer or convolution holds, so that it can be found in any copy of the model."""

    path: str
    """of the module it runs in"""
    op: str
    """``conv2d``, ``linear``, ..."""
    weight: str
    bias: str
    """name of the bias, also where there is none yet"""
    has_bias: bool
    features: int
    """how many it makes; 0 where it cannot be given a bias"""
    transposed: bool
    """the weight has its input features first"""
    padded: bool
    """it fills in zeros"""

    def scale_outputs(self, values: Values, a: Tensor, b: Tensor) -> None:
        """The norm ``a y + b`` of each output feature."""
        weight = values[self.weight]
        groups = a.numel() // weight.shape[1] if self.transposed else 1
        _canonical(weight, groups, self.transposed).mul_(a.view(groups, 1, -1, 1))
        if self.bias in values:  # without one, and without a shift, none was made
            values[self.bias].mul_(a).add_(b)

    def scale_inputs(self, values: Values, a: Tensor, b: Tensor) -> None:
        """The norm ``a x + b`` of each input feature."""
        weight = values[self.weight]
        groups = 1 if self.transposed else a.numel() // weight.shape[1]
        form = _canonical(weight, groups, self.transposed)
        if bool(b.any()):
            values[self.bias].add_((form * b.view(groups, -1, 1, 1)).sum((1, 3)).reshape(-1))
        form.mul_(a.view(groups, -1, 1, 1))

    def center_outputs(self, values: Values) -> None:
        """The mean over the output features of each place is taken away."""
        form = _canonical(values[self.weight], 1, self.transposed)
        form.sub_(form.mean(2, keepdim=True))
        if self.bias in values:
            values[self.bias].sub_(values[self.bias].mean())


def _canonical(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """A view (groups, in, out, places) of a contiguous weight."""
    first, second = weight.shape[:2]
    if transposed:
        return weight.view(groups, first // groups, second, -1)
    return weight.view(groups, first // groups, second, -1).transpose(1, 2)
