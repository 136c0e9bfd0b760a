"""Keras 3 layers, on whichever backend Keras runs, as float64 layers of the same configuration and weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from normscope.errors import BadInput, told
from normscope.identify.adapters.jax_arrays import double_precision
from normscope.identify.box import Array, Box, Boxed, is_shape


def adapt(fn: Any, example: Any) -> Box | None:
    """A built layer, called as ``layer(x)``: in evaluation, unless it trains by itself.

    Raises BadInput where the layer has no configuration to make a float64 twin of.
    """
    if not is_keras_layer(fn):
        return None
    if is_shape(example):
        shape = tuple(int(n) for n in example)
    elif hasattr(example, "shape"):
        shape = tuple(int(n) for n in example.shape)
    else:
        return None
    return box_in_mode(fn, shape)


def is_keras_layer(obj: Any) -> bool:
    """Whether it is a layer or model of Keras; on the torch backend it is a torch module as well."""
    layer = getattr(sys.modules.get("keras"), "Layer", None)
    return layer is not None and isinstance(obj, layer)


def box_in_mode(layer: Any, shape: tuple[int, ...], training: bool = False) -> Box:
    """A layer as a function of inputs like one of this shape: called as ``layer(x)``, or with ``training=True``.

    Raises BadInput where no float64 twin can be made.
    """
    keras = sys.modules["keras"]
    twin, weights = twin_of(layer, shape)
    mode = {"training": True} if training else {}

    def call(x: Array) -> Any:
        with in_float64():
            twin.set_weights(weights)  # what a training call moved goes back
            y = twin(keras.ops.convert_to_tensor(x, dtype="float64"), **mode)
            return np.asarray(keras.ops.convert_to_numpy(y))

    return Boxed(f"Keras layer {type(layer).__name__}, on {keras.backend.backend()} float64", 2.0**-53, call)


def twin_of(layer: Any, shape: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """A float64 layer like this one, and its weights. Raises BadInput where it cannot be rebuilt."""
    for part in layer._flatten_layers():
        if method := _put_on(part):
            raise BadInput(
                f"a Keras layer is identified through a float64 twin, and the {method} that was put on "
                f"{type(part).__name__} {part.name!r} would be missing there. Define {method} in a subclass, or pass a "
                "function: lambda x: layer(x)"
            )
    try:
        with in_float64():
            twin = type(layer).from_config({**layer.get_config(), "dtype": "float64"})
            twin.build(shape)
            weights = [np.asarray(weight, dtype=np.float64) for weight in layer.get_weights()]
            if layer.built:
                twin.set_weights(weights)
            return twin, [np.asarray(weight) for weight in twin.get_weights()]
    except Exception as error:
        raise BadInput(
            f"a Keras layer is identified through a float64 twin, and {type(layer).__name__} cannot be rebuilt from "
            f"its configuration ({told(error)}). Pass a function: lambda x: layer(x)"
        ) from error


def _put_on(layer: Any) -> str:
    """A method that somebody put on one layer, which its configuration does not hold; "" where none was. Keras itself
    puts wrappers of ``build`` and others there."""
    for name, value in vars(layer).items():
        if callable(value) and callable(getattr(type(layer), name, None)):
            scope = getattr(getattr(value, "__func__", value), "__globals__", {})
            if name == "call" or not str(scope.get("__name__")).startswith("keras."):
                return str(name)
    return ""


@contextmanager
def in_float64() -> Iterator[None]:
    """64-bit numbers: in JAX where that is the backend, and in Keras's own table of promotions.

    Keras narrows float64 with anything to float32 (its ``BIT64_TO_BIT32_DTYPE``), in layers of dtype float64 too. Where
    a version of Keras has no such table, the result has float32 errors, which identification notices and says.
    """
    table = getattr(sys.modules.get("keras.src.backend.common.dtypes"), "BIT64_TO_BIT32_DTYPE", {})
    narrow = table.get("float64")
    jax = sys.modules["keras"].backend.backend() == "jax"
    with double_precision() if jax else nullcontext():
        try:
            if narrow is not None:
                table["float64"] = "float64"
            yield
        finally:
            if narrow is not None:
                table["float64"] = narrow
