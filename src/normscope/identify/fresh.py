"""The last word: the specification against the callable on inputs that no conclusion was drawn from."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np

from normscope import reference
from normscope.identify.box import Array
from normscope.identify.probing import Prober, direction
from normscope.spec import NormSpec

ROUNDINGS = 64
"""that every output may carry, times sqrt(n) for the sums and (1 + kappa)^2 for the centering"""


ALL_DIGITS = 2.0**50
"""a mean so many spreads high leaves no digit of them in float64"""


SIZES = {f"the size 10^{k}": 10.0**k for k in range(-6, 9, 2)}
"""what is verified of every answer: a clamp at 1e5 is no part of any norm, and shows on no smaller input"""
FEW = ("another direction", "a spread near eps")
ORDINARY = (*FEW, "a few large elements", "a level of 2", "a spread far above eps")
ZEROS = "zeros"
ALL = (*ORDINARY, *SIZES, ZEROS)
"""the inputs by name"""


@dataclass(frozen=True)
class Verdict:
    error: float
    """largest difference over the largest output of that input"""
    allowed: float
    """what rounding allows at that input"""
    input: str
    inputs: int
    resolution: float
    """the most that rounding allows at any of the inputs"""

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed


def inputs(shape: tuple[int, ...], near_eps: float | None) -> Iterator[tuple[str, Array]]:
    """Fresh inputs by name; ``near_eps`` is a scale at which eps and the spread are of one size."""
    yield "another direction", direction(shape, 101)
    yield "a few large elements", direction(shape, 102) ** 3
    yield "a level of 2", direction(shape, 103) + 2.0
    if near_eps is not None:
        near = 2.0 ** round(np.log2(near_eps))
        yield "a spread near eps", near * direction(shape, 104)
        if near > 1:  # inputs of ordinary size are far below it
            yield "a spread far above eps", 2.0**6 * near * direction(shape, 105)
    for name, size in SIZES.items():
        yield name, size * direction(shape, 101)
    if near_eps is not None:  # else 0 / 0, of which each makes its own
        yield ZEROS, np.zeros(shape)


def verify(
    f: Prober,
    shape: tuple[int, ...],
    spec: NormSpec,
    weight: Array | None,
    bias: Array | None,
    near_eps: float | None,
    names: Container[str] = ALL,
) -> Verdict:
    """Compare on fresh inputs; the worst of them, measured by what rounding allows there."""
    verdicts = []
    for name, x in inputs(shape, near_eps):
        if name not in names:
            continue
        # as PyTorch's rule has it, eps=None is that of the dtype the callable computes in
        seen = x.astype(np.float32) if f.roundoff > 2.0**-50 else x
        expected = reference.forward(seen, spec, weight, bias)
        largest = float(np.abs(expected).max()) or 1.0
        error = float(np.abs(f(seen.astype(np.float64)) - expected).max()) / largest
        verdicts.append((error if np.isfinite(error) else np.inf, _allowed(f.roundoff, x, spec), name))
    error, allowed, name = max(verdicts, key=lambda v: v[0] / v[1])
    return Verdict(error, allowed, name, len(verdicts), max(v[1] for v in verdicts))


def _allowed(roundoff: float, x: Array, spec: NormSpec) -> float:
    """n roundings of a sum grow like sqrt(n); the square of a mean that is kappa spreads high costs kappa^2 of them."""
    mean, variance, count = reference.statistics(x, spec.replace(scale="std", correction=0))
    spread = np.sqrt(variance)
    told = spread * ALL_DIGITS > np.abs(
        mean
    )  # sets of one element, or of equal ones, are centered without rounding
    kappa = float(np.max(np.abs(mean[told]) / spread[told], initial=0.0)) if spec.center else 0.0
    return ROUNDINGS * roundoff * sqrt(float(np.max(count))) * (1 + kappa) ** 2
