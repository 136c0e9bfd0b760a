"""The law by which a gain enters: offset + weight, or something that no specification says, such as |weight| + eps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from normscope.identify.decimals import shortest
from normscope.identify.module_box import Array, ModuleBox
from normscope.identify.result import Evidence
from normscope.identify.tensor_roles import Role

VALUES = (-1.0, 0.0, 1.0, 4.0)
OTHERS = (0.7, 1.6)
"""values of the other gains at which the law of one is seen: gains that add have another law at each"""
LAW = 1e-9
ROUNDING = 1e-13
"""relative: what an offset read off four outputs of float64 may be off by"""
FAINT = 1e-3
"""of the largest output: a gain this near to 0 is no measure for others"""


@dataclass(frozen=True)
class Gain:
    """How one tensor multiplies."""

    offset: float | None
    """0 for weight, 1 for 1 + weight; None where it is no offset + weight"""
    evidence: Evidence
    straight: bool = True
    """the factor of each element is some number + weight at least, whatever the input"""


def laws_of_gains(box: ModuleBox, gains: Mapping[str, Role], x: Array) -> dict[str, Gain]:
    """The law of each gain; ``box`` has biases of 0. Gains that multiply do not see each other, gains that add do."""
    found = {}
    for name, role in gains.items():
        others = {other: one.shape for other, one in gains.items() if other != name}
        one, *more = (
            law_of_gain(box.set({other: np.full(shape, value) for other, shape in others.items()}), role, x)
            for value in (OTHERS if others else OTHERS[:1])
        )
        found[name] = one if not more else _alone(name, list(others), one, more[0])
    return found


def _alone(name: str, others: list[str], one: Gain, two: Gain) -> Gain:
    """The law, where it is the same for two values of the other gains."""
    if one.offset is None or two.offset is None:
        return one if one.offset is None else two
    if abs(one.offset - two.offset) <= LAW * max(1.0, abs(one.offset)):
        return one
    offsets = (one.offset, two.offset)
    numbers = {f"others at {at:g}, constant": offset for at, offset in zip(OTHERS, offsets, strict=True)}
    what = f"{name} is a gain, but the factor is a constant + {name} where the constant follows {' and '.join(others)}"
    return Gain(None, Evidence(what, f"{name} moved, at two values of {' and '.join(others)}", numbers))


def law_of_gain(box: ModuleBox, role: Role, x: Array) -> Gain:
    """Set a tensor to -1, 0, 1 and 4 and compare the outputs; ``box`` has biases of 0.

    The factor s (o + w) is a line: o is its value at 0 over its slope.
    """

    set_to = [box.set({role.name: np.full(role.shape, value)}) for value in VALUES]
    outputs = [one(x) for one in set_to]
    probe = f"{role.name} set to {', '.join(f'{v:g}' for v in VALUES)}"
    if (found := _one_factor(role.name, outputs, probe)).offset is not None:
        return found
    # beside a bias that is written in the code only the part that changes sign with the input is multiplied
    odd = [(y - one(-x)) / 2 for y, one in zip(outputs, set_to, strict=True)]
    if (found := _one_factor(role.name, odd, probe)).offset is not None:
        return found
    other = np.roll(x.ravel(), 1).reshape(x.shape)
    if _same_for_both(odd, [(one(other) - one(-other)) / 2 for one in set_to]):
        what = f"{role.name} is a gain, but the factor is {role.name} + another number at each element"
        return Gain(None, Evidence(what, probe, found.evidence.numbers))
    return found


def _one_factor(name: str, outputs: list[Array], probe: str) -> Gain:
    """The law where the outputs at `VALUES` are multiples of one another."""
    sizes = [float(np.sqrt(np.sum(y * y))) for y in outputs]
    usual = VALUES.index(1.0)
    base = usual if sizes[usual] > FAINT * max(sizes) else int(np.argmax(sizes))
    measure = outputs[base]
    ratios = [float(np.sum(y * measure) / np.sum(measure * measure)) for y in outputs]
    spread = max(float(np.max(np.abs(y - r * measure))) for y, r in zip(outputs, ratios, strict=True))
    below, at_zero, at_one, above = ratios
    slope = at_one - at_zero
    one_factor = (
        spread <= LAW * float(np.max(np.abs(measure)))
        and abs(slope) > LAW
        and abs(below - (at_zero - slope)) <= LAW
        and abs(above - (at_zero + 4 * slope)) <= 4 * LAW
    )
    numbers = {
        f"output at {v:g} over output at {VALUES[base]:g}": r
        for v, r in zip(VALUES, ratios, strict=True)
        if v != VALUES[base]
    }
    if one_factor:
        offset = _offset(at_zero / slope)
        factor = f"{offset:g} + {name}" if offset else name
        return Gain(offset, Evidence(f"{name} is the gain, as the factor {factor}", probe, numbers))
    law = f"|{name}| + constant" if abs(below - at_one) <= LAW else f"no constant + {name}"
    return Gain(None, Evidence(f"{name} is a gain, but the factor is {law}", probe, numbers), straight=False)


def _offset(value: float) -> float:
    return float(round(value)) if abs(value - round(value)) < LAW else shortest(value, ROUNDING)


def _same_for_both(one: list[Array], other: list[Array]) -> bool:
    """Whether the output of each element is a line in the tensor, with one offset for two inputs."""
    offsets = []
    for below, at_zero, at_one, above in (one, other):
        slope = at_one - at_zero
        size = float(np.max(np.abs(above)))
        bent = np.maximum(np.abs(below - (at_zero - slope)), np.abs(above - (at_zero + 4 * slope)))
        if not np.max(bent) <= LAW * size:
            return False
        clear = np.abs(slope) > FAINT * size
        offsets.append(np.where(clear, at_zero / np.where(clear, slope, 1.0), np.nan))
    difference = np.abs(offsets[0] - offsets[1])
    return bool(np.nanmax(difference, initial=0.0) <= LAW / FAINT)
