"""Carrying a plan out on a model: new weights, and what becomes of the norms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normscope.doctor.folding.linear_map import LinearMap, Values
from normscope.transforms.folding.plan import IDENTITY, LAYER_NORMS, NEUTRAL, RMS, Step
from normscope.transforms.folding.separate import separate


def fold_into(model: nn.Module, steps: Sequence[Step], copies: Iterable[str] = ()) -> dict[str, str]:
    """Folds the norms of ``steps`` into the layers beside them, in place; ``copies`` names what first gets its own.

    Several norms may fold into one layer: its weight is computed in float64 from all of them and rounded once.
    Returns the names of biases that had to be made, each with the name of its weight.
    """
    separate(model, copies)
    values: Values = {}
    made: dict[str, str] = {}
    for step in steps:
        for one in (*step.maps, *filter(None, [step.centered])):
            _load(model, one, values)
        for one in step.maps:
            if step.shifts and not one.has_bias and one.features and one.bias not in values:
                values[one.bias] = torch.zeros(one.features, dtype=torch.float64)
                made[one.bias] = one.weight
    for step in steps:
        for one in step.maps:
            if step.where == "before":
                one.scale_outputs(values, step.scale, step.shift)
            else:
                one.scale_inputs(values, step.scale, step.shift)
        if step.centered is not None:
            step.centered.center_outputs(values)
    for name, value in values.items():
        if name in made:
            _make(model, name, held(model, made[name]), value)
        _write(held(model, name), value)
    for step in steps:
        _replace(model.get_submodule(step.path), step)
    return made


def _load(model: nn.Module, one: LinearMap, values: Values) -> None:
    for name in (one.weight, one.bias) if one.has_bias else (one.weight,):
        if name not in values:
            exact = held(model, name).detach().to("cpu", torch.float64)
            values[name] = exact.clone(memory_format=torch.contiguous_format)


def held(model: nn.Module, name: str) -> Any:
    """The parameter or buffer of that name."""
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def _write(held: Tensor, value: Tensor) -> None:
    # a tensor made in inference mode can only be written there
    with torch.inference_mode(held.is_inference()), torch.no_grad():
        held.copy_(value)


def _make(model: nn.Module, name: str, weight: Tensor, value: Tensor) -> None:
    path, _, last = name.rpartition(".")
    zeros = torch.zeros(value.shape, dtype=weight.dtype, device=weight.device)
    parameter = nn.Parameter(zeros, requires_grad=weight.requires_grad)
    model.get_submodule(path).register_parameter(last, parameter)


def _replace(norm: Any, step: Step) -> None:
    """The norm stays the object it is, so every reference to it sees what it became."""
    if step.becomes == IDENTITY:
        norm._parameters.clear()
        norm._buffers.clear()
        norm._modules.clear()  # of a norm that is made of others, all that it computed is gone
        kept = vars(nn.Module())
        for name in [name for name in vars(norm) if name not in kept]:
            del vars(norm)[name]
        norm.__class__ = nn.Identity
    elif step.becomes == NEUTRAL:
        _write(norm.weight, torch.tensor(step.neutral))
        if getattr(norm, "bias", None) is not None:
            _write(norm.bias, torch.tensor(0.0))
    else:
        if step.maps:
            norm.weight = norm.bias = None
            setattr(norm, "affine" if hasattr(norm, "affine") else "elementwise_affine", False)
        if step.becomes == RMS:
            del norm._parameters["bias"]
            norm.__class__ = LAYER_NORMS[type(norm)]
