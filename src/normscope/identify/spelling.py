"""The words for a partition: the named family's own pattern where there is one, else the axes by their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from normscope.errors import BadInput
from normscope.identify.partition import Labels, Partition
from normscope.spec import NormSpec, Pattern, PatternError
from normscope.spec.axes import last_axes
from normscope.spec.bound import BoundSpec
from normscope.spec.pattern import ELLIPSIS, tokenize

USUAL = {
    1: ("d",),
    2: ("b", "c"),
    3: ("b", "l", "d"),
    4: ("b", "c", "h", "w"),
    5: ("b", "c", "d", "h", "w"),
}
MEANT = ("b", "c", "t", "o", "i")
"""names that mean the same everywhere: samples, channels, time, outputs and inputs of a weight"""

_RANK2, _RANK3 = (2, None), (3, None)
# family, least number of axes at which it comes to mind, pattern, bounds of the rank in its specification, where its
# parameters live
_PLAIN = [
    ("batch norm", 2, "b c ... -> c", _RANK2, "c"),
    ("instance norm", 4, "b c ... -> b c", _RANK3, "c"),
    *(
        (f"layer norm over {k}", k + (k > 1), f"... {last_axes(k)} -> ...", None, last_axes(k))
        for k in (1, 2, 3, 4)
    ),
    ("channels-first layer norm", 3, "b c ... -> b ...", _RANK2, "c"),
    ("instance norm", 3, "b c ... -> b c", _RANK3, "c"),
    ("group norm", 2, "b (g c) ... -> b g", _RANK2, "(g c)"),
    ("ghost batch norm", 2, "(v b) c ... -> v c", None, "c"),
    ("batch norm, channels last", 3, "b ... c -> c", _RANK2, "c"),
    ("instance norm, channels last", 3, "b ... c -> b c", _RANK3, "c"),
    ("group norm, channels last", 3, "b ... (g c) -> b g", _RANK2, "(g c)"),
]
_BY_LAYOUT = [
    ("unbatched instance norm", 2, "c ... -> c", _RANK2, "c"),
    *(
        (family, 3, f"{left} ... -> {kept}", _RANK3, own)
        for left in ("t b c", "b t c")
        for family, kept, own in (
            ("threshold-dependent batch norm", "c", "c"),
            ("threshold-dependent layer norm", "b", "c"),
            ("threshold-dependent layer norm per step", "t b", "c"),
            ("batch norm through time", "t c", "t c"),
        )
    ),
    ("weight norm", 2, "o i ... -> o", None, "o"),
]


@dataclass(frozen=True)
class Spelling:
    """One way to write a partition down, bound to its shape."""

    family: str
    spec: NormSpec
    """axes only"""
    bound: BoundSpec
    own: str | None
    """where the family's parameters live; None for what is no family"""


def names_of(layout: str | None, shape: tuple[int, ...]) -> tuple[str, ...]:
    """One name for each axis, as the layout says or by the rank. Raises BadInput where the layout does not fit."""
    if layout is None:
        return USUAL.get(len(shape)) or ("b", "c", *(f"d{i}" for i in range(1, len(shape) - 1)))
    if not isinstance(layout, str):
        raise BadInput(
            f"a layout names the axes of the input in one string, such as 'b c h w'; got a {type(layout).__name__}."
        )
    try:
        groups = tokenize(layout)
    except PatternError as error:
        raise BadInput(
            f"a layout names the axes of the input, such as 'b c h w'; got {layout!r}: {error}."
        ) from None
    spread = len(shape) - len(groups) + 1
    names: list[str] = []
    for group in groups:
        more = [f"d{i}" for i in range(1, spread + 1)]
        names += more if group == (ELLIPSIS,) else [group[-1]]
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise BadInput(
            f"a layout names every axis once; got {layout!r} for an input of shape {shape}. Name {len(shape)} axes, "
            "such as 'b c h w'."
        )
    return tuple(names)


def spellings(partition: Partition, layout: str | None, stays: dict[int, str]) -> Iterator[Spelling]:
    """Ways to write the partition down: families first, the bare pattern last.

    ``stays`` says of a factored axis whether the number (``"outer"``) or the size (``"inner"``) of its blocks is
    fixed, where a second size told.
    """
    names = names_of(layout, partition.shape)
    wanted = _canonical(partition.labels)
    templates = _PLAIN + (_BY_LAYOUT if layout is not None else [])
    for family, least, stats, ndim, own in templates:
        pattern = Pattern.parse(stats)
        if len(names) < least:
            continue
        if layout is not None and not _agrees(pattern, names):
            continue
        for sizes, remainder in _sizes(pattern, partition, stays):
            yield from _fitting(family, stats, ndim, own, sizes, remainder, partition, wanted)
    yield from _bare(partition, names, wanted)


def labels_of(bound: BoundSpec) -> Labels:
    """The number of its set for every element of the input."""
    number: Labels = np.zeros((), dtype=np.int64)
    dims = sorted({axis.dim for axis in bound.axes})
    for dim in dims:
        factors = [axis for axis in bound.axes if axis.dim == dim]
        if bound.segments and dim == bound.sample_dim:
            along = np.repeat(np.arange(len(bound.segments)), bound.segments)
        else:
            place = np.unravel_index(
                np.arange(prod(axis.size for axis in factors)), [axis.size for axis in factors]
            )
            along = np.zeros(prod(axis.size for axis in factors), dtype=np.int64)
            for axis, coordinate in zip(factors, place, strict=True):
                along = along * axis.size + coordinate if axis.kept else along
        number = number[..., None] * (int(along.max()) + 1) + along
    return _canonical(number)


