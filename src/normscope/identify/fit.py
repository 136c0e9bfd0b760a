"""The joint fit of gain and eps to everything that was measured, for each way to center and to place eps.

``z_i = a_i u_i / D(v)`` with ``u = x - mean`` or ``x``, v the variance or the mean square of the set, and D one of
``sqrt(v + q^2)``, ``sqrt(v) + q``, ``max(sqrt(v), q)``. Given q, the best a_i are linear least squares, one by one;
what remains is a search for one number. The wrong form leaves 20 to 45 % of the output where sqrt(v) is near q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normscope.identify.box import Array
from normscope.identify.partition import Labels, Partition
from normscope.identify.scan import Observation

FORMS = ("variance", "std", "max")
SEARCHED = 512
"""elements that the search for eps looks at; the gain is then taken from all"""
SCREENED = 48
"""elements that tell roughly where eps is"""


@dataclass(frozen=True)
class Shape:
    """What is divided, and by the spread about what."""

    center: bool
    """u = x - mean, else x"""
    about_mean: bool
    """v is the variance, else the mean square"""

    def __str__(self) -> str:
        over = "the variance" if self.about_mean else "the mean square"
        return f"{'x - mean' if self.center else 'x'} over {over}"


SHAPES = (Shape(True, True), Shape(False, False), Shape(False, True))


@dataclass(frozen=True)
class Fit:
    """One form of the denominator and the best gain and eps under it."""

    shape: Shape
    form: str
    """where the constant stands: one of `FORMS`; ``"variance"`` where there is none"""
    root_eps: float
    """q: the constant in units of the root, 0 for none"""
    error: float
    """standard error of log q, by the misfit that was left; 0 where q is 0"""
    gain: Array
    """a, element by element, in the shape of the input"""
    gain_error: Array
    """standard error of it"""
    lever: Array
    """the largest u / D at which it was seen: where that is small, an error of the mean counts much"""
    misfit: float
    """root mean square of what is left, in units of the rounding that is expected"""


@dataclass(frozen=True)
class Data:
    """Observations laid side by side: rows are observations, columns elements."""

    u: Array
    root: Array
    """sqrt(v) of the set of each element"""
    z: Array
    """in units of its standard error, like everything that is compared with it"""
    precision: Array
    """1 / standard error"""

    def columns(self, picked: Labels) -> Data:
        return Data(*(part[:, picked] for part in (self.u, self.root, self.z, self.precision)))

    def model(self, q: float, form: str) -> Array:
        return self.u / denominator(self.root, q, form) * self.precision


def lay_out(observed: Sequence[Observation], partition: Partition, shape: Shape) -> Data:
    sets = Sets(partition.labels.ravel())
    rows = [_numerator_and_root(o.x.ravel(), sets, shape) for o in observed]
    return Data(
        np.array([u for u, _ in rows]),
        np.array([root for _, root in rows]),
        np.array([(o.z / o.sigma).ravel() for o in observed]),
        np.array([1 / o.sigma.ravel() for o in observed]),
    )


class Sets:
    """Means over sets by pairwise sums: a running sum over thousands of elements would lose digits."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.order = np.argsort(labels, kind="stable")
        self.sizes = np.bincount(labels)

    def mean(self, values: Array) -> Array:
        """The mean of its set, for every element."""
        sorted_values = values[self.order]
        if np.ptp(self.sizes) == 0:
            means = sorted_values.reshape(len(self.sizes), -1).mean(axis=1)
        else:
            parts = np.split(sorted_values, np.cumsum(self.sizes)[:-1])
            means = np.array([part.mean() for part in parts])
        return np.asarray(means[self.labels])


def _numerator_and_root(x: Array, sets: Sets, shape: Shape) -> tuple[Array, Array]:
    centered = x - sets.mean(x)
    centered = centered - sets.mean(centered)
    spread = centered if shape.about_mean else x
    largest = float(np.abs(spread).max()) or 1.0  # squares of 2^-480 are no numbers
    root = np.sqrt(sets.mean((spread / largest) ** 2)) * largest
    return centered if shape.center else x, root


def denominator(root: Array, q: float, form: str) -> Array:
    """D for one root of v."""
    if form == "std":
        return root + q
    return np.maximum(root, q) if form == "max" else np.hypot(root, q)


