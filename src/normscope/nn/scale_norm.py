"""Scale norm: one learned scalar times the unit vector of every position.

    y = weight * x / max(|x|, eps),  |x| = sqrt(sum(x^2)) over the last axis

The weight starts at sqrt(features), where |y| is that of a layer norm's output. Nguyen and Salazar 2019,
https://arxiv.org/abs/1910.05895, section 2.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from normscope.functional import normalize
from normscope.nn.arguments import last_sizes, positive_eps, sizes
from normscope.nn.masking import by_element, is_packed, masked_leaf, normalize_masked
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec, families


class ScaleNorm(Unscriptable):
    """Scale norm over the last axis.

    Arguments: features, the size of the last axis; eps=1e-5, the least length that is divided by; device, dtype.
    Shapes: input (..., features), weight (), one scalar. Input and output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where features is below 1, eps is 0 or less, or the last axis has another size.

    >>> import torch
    >>> norm = ScaleNorm(4)
    >>> norm, norm.weight.item()
    (ScaleNorm(4, eps=1e-05), 2.0)
    >>> norm(torch.tensor([3.0, 0.0, 4.0, 0.0])).round(decimals=4)
    tensor([1.2000, 0.0000, 1.6000, 0.0000], grad_fn=...)
    """

    __constants__ = ("features", "eps")
    weight: Tensor

    def __init__(self, features: int, eps: float = 1e-5, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        (self.features,) = sizes("ScaleNorm", "features", features, "Give the size of the last axis.")
        self.eps = positive_eps("ScaleNorm", eps)
        self.weight = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight sqrt(features)."""
        nn.init.constant_(self.weight, math.sqrt(self.features))

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """The length of each position, in training as in evaluation. Masks: see `normscope.nn.masking`;
        lengths run along axis 1.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_element(input, self.forward)
        last_sizes("ScaleNorm", input, (self.features,))
        if mask is not None or lengths is not None:
            return normalize_masked(self, input, mask, lengths, fill, time=1)
        return normalize(input, self.spec, self.weight)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(float(self.eps))

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.features}, eps={self.eps}"


@remembered
def _spec(eps: float) -> NormSpec:
    return families.scale_norm(eps=eps)
