"""The normalized value of every element, with everything that its backward needs.

x_hat = numerator / s, where s is a function of v = sum(argument^2) / divisor over the set of the element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from normscope.reference.axes import Labels
from normscope.reference.inputs import Inputs
from normscope.reference.moments import Array, denominator, moments
from normscope.reference.running import read_state


@dataclass(frozen=True)
class Normalized:
    """What forward computes and backward reads. Arrays hold one number an element, or one a set."""

    value: Array
    """x_hat (r x_hat + d under batch renormalization) of every element"""
    labels: Labels
    sets: int
    live: bool
    """the statistics move with x; False where they are stored ones"""
    count: Array
    """elements of each set, at least 1"""
    numerator: Array
    """x - mean, or x where the spec does not center"""
    argument: Array
    """what is squared under the root: the numerator, save that a variance is about the mean always"""
    divisor: Array
    """n - correction, n or 1, of each set"""
    s: Array
    slope: Array
    """ds/dv of each set"""
    stretch: Array
    """r of batch renormalization for each set, which the backward takes as a constant; else 1"""


def by_batch(inputs: Inputs, running: Any) -> Normalized:
    """Normalize by the statistics of the input; ``running`` is read under batch renormalization only."""
    spec, labels, sets = inputs.spec, inputs.labels, inputs.sets
    m = moments(inputs.x, labels, sets, inputs.valid)
    v, argument, divisor = m.under_root(spec, inputs.x)
    s, slope = denominator(v, inputs.eps, spec.eps_at)
    numerator = m.centered if spec.center else inputs.x
    stretch, value = np.ones(sets), numerator / s[labels]
    if spec.running is not None and spec.running.renorm is not None:
        state = read_state(running, inputs)
        r_max, d_max = spec.running.renorm
        stored = np.zeros(sets, dtype=np.int64)
        stored[labels] = state.mean_labels
        sigma, _ = denominator(state.var[stored], inputs.eps, spec.eps_at)
        stretch = np.clip(s / sigma, 1 / r_max, r_max)
        shift = np.clip((m.mean - state.mean[stored]) / sigma, -d_max, d_max)
        value = value * stretch[labels] + shift[labels]
    count = np.maximum(m.count, 1).astype(np.float64)
    return Normalized(value, labels, sets, True, count, numerator, argument, divisor, s, slope, stretch)


def by_state(inputs: Inputs, running: Any) -> Normalized:
    """Normalize by stored statistics: an affine map of every element on its own."""
    state = read_state(running, inputs)
    s, _ = denominator(state.var, inputs.eps, inputs.spec.eps_at)
    numerator = inputs.x - state.mean[state.mean_labels] if inputs.spec.center else inputs.x
    one = np.ones(s.size)
    value = numerator / s[state.mean_labels]
    return Normalized(
        value, state.mean_labels, s.size, False, one, numerator, numerator, one, s, 0 * one, one
    )


def normalized(inputs: Inputs, running: Any, training: bool) -> Normalized:
    """By the batch, or by the stored statistics where the spec has some and ``training`` is False."""
    if inputs.spec.running is None or training:
        return by_batch(inputs, running)
    return by_state(inputs, running)
