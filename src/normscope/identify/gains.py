"""The law by which a gain enters: offset + weight, or something that no specification says, such as |weight| + eps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from normscope.identify.module_box import Array, ModuleBox
from normscope.identify.result import Evidence
from normscope.identify.tensor_roles import Role

VALUES = (-1.0, 0.0, 1.0, 4.0)
LAW = 1e-9


@dataclass(frozen=True)
class Gain:
    """How one tensor multiplies."""

    offset: float | None
    """0 for weight, 1 for 1 + weight; None where it is no offset + weight"""
    evidence: Evidence


def law_of_gain(box: ModuleBox, role: Role, x: Array) -> Gain:
    """Set a tensor to -1, 0, 1 and 4 and compare the outputs with that at 1; ``box`` has biases of 0.

    The factor o + w gives the ratios (o - 1) / (o + 1), o / (o + 1) and (o + 4) / (o + 1).
    """
    outputs = [box.set({role.name: np.full(role.shape, value)})(x) for value in VALUES]
    at_one = outputs[2]
    ratios = [float(np.sum(y * at_one) / np.sum(at_one * at_one)) for y in outputs]
    spread = max(float(np.max(np.abs(y - r * at_one))) for y, r in zip(outputs, ratios, strict=True))
    below, at_zero, _, above = ratios
    offset = at_zero / (1 - at_zero) if at_zero != 1 else np.inf
    size = float(np.max(np.abs(at_one)))
    straight = (
        np.isfinite(offset)
        and spread <= LAW * size
        and abs(below - (offset - 1) / (offset + 1)) <= LAW
        and abs(above - (offset + 4) / (offset + 1)) <= LAW * 4
    )
    numbers = {f"output at {v:g} over output at 1": r for v, r in zip(VALUES, ratios, strict=True) if v != 1}
    probe = f"{role.name} set to {', '.join(f'{v:g}' for v in VALUES)}"
    if not straight:
        law = f"|{role.name}| + constant" if abs(below - 1) <= LAW else f"no constant + {role.name}"
        return Gain(None, Evidence(f"{role.name} is a gain, but the factor is {law}", probe, numbers))
    offset = float(round(offset)) if abs(offset - round(offset)) < LAW else float(offset)
    factor = f"{offset:g} + {role.name}" if offset else role.name
    return Gain(offset, Evidence(f"{role.name} is the gain, as the factor {factor}", probe, numbers))
