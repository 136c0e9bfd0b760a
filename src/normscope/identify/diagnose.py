"""Where no form fits: which part of ``a u / D + b`` it is that the callable contradicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np

from normscope.identify.box import Array
from normscope.identify.partition import Labels, Partition
from normscope.identify.probing import Pair, Prober, pair

CLEAR = 1e-3
"""an error below this is one of the diagnosis: eps is left out of it"""
LEAST = 3
"""elements of a set that can contradict one common factor, of which one is fitted and one goes to the mean"""
LARGE = 2.0**12
"""inputs so large that an eps of the usual sizes is not seen"""

Size = Callable[[Array, Labels], Array]


def _per_set(reduce: Callable[[Array], float]) -> Size:
    return lambda u, labels: np.array([reduce(np.abs(u[labels == k])) for k in range(labels.max() + 1)])


DENOMINATORS: dict[str, Size] = {
    "the largest magnitude": _per_set(lambda u: float(u.max())),
    "the mean magnitude": _per_set(lambda u: float(u.mean())),
    "the median magnitude": _per_set(lambda u: float(np.median(u))),
    "the 3-norm": _per_set(lambda u: float((u**3).sum() ** (1 / 3))),
    "the mean square": _per_set(lambda u: float((u**2).mean())),
    "the root mean square": _per_set(lambda u: float((u**2).mean() ** 0.5)),
}


def reason(f: Prober, pairs: list[Pair], partition: Partition, misfit: float) -> str:
    """Why the best form does not fit, measured on large inputs."""
    labels = partition.labels.ravel()
    large = [pair(f, LARGE * one.x) for one in pairs]
    off, ratios = {}, {}
    for center in (True, False):
        off[center], ratios[center] = _common_factor(large, labels, center)
    center = off[True] <= off[False]
    if off[center] > CLEAR:
        if follows := _follows_other_sets(large, partition):
            return follows
        return (
            "within one set the outputs are no common multiple of x - mean "
            f"(off by {off[True]:.2g} of themselves), nor of x ({off[False]:.2g})"
        )
    what = "x - mean" if center else "x"
    found = []
    for spread in (True, False):
        for name, size in DENOMINATORS.items():
            sizes = [size(_numerator(one.x, labels, spread), labels) for one in large]
            wrong = max(
                float(np.abs(ratio / (sizes[0] / later) - 1).max())
                for ratio, later in zip(ratios[center], sizes[1:], strict=True)
            )
            found.append((wrong, f"{name} of {'x - mean' if spread else 'x'}"))
    wrong, name = min(found)
    follows = f"; it follows {name}" if wrong < CLEAR else ""
    return (
        f"{what} is divided by one number for each set, but by none that the family knows: the best choice of "
        f"standard deviation or root mean square, eps and its place leaves {misfit:.2g} of the output{follows}"
    )


def _follows_other_sets(pairs: list[Pair], partition: Partition) -> str:
    """Whether smaller sets have one divisor each, which then follows inputs of other sets; "" where none have."""
    erased = [dim for dim, factors in enumerate(partition.dims) if len(factors) == 1 and not factors[0].kept]
    for count in range(1, len(erased)):
        for split in combinations(erased, count):
            dims = tuple(
                (replace(factors[0], kept=True),) if dim in split else factors
                for dim, factors in enumerate(partition.dims)
            )
            part = replace(partition, dims=dims)
            if part.set_size < LEAST:
                continue
            for center in (True, False):
                if _common_factor(pairs, part.labels.ravel(), center)[0] > CLEAR:
                    continue
                axes = " and ".join(str(dim) for dim in erased if dim not in split)
                return (
                    f"{'x - mean' if center else 'x'} is divided by one number for each set over axis {axes}, and that "
                    f"number follows inputs outside the set too: a set has {part.set_size} elements, and one input "
                    f"moves {partition.set_size} outputs. No specification divides by a statistic, or adds an eps, "
                    "that other sets change"
                )
    return ""


def _numerator(x: Array, labels: Labels, center: bool) -> Array:
    flat = x.ravel()
    return flat - (np.bincount(labels, flat) / np.bincount(labels))[labels] if center else flat


def _common_factor(pairs: list[Pair], labels: Labels, center: bool) -> tuple[float, list[Array]]:
    """How far the outputs are from one multiple of the numerator a set, and how each set's multiple changes."""
    u0, z0 = _numerator(pairs[0].x, labels, center), pairs[0].odd.ravel()
    level = np.sqrt(np.bincount(labels, u0**2) / np.bincount(labels))[labels]
    clear = np.abs(u0) > 0.1 * level  # elements near the mean tell nothing of the gain
    gain = np.where(clear, z0 / np.where(clear, u0, 1.0), 0.0)
    worst, ratios = 0.0, []
    for later in pairs[1:]:
        z, model = later.odd.ravel(), gain * _numerator(later.x, labels, center)
        z = np.where(clear, z, 0.0)
        tiny = np.finfo(float).tiny
        ratio = np.bincount(labels, z * model) / (np.bincount(labels, model**2) + tiny)
        left = np.bincount(labels, (z - ratio[labels] * model) ** 2)
        worst = max(worst, float(np.sqrt(left.sum() / ((z**2).sum() + tiny))))
        ratios.append(ratio)
    return worst, ratios
