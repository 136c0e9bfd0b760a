"""Inputs on which two normalizations are compared: each shows a convention that others hide.

==============  ==========================================================================================
input           what shows on it
==============  ==========================================================================================
ordinary        anything that is always there: axes, correction, a weight
offset          centering: the mean is as large as the spread
varied          axes: level and spread differ along every one of them
large mean      how the mean is taken away: a thousand standard deviations from 0
near eps        the constant and where it stands: spread of the size of each eps, and a tenth of it
large, small    a clamp or a branch that no ordinary input reaches
constant        sets without spread
zeros           what is done about a set of nothing else
spike           one element alone: axes, and a floor under the denominator
centered        that the mean of every set is 0 hides centering
==============  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from normscope.identify.compare_half import half_inputs
from normscope.identify.compare_result import HALVES
from normscope.identify.compare_values import set_means

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

USUAL_EPS = (1e-5, 1e-6, 1e-8)
"""tried where nobody says which eps there is"""
SIZES = (1e3, 1e8, 1e-6)
"""tried besides 1: the largest is the largest that identification verifies at"""
CENTERED = "centered"
ORDINARY = ("ordinary", "varied")
"""enough where nothing but the numbers of the data matters: updates of stored statistics"""


def inputs(shape: Sequence[int], specs: Sequence[NormSpec | None]) -> Iterator[tuple[str, Array]]:
    """Named inputs of one shape, the same at every call; ``specs`` tell the eps and the sets of the two."""
    shape = tuple(shape)
    z = np.random.default_rng(0).standard_normal(shape)
    yield "ordinary", z
    yield "offset", z + 1.0
    yield "varied", varied(z)
    yield "large mean", z + 1e3
    for scale in scales(specs):
        yield f"near eps ({scale:.3g})", z * scale
    for size in SIZES if None in specs else ():  # what has a specification was verified there
        yield f"of size {size:.0e}", z * size
    yield "constant", np.ones(shape)
    yield "zeros", np.zeros(shape)
    spike = np.zeros(shape)
    spike.flat[spike.size // 2] = 1.0
    yield "spike", spike
    centered = z
    for spec in specs:
        if spec is not None and not spec.whiten:
            centered = centered - set_means(centered, spec)
    yield CENTERED, centered


def inputs_for(
    mode: str, shape: Sequence[int], specs: Sequence[NormSpec | None]
) -> Iterator[tuple[str, Array]]:
    """Those inputs on which a mode is compared."""
    if mode in HALVES:
        return half_inputs(mode, shape)
    return ((name, x) for name, x in inputs(shape, specs) if mode != "update" or name in ORDINARY)


def varied(z: Array) -> Array:
    """Level and spread grow along every axis, each at its own pace."""
    out: Array = z.copy()
    for axis, size in enumerate(z.shape):
        place = np.arange(size, dtype=np.float64).reshape([-1 if d == axis else 1 for d in range(z.ndim)])
        out = out * (1 + place / (axis + 1)) + place / (axis + 2)
    return out


def scales(specs: Sequence[NormSpec | None]) -> list[float]:
    """Spreads at which an eps is about as large as what it is added to, from the largest."""
    found: set[float] = set()
    for spec in specs:
        if spec is None:
            found |= {sqrt(eps) for eps in USUAL_EPS} | {min(USUAL_EPS)}
        elif spec.eps is None:
            found.add(sqrt(float(np.finfo(np.float64).eps)))
        elif spec.eps > 0:
            found.add(sqrt(spec.eps) if spec.eps_at in ("variance", "max_variance", "trace") else spec.eps)
    return sorted({float(f"{scale * part:.1g}") for scale in found for part in (1.0, 0.1)}, reverse=True)
