"""Which statistic set an element belongs to.

Nothing is transposed or grouped here. Every element of the input carries, for each named axis, its coordinate on
that axis; the number of its set is the mixed-radix number of its kept coordinates. A factored axis splits a
coordinate by division with remainder, a ragged virtual batch by its boundaries, and every reduction of the
reference is then a sum by label.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]

_TOKEN = re.compile(r"\(\s*([^()]*?)\s*\)|(\.\.\.)|(\w+)")


def dims(pattern: str) -> list[tuple[str, ...]]:
    """Names on each axis of one side of a pattern: ``"b (g c) ..."`` gives ``[("b",), ("g", "c"), ("...",)]``."""
    return [
        tuple(group.split()) if not (dots or name) else (dots or name,)
        for group, dots, name in _TOKEN.findall(pattern)
    ]


@dataclass(frozen=True)
class Axes:
    """Coordinates of every element of one input on every named axis."""

    pattern: str
    shape: tuple[int, ...]
    sizes: dict[str, int]
    coordinates: dict[str, Labels]
    """name -> coordinate, broadcastable to ``shape``"""
    ellipsis: tuple[str, ...]
    kept: tuple[str, ...]

    def names(self, pattern: str) -> list[tuple[str, ...]]:
        """Like :func:`dims`, with ``...`` replaced by the axes it stands for; unknown names are an error."""
        found: list[tuple[str, ...]] = []
        for group in dims(pattern):
            found += [(name,) for name in self.ellipsis] if group == ("...",) else [group]
        unknown = [name for group in found for name in group if name not in self.sizes]
        if unknown:
            raise ValueError(
                f"axis {unknown[0]!r} of {pattern!r} does not occur on the left side of {self.pattern!r}"
            )
        return found

    def extent(self, groups: Iterable[Sequence[str]]) -> tuple[int, ...]:
        """Shape of an array with one axis a group: ``[("g", "c"), ("t",)]`` gives ``(g * c, t)``."""
        return tuple(math.prod(self.sizes[name] for name in group) for group in groups)

    def label(self, names: Iterable[str]) -> Labels:
        """For every element, flattened: the row-major number of its coordinates on ``names``."""
        number: Labels = np.zeros((1,) * len(self.shape), dtype=np.int64)
        for name in names:
            number = number * self.sizes[name] + self.coordinates[name]
        return np.broadcast_to(number, self.shape).ravel()


def locate(spec: Any, shape: Sequence[int]) -> Axes:
    """Coordinates of an input of ``shape`` under the axes of ``spec``.

    Raises ValueError where the shape does not fit, with pattern, shape and sizes.
    """
    pattern, shape = str(spec.stats), tuple(int(n) for n in shape)
    given = {str(name): int(size) for name, size in dict(spec.sizes).items()}
    left, _, right = pattern.partition("->")
    groups = dims(left)
    try:
        ellipsis = _ellipsis(groups, getattr(spec, "ndim", None), len(shape))
        flat: list[tuple[str, ...]] = []
        for group in groups:
            flat += [(name,) for name in ellipsis] if group == ("...",) else [group]
        sizes: dict[str, int] = {}
        coordinates: dict[str, Labels] = {}
        for dim, (group, size) in enumerate(zip(flat, shape, strict=True)):
            place = np.arange(size, dtype=np.int64).reshape(
                [-1 if d == dim else 1 for d in range(len(shape))]
            )
            for name, extent, coordinate in _split(
                group, size, given, getattr(spec, "remainder", "error"), place
            ):
                sizes[name], coordinates[name] = extent, coordinate
    except _Misfit as misfit:
        raise ValueError(
            f"pattern {pattern!r} does not fit shape {shape} with sizes {given}: {misfit}"
        ) from None
    axes = Axes(pattern, shape, sizes, coordinates, ellipsis, ())
    return replace(axes, kept=tuple(name for group in axes.names(right) for name in group))


class _Misfit(Exception):
    """What is wrong, and the likely fix; ``locate`` puts pattern, shape and sizes before it."""


def _ellipsis(groups: list[tuple[str, ...]], bounds: Any, rank: int) -> tuple[str, ...]:
    """Names of the axes that ``...`` stands for in an input of ``rank`` axes."""
    dots = ("...",) in groups
    fixed = len(groups) - dots
    if rank < fixed or (rank != fixed and not dots):
        raise _Misfit(
            f"it takes {fixed} axes{' or more' if dots else ''}, the input has {rank}. Is the batch axis there?"
        )
    if bounds is not None and (rank < bounds[0] or (bounds[1] is not None and rank > bounds[1])):
        raise _Misfit(
            f"ndim={tuple(bounds)} bounds the number of axes, the input has {rank}. Unbatched inputs have a spec of "
            "their own"
        )
    return tuple(f"...{i}" for i in range(rank - fixed))


def _split(
    group: tuple[str, ...], size: int, given: dict[str, int], remainder: str, place: Labels
) -> list[tuple[str, int, Labels]]:
    """Name, size and coordinate of each factor of one input axis."""
    known = math.prod(given[name] for name in group if name in given)
    free = [name for name in group if name not in given]
    axis = group[0] if len(group) == 1 else f"({' '.join(group)})"
    if len(free) > 1:
        raise _Misfit(f"axis {axis} leaves {' and '.join(free)} open. Give all but one in sizes")
    if not free and size != known:
        raise _Misfit(f"axis {axis} has size {size}, its sizes make {known}. Leave one out to infer it")
    if size % known:
        if remainder == "error" or len(group) != 2:
            raise _Misfit(
                f"axis {axis} of size {size} is not a multiple of {known}. Change the size"
                + (", or set remainder to 'short' or 'balanced'" if "v" in group else "")
            )
        starts = _boundaries(size, known, by_number=group[0] in given, balanced=remainder == "balanced")
        first = (np.searchsorted(starts, place, side="right") - 1).astype(np.int64)
        largest = int(np.diff([*starts, size]).max())
        return [(group[0], len(starts), first), (group[1], largest, place - starts[first])]
    parts: list[tuple[str, int, Labels]] = []
    for name in reversed(group):
        extent = given.get(name, size // known)
        parts.append((name, extent, place % max(extent, 1)))
        place = place // max(extent, 1)
    return parts


def _boundaries(size: int, known: int, *, by_number: bool, balanced: bool) -> Labels:
    """First index of each virtual batch of a ragged axis; 33 by 32 is 32 + 1 (short) or 17 + 16 (balanced)."""
    number = min(known, size) if by_number else -(-size // known)
    if balanced:
        return np.array([i * (size // number) + min(i, size % number) for i in range(number)], dtype=np.int64)
    return np.arange(0, size, -(-size // number) if by_number else known, dtype=np.int64)
