"""The law by which a stored variance enters: where eps stands, read off the slope of a fixed map."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from normscope.identify.decimals import shortest
from normscope.identify.module_box import Array, ModuleBox
from normscope.identify.remarks import EPS_WORDS
from normscope.identify.result import Evidence

LEVELS = (0.0, 0.25, 1.0, 4.0)
"""values that a stored variance is set to"""
ROUNDING = 1e-14
"""of numbers that a few outputs of float64 give"""
LAW = 1e-10
"""largest misfit of a law, relative: rounding gives 1e-15, the wrong law 1e-3"""


@dataclass(frozen=True)
class Law:
    """The slope of the map as a function of the stored variance: gain / sqrt(v + eps), and the like."""

    gain: float
    eps: float
    eps_at: str
    evidence: Evidence


def law_of_variance(
    box: ModuleBox, name: str, shape: tuple[int, ...], inputs: tuple[Array, Array]
) -> Law | str:
    """Set a stored variance to some values and see which law the slope of the map follows; a reason where none.

    ``box`` has gains of 1, so the slope is gain / denominator.
    """
    one, other = inputs
    inverse = []
    with np.errstate(all="ignore"):  # without eps, a variance of 0 gives 0 / 0
        for v in LEVELS:
            at = box.set({name: np.full(shape, v)})
            inverse.append(1.0 / float(np.median((at(one) - at(other)) / (one - other))))
    sign = -1.0 if inverse[2] < 0 else 1.0  # of the gain
    at_zero, quarter, unit, four = (sign * one for one in inverse)
    at_zero = at_zero if np.isfinite(at_zero) else 0.0
    inside = _line(0.25, 1.0, 4.0, quarter**2, unit**2, four**2)
    outside = _line(0.5, 1.0, 2.0, quarter, unit, four)
    deviation = _line(0.25, 1.0, 4.0, quarter, unit, four)
    if inside[2] < LAW and abs(at_zero**2 - inside[1]) <= LAW * unit**2 and inside[0] > 0:
        gain, eps, eps_at = inside[0] ** -0.5, at_zero**2 / inside[0], "variance"
    elif outside[2] < LAW and outside[0] > 0:
        eps_at = "std" if abs(at_zero - outside[1]) <= LAW * unit else "max"
        gain, eps = 1 / outside[0], at_zero / outside[0]
    elif deviation[2] < LAW:
        return (
            f"{name} is a stored standard deviation: 1/a is a line in it, a the slope of the map, where a "
            "specification stores the variance"
        )
    else:
        return (
            f"{name} enters by no known law: with a the slope of the map, neither 1/a^2 nor 1/a is a line in it or "
            "its root"
        )
    gain, eps = sign * short(gain), short(eps)
    if eps_at == "max" and len(f"{short(eps**2):g}") < len(
        f"{eps:g}"
    ):  # a floor under the root, by its rounder number
        eps, eps_at = short(eps**2), "max_variance"
    evidence = Evidence(
        f"{name} is the stored variance, with eps {eps:g} {EPS_WORDS[eps_at]}",
        f"{name} set to {', '.join(f'{v:g}' for v in LEVELS)}, and the slope a of the map read",
        {"misfit of 1/a^2 linear in v": inside[2], "misfit of 1/a linear in sqrt(v)": outside[2]},
    )
    return Law(gain, eps, eps_at, evidence)


def _line(x1: float, x2: float, x3: float, y1: float, y2: float, y3: float) -> tuple[float, float, float]:
    """Slope and intercept through the outer points, and the misfit of the middle one relative to it."""
    slope = (y3 - y1) / (x3 - x1)
    intercept = y1 - slope * x1
    return slope, intercept, abs(intercept + slope * x2 - y2) / abs(y2)


def short(value: float) -> float:
    """The number of at most 6 digits that it is near to, if there is one; else the shortest within rounding."""
    rounded = float(f"{value:.6g}")
    return rounded if abs(value - rounded) <= 1e-9 * abs(value) else shortest(value, ROUNDING)
