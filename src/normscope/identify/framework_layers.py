"""Keras and Flax layers as functions in float64: in training and in evaluation, with other values where asked.

The layer itself is never run: a Keras layer by a float64 twin, a Flax module by copies of its variables, with
``use_fast_variance=False``, since mean(x^2) - mean(x)^2 is the same function and its rounding another question, and
with ``axis_name=None``: outside of a ``pmap`` or ``vmap`` with that axis a layer that averages over it cannot run.
A half type that either is told to compute in is left out: that is a question of rounding too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.reading import Reading, read
from normscope.reading.by_class import home_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]

STORED = ("running_mean", "running_var")


@dataclass(frozen=True)
class FrameworkLayer:
    """A layer of Keras or Flax with what it is."""

    name: str
    reading: Reading
    held: dict[str, Array]
    """parameters and stored statistics by their usual names"""
    run: Callable[[Array, bool, Values], tuple[Array, dict[str, Array]]]
    """input, training, values that replace those held -> output, stored statistics afterwards"""
    frozen: bool
    """stored statistics normalize in training too, and do not move"""
    notes: tuple[str, ...]


def framework_layer(obj: Any, shape: tuple[int, ...]) -> FrameworkLayer | None:
    """A normalization of Keras, flax.nnx or flax.linen on inputs of this shape; None for anything else.

    Raises UnknownNormalization where it is one that no specification holds, BadInput where it cannot be copied.
    """
    maker = _maker(obj)
    if maker is None:
        return None
    reading = read(obj, input_ndim=len(shape))
    held = {name: _array(value) for name, value in reading.tensors.items()}
    run = maker(obj, reading, shape)
    return FrameworkLayer(
        f"{reading.type_name}, on float64", reading, held, run, _frozen(obj, reading), _notes(obj)
    )


def _frozen(obj: Any, reading: Reading) -> bool:
    """Of Keras by ``trainable``; of linen by a ``use_running_average`` of its own, which no call can change."""
    linen = home_of(obj, "flax.linen.", ("BatchNorm",)) is not None
    return reading.mode_train == "frozen" or (linen and obj.use_running_average is True)


def _notes(obj: Any) -> tuple[str, ...]:
    notes = []
    dtype = getattr(obj, "compute_dtype", None) or getattr(obj, "dtype", None)
    name = str(getattr(dtype, "__name__", dtype))
    if name in ("bfloat16", "float16"):
        notes.append(f"it computes in {name}; compared was the function of real numbers, not how it rounds")
    if home_of(obj, "flax.nnx.", ("BatchNorm",)) and obj.use_running_average:
        notes.append(
            "use_running_average=True is the mode it is in, which train(), eval() and each call set: both were compared"
        )
    return tuple(notes)


def _maker(obj: Any) -> Callable[..., Any] | None:
    from normscope.reading import flax_layers, flax_linen, flax_nnx, keras

    if home_of(obj, keras.PACKAGE, keras.KINDS):
        return _keras
    names = {*flax_layers.NAMES} - {"WeightNorm"}  # which normalizes the kernel of the layer that it wraps
    if home_of(obj, flax_nnx.PACKAGE, names):
        return _nnx
    if home_of(obj, flax_linen.PACKAGE, names):
        return _linen
    return None


def _keras(layer: Any, reading: Reading, shape: tuple[int, ...]) -> Any:
    from normscope.identify.adapters.keras_layers import in_float64, twin_of
    from normscope.reading.keras import variables_of

    ops = sys.modules["keras"].ops
    twin, weights = twin_of(layer, shape)
    twin.trainable = layer.trainable
    mode = {"BatchNormalization"} & {cls.__qualname__ for cls in type(layer).__mro__}

    def run(x: Array, training: bool, values: Values) -> tuple[Array, dict[str, Array]]:
        with in_float64():
            twin.set_weights(weights)
            held = variables_of(twin)
            for name, value in values.items():
                held[name].assign(value)
            given = ops.convert_to_tensor(x, dtype="float64")
            y = twin(given, training=training) if mode else twin(given)
            after = {name: _array(ops.convert_to_numpy(v)) for name, v in variables_of(twin).items()}
            return _array(ops.convert_to_numpy(y)), {n: after[n] for n in STORED if n in after}

    return run


def _nnx(module: Any, reading: Reading, shape: tuple[int, ...]) -> Any:
    from flax import nnx

    from normscope.identify.adapters.jax_arrays import double_precision, widened
    from normscope.reading.flax_nnx import VARIABLES, held

    graph, state = nnx.split(module)
    mode = "running_mean" in reading.tensors

    def run(x: Array, training: bool, values: Values) -> tuple[Array, dict[str, Array]]:
        import jax.numpy as jnp

        with double_precision():
            copy = nnx.merge(graph, widened(state))
            copy.use_fast_variance = False
            copy.axis_name = copy.dtype = None
            copy.param_dtype = jnp.float64
            for name, value in values.items():
                getattr(copy, VARIABLES[name])[...] = jnp.asarray(value)
            given = jnp.asarray(x, dtype=jnp.float64)
            y = copy(given, use_running_average=not training) if mode else copy(given)
            after = {name: _array(held(getattr(copy, VARIABLES[name]))) for name in STORED if mode}
            return _array(y), after

    return run


def _linen(module: Any, reading: Reading, shape: tuple[int, ...]) -> Any:
    from normscope.errors import BadInput
    from normscope.identify.adapters.jax_arrays import double_precision, widened
    from normscope.reading.flax_linen import VARIABLES

    if module.scope is None:
        raise BadInput(
            f"{reading.type_name} is not bound to variables. Pass module.bind(variables), with variables from "
            "module.init(key, x)"
        )
    unbound, variables = module.unbind()
    mode = "running_mean" in reading.tensors
    by_stored = _frozen(module, reading)
    settings = {"use_fast_variance": False, "axis_name": None, "dtype": None}
    unbound = unbound.clone(**settings, **({"use_running_average": None} if mode else {}))

    def run(x: Array, training: bool, values: Values) -> tuple[Array, dict[str, Array]]:
        import jax.numpy as jnp

        with double_precision():
            copy = {name: dict(held) for name, held in widened(dict(variables)).items()}
            for name, value in values.items():
                collection, own = VARIABLES[name]
                copy[collection][own] = jnp.asarray(value)
            given = jnp.asarray(x, dtype=jnp.float64)
            alone = unbound.clone(param_dtype=jnp.float64)
            if not mode:
                return _array(alone.apply(copy, given)), {}
            y, moved = alone.apply(
                copy, given, use_running_average=by_stored or not training, mutable=["batch_stats"]
            )
            after = {name: _array(moved["batch_stats"][VARIABLES[name][1]]) for name in STORED}
            return _array(y), after

    return run


def _array(value: Any) -> Array:
    if hasattr(value, "detach"):  # of Keras on torch
        value = value.detach().double().cpu().numpy()
    return np.array(value, dtype=np.float64)
