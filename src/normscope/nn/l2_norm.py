"""L2 norm: every vector along one axis brought to length 1.

    y = x / max(|x|, eps),  |x| = sqrt(sum(x^2)) over the axis

torch.nn.functional.normalize as a layer, with p = 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import positive_eps
from normscope.nn.masking import by_element, is_packed, masked_leaf, normalize_masked
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec
from normscope.spec.axes import erase


class L2Norm(Unscriptable):
    """Unit vectors along ``dim``; no parameters.

    Arguments, by name: dim=-1, counted from the front or, where negative, from the end; eps=1e-12, the least
    length that is divided by.
    Shapes: any input that has the axis. Input and output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where eps is 0 or less, or the input has no such axis.

    >>> import torch
    >>> L2Norm()(torch.tensor([[3.0, 4.0]])).round(decimals=4)
    tensor([[0.6000, 0.8000]])
    >>> print(L2Norm(dim=1).spec)
    b d1 ... -> b ...; not centered; l2; eps 1e-12 as the least root; no weight; no bias
    """

    __constants__ = ("dim", "eps")

    def __init__(self, *, dim: int = -1, eps: float = 1e-12) -> None:
        super().__init__()
        self.dim = dim
        self.eps = positive_eps("L2Norm", eps)

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, fill: str = "zero"
    ) -> Tensor:
        """The length of each vector, in training as in evaluation. Masks: see `normscope.nn.masking`;
        lengths run along axis 1.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return self._packed(input)
        if not -input.dim() <= self.dim < input.dim():
            raise BadInput(
                f"L2Norm normalizes along axis {self.dim}; got an input of shape {tuple(input.shape)}. "
                "The last axis is dim=-1."
            )
        if mask is not None or lengths is not None:
            return normalize_masked(self, input, mask, lengths, fill, time=1, axes=2)
        return normalize(input, self.spec)

    def _packed(self, input: Any) -> Tensor:
        if not -input.data.dim() < self.dim < 0:  # steps and samples are in one axis there
            raise BadInput(
                "L2Norm takes a packed sequence along an axis of its features, counted from the end; got "
                f"dim={self.dim} and elements of shape {tuple(input.data.shape[1:])}. Unpack it "
                "(pad_packed_sequence), and pass lengths=."
            )
        return by_element(input, self.forward)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(int(self.dim), float(self.eps))

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"dim={self.dim}, eps={self.eps}"


@remembered
def _spec(dim: int, eps: float) -> NormSpec:
    stats = erase((dim,), None)
    assert stats is not None  # a single axis, from either end, always has a pattern
    return NormSpec(stats, center=False, scale="l2", eps=eps, eps_at="max")
