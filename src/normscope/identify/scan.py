"""How the output answers when the input is scaled: where eps takes over, and whether the output stops growing at all.

For every member ``f(t x) - b`` is ``a t u / D(t)``, with ``u`` the input or the input less its mean: proportional to t
where a constant rules the denominator, constant where the spread does. Scales are powers of two, so that the spread of
``t x`` is exactly t times that of ``x``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

import numpy as np

from normscope.identify.affine import Values
from normscope.identify.box import Array
from normscope.identify.probing import Contradiction, Pair, Prober, pair

COARSE = 4
"""octaves between the scales that look for the place where eps takes over"""
FINE = 6
"""octaves on either side of it that are measured one by one"""
NOISE = 4
"""roundings that one output carries, before its neighbours' are counted"""
STAYS = 1.02
"""growth over `COARSE` octaves up to which an output is one that no longer grows"""
STANDARD = 4
"""standard errors that a bias may be off by"""


@dataclass(frozen=True)
class Observation:
    """One input and ``f(input) - b``, with the rounding error that it has."""

    x: Array
    z: Array
    sigma: Array


@dataclass
class Scan:
    """Outputs of one direction at many scales."""

    f: Prober
    pairs: list[Pair]
    """directions; the first is scaled"""
    bias: Values
    found: dict[int, Observation] = field(default_factory=dict)
    """octave k -> the observation at the scale 2^k"""

    def size(self, k: int) -> float:
        """Root mean square of ``f(2^k x) - b``."""
        return float(np.sqrt(np.mean(self.at(k).z ** 2)))

    def at(self, k: int) -> Observation:
        if k not in self.found:
            x = self.pairs[0].x * 2.0**k
            y = self.f(x) if k else self.pairs[0].plus
            if not np.isfinite(y).all():
                bad = int((~np.isfinite(y)).sum())
                raise Contradiction(
                    f"inputs of the size 2^{k} give {bad} outputs of {y.size} that are NaN or infinite, "
                    + (
                        "as under a negative eps"
                        if k < 0
                        else "as where a square or an exponential overflows"
                    )
                )
            z = y - self.bias.value
            self.found[k] = Observation(x, z, self.noise(y, z))
        return self.found[k]

    def noise(self, y: Array, z: Array) -> Array:
        """Standard error of ``z = y - bias``: roundings of the output and of the input that was centered, which grow
        with how large z gets where the input has the scale 1; and the error of the bias."""
        reach = np.maximum.reduce([np.abs(one.odd) for one in self.pairs])
        own = float(np.sqrt(np.mean(z**2)))
        level = float(np.sqrt(np.mean(self.pairs[0].odd ** 2))) or 1.0
        sigma = NOISE * self.f.roundoff * (np.abs(y) + own / level * reach) + self.bias.error / STANDARD
        # an output that is 0 is not exact
        return np.asarray(sigma + 1e-6 * self.f.roundoff * own + np.finfo(float).tiny)

    def measurable(self, k: int) -> bool:
        """Whether the output at this scale stands out from the rounding of the bias."""
        seen = self.at(k)
        return bool(np.sqrt(np.mean(seen.z**2)) > 2**12 * np.sqrt(np.mean(seen.sigma**2)) / NOISE)


def smallest(f: Prober) -> tuple[int, ...]:
    """The octaves of the smallest inputs: what is always measured, and where eps is looked for deeper. Squares of all
    stay within the range of the dtype."""
    return (-64, -128, -256, -480) if f.roundoff < 2.0**-50 else (-48,)


def scan(f: Prober, pairs: list[Pair], bias: Values) -> Scan:
    """Scales from far below any eps to where the output no longer grows.

    Raises Contradiction where it never stops growing; a linear map is told by `is_linear`.
    """
    s = Scan(f, pairs, bias)
    # sums of squares of the largest inputs stay within the range of the dtype
    top, limit = (8, 100) if f.roundoff < 2.0**-50 else (8, 40)
    for k in range(smallest(f)[0], top + 1, COARSE):
        s.at(k)
    while s.size(top) > STAYS * s.size(top - COARSE) and top < limit:
        top += COARSE
        s.at(top)
    return s


