"""How far rounding may take a layer that is right: bounds for every element, from what goes into it.

With u the unit of the arithmetic, k = n + 16 for sums of n terms and 16 operations, s the denominator,
z = (x - mean) / s, l = max|x| / s, a the gain and b the bias:

- the mean is off by k u max|x|, which shows in z as k u l, as does an affine map a / s x + (b - a / s mean);
- v is off by k u (v + max|x| sqrt(v)) at worst, by Welford's recurrence, and s by k u (1 + l) s, which scales z;
- so y is off by k u (|a| (|z| + (1 + |z|) l) + |b|), and never less than the step between subnormal numbers;
- dx = (h - mean(h) - z mean(h z)) / s with h = a g is four terms of at most max|h| (1 + |z|) / s, each off by
  k u (1 + l) times that.

Without a mean to subtract l is 0. Stored statistics are no sums, so k is 17, and dx = h / s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normscope.reference.inputs import affine, read
from normscope.reference.normalized import normalized
from normscope.spec import NormSpec, RunningState
from normscope.verify.float64 import ULP, Array

OPERATIONS = 16
TINY = 2.0**-1074


@dataclass(frozen=True)
class Magnitudes:
    """Of one forward, one number an element, flattened (``shape`` restores the input's)."""

    shape: tuple[int, ...]
    terms: Array
    gain: Array
    bias: Array
    z: Array
    level: Array
    """max|x| / s, 0 where no mean is subtracted"""
    rate: Array
    """1 / s"""
    labels: NDArray[np.int64]
    live: bool

    def forward(self, unit: float = ULP, tiny: float = TINY) -> Array:
        """Bound on the error of each element of y."""
        size = self.gain * (self.z + (1 + self.z) * self.level) + self.bias
        bound: Array = (self.terms * (unit * size + tiny)).reshape(self.shape)
        return bound

    def gradient(self, cotangent: Array, unit: float = ULP) -> Array:
        """Bound on the error of each element of dx."""
        h = self.gain * np.abs(cotangent.ravel())
        largest = np.zeros(int(self.labels.max()) + 1)
        np.maximum.at(largest, self.labels, h)
        bound: Array = unit * largest[self.labels] * self._slack
        return bound.reshape(self.shape) + TINY

    def jacobian(self, unit: float = ULP) -> Array:
        """Bound on the error of each entry of dy/dx: the gradient of one element at a time."""
        bound: Array = unit * np.outer(self.gain, self._slack) + TINY
        return bound.reshape(self.shape * 2)

    @property
    def _slack(self) -> Array:
        moving = (1 + self.z) * (1 + self.level) if self.live else 1.0
        slack: Array = 4 * self.terms * self.rate * moving
        return slack

    def truncation(self, cotangent: Array, move: Array, step: float) -> float:
        """Bound on what central differences of y along ``move`` leave out of the slope of sum(cotangent * y).

        On one set the unit vector of (x - mean, sqrt(n eps)) turns by at most r = |move| / (sqrt(n) s) a unit of the
        step, so the third derivative of z is at most 4.3 sqrt(n) r^3, and step^2 / 6 times it is below step^2 times.
        """
        if not self.live:
            return 0.0
        h = np.bincount(self.labels, (self.gain * cotangent.ravel()) ** 2) ** 0.5
        n = np.maximum(np.bincount(self.labels), 1)
        turn = (np.bincount(self.labels, (move.ravel() * self.rate) ** 2) / n) ** 0.5
        return float(step**2 * np.sum(h * n**0.5 * turn**3))


def magnitudes(
    x: Array,
    spec: NormSpec,
    weight: Array | None,
    bias: Array | None,
    *,
    running: RunningState | None,
    training: bool,
) -> Magnitudes:
    """What the reference meets on the way to y; arguments as of `normscope.reference.forward`."""
    inputs = read(x, spec, None)
    parameters = affine(inputs, weight, bias)
    weights = 1.0 if parameters.weight is None else np.abs(parameters.weight.spread) + abs(spec.weight_offset)
    gain = np.full_like(inputs.x, abs(float(spec.gain))) * weights  # 1 + w is rounded before it cancels
    with np.errstate(all="ignore"):
        n = normalized(inputs, running, training)
        rate = (n.stretch / n.s)[n.labels]
        size = np.abs(inputs.x) + np.abs(inputs.x - n.argument)
        if n.live:
            largest = np.zeros(n.sets)
            np.maximum.at(largest, n.labels, np.abs(inputs.x))
            size = largest[n.labels]
        subtracts = spec.center or (n.live and spec.scale == "std")
        return Magnitudes(
            shape=x.shape,
            terms=OPERATIONS + n.count[n.labels],
            gain=gain,
            bias=np.zeros_like(inputs.x) if parameters.bias is None else np.abs(parameters.bias.spread),
            z=np.maximum(np.abs(n.value), np.abs(n.numerator) * rate),
            level=size * rate if subtracts else np.zeros_like(inputs.x),
            rate=rate,
            labels=n.labels,
            live=n.live,
        )


def state_bounds(stored: RunningState, x: Array, terms: int, unit: float) -> tuple[Array, Array]:
    """Bounds on the error of an updated mean and variance.

    The mean of a batch is off by k u max|x|, its variance, with n / (n - 1) of at most 2, by 2 k u 2 max|x|^2; what was
    stored is scaled and added to, which rounds it k times at most (instance norm adds up one copy a sample).
    """
    k, largest = terms + OPERATIONS, float(np.abs(x).max())
    mean: Array = k * unit * (np.abs(stored.mean) + largest)
    var: Array = k * unit * (np.abs(stored.var) + 4 * largest**2)
    return mean, var
