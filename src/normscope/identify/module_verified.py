"""The whole against the reference: fresh inputs, the module's own tensors and random ones, in both modes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from normscope import reference
from normscope.errors import ModelError
from normscope.identify.fresh import SIZES
from normscope.identify.module_box import Array
from normscope.identify.module_mode import InMode
from normscope.identify.module_state import Whole
from normscope.identify.probing import direction
from normscope.identify.result import Evidence

FLOAT64, FLOAT32 = 1e-9, 1e-5
"""largest error allowed, over the largest output: float64 gives 1e-15; float32 inside, 1e-7 times the conditioning"""
SEEDS = (201, 202)
LARGEST = 2**21
"""elements; the reference takes a second for so many"""


@dataclass(frozen=True)
class Verified:
    """How far the module is from the reference."""

    error: float
    resolution: float
    """what errors are allowed"""
    evidence: Evidence
    contradiction: str
    """\"\" where all errors are within rounding"""


def verified(whole: Whole, modes: Sequence[InMode], example: tuple[int, ...]) -> Verified:
    """Compare outputs with the tensors put back, and with random ones, which no zero hides.

    ``example``: the shape that the user passed, where probes ran on another.
    """
    errors: dict[str, float] = {}
    for mode in modes:
        word = "training" if mode.training else "evaluation"
        for which, tensors in (("own", mode.own), ("random", {**mode.own, **mode.generic})):
            errors[f"{word}, {which} tensors"] = max(
                _error(whole, mode, tensors, x) for x in _inputs(whole, mode.box.shape)
            )
        if example != mode.box.shape and np.prod(example) <= LARGEST:
            with suppress(ModelError):  # one sample, of which training takes no statistics
                errors[f"{word}, shape of the example"] = _error(
                    whole, mode, mode.own, direction(example, 203)
                )
    error = max(errors.values())
    coarse = any("float32" in entry.conclusion for mode in modes for entry in mode.core.evidence)
    evidence = Evidence(
        "the whole was compared with the reference, tensors put back",
        "fresh inputs of usual size, far from zero, at the size of eps, and the largest",
        errors,
    )
    resolution = FLOAT32 if coarse else FLOAT64
    if error <= resolution:
        return Verified(error, resolution, evidence, "")
    worst = max(errors, key=lambda name: errors[name])
    return Verified(
        error,
        resolution,
        evidence,
        f"it is near to {whole.spec}, but misses it by {error:.2g} of the largest output ({worst})",
    )


def _inputs(whole: Whole, shape: tuple[int, ...]) -> list[Array]:
    eps = 2.0**-52 if whole.spec.eps is None else abs(whole.spec.eps)
    small = eps if whole.spec.eps_at in ("std", "max") else eps**0.5
    one, two = (direction(shape, seed) for seed in SEEDS)
    return [one, 5 + 30 * two, (small or 1e-3) * one, max(SIZES.values()) * one]


def _error(whole: Whole, mode: InMode, tensors: dict[str, Array], x: Array) -> float:
    settings = {name: value for name, value in tensors.items() if name in mode.generic}
    y = mode.box.set(settings)(x)
    weight, bias = whole.values.read(tensors)
    try:
        expected = reference.forward(
            x, whole.spec, weight, bias, running=whole.state(tensors), training=not mode.fixed
        )
    except ValueError:  # sets or parameters are others at this shape
        return float("inf")
    known = np.isfinite(expected)
    if (np.isfinite(y) != known).any():
        return float("inf")
    apart, size = np.abs(y[known] - expected[known]), np.abs(expected[known])
    return float(np.max(apart, initial=0.0) / (np.max(size, initial=0.0) or 1.0))
