"""Group whitening: the groups of a sample's channels decorrelated, over what is in a group at all positions.

    y = weight * W (x - mean) + bias,    W S W^T = 1,    S = covariance + eps I

The C channels are G groups of C / G. A sample is seen as G rows of C / G times the number of positions; their means
are taken off, and S is the G by G covariance of the rows, over that many elements. So it is group norm whose groups are
decorrelated too, without companions, and the same in training as in evaluation. Huang, Zhou, Liu and Shao 2021, Group
Whitening: Balancing Learning Efficiency and Representational Capacity, https://arxiv.org/abs/2009.13333, equations 7
and 8; whitening over channels of a batch is `BatchWhitening`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.nn.arguments import sizes
from normscope.nn.masking import Lengths, by_sequence, is_packed, masked_leaf, normalize_valid, valid
from normscope.nn.optional_bias import OptionalBias
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.nn.whitened_sets import choice, divided, eps_or_zero, large_enough
from normscope.spec import NormSpec, families

METHODS = ("zca", "cholesky", "iternorm")


class GroupWhitening(Unscriptable, OptionalBias):
    """Group whitening of inputs (N, C, ...).

    Arguments: num_groups, the number of groups G, whitened together; num_channels C; eps=1e-5, 0 or more; affine=True;
    device, dtype; and by name
        method: ``"zca"``, ``"cholesky"``, or ``"iternorm"`` with ``iterations=5`` steps of Newton's method.
        eps_at: ``"variance"``, eps on the diagonal as in the paper, or ``"trace"``, eps times the mean variance of the
            groups.
        bias=True
    Called with ``mask=``, ``lengths=`` or a packed sequence: statistics are over the elements that count, the output is
    0 elsewhere. A mask is one for all groups.
    Shapes: parameters (C,). Input and output float16, bfloat16, float32 or float64; covariance and W are computed in
    float64.

    Raises BadInput (a ValueError) where num_groups does not divide num_channels, the input has another number of
    channels, or eps is 0 and a group has no more elements than there are groups: the covariance has no inverse.

    >>> import torch
    >>> x = torch.randn(3, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    >>> y = GroupWhitening(2, 8, eps=0.0, affine=False)(x)
    >>> rows = y[0].reshape(2, -1)
    >>> (rows @ rows.T / rows.shape[1]).round(decimals=3).abs()
    tensor([[1., 0.],
            [0., 1.]])
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        method: str = "zca",
        iterations: int = 5,
        eps_at: str = "variance",
        bias: bool = True,
    ) -> None:
        super().__init__()
        name = "GroupWhitening"
        (self.num_groups,) = sizes(name, "num_groups", num_groups, "Give the number of groups.")
        (self.num_channels,) = sizes(name, "num_channels", num_channels, "Give the size of axis 1.")
        divided(name, self.num_channels, "num_groups", self.num_groups)
        (self.iterations,) = sizes(name, "iterations", iterations, "Leave it at 5.")
        self.method = choice(name, "method", method, METHODS)
        self.eps, self.eps_at = eps_or_zero(name, eps), choice(name, "eps_at", eps_at, ("variance", "trace"))
        self._set_affine(self.num_channels, affine, bias, device, dtype)
        self.reset_parameters()

    def forward(
        self, input: Tensor, mask: Tensor | None = None, lengths: Lengths | None = None, fill: str = "zero"
    ) -> Tensor:
        """By the covariance of each sample, in training as in evaluation. Masks: see `normscope.nn.masking`; lengths
        run along the last axis.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        if is_packed(self, input, mask, lengths, fill):
            return by_sequence(input, self.forward)
        if input.dim() < 2 or input.shape[1] != self.num_channels:
            raise BadInput(
                f"GroupWhitening was made for an input (N, {self.num_channels}, ...); got an input of shape "
                f"{tuple(input.shape)}. For one sample use x.unsqueeze(0)."
            )
        spec, counts = self.spec, None
        if mask is not None or lengths is not None:
            counts = valid("GroupWhitening", input, mask, lengths)
        large_enough("GroupWhitening", spec, input, counts, "fewer groups")
        if counts is None:
            return normalize(input, spec, self.weight, self.bias)
        return normalize_valid(input, spec, self.weight, self.bias, counts, fill)

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now."""
        return _spec(
            int(self.num_groups),
            self.method,
            int(self.iterations),
            float(self.eps),
            self.eps_at,
            self.weight is not None,
            self.bias is not None,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        steps = f", iterations={self.iterations}" if self.method == "iternorm" else ""
        return (
            f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}, method={self.method!r}"
            f"{steps}, eps_at={self.eps_at!r}"
        )


@remembered
def _spec(
    groups: int, method: str, iterations: int, eps: float, eps_at: str, weight: bool, bias: bool
) -> NormSpec:
    return families.group_whitening(
        groups, method=method, iterations=iterations, eps=eps, eps_at=eps_at, weight=weight, bias=bias
    )