def _canonical(labels: Labels) -> Labels:
    """Sets numbered in the order in which they first occur."""
    _, first, inverse = np.unique(labels.ravel(), return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return np.asarray(rank[inverse.ravel()].reshape(labels.shape), dtype=np.int64)


def _agrees(pattern: Pattern, names: tuple[str, ...]) -> bool:
    """Whether the pattern's samples, channels and steps are those of the layout."""
    before = pattern.left.index((ELLIPSIS,)) if pattern.has_ellipsis else len(pattern.left)
    after = len(pattern.left) - before - pattern.has_ellipsis
    pairs = [*zip(pattern.left[:before], names, strict=False)]
    pairs += [*zip(pattern.left[len(pattern.left) - after :], names[len(names) - after :], strict=True)]
    return all(name == group[-1] for group, name in pairs if group[-1] in MEANT)


def _sizes(
    pattern: Pattern, partition: Partition, stays: dict[int, str]
) -> Iterator[tuple[dict[str, int], str]]:
    """Sizes for the factored axis of a pattern, as the partition has them."""
    group = next((group for group in pattern.left if len(group) > 1), None)
    if group is None:
        yield {}, "error"
        return
    outer, inner = group
    virtual = outer in ("v", "b0")
    at = len(partition.shape) - 1 if pattern.left[-1] == group else pattern.left.index(group)
    if partition.segments and not virtual:
        return
    if partition.segments:
        number, longest = len(partition.segments), max(partition.segments)
        by = [{outer: number}, {inner: longest}]
        order = by if stays.get(partition.ragged or 0) == "outer" else [*reversed(by)]
        for sizes in order[: 1 if partition.ragged in stays else 2]:
            yield from ((sizes, remainder) for remainder in ("short", "balanced"))
        return
    factors = partition.dims[at]
    if all(factor.kept for factor in factors):
        blocks, size = prod(factor.size for factor in factors), 1
    elif not any(factor.kept for factor in factors):
        blocks, size = 1, prod(factor.size for factor in factors)
    elif len(factors) == 2 and factors[0].kept:
        blocks, size = factors[0].size, factors[1].size
    else:
        return
    one_of_a_kind = blocks == 1 or size == 1
    if one_of_a_kind and (virtual or pattern.left[-1] == group or len(partition.shape) == 2):
        return  # plain batch norm, said already with the channels first, or plain layer norm
    both = [{outer: blocks}, {inner: size}]
    by_size = stays.get(at) == "inner" or (virtual and stays.get(at) != "outer")
    told = at in stays or one_of_a_kind
    for sizes in ([*reversed(both)] if by_size else both)[: 1 if told else 2]:
        yield sizes, "error"


def _fitting(
    family: str,
    stats: str,
    ndim: tuple[int, int | None] | None,
    own: str | None,
    sizes: dict[str, int],
    remainder: str,
    partition: Partition,
    wanted: Labels,
) -> Iterator[Spelling]:
    spec = NormSpec(stats, ndim=ndim, sizes=sizes, remainder=remainder)
    try:
        bound = spec.bind(partition.shape)
    except PatternError:
        return
    if np.array_equal(labels_of(bound), wanted):
        yield Spelling(family, spec, bound, own)


def _bare(partition: Partition, names: tuple[str, ...], wanted: Labels) -> Iterator[Spelling]:
    """The pattern that names every axis; factors of an axis get names of their own."""
    groups: list[tuple[str, ...]]
    if partition.ragged is not None:
        at = partition.ragged
        if names[at] != "b":
            return  # only samples fall into virtual batches of different sizes
        outer = _part("b", 0, 2, names)
        groups = [(outer, "b") if dim == at else (name,) for dim, name in enumerate(names)]
        kept = [outer, *(n for n, f in zip(names, partition.dims, strict=True) if f[0].kept)]
        stats = f"{_left(groups)} -> {' '.join(kept)}"
        for sizes, remainder in _sizes(Pattern.parse(f"({outer} b) ... ->"), partition, {}):
            yield from _fitting("", stats, None, None, sizes, remainder, partition, wanted)
        return
    groups, kept = [], []
    own_sizes: dict[str, int] = {}
    for name, factors in zip(names, partition.dims, strict=True):
        own = (
            [name]
            if len(factors) == 1
            else [_part(name, i, len(factors), names) for i in range(len(factors))]
        )
        groups.append(tuple(own))
        kept += [part for part, factor in zip(own, factors, strict=True) if factor.kept]
        own_sizes |= {part: f.size for part, f in zip(own[:-1], factors[:-1], strict=True)}
    yield from _fitting(
        "", f"{_left(groups)} -> {' '.join(kept)}", None, None, own_sizes, "error", partition, wanted
    )


def _part(name: str, index: int, count: int, names: tuple[str, ...]) -> str:
    """A name for one factor of an axis: that of the family, unless an axis of the layout has it."""
    usual = {"b": "v", "c": "g"}.get(name, f"{name}0")
    if count == 2 and index == 0 and usual not in names:
        return usual
    return name if index == count - 1 else f"{name}{index}"


def _left(groups: list[tuple[str, ...]]) -> str:
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)
