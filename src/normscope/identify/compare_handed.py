"""What was handed to a comparison, made one of its sides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import BadInput, ModelError, NormscopeError
from normscope.identify.compare_sides import (
    BoxSide,
    HalfOutput,
    Side,
    SpecSide,
    half_output,
)
from normscope.identify.framework_side import framework_side
from normscope.spec import NormSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.identify.box import Box

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
        from normscope.identify.compare_module import module_side

        return module_side(obj, example, layout)
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
        why(found),
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


def why(found: Any) -> str:
    """Why an answer of identification has no specification; "" where it has one."""
    if found.spec is not None:
        return ""
    return str(found.reason or f"it is a fixed affine map ({found.fixed})")


def _is_module(obj: Any) -> bool:
    from normscope.identify.adapters.keras_layers import is_keras_layer

    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.nn.Module) and not is_keras_layer(obj)


def as_written(obj: Any) -> Any:
    """The module that torch.compile was given; anything else itself."""
    if not _is_module(obj):
        return obj
    from normscope.identify.patched_forward import uncompiled

    return uncompiled(obj)


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
