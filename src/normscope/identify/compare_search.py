"""Make a counterexample small and plain: fewer elements, round numbers, zeros, while the difference stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import floor, log10
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

ONE_BY_ONE = 48
"""elements up to which each is made plain by itself"""


def shrunk(x: Array, stays: Callable[[Array], bool]) -> Array:
    """The smallest input found from ``x`` on which ``stays`` is still True; the same for the same arguments.

    First axes are cut (to 1, 2, half, one less, from either end) and axes of size 1 dropped, until nothing is left that
    stays; then all elements are rounded, as coarsely as stays; then single elements become 0, or 1.

    >>> shrunk(np.array([0.1, 7.3, 0.2, 0.3]), lambda x: x.max(initial=0) > 5)
    array([7.])
    """
    x = _cut(x, stays)
    x = _rounded(x, stays)
    return _plain(x, stays) if x.size <= ONE_BY_ONE else x


def _cut(x: Array, stays: Callable[[Array], bool]) -> Array:
    changed = True
    while changed:
        changed = False
        for smaller in _slices(x):
            if stays(smaller):
                x, changed = smaller, True
                break
    return x


def _slices(x: Array) -> Iterator[Array]:
    """Without an axis of size 1; shorter along one axis, from the front and from the back."""
    for axis, size in enumerate(x.shape):
        if size == 1 and x.ndim > 1:
            yield x.squeeze(axis)
    for axis, size in enumerate(x.shape):
        for length in sorted({n for n in (1, 2, size // 2, size - 1) if 0 < n < size}):
            for start in (0, size - length):
                yield np.take(x, range(start, start + length), axis)


def _rounded(x: Array, stays: Callable[[Array], bool]) -> Array:
    largest = float(np.abs(x).max(initial=0.0))
    if not largest or not np.isfinite(largest):
        return x
    digits = -floor(log10(largest))
    for places in range(digits, digits + 5):
        coarse = np.round(x, places) + 0.0  # no negative zeros
        if stays(coarse):
            return coarse
    return x


def _plain(x: Array, stays: Callable[[Array], bool]) -> Array:
    for place in np.ndindex(x.shape):
        for value in (0.0, 1.0):
            if x[place] in (0.0, value):
                continue
            other = x.copy()
            other[place] = value
            if stays(other):
                x = other
                break
    return x
