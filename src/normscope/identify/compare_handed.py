"""What was handed to a comparison, made one of its sides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import BadInput, ModelError, NormscopeError
from normscope.identify.compare_sides import (
    STORED,
    BoxSide,
    HalfOutput,
    ModuleSide,
    Side,
    SpecSide,
    half_output,
)
from normscope.identify.framework_side import framework_side
from normscope.spec import NormSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.identify.box import Box
    from normscope.identify.module_box import ModuleBox
    from normscope.identify.result import Identification

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]


def side_of(obj: Any, example: Any, layout: str | None, which: str) -> Side:
    """What was handed in as a side of a comparison, on inputs like ``example``.

    Raises BadInput where it is no specification and cannot be called.
    """
    if isinstance(obj, NormSpec):
        return SpecSide(f"spec ({obj.stats})", obj, settable=True)
    side = framework_side(obj, example)  # before modules: on its torch backend a Keras layer is one
    if side is not None:
        return side
    if _is_module(obj):
        return _module_side(obj, example, layout)
    from normscope.identify import box_of, identify

    if not callable(obj) and not hasattr(obj, "run"):
        raise BadInput(
            f"compare takes specifications, modules and callables; {which} is a {type(obj).__name__}. Pass the layer "
            "itself, or what it computes as a NormSpec."
        )
    box = box_of(obj, example)
    in_training = _keras_in_training(obj, example)
    found = identify(obj, example, layout=layout)
    held = {name: value for name in ("weight", "bias") if (value := getattr(found, name)) is not None}
    return BoxSide(
        box.name,
        found.spec,
        _why(found),
        held if found.spec is not None else None,
        fixed=found.fixed is not None,
        trains=in_training is not None,
        roundoff=max(box.roundoff, found.roundoff or 0.0),
        note=getattr(box, "note", ""),
        box=box,
        in_training=in_training,
        in_half=_in_half(obj, example, box),
    )


def _keras_in_training(obj: Any, example: Any) -> Box | None:
    """A Keras layer that no reader knows, called with ``training=True``."""
    from normscope.identify.adapters.keras_layers import box_in_mode, is_keras_layer
    from normscope.identify.box import Boxed

    if not is_keras_layer(obj):
        return None
    box = box_in_mode(obj, shape_of(example), training=True)
    x = np.random.default_rng(0).standard_normal(shape_of(example))

    def random(x: Array) -> Array:
        raise ModelError("it is random in training: two calls on one input differ")

    try:
        alike = np.array_equal(box(x), box(x), equal_nan=True)
    except Exception:  # any that Keras or its backend raises: the comparison meets it again, and says so
        return box
    return box if alike else Boxed(box.name, box.roundoff, random)


def _in_half(fn: Any, example: Any, box: Box) -> Callable[[Array, str], HalfOutput] | None:
    """The function on tensors of a half type, where its box calls it with tensors; what wraps arrays does not."""
    from normscope.identify.adapters import torch_functions
    from normscope.identify.box import Boxed

    if not isinstance(box, Boxed) or box.function.__module__ != torch_functions.__name__:
        return None
    import torch

    device = getattr(example, "device", None)

    def call(x: Array, dtype: str) -> HalfOutput:
        with torch.no_grad():
            return half_output(fn(torch.tensor(x, dtype=getattr(torch, dtype), device=device)))

    return call


def _module_side(module: Any, example: Any, layout: str | None) -> Side:
    from normscope.identify.module_box import as_array, box_of_module, call_of, tensors_of
    from normscope.identify.tensor_paths import tensor_paths, value_shapes
    from normscope.reading import UnknownNormalization, read

    box = box_of_module(module, call_of(example))
    copy, shape = box.module, tuple(box.call.example.shape)
    tensors = tensors_of(copy)
    spec, reason, half_words, values = None, "", "", {}
    reached = _takes_values(box)
    try:
        reading = read(copy, input_ndim=len(shape))
    except (UnknownNormalization, ValueError):
        found, reason = _identified(module, example, layout)
        if found is not None:
            spec, half_words = found.spec, "" if found.half is None else found.half.conclusion
            values = {
                name: value for name in ("weight", "bias") if (value := getattr(found, name)) is not None
            }
        paths = {} if spec is None or not reached else tensor_paths(box.in_mode(training=False), spec)
    else:
        spec = reading.spec
        named = {
            name: path for path, t in tensors.items() for name, held in reading.tensors.items() if held is t
        }
        paths = {name: named[name] for name in ("weight", "bias", *STORED) if name in named}
    if reached:
        values = {name: as_array(tensors[path]) for name, path in paths.items()}
    if spec is not None:
        wanted = value_shapes(spec.bind(shape))
        values = {
            n: v.reshape(wanted[n]) for n, v in values.items() if n in wanted and v.size == prod(wanted[n])
        }
    return ModuleSide(
        type(module).__name__,
        spec,
        reason,
        values,
        settable=reached and _all_named(spec, paths),
        boxes={"train": box.in_mode(True), "eval": box.in_mode(False)},
        paths=paths,
        original=module,
        half_words=half_words,
    )


def _takes_values(box: ModuleBox) -> bool:
    """Whether its tensors can be replaced in a copy: those of a scripted module are out of reach."""
    from normscope.identify.module_box import as_array, tensors_of

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
    from normscope.identify import identify

    reason = ""
    for training in (False, True):
        try:
            found = identify(module, example, layout=layout, training=training)
        except ModelError as error:
            reason = str(error)
            continue
        return found, _why(found)
    return None, reason


def _all_named(spec: NormSpec | None, paths: Mapping[str, str]) -> bool:
    """Everything that the specification says it holds was found in the module."""
    if spec is None:
        return False
    needed = {name for name in ("weight", "bias") if getattr(spec, name) is not None}
    needed |= set(STORED) if spec.running is not None else set()
    return needed <= set(paths)


def _why(found: Any) -> str:
    if found.spec is not None:
        return ""
    return str(found.reason or f"it is a fixed affine map ({found.fixed})")


def _is_module(obj: Any) -> bool:
    from normscope.identify.adapters.keras_layers import is_keras_layer

    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.nn.Module) and not is_keras_layer(obj)


def fits(side: Side, x: Array, values: Values | None) -> str:
    """ "" where the side takes an input in one of its modes, else why not."""
    why = ""
    for mode in ("eval", "train"):
        try:
            y = side.output(x, mode, values)
        except (NormscopeError, ValueError, ArithmeticError) as error:
            why = str(error)
            continue
        return "" if y.shape == x.shape else f"it returns shape {y.shape} for an input of shape {x.shape}"
    return why


def shape_of(example: Any) -> tuple[int, ...]:
    """The shape of an example. Raises BadInput where it is neither an array, a tensor nor sizes, or has no numbers."""
    from normscope.identify.box import is_shape

    if not hasattr(example, "shape") and not is_shape(example):
        raise BadInput(
            f"an example is an array, a tensor or the sizes of one; got a {type(example).__name__}. Wrap a layer that "
            "takes more than one argument in a function of one."
        )
    if getattr(example, "is_meta", False):
        sizes = tuple(example.shape)
        raise BadInput(
            f"an example holds numbers; got a tensor of shape {sizes} on the meta device. Pass the sizes, {sizes}, or "
            "a tensor on the CPU."
        )
    return tuple(int(n) for n in getattr(example, "shape", example))
