"""JAX in double precision for a while, and functions of JAX arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from normscope.identify.box import Array, Box, Boxed, name_of, roundoff_of


def adapt(fn: Any, example: Any) -> Box | None:
    """A function called with JAX arrays, where the example is one: in its dtype, which the function's constants share.

    Float64 needs ``jax_enable_x64``, as everywhere in JAX.
    """
    jax = sys.modules.get("jax")
    if jax is None or not callable(fn) or not isinstance(example, jax.Array):
        return None
    dtype = str(example.dtype)
    roundoff = roundoff_of(dtype)
    return Boxed(f"{name_of(fn)}, on JAX {dtype}", roundoff, on_arrays(fn, dtype))


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
