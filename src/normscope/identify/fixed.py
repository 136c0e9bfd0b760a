"""Linear answers: a fixed affine map of every element alone, or a linear map that is no normalization at all."""

from __future__ import annotations

import numpy as np

from normscope.identify.affine import Values
from normscope.identify.box import Array
from normscope.identify.fresh import SIZES
from normscope.identify.partition import Partition
from normscope.identify.probing import Contradiction, Pair, Prober, direction
from normscope.identify.result import FixedAffine
from normscope.identify.spelling import names_of

LINEAR = (
    "it is a linear map that mixes elements: twice the input gives twice the output, while a normalization's output "
    "stops growing"
)


def fixed_affine(
    f: Prober, pairs: list[Pair], partition: Partition, bias: Values, layout: str | None
) -> tuple[FixedAffine, float]:
    """``a`` and ``b`` with the axes that they vary along, and the largest error on fresh inputs.

    Raises Contradiction where inputs mix.
    """
    if not partition.pointwise:
        raise Contradiction(_mixes(f, pairs, partition))
    slope = np.sum([p.odd * p.x for p in pairs], axis=0) / np.sum([p.x * p.x for p in pairs], axis=0)
    a = Values(slope, 16 * f.roundoff * np.abs(slope))
    names = names_of(layout, partition.shape)
    needed = [dim for dim in range(len(names)) if not (a.constant_along(dim) and bias.constant_along(dim))]
    others = tuple(dim for dim in range(len(names)) if dim not in needed)
    fixed = FixedAffine(
        a.value.mean(axis=others), bias.value.mean(axis=others), " ".join(names[dim] for dim in needed)
    )
    factor, shift = (v.value.mean(axis=others, keepdims=True) for v in (a, bias))
    errors = []
    for size in (1.0, *SIZES.values(), 0.0):
        x = direction(partition.shape, 101) * size
        x = x.astype(np.float32).astype(np.float64) if f.roundoff > 2.0**-50 else x
        expected = factor * x + shift
        errors.append(float(np.abs(f(x) - expected).max() / (np.abs(expected).max() or 1.0)))
    error = float(np.max(errors))
    if not error <= 256 * f.roundoff:
        raise Contradiction(
            f"scaled inputs give a * x + b of each element alone, but a fresh input is off that by {error:.2g} of the "
            "largest output: no normalization with stored statistics is"
        )
    f.conclude(
        "every output is an affine function of its own input alone",
        "one element moved far, and the input scaled",
        error=error,
    )
    return fixed, error


def _mixes(f: Prober, pairs: list[Pair], partition: Partition) -> str:
    labels = partition.labels.ravel()
    count = np.bincount(labels)

    def centered(x: Array) -> Array:
        flat = x.ravel()
        return flat - (np.bincount(labels, flat) / count)[labels]

    first = centered(pairs[0].x)
    factor = pairs[0].odd.ravel() / first
    off = max(
        float(np.abs(p.odd.ravel() - factor * centered(p.x)).max() / (np.abs(p.odd).max() or 1.0))
        for p in pairs[1:]
    )
    if off < 2.0**20 * f.roundoff:
        return (
            "it subtracts the mean of each set and divides by nothing: twice the input gives twice the output"
        )
    return LINEAR
