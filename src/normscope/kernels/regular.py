"""Which calls are plainly regular: shapes, dtypes and numbers as they should be. Others are for PyTorch to judge.

Below that, the checks of what PyTorch's functions do not have: a residual, and a tensor to write into.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from normscope.errors import BadInput
from normscope.kernels import layout
from normscope.kernels.dispatch import transforming
from normscope.kernels.elementary import HALF, axes_of, constant, shape_on
from normscope.kernels.layout import Call
from normscope.spec import NormSpec, families
from normscope.spec.parts import is_number

is_compiling, strided = torch.compiler.is_compiling, torch.strided
MOST_SEEN = 4096
NONE = object()
FLOATS = frozenset((torch.float32, *HALF, torch.float64))


class Shelf:
    """Calls by name, for torch.compile: an attribute is what its guards can look up again."""

    def __init__(self) -> None:
        self.names: dict[Hashable, str] = {}

    def put(self, key: Hashable, call: Call | None) -> str:
        name = self.names.setdefault(key, f"call{len(self.names)}")
        setattr(self, name, call)
        return name


SHELF = Shelf()


def recipe(kind: str, ndim: int, number: int, eps: float | None) -> Call | None:
    """The codes of a named norm for inputs of ``ndim`` axes; None where ``eps`` is no finite number.

    ``number`` is the number of normalized axes for ``"layer"`` and ``"rms"``, of groups for ``"group"``, the axis for
    ``"l2"``, else 0.
    """
    if is_compiling():
        eps = eps if eps is None else plain(eps)
        found: Call | None = getattr(SHELF, _shelved(kind, ndim, number, eps))
        return found
    return _built(kind, ndim, number, eps) if type(eps) is float or _is_eps(eps, kind) else None


def plain(number: float) -> float:
    """The same number. With open sizes torch.compile may hold numbers open too; one that was compared is a constant.

    A number that is not usual breaks the graph then.
    """
    if is_compiling():
        # written here: a global would be held open like the rest
        for usual in (1e-5, 1e-6, 1e-3, 1e-12, 1e-8, 1e-7, 1e-4, 1e-10, 0.1, 0.01, 0.05, 0.2, 0.3, 0.5, 1.0):
            if number == usual:
                return usual
    return number


def _is_eps(eps: float | None, kind: str) -> bool:
    return is_number(eps) or (eps is None and kind in ("rms", "pixel", "l2"))


@constant
def _shelved(kind: str, ndim: int, number: int, eps: float | None) -> str:
    return SHELF.put(
        (kind, ndim, number, eps), _built(kind, ndim, number, eps) if _is_eps(eps, kind) else None
    )


@lru_cache(maxsize=4096)
def _built(kind: str, ndim: int, number: int, eps: float | None) -> Call | None:
    if not _is_eps(eps, kind):
        return None
    axes = "d" if number == 1 else " ".join(f"d{i}" for i in range(number))
    if kind == "layer":
        spec = families.layer_norm(axes, eps=eps)
    elif kind == "rms":
        spec = families.rms_norm(axes, eps=eps)
    elif kind == "group":
        spec = families.group_norm(number, eps=eps)
    elif kind == "instance":
        spec = families.instance_norm(eps=eps, weight=True, bias=True, running=True)
    elif kind == "pixel":
        spec = families.pixel_norm(eps=eps)
    elif kind == "scale":
        spec = families.scale_norm(eps=eps or 0.0)
    elif kind == "l2":
        names = [f"a{i}" for i in range(ndim)]
        left, right = " ".join(names), " ".join(names[:number] + names[number + 1 :])
        spec = NormSpec(f"{left} -> {right}", center=False, scale="l2", eps=eps, eps_at="max")
    else:
        spec = families.batch_norm(eps=eps)
    return layout.call(spec, ndim)


def trailing(
    kind: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
) -> Call | None:
    """The codes of a norm over the last axes, or None where something does not fit."""
    if not isinstance(x, Tensor) or not isinstance(normalized_shape, (tuple, list)):
        return None
    try:
        shape, size = tuple(normalized_shape), x.shape
    except RuntimeError:  # a nested tensor has none
        return None
    ndim = len(size)
    if shape and size[ndim - len(shape) :] == shape and suits(x, shape, weight, bias):
        return remembered(kind, ndim, len(shape), eps)
    return None


def remembered(kind: str, ndim: int, number: int, eps: float | None) -> Call | None:
    """`recipe`, which `seen` finds from then on."""
    call = recipe(kind, ndim, number, eps)
    if call is not None and not is_compiling() and len(_SEEN) < MOST_SEEN:
        _SEEN[kind, ndim, number, eps] = call
    return call


_SEEN: dict[tuple[str, int, int, float | None], Call] = {}


def seen(kind: str, x: Tensor, number: int, eps: float) -> Call | None:
    """The codes of a norm that was called before on inputs of as many axes. Only for calls outside programs; says
    nothing of shapes."""
    return _SEEN.get((kind, x.dim(), number, eps)) if type(x) is Tensor else None


def in_order(x: Tensor) -> Tensor:
    """With its axes in the order of memory, copied where need be: norms of PyTorch over the last axes return such."""
    if (type(x) is Tensor or isinstance(x, Tensor)) and not x.is_contiguous() and not x.is_nested:
        steps = x.stride()
        if any(a < b for a, b in pairwise(steps)):
            return x.contiguous()
    return x


def seen_trailing(kind: str, x: Tensor, normalized_shape: Sequence[int], eps: float | None) -> Call | None:
    """The codes of a norm over the last axes that was called before, where x ends in ``normalized_shape``.

    Says nothing of the parameters. Only for calls outside programs.
    """
    if type(normalized_shape) is not tuple or type(x) is not Tensor:
        return None
    try:
        size, number = x.shape, len(normalized_shape)
    except RuntimeError:  # a nested tensor has none
        return None
    if size[-number:] != normalized_shape:
        return None
    return _SEEN.get((kind, len(size), number, eps))


def by_channel(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether x is (B, C, ...) and all that is given (C,)."""
    try:
        size = x.shape
    except (AttributeError, RuntimeError):  # no tensor, or a nested one
        return False
    return len(size) > 1 and suits(x, size[1:2], *parameters)


