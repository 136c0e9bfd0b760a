"""Pixel norm: every position of (N, C, ...) by the root of its mean square over channels.

    y = x / sqrt(mean(x^2) + eps)

Karras et al. 2018 (progressive growing of GANs), https://arxiv.org/abs/1710.10196, section 4.2, whose eps is 1e-8.
"""

from __future__ import annotations

from torch import Tensor

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import positive_eps
from normscope.nn.masking import by_element, is_packed, masked_leaf, normalize_masked
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec, families


class PixelNorm(Unscriptable):
    """Pixel norm over axis 1; no parameters.

    Arguments, by name: eps=1e-8.
    Shapes: input (N, C, ...) of any number of positions, contiguous or channels-last. Input and output float16,
    bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where eps is 0 or less, or the input has fewer than two axes.

    >>> import torch
    >>> PixelNorm()(torch.tensor([[3.0, 4.0]])).round(decimals=4)
    tensor([[0.8485, 1.1314]])
    """

    __constants__ = ("eps",)

    def __init__(self, *, eps: float = 1e-8) -> None:
        super().__init__()
        self.eps = positive_eps("PixelNorm", eps)

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """The mean square of each position, in training as in evaluation. Masks: see `normscope.nn.masking`;
        lengths run along the last axis.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_element(input, self.forward)
        if input.dim() < 2:
            raise BadInput(
                f"PixelNorm takes an input (N, C, ...); got an input of shape {tuple(input.shape)}. "
                "For one sample use x.unsqueeze(0)."
            )
        if mask is not None or lengths is not None:
            return normalize_masked(self, input, mask, lengths, fill)
        return normalize(input, self.spec)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(float(self.eps))

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"eps={self.eps}"


@remembered
def _spec(eps: float) -> NormSpec:
    return families.pixel_norm(eps=eps)
