"""What no probe at one shape can tell apart, and what breaks the tie.

With k = n / (n - c), ``w (x - mean) / sqrt(k v + eps)`` is ``w / sqrt(k)`` over ``sqrt(v + eps / k)``: a corrected
variance with one weight and eps is the biased one with another weight and eps. A sum of squares is n mean squares. Two
things tell them apart from outside: a second set size, where n changes and the callable's own numbers do not; and round
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt

from normscope.identify.affine import Values
from normscope.identify.decimals import shortest
from normscope.identify.fit import Fit

DIGITS = 9
"""significant digits that a number needs at most to be called round; this many and more count as none"""


@dataclass(frozen=True)
class Units:
    """A way to measure the spread of a set of n elements: its square over the biased variance or mean square."""

    scale: str
    correction: int
    words: str

    def ratio(self, n: int) -> float:
        """k"""
        if self.scale == "l2":
            return float(n)
        return n / (n - self.correction) if n > self.correction else inf


def choices(one: Fit, n: int) -> list[Units]:
    """The units that sets of this size may be measured in, the usual first."""
    if one.shape.about_mean:
        found = [Units("std", 0, "the biased variance"), Units("std", 1, "the unbiased variance")]
        found += [Units("l2", 0, "the sum of squares")] if one.shape.center else []
    else:
        found = [Units("rms", 0, "the mean square"), Units("l2", 0, "the sum of squares")]
    return [units for units in found if units.ratio(n) < inf]


@dataclass(frozen=True)
class Constant:
    """eps as a specification writes it."""

    eps: float | None
    eps_at: str
    digits: int


def constant(one: Fit, units: Units, n: int, machine: float) -> Constant:
    """eps in these units, as the round number that it is within its error, if it is one.

    A constant that is the machine epsilon of the dtype is ``eps=None``. A floor may stand at the root or under it:
    the rounder of the two is named, the root where both are.
    """
    if one.root_eps == 0:
        return Constant(0.0, "variance", 0)
    root = one.root_eps * sqrt(units.ratio(n))
    error = eps_error(one, machine)
    if one.form == "variance":
        return _round(root**2, 2 * error, "variance", machine)
    at_root = _round(root, error, one.form, machine)
    if one.form == "max":
        under = _round(root**2, 2 * error, "max_variance", machine)
        return under if under.digits < at_root.digits else at_root
    return at_root


def eps_error(one: Fit, machine: float) -> float:
    """What the constant may be off by, relative, in units of the root: it is itself a number of the dtype."""
    return 4 * one.error + 4 * machine


def _round(value: float, error: float, eps_at: str, machine: float) -> Constant:
    if abs(value / machine - 1) <= error:
        return Constant(None, eps_at, 1)
    digits = digits_of(value, error)
    told = float(f"{value:.{digits - 1}e}") if digits < DIGITS else shortest(value, error)
    return Constant(told, eps_at, digits)


def digits_of(value: float, error: float) -> int:
    """Significant digits of the shortest decimal within the relative error; `DIGITS` where it is not worth a name.

    >>> digits_of(1.0000000001e-5, 1e-8), digits_of(9.574e-7, 1e-9)
    (1, 4)
    """
    for digits in range(1, DIGITS):
        # digits that the error would allow by chance are no sign of anything
        if error > 0.01 * 10.0**-digits:
            break
        if abs(float(f"{value:.{digits - 1}e}") / value - 1) <= error:
            return digits
    return DIGITS


def by_second_size(
    candidates: Sequence[Units], sizes: tuple[int, int], gain_ratio: float, error: float
) -> Units | None:
    """The units under which one weight explains the gain at two set sizes; None where none does.

    The canonical gain is w / sqrt(k), so from n to m elements it changes by sqrt(k(n) / k(m)).
    """
    n, m = sizes
    for units in candidates:
        expected = 0.5 * (log(units.ratio(n)) - log(units.ratio(m)))
        if abs(log(gain_ratio) - expected) <= error:
            return units
    if not any(units.scale == "std" for units in candidates):
        return None
    square = gain_ratio**2  # (1 - c / m) / (1 - c / n)
    correction = n * m * (1 - square) / (n - square * m)
    told = Units("std", round(correction), f"the variance with the correction {round(correction)}")
    # so near to a whole number that its own gain ratio is the measured one
    if not 1 < told.correction < min(n, m):
        return None
    expected = 0.5 * (log(told.ratio(n)) - log(told.ratio(m)))
    return told if abs(log(gain_ratio) - expected) <= error else None


def roundness(units: Units, n: int, eps: Constant, gain: Values) -> int:
    """How many digits the numbers need in these units: fewer are likelier to have been written by somebody."""
    total = eps.digits
    scaled = gain.scaled(sqrt(units.ratio(n)))
    if scaled.is_everywhere(float(scaled.value.flat[0])):
        value = float(scaled.value.flat[0])
        total += (
            0 if scaled.is_everywhere(1.0) else digits_of(abs(value), float(scaled.error.max() / abs(value)))
        )
    return total