def states(mean: Tensor | None, var: Tensor | None, by_batch: bool) -> bool:
    """Whether stored statistics come in a pair (or not at all, where the batch has its own) and want no gradient."""
    if mean is None or var is None:
        return by_batch and mean is var
    if by_batch and not (
        mean.is_contiguous() and var.is_contiguous()
    ):  # written to: torch judges what that means
        return False
    return not (mean.requires_grad or var.requires_grad)


def suits(x: Tensor, shape: tuple[int, ...], *parameters: Tensor | None) -> bool:
    """Whether x is one of the usual floats, dense and not empty, and every parameter has ``shape`` and one dtype:
    that of x, or float32 beside half types."""
    try:
        dtype, here = x.dtype, x.is_cpu
        if dtype not in FLOATS or x.layout is not strided or not x.numel():
            return False
        common = None
        for p in parameters:
            if p is not None:
                if common is None:
                    common = p.dtype
                if p.shape != shape or p.dtype is not common or p.is_cpu is not here:
                    return False
    except AttributeError:  # no tensor
        return False
    return common is None or common is dtype or (common is torch.float32 and dtype in HALF)


def _codes(spec: NormSpec, ndim: int) -> Call:
    if is_compiling():
        found: Call = getattr(SHELF, _shelved_codes(spec, ndim))
        return found
    return layout.call(spec, ndim)


@constant
def _shelved_codes(spec: NormSpec, ndim: int) -> str:
    return SHELF.put((spec, ndim), layout.call(spec, ndim))


