"""Mean, variance and denominator of statistic sets, in float64, and how the denominator moves with the variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.reference.axes import Labels

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


def total(values: Array, labels: Labels, sets: int) -> Array:
    """Sum of ``values`` over each set."""
    return np.asarray(np.bincount(labels, weights=values, minlength=sets), dtype=np.float64)


@dataclass(frozen=True)
class Moments:
    """Moments of each set over its valid elements. An empty set has mean 0, variance 0 and count 0."""

    count: NDArray[np.int64]
    mean: Array
    centered: Array
    """x - mean of every element, 0 where it is not valid"""
    variance: Array
    """biased: the mean of the squared centered elements"""
    square: Array
    """the mean of the squared elements, uncentered"""

    def bessel(self, correction: float) -> Array:
        """n / (n - correction) of each set; NaN where n is not above the correction, 1 where the set is empty."""
        left = self.count - correction
        ratio = np.where(left > 0, self.count / np.where(left > 0, left, 1.0), np.nan)
        return np.where(self.count > 0, ratio, 1.0)

    def under_root(self, spec: Any, x: Array) -> tuple[Array, Array, Array]:
        """v of each set, with the argument and the divisor of v = sum(argument^2) / divisor.

        The variance is about the mean always; mean square and sum of squares are of what is divided: x - mean where
        the spec centers, else x.
        """
        number = np.maximum(self.count, 1).astype(np.float64)
        if spec.scale == "std":
            ratio = self.bessel(float(spec.correction))
            return self.variance * ratio, self.centered, number / ratio
        square, argument = (self.variance, self.centered) if spec.center else (self.square, x)
        if spec.scale == "rms":
            return square, argument, number
        if spec.scale == "l2":
            return square * number, argument, np.ones_like(number)
        raise ValueError(f"a scalar denominator has scale std, rms or l2; got {spec.scale!r}")


def moments(x: Array, labels: Labels, sets: int, valid: Flags) -> Moments:
    """Two passes about a pivot near the mean. ``x`` is 0 where it is not valid.

    The first sum runs in order and is off by up to n ulp of the largest element, which is much where the level of x is
    high. It only gives the pivot. Elements minus pivot are small and keep all their digits, and so does their mean,
    which is taken off in turn. In a constant set they are one small multiple of an ulp, whose sum and mean are exact,
    so that the set centers to exactly 0.
    """
    count = np.bincount(labels, weights=valid, minlength=sets).astype(np.int64)
    number = np.maximum(count, 1)
    pivot = total(x, labels, sets) / number
    shifted = np.where(valid, x - pivot[labels], 0.0)
    left = total(shifted, labels, sets) / number
    centered = np.where(valid, shifted - left[labels], 0.0)
    variance = total(centered * centered, labels, sets) / number
    return Moments(count, pivot + left, centered, variance, total(x * x, labels, sets) / number)


def denominator(v: Array, eps: float, eps_at: str) -> tuple[Array, Array]:
    """The denominator s(v) and its slope ds/dv.

    ==============  ====================  =======================================
    ``eps_at``      s                     ds/dv
    ==============  ====================  =======================================
    variance        sqrt(v + eps)         1 / (2 s)
    std             sqrt(v) + eps         1 / (2 sqrt(v))
    max             max(sqrt(v), eps)     1 / (2 s) where sqrt(v) > eps, else 0
    max_variance    sqrt(max(v, eps))     1 / (2 s) where v > eps, else 0
    ==============  ====================  =======================================

    Where v is 0 the slope is given as 0: it only ever multiplies the centered elements, which are 0 there too, and
    x / (|x| + eps) does have a derivative at 0.
    """
    if eps_at == "variance":
        s = root = np.sqrt(v + eps)
        still = v == 0
    elif eps_at == "std":
        root = np.sqrt(v)
        s, still = root + eps, v == 0
    elif eps_at == "max":
        root = np.sqrt(v)
        s, still = np.maximum(root, eps), root <= eps
    elif eps_at == "max_variance":
        s = root = np.sqrt(np.maximum(v, eps))
        still = v <= eps
    else:
        raise ValueError(
            f"eps stands at variance, std, max or max_variance of a scalar denominator; got {eps_at!r}"
        )
    return s, np.where(still, 0.0, 0.5 / np.where(still, 1.0, root))
