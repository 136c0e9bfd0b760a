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
from dataclasses import dataclass
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

    Raises ``ValueError`` where the shape does not fit the pattern, with pattern, shape and sizes.
    """
    pattern, shape = str(spec.stats), tuple(int(n) for n in shape)
    given = {str(name): int(size) for name, size in dict(getattr(spec, "sizes", None) or {}).items()}

    def refuse(reason: str) -> ValueError:
        return ValueError(f"pattern {pattern!r} does not fit shape {shape} with sizes {given}: {reason}")

    left, _, right = pattern.partition("->")
    groups = dims(left)
    fixed = len(groups) - (("...",) in groups)
    bounds = getattr(spec, "ndim", None)
    if len(shape) < fixed or (("...",) not in groups and len(shape) != fixed):
        raise refuse(f"it has {fixed} axes{' or more' if ('...',) in groups else ''}, the input {len(shape)}")
    if bounds is not None and not bounds[0] <= len(shape) <= (bounds[1] or len(shape)):
        raise refuse(f"inputs must have {bounds[0]} to {bounds[1] or 'any'} axes, this one has {len(shape)}")
    ellipsis = tuple(f"...{i}" for i in range(len(shape) - fixed))
    flat: list[tuple[str, ...]] = []
    for group in groups:
        flat += [(name,) for name in ellipsis] if group == ("...",) else [group]

    sizes: dict[str, int] = {}
    coordinates: dict[str, Labels] = {}
    for dim, (group, size) in enumerate(zip(flat, shape, strict=True)):
        place = np.arange(size, dtype=np.int64).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        parts = _split(group, size, given, str(getattr(spec, "remainder", "error")), place)
        if parts is None:
            known = {name: given[name] for name in group if name in given}
            raise refuse(f"axis ({' '.join(group)}) of size {size} does not divide by {known}")
        for name, (extent, coordinate) in zip(group, parts, strict=True):
            sizes[name], coordinates[name] = extent, coordinate
    axes = Axes(pattern, shape, sizes, coordinates, ellipsis, ())
    kept = tuple(name for group in axes.names(right) for name in group)
    return Axes(pattern, shape, sizes, coordinates, ellipsis, kept)


def _split(
    group: tuple[str, ...], size: int, given: dict[str, int], remainder: str, place: Labels
) -> list[tuple[int, Labels]] | None:
    """Size and coordinate of each factor of one input axis, or None where the sizes do not fit."""
    known = math.prod(given[name] for name in group if name in given)
    free = [name for name in group if name not in given]
    if len(free) > 1 or known == 0:
        return None
    if size % known or (not free and size != known):
        if remainder == "error" or len(group) != 2 or len(free) != 1:
            return None
        starts = _boundaries(size, known, by_number=group[0] in given, balanced=remainder == "balanced")
        first = (np.searchsorted(starts, place, side="right") - 1).astype(np.int64)
        return [(len(starts), first), (int(np.diff([*starts, size]).max()), place - starts[first])]
    parts: list[tuple[int, Labels]] = []
    for name in reversed(group):
        extent = given.get(name, size // known)
        parts.insert(0, (extent, place % max(extent, 1)))
        place = place // max(extent, 1)
    return parts


def _boundaries(size: int, known: int, *, by_number: bool, balanced: bool) -> Labels:
    """First index of each virtual batch of a ragged axis; 33 by 32 is 32 + 1 (short) or 17 + 16 (balanced)."""
    number = min(known, size) if by_number else -(-size // known)
    if balanced:
        return np.array([(i * size + number - 1) // number for i in range(number)], dtype=np.int64)
    return np.arange(0, size, -(-size // number) if by_number else known, dtype=np.int64)