def codes_of(x: Tensor, spec: NormSpec, *given: tuple[Tensor | None, str | None]) -> Call | None:
    """The codes of any specification, or None where it is not served or a tensor is not on the axes it should be."""
    axes = axes_of(spec, tuple(x.shape)) if spec.remainder == "error" else None
    if axes is None or not suits(x, ()):
        return None
    for tensor, where in given:
        if tensor is not None and (where is None or not suits(x, shape_on(where, axes), tensor)):
            return None
    call = _codes(spec, x.dim())
    # one element has no stored variance: the composite path says so
    lone = spec.running is not None and prod([axis.size for axis in axes if not axis.kept]) < 2
    return None if call.unserved or lone else call


R = TypeVar("R")


def ask(
    function: Callable[..., R], relevant: Iterable[Any], *args: Any, out: Tensor | None = None, **rest: Any
) -> R:
    """Tensor subclasses and modes have the first word, as in torch.nn.functional."""
    if out is not None:
        rest["out"] = out
    answer: R = handle_torch_function(function, relevant, *args, **rest)
    return answer


def only_tensors(function: str, input: Any, *, residual: Any = NONE, **optional: Any) -> None:
    """Raises TypeError where something that should be a tensor is none."""
    needed = {"input": input} | ({} if residual is NONE else {"residual": residual})
    for name, value in (*needed.items(), *optional.items()):
        if not isinstance(value, Tensor) and (value is not None or name in needed):
            raise TypeError(
                f"{function} takes a tensor for {name}, got {type(value).__name__}. Convert it: "
                f"torch.as_tensor({name})"
            )


def same(function: str, input: Tensor, residual: Tensor) -> None:
    only_tensors(function, input, residual=residual)
    if input.is_nested or residual.is_nested:
        return  # for PyTorch to judge
    if input.shape != residual.shape or input.dtype is not residual.dtype or input.device != residual.device:
        raise BadInput(
            "a residual has the shape, dtype and device of the input: "
            f"{tuple(input.shape)}, {input.dtype}, {input.device}; got {tuple(residual.shape)}, {residual.dtype}, "
            f"{residual.device}. Expand or convert it first"
        )


def writable(out: Tensor, input: Tensor, *parameters: Tensor | None) -> Tensor:
    """What may be written into: the input itself, or memory apart from all that is read."""
    if not isinstance(out, Tensor):
        raise TypeError(
            f"out is a tensor to write into, got {type(out).__name__}: torch.empty_like(input) is one"
        )
    if out.shape != input.shape or out.dtype is not input.dtype or out.device != input.device:
        raise BadInput(
            f"out has the shape, dtype and device of the input: {tuple(input.shape)}, {input.dtype}, {input.device}; "
            f"got {tuple(out.shape)}, {out.dtype}, {out.device}. Allocate it with torch.empty_like(input)"
        )
    # Neither a program that is compiled nor a function transform has memory that could be looked at.
    apart = is_compiling() or transforming()
    if not apart and _meets_itself(out):
        raise BadInput(
            f"each element of out has a place of its own in memory; got strides {out.stride()} for the shape "
            f"{tuple(out.shape)}. Allocate it with torch.empty_like(input)"
        )
    for t in (input, *parameters):
        if t is not None and not apart and not (t is input and _one(t, out)) and _meet(t, out):
            raise BadInput(
                "out overlaps in memory with what is read, so that values would be overwritten before their use. Pass "
                "the input itself, or a tensor of its own: torch.empty_like(input)"
            )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (out, input, *parameters)):
        raise BadInput(
            "out= is for inference, and a tensor of this call requires a gradient. Call under torch.no_grad(), or "
            "leave out= away"
        )
    return out


def _meets_itself(t: Tensor) -> bool:
    """Whether two elements may share their place: axes, inner ones first, step over what lies within them."""
    reach = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _one(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory, by the first and the last byte of each."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (a_first, a_last), (b_first, b_last) = (
        (
            t.data_ptr(),
            t.data_ptr()
            + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) * t.element_size(),
        )
        for t in (a, b)
    )
    return a_first <= b_last and b_first <= a_last


def into(y: Tensor, out: Tensor | None) -> Tensor:
    return y if out is None else writable(out, y).copy_(y)
