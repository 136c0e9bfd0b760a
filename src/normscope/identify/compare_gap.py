"""How far two sides are apart on one input, and how far rounding alone may take them.

Rounding is measured, not bounded: each side is run again on inputs whose elements are a roundoff or two off, and what
that changes is what an implementation of the same function may be off by. So an ill-conditioned input (a constant set
under a tiny eps) excuses much, and an ordinary one next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.errors import ModelError
from normscope.identify.compare_half import SHARE, HalfGap, half_gap
from normscope.identify.compare_result import HALVES, largest_difference
from normscope.identify.compare_sides import STORED, Side

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]

TIMES = 64
"""of what a few roundoffs in the input change: a sum of n elements rounds about sqrt(n) times, and differently"""


@dataclass(frozen=True, eq=False)
class Gap:
    """Two outputs (or stored tensors) for one input."""

    quantity: str
    y_a: Array
    y_b: Array
    allowed: float
    """what rounding explains"""
    half: HalfGap | None = None
    """in half precision, where not sizes but shares of elements tell: one last bit may be off anywhere"""

    @property
    def size(self) -> float:
        return largest_difference(self.y_a, self.y_b)

    @property
    def real(self) -> bool:
        return self.size > self.allowed


def gap(
    a: Side,
    b: Side,
    x: Array,
    x_b: Array,
    back: tuple[int, ...],
    mode: str,
    values: tuple[Values | None, Values | None],
) -> Gap:
    """The largest gap of one mode. ``x_b`` is what the second is given, ``back`` takes its axes to the first's."""
    va, vb = values
    if mode == "update":
        return _stored_gap(a.stored(x, va), b.stored(x_b, vb))
    if mode in HALVES:
        half = half_gap(a, b, x, x_b, back, mode, values)
        if half is None:
            raise ModelError(f"{a.name} or {b.name} cannot be asked in {HALVES[mode].dtype}")
        return Gap("output", half.y_a, half.y_b, -np.inf if half.off.mean() > SHARE else np.inf, half)
    y_a, y_b = a.output(x, mode, va), b.output(x_b, mode, vb).transpose(back)
    size = float(np.abs(np.concatenate([y_a.ravel(), y_b.ravel()])).max(initial=0.0, where=_finite(y_a, y_b)))
    roundoff = max(a.roundoff, b.roundoff)
    least = TIMES * roundoff * size * (1 + _level(x) ** 2)
    seen = largest_difference(y_a, y_b)
    if seen <= least:
        return Gap("output", y_a, y_b, least)
    allowed = least
    signs = np.random.default_rng(1)
    for _ in range(2):
        off = 1 + 2 * roundoff * signs.choice([-1.0, 1.0], x.shape)
        moved = (
            a.output(x * off, mode, va),
            b.output(x_b * off.transpose(np.argsort(back)), mode, vb).transpose(back),
        )
        allowed = max(
            allowed, *(TIMES * largest_difference(y, was) for y, was in zip(moved, (y_a, y_b), strict=True))
        )
        if np.isinf(seen) and not np.isinf(largest_difference(*moved)):
            allowed = (
                np.inf
            )  # a number against none, on this very input only: 0/0 in one, rounding in the other
    return Gap("output", y_a, y_b, allowed if not np.isinf(allowed) or np.isinf(seen) else np.inf)


def _level(x: Array) -> float:
    """|mean| over spread: E[x^2] - E[x]^2 is off by its square, in units of the roundoff, and is no other function."""
    with np.errstate(all="ignore"):
        spread = float(x.std())
        return float(abs(x.mean()) / spread) if spread > 0 else 0.0


def _finite(y_a: Array, y_b: Array) -> NDArray[np.bool_]:
    both = np.concatenate([y_a.ravel(), y_b.ravel()])
    finite: NDArray[np.bool_] = np.isfinite(both)
    return finite


def _stored_gap(a: dict[str, Array], b: dict[str, Array]) -> Gap:
    """The stored tensor that differs most. Stored numbers are means of data: rounding takes a few units."""
    found = []
    for name in STORED:
        if name in a and name in b:
            y_a, y_b = a[name], b[name].reshape(a[name].shape) if b[name].size == a[name].size else b[name]
            size = float(np.abs(y_a).max(initial=0.0))
            found.append(Gap(name, y_a, y_b, TIMES * 2.0**-53 * max(size, 1e-300)))
    return max(found, key=lambda g: g.size - g.allowed)
