"""What each tensor of a module does to its output, found by moving one at a time.

Every tensor is first set to random numbers between 1/2 and 3/2, so that no gain of 0 hides another. Then:

- which of its numbers an output element depends on: its numbers move in subsets, once for each bit of their index;
- how: the output at values 0, 1, 2 times itself is a straight line (a gain, if the line's slope depends on the input; a
  bias or a stored mean, if not), or it is not (a stored variance, a learned eps, a gain such as exp(w));
- a stored mean is what adds with the slope -gain / denominator, which follows a stored variance, a bias with slope 1;
  where no tensor bends the output, what adds with a negative slope counts as a mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from normscope.identify.module_box import Array, ModuleBox, tensors_of

STRAIGHT = 1e-9
"""relative to the largest output: far above rounding in float64, far below the curvature of a root"""


@dataclass(frozen=True)
class Role:
    """What one tensor does."""

    name: str
    kind: str
    """``gain``, ``bias``, ``mean``, ``nonlinear``; ``mixed`` where an output depends on several of its numbers;
    ``none`` where the output does not move"""
    shape: tuple[int, ...]
    entries: NDArray[np.int64] | None = None
    """for each output element the index of the number that it depends on, -1 for none; None for ``mixed``"""


def generic_values(box: ModuleBox, seed: int = 11) -> dict[str, Array]:
    """Random numbers between 1/2 and 3/2 for every floating tensor."""
    random = np.random.default_rng(seed)
    return {
        name: random.uniform(0.5, 1.5, tuple(tensor.shape))
        for name, tensor in tensors_of(box.module).items()
        if tensor.is_floating_point() and tensor.numel()
    }


def roles(box: ModuleBox, inputs: tuple[Array, Array]) -> dict[str, Role]:
    """The role of every floating tensor, on two inputs of one shape."""
    values = generic_values(box)
    at = box.set(values)
    found = {name: _role(at, name, value, inputs) for name, value in values.items()}
    bent = {name: 2 * values[name] for name, role in found.items() if role.kind == "nonlinear"}
    if not bent:
        return found
    other = at.set(bent)

    def added(name: str, role: Role) -> Role:
        twice = {name: 2 * values[name]}
        steps = [one.set(twice)(inputs[0]) - one(inputs[0]) for one in (at, other)]
        still = np.max(np.abs(steps[1] - steps[0])) <= STRAIGHT * np.max(np.abs(steps[0]))
        return replace(role, kind="bias" if still else "mean")

    return {
        name: added(name, role) if role.kind in ("bias", "mean") else role for name, role in found.items()
    }


def _role(at: ModuleBox, name: str, value: Array, inputs: tuple[Array, Array]) -> Role:
    start = at(inputs[0])

    def moved(subset: NDArray[np.bool_]) -> NDArray[np.bool_]:
        y = at.set({name: np.where(subset.reshape(value.shape), value * 1.25, value)})(inputs[0])
        changed: NDArray[np.bool_] = ~((y == start) | (np.isnan(y) & np.isnan(start)))
        return changed

    everything = moved(np.ones(value.size, dtype=np.bool_))
    if not everything.any():
        return Role(name, "none", value.shape)
    index: NDArray[np.int64] = np.zeros(start.shape, dtype=np.int64)
    for bit in range((value.size - 1).bit_length()):
        chosen = (np.arange(value.size) >> bit) & 1 == 1
        on, off = moved(chosen), moved(~chosen)
        if (on & off).any():
            return Role(name, "mixed", value.shape)
        index += on.astype(np.int64) << bit
    entries = np.where(everything, index, -1)

    zero, once, twice = ([at.set({name: s * value})(x) for x in inputs] for s in (0.0, 1.0, 2.0))
    size = max(float(np.max(np.abs(y), initial=0.0)) for y in (*once, *twice) if np.isfinite(y).all())
    bent = any(
        not np.isfinite(a).all() or np.max(np.abs(c - 2 * b + a)) > STRAIGHT * size
        for a, b, c in zip(zero, once, twice, strict=True)
    )
    if bent:
        return Role(name, "nonlinear", value.shape, entries)
    slopes = [b - a for a, b in zip(zero, once, strict=True)]
    if np.max(np.abs(slopes[0] - slopes[1])) > STRAIGHT * size:
        return Role(name, "gain", value.shape, entries)
    negative = float(np.sum(slopes[0])) < 0
    return Role(name, "mean" if negative else "bias", value.shape, entries)
