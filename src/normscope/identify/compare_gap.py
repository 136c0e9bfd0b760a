"""How far two sides are apart on one input, and how far rounding alone may take them.

Rounding is measured, not bounded: each side is run again on inputs whose elements are a roundoff or two off, and what
that changes is what an implementation of the same function may be off by. So an ill-conditioned input (a constant set
under a tiny eps) excuses much, and an ordinary one next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from normscope.errors import ModelError
from normscope.identify.compare_half import SHARE, HalfGap, half_gap
from normscope.identify.compare_result import HALVES, largest_difference
from normscope.identify.compare_sides import STORED, Side
from normscope.reference.axes import locate
from normscope.reference.moments import moments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.spec import NormSpec

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
    """what rounding explains, where ``excuse`` is 1"""
    excuse: Array | float = 1.0
    """how many times as much it explains at an element"""
    half: HalfGap | None = None
    """in half precision, where not sizes but shares of elements tell: one last bit may be off anywhere"""

    @property
    def size(self) -> float:
        return largest_difference(self.y_a, self.y_b)

    @property
    def real(self) -> bool:
        return largest_difference(self.y_a / self.excuse, self.y_b / self.excuse) > self.allowed


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
        tells = half.other_dtype or half.off.mean() > SHARE
        return Gap("output", half.y_a, half.y_b, -np.inf if tells else np.inf, half=half)
    y_a, y_b = a.output(x, mode, va), b.output(x_b, mode, vb).transpose(back)
    size = float(np.abs(np.concatenate([y_a.ravel(), y_b.ravel()])).max(initial=0.0, where=_finite(y_a, y_b)))
    roundoff = max(a.roundoff, b.roundoff)
    levels = np.maximum(_levels(x, a.spec or b.spec), _levels(x_b, b.spec or a.spec).transpose(back))
    found = Gap("output", y_a, y_b, TIMES * roundoff * size, 1 + levels**2)
    if not found.real:
        return found
    allowed, seen = found.allowed, largest_difference(y_a, y_b)
    signs = np.random.default_rng(1)
    for _ in range(2):
        off = 1 + 2 * roundoff * signs.choice([-1.0, 1.0], x.shape)
        moved = (
            a.output(x * off, mode, va),
            b.output(x_b * off.transpose(np.argsort(back)), mode, vb).transpose(back),
        )
        changes = (
            largest_difference(y / found.excuse, was / found.excuse)
            for y, was in zip(moved, (y_a, y_b), strict=True)
        )
        allowed = max(allowed, *(TIMES * change for change in changes))
        if np.isinf(seen) and not np.isinf(largest_difference(*moved)):
            allowed = (
                np.inf
            )  # a number against none, on this very input only: 0/0 in one, rounding in the other
    return replace(found, allowed=allowed if not np.isinf(allowed) or np.isinf(seen) else np.inf)


def _levels(x: Array, spec: NormSpec | None) -> Array:
    """|mean| over denominator of the statistic set that each element belongs to, or of all where no specification says.

    E[x^2] - E[x]^2 is off by its square, in units of the roundoff, and is no other function. What one set excuses does
    not excuse the others.
    """
    labels, sets, eps = np.zeros(x.size, dtype=np.int64), 1, 0.0
    if spec is not None:
        try:
            axes = locate(spec, x.shape)
        except ValueError:  # a shape that only the other side takes
            return _levels(x, None)
        labels = axes.label(axes.kept)
        sets = int(labels.max(initial=0)) + 1
        eps = (spec.eps or 0.0) ** (1 if "variance" in spec.eps_at else 2)
    with np.errstate(all="ignore"):
        found = moments(x.ravel(), labels, sets, np.ones(x.size, dtype=np.bool_))
        square = np.divide(found.mean**2, found.variance + eps, where=found.variance > 0, out=np.zeros(sets))
    levels: Array = np.sqrt(np.nan_to_num(square, posinf=0.0))[labels].reshape(x.shape)
    return levels


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
