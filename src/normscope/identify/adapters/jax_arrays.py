"""JAX in double precision for a while, and functions of JAX arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from normscope.identify.box import Array, Box, Boxed, is_shape, name_of, roundoff_of, shape_of

GIVEN = "it was called with JAX arrays of {}, as it is a function of these"


def adapt(fn: Any, example: Any) -> Box | None:
    """A function called with JAX arrays, where the example is one, or is NumPy's or a shape and the function gives one:
    in the dtype of the example, which the function's constants share.

    Float64 needs ``jax_enable_x64``, as everywhere in JAX.
    """
    jax = sys.modules.get("jax")
    if jax is None or not callable(fn):
        return None
    note = ""
    if not isinstance(example, jax.Array):
        if not (isinstance(example, np.ndarray) or is_shape(example)) or not _gives_jax(
            fn, shape_of(example)
        ):
            return None
        example = jax.numpy.asarray(np.zeros(shape_of(example)) if is_shape(example) else example)
        note = GIVEN.format(example.dtype)
    dtype = str(example.dtype)
    roundoff = roundoff_of(dtype)
    return Boxed(f"{name_of(fn)}, on JAX {dtype}", roundoff, on_arrays(fn, dtype), note)


def _gives_jax(fn: Callable[[Any], Any], shape: tuple[int, ...]) -> bool:
    """Whether a function gives a JAX array for an array of NumPy, or takes those of JAX alone."""
    jax = sys.modules["jax"]
    x = np.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape)
    for array in (x, jax.numpy.asarray(x)):
        try:
            with np.errstate(all="ignore"):
                return isinstance(fn(array), jax.Array)
        except (Exception, SystemExit):
            continue
    return False


def on_arrays(fn: Callable[[Any], Any], dtype: str) -> Callable[[Array], Any]:
    """The function on NumPy arrays, through JAX arrays of ``dtype``."""
    import jax.numpy as jnp

    def call(x: Array) -> Any:
        y = fn(jnp.asarray(x, dtype=dtype))
        return np.asarray(y) if hasattr(y, "dtype") else y

    return call


def double_precision() -> AbstractContextManager[Any]:
    """JAX with 64-bit numbers inside the block; the setting outside stays as it is."""
    import jax

    if hasattr(jax, "enable_x64"):
        context: AbstractContextManager[Any] = jax.enable_x64(True)
        return context
    from jax.experimental import enable_x64

    older: AbstractContextManager[Any] = enable_x64()
    return older


def widened(tree: Any) -> Any:
    """A tree of arrays with all floating leaves in float64. Inside `double_precision` only."""
    import jax
    import jax.numpy as jnp

    def wide(leaf: Any) -> Any:
        floats = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(np.asarray(leaf), dtype=jnp.float64) if floats else leaf

    return jax.tree.map(wide, tree)
