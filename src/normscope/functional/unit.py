"""Norms that only divide: by the length of a vector, or the root of its mean square."""

from __future__ import annotations

from torch import Tensor

from normscope.errors import BadInput
from normscope.functional.general import normalize
from normscope.kernels.regular import only_tensors, recipe
from normscope.spec import NormSpec


def scale_norm(input: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Scale norm: one scalar times the unit vector, y = weight * x / max(|x|, eps) over the last axis.

    Shapes: input (..., D), weight (). Raises BadInput where they do not fit. Source: Nguyen and Salazar 2019.

    >>> import torch
    >>> scale_norm(torch.tensor([3.0, 4.0]), torch.tensor(10.0))
    tensor([6., 8.])
    """
    only_tensors("scale_norm", input, weight=weight)
    return normalize(input, _spec("scale", input.dim(), 0, eps), weight)


def pixel_norm(input: Tensor, eps: float = 1e-8) -> Tensor:
    """Pixel norm: every position by the root of its mean square over channels, y = x / sqrt(mean(x^2) + eps).

    Shapes: input (B, C, ...). Raises BadInput where it is no floating point tensor. Source: Karras et al. 2018,
    section 4.2.

    >>> import torch
    >>> pixel_norm(torch.tensor([[3.0, 4.0]]))
    tensor([[0.8485, 1.1314]])
    """
    only_tensors("pixel_norm", input)
    return normalize(input, _spec("pixel", input.dim(), 0, eps))


def l2_norm(input: Tensor, dim: int = -1, eps: float = 1e-12) -> Tensor:
    """Unit vectors along one axis: y = x / max(|x|, eps), as torch.nn.functional.normalize with p = 2.

    Shapes: input of any. Raises BadInput where ``dim`` is no axis of it.

    >>> import torch
    >>> l2_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    only_tensors("l2_norm", input)
    ndim = input.dim()
    if not -ndim <= dim < ndim:
        raise BadInput(f"dim is an axis of the input, which has {ndim}; got {dim}. The last is -1")
    return normalize(input, _spec("l2", ndim, dim % ndim, eps))


def _spec(kind: str, ndim: int, number: int, eps: float) -> NormSpec:
    call = recipe(kind, ndim, number, eps)
    if call is None:
        raise BadInput(f"eps is a finite number; got {eps!r}. Leave it out for the usual one")
    return call.spec
