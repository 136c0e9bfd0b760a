"""Group norm: every group of a sample's channels by its mean and variance, over positions too.

    y = weight * (x - mean) / sqrt(var + eps) + bias

var is the biased variance over the C / G channels of a group at all positions; the parameters stand on the channels.
Wu and He 2018, https://arxiv.org/abs/1803.08494, equation 7.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from normscope.functional import group_norm
from normscope.nn.masking import by_sequence, is_packed, masked_leaf, normalize_masked
from normscope.nn.optional_bias import OptionalBias
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, is_scripting, method
from normscope.spec import NormSpec, families


class GroupNorm(OptionalBias, nn.GroupNorm):
    """Group norm of inputs (N, C, ...): a ``torch.nn.GroupNorm``.

    Arguments: torch's, num_groups, num_channels, eps=1e-5, affine=True, device, dtype, bias=True.
    Shapes: parameters (C,). Input and output float16, bfloat16, float32 or float64, contiguous or channels-last.

    Raises ValueError where num_channels is not divisible by num_groups, RuntimeError where the input has another
    number of channels, as torch does.

    >>> import torch
    >>> norm = GroupNorm(2, 4)
    >>> norm(torch.arange(8.0).reshape(1, 4, 2)).flatten().round(decimals=2)
    tensor([-1.3400, -0.4500,  0.4500,  1.3400, -1.3400, -0.4500,  0.4500,  1.3400],
           grad_fn=...)
    >>> norm.spec.stats, norm.spec.sizes, norm.spec.weight
    ('b (g c) ... -> b g', {'g': 2}, '(g c)')
    """

    __jit_unused_properties__ = ("spec",)
    _scripted = method("_scripted", nn.GroupNorm.forward)

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)
        self._set_bias(bias)

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """Statistics of each sample's groups, in training as in evaluation. Masks: see `normscope.nn.masking`; lengths
        run along the last axis.
        """
        if is_scripting():
            return self._scripted(input)
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_sequence(input, self.forward)
        if mask is not None or lengths is not None:
            return normalize_masked(self, input, mask, lengths, fill)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(int(self.num_groups), float(self.eps), self.weight is not None, self.bias is not None)


@remembered
def _spec(groups: int, eps: float, weight: bool, bias: bool) -> NormSpec:
    return families.group_norm(groups, eps=eps, weight=weight, bias=bias)
