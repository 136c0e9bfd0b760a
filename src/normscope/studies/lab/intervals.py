"""Means over seeds with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np

CONFIDENCE, RESAMPLES = 0.95, 9999


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` seeds and its bootstrap interval; low and high are NaN where there is no interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]" if self.n > 1 else f"{self.mean:.4g}"


def interval(values: Sequence[float]) -> Interval:
    """The mean, and where 95 % of the means of 9999 resamples lie (percentile bootstrap, a fixed generator).

    It cannot reach beyond the smallest and the largest value: with 3 seeds it is their range, and covers the true
    median in 3 of 4 cases; with 5 seeds in 15 of 16. One value has no interval; values that are not finite give none.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=1.0, high=3.0, n=3)
    >>> interval([1.0])
    Interval(mean=1.0, low=nan, high=nan, n=1)

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    found = [float(value) for value in values]
    n = len(found)
    if n == 0 or not all(map(isfinite, found)):
        return Interval(nan, nan, nan, n)
    mean = float(np.mean(found))
    if n == 1:
        return Interval(mean, nan, nan, n)
    if min(found) == max(found):
        return Interval(found[0], found[0], found[0], n)
    from scipy import stats

    # In vectors of about a million numbers at most, for samples of any size.
    result = stats.bootstrap(
        (found,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, 2**20 // n),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(mean, float(result.low), float(result.high), n)
