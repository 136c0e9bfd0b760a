"""The order of casts of an identified module, from a bfloat16 copy with random gains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from normscope import reference
from normscope.errors import ModelError
from normscope.identify.cast_order import cast_order, rounded
from normscope.identify.module_box import Array, ModuleBox, box_of_module
from normscope.identify.module_mode import InMode
from normscope.identify.module_state import Whole
from normscope.identify.probing import direction
from normscope.identify.result import Evidence
from normscope.spec import Cast

FLOAT32 = 1e-4
"""of float32 arithmetic where eps and the spread are alike; another eps is off by a large part"""
CAST = 1e-12
"""a cast to float32 on the way leaves 6e-8, float64 throughout 1e-15"""


def _casts_to_float32(box: ModuleBox, x: Array) -> tuple[bool, Evidence]:
    """Whether a float64 module computes in float32 where casts are not redirected."""
    probe = "a float64 copy, casts to float32 redirected and not"
    inside = box(x)
    try:
        direct = replace(box, redirect=False)(x)
    except ModelError:
        return True, Evidence("casts to float32, which its float64 parameters do not take", probe)
    lost = float(np.max(np.abs(inside - direct)) / (np.max(np.abs(inside)) or 1.0))
    what = (
        "casts to float32 whatever the input's dtype" if lost > CAST else "computes float64 inputs in float64"
    )
    return lost > CAST, Evidence(what, probe, {"largest difference": lost})


def machine_epsilon(module: nn.Module, whole: Whole, here: InMode, training: bool | None) -> Evidence | None:
    """Whether an eps that is float64's machine epsilon is float32's on a float32 copy: then it follows the dtype.

    None where it does not: then it is a number that happens to be 2^-52.
    """
    single = box_of_module(module, here.box.call, torch.float32)
    single = (single if training is None else single.in_mode(training)).set(here.generic)
    eps = 2.0**-23
    x = float(np.sqrt(eps)) * direction(here.box.shape, 108)
    tensors = {**here.own, **here.generic}
    weight, bias = whole.values.read(tensors)
    spec = whole.spec.replace(eps=eps)
    expected = reference.forward(x, spec, weight, bias, running=whole.state(tensors), training=not here.fixed)
    error = float(np.max(np.abs(single(x) - expected)) / np.max(np.abs(expected)))
    if error > FLOAT32:
        return None
    numbers = {"error with 2^-23": error}
    return Evidence(
        "eps is the machine epsilon of the dtype", "a float32 copy at inputs of the size of eps", numbers
    )


def casts(
    module: nn.Module, whole: Whole, here: InMode, training: bool | None
) -> tuple[Cast | None, tuple[Evidence, ...]]:
    """Which dtype computes, and where the weight is applied; None where bfloat16 does not run."""
    x = direction(here.box.shape, 107)
    float32, found = _casts_to_float32(here.box.set(here.generic), x)
    values = {name: rounded(value) for name, value in here.generic.items()}
    tensors = {**here.own, **values}
    weight, bias = whole.values.read(tensors)
    half = replace(box_of_module(module, here.box.call, torch.bfloat16), name=here.box.name)
    half = (half if training is None else half.in_mode(training)).set(values)
    try:
        cast, told = cast_order(half, whole.spec, weight, bias, whole.state(tensors), not here.fixed, float32)
    except ModelError as error:
        told = Evidence(f"casts were not seen ({error})", "a bfloat16 copy")
        return None, (found, told)
    return cast or Cast("input"), (found, told)