def is_linear(s: Scan) -> bool:
    """Whether the output follows every scale: ``f(t x) - b = t (f(x) - b)`` to rounding."""
    one = s.at(0)
    for k, seen in s.found.items():
        off = np.abs(seen.z - 2.0**k * one.z)
        if (off > 16 * (seen.sigma + 2.0**k * one.sigma)).any():
            return False
    return True


def _growth(s: Scan) -> float:
    """of the output from the largest inputs but one to the largest"""
    top = max(s.found)
    return s.size(top) / max(s.size(top - COARSE), np.finfo(float).tiny)


def growing(s: Scan) -> bool:
    """Whether the output still grows with the largest inputs."""
    return _growth(s) > STAYS


def require_bounded(s: Scan) -> None:
    """Raises Contradiction where the output still grows with the largest inputs."""
    top, growth = max(s.found), _growth(s)
    if growing(s):
        raise Contradiction(
            f"the output grows without bound: {growth:.4g} times from inputs of the size 2^{top - COARSE} to 2^{top}; "
            "that of a normalization stops growing"
        )
    if s.size(top) < 0.01 * max(s.size(k) for k in s.found):
        raise Contradiction(
            f"the output shrinks for large inputs: at the size 2^{top} it is {s.size(top):.2g}, at smaller ones up to "
            f"{max(s.size(k) for k in s.found):.2g}; that of a normalization grows until it stays"
        )
    s.f.conclude(
        "divides by the spread: the output stays the same for large inputs",
        f"the input scaled by 2^{min(s.found)} to 2^{top}",
        growth=growth,
    )


def crossing(s: Scan) -> float | None:
    """The octave at which eps takes over, to a few octaves; None where the output never falls off.

    Where a constant rules, ``size(t) / size(top)`` is ``t / t*``. The smallest scale that can be measured tells t*.

    Raises Contradiction where no scale can be measured beside the bias.
    """
    top = s.size(max(s.found))
    for k in smallest(s.f):
        low = min((j for j in {*s.found, k} if s.measurable(j)), default=None)
        if low is None:
            raise Contradiction(_hidden(s, top))
        share = s.size(low) / top
        if share < 0.999:
            return float(low - log2(share))
    return None


def require_shown(s: Scan) -> None:
    """Raises Contradiction where outputs of ordinary inputs do not stand out from the rounding of the bias."""
    if not s.measurable(0):
        raise Contradiction(_hidden(s, s.size(0)))


def _hidden(s: Scan, largest: float) -> str:
    fix = "Pass a callable and an example of float64" if s.f.roundoff > 2.0**-50 else "Leave the bias out"
    return (
        f"the bias hides the rest: outputs of the size {largest:.2g} are added to a bias of up to "
        f"{np.abs(s.bias.value).max():.2g}, which is known to {np.abs(s.bias.error).max():.1g}. {fix}"
    )


def refine(s: Scan, octave: float) -> None:
    """Measure around the place where eps takes over."""
    center = round(octave)
    for k in range(center - FINE, center + FINE + 1):
        s.at(k)


def observations(s: Scan, start: float | None) -> list[Observation]:
    """Everything that a fit is made of: the scales of one direction, then the other directions.

    ``start`` is the octave at which eps takes over. Where it rules inputs of the scale 1, which then say nothing of the
    spread, the other directions are measured above it too.
    """
    above = 2.0 ** (round(start) + FINE) if start is not None and start > -FINE else 0.0
    large = [pair(s.f, above * p.x) for p in s.pairs[1:]] if above else []
    others = [Observation(p.x, p.odd, s.noise(p.plus, p.odd)) for p in (*large, *s.pairs[1:])]
    return [*(s.found[k] for k in sorted(s.found)), *others]
