"""A torch module made a side of a comparison: its class says what it is, or identification where its class does not."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from normscope.errors import ModelError
from normscope.identify import identify
from normscope.identify.compare_handed import why
from normscope.identify.compare_sides import STORED, ModuleSide
from normscope.identify.hooks_that_act import ACT
from normscope.identify.module_box import ModuleBox, as_array, box_of_module, call_of, tensors_of
from normscope.identify.tensor_paths import tensor_paths, value_shapes
from normscope.reading import UnknownNormalization, read

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from normscope.identify.result import Identification
    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

BY_CLASS = f"{ACT}; the specification is that of its class, without them"


class Told(NamedTuple):
    """What a module is, as far as it is known."""

    spec: NormSpec | None
    reason: str = ""
    """why there is no specification"""
    paths: Mapping[str, str] = {}
    """usual name -> path of the tensor"""
    values: Mapping[str, Array] = {}
    """weight and bias that are no tensor of the module"""
    half_words: str = ""


def module_side(module: Any, example: Any, layout: str | None) -> ModuleSide:
    """A module by copies, with its owner's hooks where they act. Those are no part of its class, so that it is
    identified; where that finds no member, other weights still are weights of the class, and show what the hooks do."""
    box = box_of_module(module, call_of(example))
    shape, note = box.shape, box.note
    told = None if note == ACT else _by_class(box)
    reached = _takes_values(box)
    told = told or _by_probing(module, box if reached else None, example, layout)
    if told.spec is None and note == ACT and (by_class := _by_class(box)):
        told, note = by_class, BY_CLASS
    spec, paths, values = told.spec, told.paths, dict(told.values)
    if reached:
        tensors = tensors_of(box.module)
        values |= {name: as_array(tensors[path]) for name, path in paths.items()}
    if spec is not None:
        wanted = value_shapes(spec.bind(shape))
        values = {
            n: v.reshape(wanted[n]) for n, v in values.items() if n in wanted and v.size == prod(wanted[n])
        }
    return ModuleSide(
        box.name,
        spec,
        told.reason,
        values,
        settable=reached and _all_named(spec, paths),
        boxes={"train": box.in_mode(True), "eval": box.in_mode(False)},
        paths=dict(paths),
        original=module,
        note=note,
        half_words=told.half_words,
    )


def _by_class(box: ModuleBox) -> Told | None:
    """None where no reader knows it."""
    try:
        reading = read(box.module, input_ndim=len(box.shape))
    except (UnknownNormalization, ValueError):
        return None
    tensors = tensors_of(box.module)
    named = {name: path for path, t in tensors.items() for name, held in reading.tensors.items() if held is t}
    paths = {name: named[name] for name in ("weight", "bias", *STORED) if name in named}
    return Told(reading.spec, paths=paths)


def _by_probing(module: Any, box: ModuleBox | None, example: Any, layout: str | None) -> Told:
    """``box`` is None where its tensors are out of reach."""
    found, reason = _identified(module, example, layout)
    if found is None or found.spec is None:
        return Told(None, reason)
    values = {name: value for name in ("weight", "bias") if (value := getattr(found, name)) is not None}
    paths = {}
    if box is not None:
        tensors, named = tensors_of(box.module), tensor_paths(box.in_mode(training=False), found.spec)
        paths = {name: path for name, path in named.items() if _is(tensors[path], values.get(name))}
    return Told(found.spec, reason, paths, values, "" if found.half is None else found.half.conclusion)


def _is(tensor: torch.Tensor, found: Array | None) -> bool:
    """Whether a tensor is the weight or bias that was found, and not one that it is made of; any other tensor is."""
    if found is None:
        return True
    held = as_array(tensor).ravel()
    return held.shape == found.ravel().shape and np.allclose(held, found.ravel(), rtol=1e-6, atol=1e-12)


def _takes_values(box: ModuleBox) -> bool:
    """Whether its tensors can be replaced in a copy: those of a scripted module are out of reach."""
    for name, tensor in tensors_of(box.module).items():
        if tensor.is_floating_point() and tensor.numel():
            other = as_array(tensor) + 1.0
            return np.array_equal(
                as_array(tensors_of(box.set({name: other}).fork())[name]), other, equal_nan=True
            )
    return True


def _identified(module: Any, example: Any, layout: str | None) -> tuple[Identification | None, str]:
    """A module that no reader knows, identified, and why it has no specification. In evaluation, where stored
    statistics act, if it runs there."""
    reason = ""
    for training in (False, True):
        try:
            found = identify(module, example, layout=layout, training=training)
        except ModelError as error:
            reason = str(error)
            continue
        return found, why(found)
    return None, reason


def _all_named(spec: NormSpec | None, paths: Mapping[str, str]) -> bool:
    """Everything that the specification says it holds was found in the module."""
    if spec is None:
        return False
    needed = {name for name in ("weight", "bias") if getattr(spec, name) is not None}
    needed |= set(STORED) if spec.running is not None else set()
    return needed <= set(paths)
