"""Filter response norm (FRN) and its activation, the thresholded linear unit (TLU).

    FRN  y = weight * x / sqrt(mean(x^2) + eps) + bias        TLU  z = max(y, tau)

Nothing is subtracted; the mean square of each channel of each sample runs over its positions. weight, bias and tau are
of the channels. With ``learned_eps`` the constant under the root is eps + |learned_eps|, a parameter beside eps = 1e-6:
for maps of few positions. Singh and Krishnan 2020, https://arxiv.org/abs/1911.09737, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import BadInput
from normscope.functional import normalize
from normscope.kernels.composite import Moments
from normscope.kernels.elementary import Elementary
from normscope.nn.arguments import floating, on_axis_1, positive_eps, sizes
from normscope.nn.masking import (
    Lengths,
    by_element,
    filled,
    is_packed,
    masked_leaf,
    normalize_valid,
    not_packed,
    valid,
)
from normscope.nn.remembered import remembered
from normscope.nn.torch_tools import Proxy, Unscriptable
from normscope.spec import NormSpec, families


class _FilterResponseNorm(Unscriptable):
    """What the two share; they differ in the number of axes they take."""

    _ndim: int
    learned_eps: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        *,
        learned_eps: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        (self.num_features,) = sizes(name, "num_features", num_features, "Give the size of axis 1.")
        self.eps = positive_eps(name, eps)
        self.initial_eps = None if learned_eps is None else positive_eps(name, learned_eps)
        self.weight = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))
        self.learned_eps = None
        if learned_eps is not None:
            self.learned_eps = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0, and the learned eps as it was given."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        if self.learned_eps is not None and self.initial_eps is not None:
            nn.init.constant_(self.learned_eps, self.initial_eps)

    def forward(
        self,
        input: Tensor,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Tensor:
        """The mean square of each sample, in training as in evaluation. Masks: see `normscope.nn.masking`; lengths run
        along the last axis.
        """
        if isinstance(input, Proxy):
            return masked_leaf(self, input, mask, lengths, fill)
        not_packed(self, input, fill)
        name = type(self).__name__
        on_axis_1(name, input, self.num_features, "L" if self._ndim == 3 else "H, W")
        counts = None
        if mask is not None or lengths is not None:
            counts = valid(name, input, mask, lengths)
        spec = _spec(float(self.eps), self._ndim)
        if self.learned_eps is not None:
            y = self._by_learned(input, spec, self.learned_eps, counts)
            return y if counts is None else filled(y, spec, self.bias, counts, fill)
        if counts is not None:
            return normalize_valid(input, spec, self.weight, self.bias, counts, fill)
        return normalize(input, spec, self.weight, self.bias)

    def _by_learned(self, input: Tensor, spec: NormSpec, learned: Tensor, mask: Tensor | None) -> Tensor:
        view = Elementary.of(input, spec, mask)
        squares = Moments.of(view).under_root(view)
        root = (squares + self.eps + learned.abs().to(squares.dtype)).sqrt().to(view.x.dtype)
        beside = (1, self.num_features, *[1] * (self._ndim - 2))
        weight, bias = (each.to(view.x.dtype).view(beside) for each in (self.weight, self.bias))
        return view.close(view.only(weight * (view.x / root) + bias))

    @property
    def outside_family(self) -> str:
        """Why no specification says what the layer computes; "" where one does."""
        if self.learned_eps is None:
            return ""
        return (
            "learns its eps, and a specification holds a number: every statistic is as in filter response norm, and "
            "eps moves with training. Leave learned_eps at None for a fixed one"
        )

    @property
    def spec(self) -> NormSpec:
        """What the layer computes, from its attributes as they are now. Raises BadInput where eps is learned."""
        if self.outside_family:
            raise BadInput(f"{type(self).__name__} {self.outside_family}.")
        return _spec(float(self.eps), self._ndim)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        learned = "" if self.initial_eps is None else f", learned_eps={self.initial_eps}"
        return f"{self.num_features}, eps={self.eps}{learned}"


@remembered
def _spec(eps: float, ndim: int) -> NormSpec:
    return families.filter_response_norm(eps=eps, ndim=(ndim, ndim))


class FilterResponseNorm1d(_FilterResponseNorm):
    """Filter response norm of inputs (N, C, L).

    Arguments: num_features; eps=1e-6; and by name learned_eps=None, or the number above 0 that a learned eps starts at
    (the paper's is 1e-4): it is outside the family, so that the layer has no ``spec``; device, dtype.
    Called with ``mask=`` or ``lengths=`` the mean square is over the elements that count, the output 0 elsewhere.
    Shapes: weight and bias (C,), learned_eps (1,). Input and output float16, bfloat16, float32 or float64.

    Raises BadInput (a ValueError) where a size is below 1, an eps is 0 or less, or the input has another number of axes
    or channels.

    >>> import torch
    >>> FilterResponseNorm1d(1)(torch.tensor([[[1.0, 7.0]]])).round(decimals=3).tolist()
    [[[0.20000000298023224, 1.399999976158142]]]
    """

    _ndim = 3


class FilterResponseNorm2d(_FilterResponseNorm):
    """Filter response norm of inputs (N, C, H, W), contiguous or channels-last.

    Arguments, shapes and errors as `FilterResponseNorm1d`.

    >>> import torch
    >>> norm = torch.nn.Sequential(FilterResponseNorm2d(3), TLU(3))
    >>> norm(torch.randn(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    >>> norm[0].spec.stats, norm[0].spec.center, norm[0].spec.scale
    ('b c ... -> b c', False, 'rms')
    """

    _ndim = 4


class TLU(Unscriptable):
    """Thresholded linear unit, max(x, tau) with a learned tau of each channel: no normalization, but FRN's activation.

    Arguments: num_features; device, dtype. Shapes: x (N, C, ...), tau (C,), which starts at 0, as ReLU.

    Raises BadInput (a ValueError) where the size is below 1 or x has other channels on axis 1.

    >>> import torch
    >>> TLU(2)(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 2.]], grad_fn=...)
    """

    def __init__(self, num_features: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        (self.num_features,) = sizes("TLU", "num_features", num_features, "Give the size of axis 1.")
        self.tau = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """tau 0."""
        nn.init.zeros_(self.tau)

    def forward(self, input: Tensor) -> Tensor:
        """Element by element; the dtype is that of ``input``."""
        if isinstance(input, Proxy):
            return masked_leaf(self, input, None, None, "zero")
        if is_packed(self, input):
            return by_element(input, self.forward)
        floating("TLU", input)
        on_axis_1("TLU", input, self.num_features)
        return torch.maximum(input, self.tau.to(input.dtype).view(-1, *[1] * (input.dim() - 2)))

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return str(self.num_features)