def gain_of(d: Data, q: float, form: str) -> tuple[Array, Array, Array]:
    """The best a of each element, its standard error where roundings are as expected, and what is left over."""
    model = d.model(q, form)
    power = _dot(model, model)
    a = _dot(model, d.z) / power
    return a, 1 / np.sqrt(power), d.z - a * model


def _dot(a: Array, b: Array) -> Array:
    """Products summed over the observations; never 0, so that it can divide."""
    return np.asarray(np.einsum("ki,ki->i", a, b) + np.finfo(float).tiny)


def _misfit(d: Data, q: float, form: str) -> float:
    left = gain_of(d, q, form)[2]
    return float(np.sqrt(np.mean(left**2)))


def _polish(d: Data, q: float, form: str) -> tuple[float, float]:
    """Steps of Gauss and Newton on log q, and its standard error where roundings are as expected."""
    error, h = np.inf, 1e-4
    for _ in range(30):
        a, _, left = gain_of(d, q, form)
        model = d.model(q, form)
        slope = a * (d.model(q * (1 + h), form) - d.model(q * (1 - h), form)) / (2 * h)
        slope = slope - _dot(model, slope) / _dot(model, model) * model  # a follows q: only the rest is news
        curvature = float(np.sum(slope**2))
        if not curvature > 0:
            break
        error = 1 / np.sqrt(curvature)
        move = float(np.sum(slope * left)) / curvature
        q *= float(np.exp(np.clip(move, -0.5, 0.5)))
        # a wrong form leaves more than roundings, and is as well known as that allows
        if abs(move) < 0.01 * error * max(1.0, float(np.sqrt(np.mean(left**2)))):
            break
    return q, float(error)


def fit(
    observed: Sequence[Observation],
    partition: Partition,
    start: float | None,
    shapes: Sequence[Shape] = SHAPES,
) -> list[Fit]:
    """Fits, best first: every form of the best shape, and the best form of the others.

    ``start`` is the octave, on the scale of the inputs, at which eps takes over; None for no eps.
    """
    found: list[Fit] = []
    for shape in shapes:
        data = lay_out(observed, partition, shape)
        if start is None:
            found.append(_finish(data, partition, shape, "variance", 0.0, 0.0))
            continue
        picked = np.random.default_rng(0).permutation(data.z.shape[1])[:SEARCHED]
        few, part = data.columns(picked[:SCREENED]), data.columns(picked)
        usual = float(np.median(part.root[-1])) * 2.0**start  # the last is another direction, at the scale 1
        tried = usual * 2.0 ** np.arange(-9, 9.25, 0.5)
        rough = {form: min((_misfit(few, q, form), q) for q in tried) for form in FORMS}
        best, *others = sorted(FORMS, key=lambda form: rough[form])
        for form in (best, *others) if len(shapes) == 1 else (best,):
            found.append(_finish(data, partition, shape, form, *_polish(part, float(rough[form][1]), form)))
    found.sort(key=lambda one: one.misfit)
    if len(shapes) == 1 or start is None:
        return found
    return sorted(fit(observed, partition, start, [found[0].shape]) + found[1:], key=lambda one: one.misfit)


def _finish(data: Data, partition: Partition, shape: Shape, form: str, q: float, error: float) -> Fit:
    gain, gain_error, left = gain_of(data, q, form)
    lever = np.abs(data.u / denominator(data.root, q, form)).max(axis=0)
    freedom = max(left.size - gain.size - 1, 1)
    misfit = float(np.sqrt(np.sum(left**2) / freedom))
    spread = max(misfit, 0.1)
    return Fit(
        shape,
        form,
        q,
        error * spread,
        gain.reshape(partition.shape),
        # scales of one direction round alike, so that their number does not average anything out
        (gain_error * spread * np.sqrt(len(left))).reshape(partition.shape),
        lever.reshape(partition.shape),
        misfit,
    )


def at_fixed_eps(observed: Sequence[Observation], partition: Partition, one: Fit, q: float) -> Fit:
    """The same form with q given: the gain that goes with a constant that was recognized."""
    data = lay_out(observed, partition, one.shape)
    return _finish(data, partition, one.shape, one.form, q, 0.0)
