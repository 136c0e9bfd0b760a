"""One input seen along the elementary axes of its specification.

A factored axis is split, so that a statistic is a reduction over whole axes. Virtual batches of different sizes are
filled up to the largest with elements that a mask leaves out, so that they too are one reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan, prod
from typing import TypeVar

import torch
from torch import Tensor

from normscope.errors import BadInput
from normscope.spec import NormSpec
from normscope.spec.pattern import ELLIPSIS, Axis, tokenize

HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> torch.dtype:
    """The dtype of sums: float64 where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def compute_dtype(spec: NormSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: half types in float32, others in their own, unless ``spec.cast`` says else."""
    if spec.cast.compute is None:
        return torch.float32 if dtype in HALF else dtype
    if spec.cast.compute == "input":
        return dtype
    found: torch.dtype = getattr(torch, spec.cast.compute)
    return found


@dataclass(frozen=True)
class Elementary:
    """An input reshaped to elementary axes, in the dtype of the arithmetic."""

    spec: NormSpec
    axes: tuple[Axis, ...]
    x: Tensor
    """0 where the mask is False, so that nothing under it can leak, neither forward nor backward"""
    mask: Tensor | None
    shape: tuple[int, ...]
    """of the input"""
    dtype: torch.dtype
    """of the input"""
    filled: tuple[int, Tensor] | None
    """where virtual batches were filled up: the sample axis, and the places of the true samples on it"""

    @staticmethod
    def of(x: Tensor, spec: NormSpec, mask: Tensor | None) -> Elementary:
        """Raises BadInput where x is no floating point tensor or the mask does not fit."""
        if not x.is_floating_point():
            raise BadInput(
                f"a normalization takes floating point inputs; got {x.dtype}. Convert with x.float()"
            )
        shape = tuple(x.shape)
        if mask is not None:
            mask = _mask(mask, shape)
        value = x.to(compute_dtype(spec, x.dtype))
        filled = None
        if spec.remainder == "error":
            axes = axes_of(spec, shape)
        else:
            found, dim, segments = _virtual_batches(spec, shape)
            axes = tuple(Axis(*fields) for fields in found)
            if segments:
                value, mask, filled = _fill(value, mask, dim, segments)
        split = [axis.size for axis in axes]
        value = value.reshape(split)
        if mask is not None:
            mask = mask.reshape(split)
            value = value.masked_fill(~mask, 0.0)
        return Elementary(spec, axes, value, mask, shape, x.dtype, filled)

    @property
    def eps(self) -> float:
        """As a number; None is the gap between 1 and the next number of the dtype of the arithmetic."""
        return torch.finfo(self.x.dtype).eps if self.spec.eps is None else float(self.spec.eps)

    def total(self, values: Tensor) -> Tensor:
        """Sums over statistic sets, erased axes kept with size 1."""
        erased = [i for i, axis in enumerate(self.axes) if not axis.kept]
        dtype = wide(self.x)
        return values.sum(erased, keepdim=True, dtype=dtype) if erased else values.to(dtype)

    def only(self, values: Tensor) -> Tensor:
        """0 where the mask is False."""
        return values if self.mask is None else values.masked_fill(~self.mask, 0.0)

    def close(self, values: Tensor) -> Tensor:
        """Back to the shape and dtype of the input."""
        if self.filled is None:
            return values.reshape(self.shape).to(self.dtype)
        dim, places = self.filled
        whole = [size if i != dim else -1 for i, size in enumerate(self.shape)]
        return values.reshape(whole).index_select(dim, places).to(self.dtype)


F = TypeVar("F", bound=Callable[..., object])


def constant(function: F) -> F:
    """Mark a function of specifications and plain numbers: torch.compile takes what it returns, and never looks in."""
    # what torch.compiler.assume_constant_result does, which would load all of the compiler for it, for seconds
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


Factors = tuple[tuple[str, int, bool], ...]
"""of one input axis: name, given size or 0, kept"""


def axes_of(spec: NormSpec, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """As ``spec.bind`` says, by arithmetic on sizes that a compiler may hold open."""
    axes: list[Axis] = []
    by_dim = _factors(spec, len(shape))
    if len(by_dim) != len(shape):
        spec.bind(shape)  # raises, and says which ranks fit
    for dim, factors in enumerate(by_dim):
        given = [size for _, size, _ in factors if size]
        rest = shape[dim] // prod(given)
        if rest * prod(given) != shape[dim] or (len(given) == len(factors) and rest != 1):
            spec.bind(shape)  # raises, and says what does not fit
        axes += [Axis(name, size or rest, kept, dim) for name, size, kept in factors]
    return tuple(axes)


@constant
def _factors(spec: NormSpec, ndim: int) -> tuple[Factors, ...]:
    """The factors of each input axis; nothing where the rank does not fit."""
    spread = ndim - spec.pattern.min_ndim
    low, high = spec.ndim or (0, None)
    if spread < 0 or (spread and not spec.pattern.has_ellipsis) or not low <= ndim <= (high or ndim):
        return ()
    found: list[Factors] = []
    for group in spec.pattern.left:
        if group == (ELLIPSIS,):
            found += [((f"{ELLIPSIS}{i}", 0, ELLIPSIS in spec.pattern.kept),) for i in range(spread)]
        else:
            found.append(tuple((name, spec.sizes.get(name, 0), name in spec.pattern.kept) for name in group))
    return tuple(found)


@constant
def _virtual_batches(
    spec: NormSpec, shape: tuple[int, ...]
) -> tuple[tuple[tuple[str, int, bool, int], ...], int, tuple[int, ...]]:
    """Fields of the axes, the sample axis, and the sizes of the virtual batches where they differ."""
    bound = spec.bind(shape)
    assert bound.sample_dim is not None  # a remainder has a sample axis
    axes = tuple((axis.name, axis.size, axis.kept, axis.dim) for axis in bound.axes)
    return axes, bound.sample_dim, bound.segments


def divisor(count: int | Tensor, correction: float) -> float | Tensor:
    """n - correction; 1 where n is 0, NaN where n is else not above the correction.

    >>> divisor(5, 1), divisor(0, 1), divisor(1, 1)
    (4, 1.0, nan)
    """
    left = count - correction
    if isinstance(left, Tensor):
        return torch.where(left > 0, left, nan).masked_fill(torch.as_tensor(count == 0), 1.0)
    return left if left > 0 else (1.0 if count == 0 else nan)


def _mask(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    if mask.dtype != torch.bool:
        raise BadInput(
            f"a mask is boolean, True where an element counts; got {mask.dtype}. Compare first: lengths > position"
        )
    if mask.ndim > len(shape) or not spreads(mask.shape, shape[len(shape) - mask.ndim :]):
        raise BadInput(
            f"a mask broadcasts to the input's shape {shape}; got {tuple(mask.shape)}. Add axes of size 1 on the right"
        )
    return mask.expand(shape)


def spreads(sizes: Sequence[int], to: Sequence[int]) -> bool:
    """Whether each of as many sizes is 1 or the other.

    Compared one by one, since sizes that a compiler holds open are in no tuple.

    >>> spreads((2, 1), (2, 3)), spreads((2, 2), (2, 3)), spreads((2,), (2, 3))
    (True, False, False)
    """
    if len(sizes) != len(to):
        return False
    return all(have == 1 or have == size for have, size in zip(sizes, to, strict=True))


def _fill(
    x: Tensor, mask: Tensor | None, dim: int, segments: Sequence[int]
) -> tuple[Tensor, Tensor, tuple[int, Tensor]]:
    """Fill every virtual batch up to the largest, by repeating its last sample under a False mask."""
    largest = max(segments)
    source, true, places, start = [], [], [], 0
    for number, size in enumerate(segments):
        source += [start + min(i, size - 1) for i in range(largest)]
        true += [i < size for i in range(largest)]
        places += [number * largest + i for i in range(size)]
        start += size
    index = torch.tensor(source, device=x.device)
    whole = x.index_select(dim, index)
    counts = torch.tensor(true, device=x.device).reshape([-1 if i == dim else 1 for i in range(x.ndim)])
    valid = counts.expand(whole.shape) if mask is None else counts & mask.index_select(dim, index)
    return whole, valid, (dim, torch.tensor(places, device=x.device))


@constant
def state_axes(spec: NormSpec) -> str:
    """`NormSpec.running_axes`."""
    return spec.running_axes


@constant
def has_virtual_batches(spec: NormSpec) -> bool:
    """Whether sets are virtual batches, by which running statistics move one after the other."""
    return "v" in spec.pattern.kept


def names_of(where: str, axes: Sequence[Axis]) -> list[str]:
    """The elementary axes that ``where`` names, in its order: ``"(g c) ..."`` gives ``["g", "c", "...0", "...1"]``."""
    dots = [axis.name for axis in axes if axis.name.startswith(ELLIPSIS)]
    names: list[str] = []
    for group in tokenize(where):
        names += dots if group == (ELLIPSIS,) else list(group)
    return names


def shape_on(where: str, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Shape of a tensor on the axes that ``where`` names: ``"(g c)"`` gives ``(G * C,)``."""
    sizes = {axis.name: axis.size for axis in axes}
    shape: list[int] = []
    for group in tokenize(where):
        if group == (ELLIPSIS,):
            shape += [axis.size for axis in axes if axis.name.startswith(ELLIPSIS)]
        else:
            shape.append(prod([sizes[name] for name in group]))
    return tuple(shape)


def place(value: Tensor, where: str, axes: Sequence[Axis]) -> Tensor:
    """A tensor on the axes that ``where`` names, viewed so that it broadcasts along the elementary axes."""
    names = names_of(where, axes)
    position = {axis.name: i for i, axis in enumerate(axes)}
    order = sorted(range(len(names)), key=lambda i: position[names[i]])
    split = value.reshape([axes[position[name]].size for name in names])
    return split.permute(order).reshape([axis.size if axis.name in names else 1 for axis in axes])
