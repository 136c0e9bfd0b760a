"""Flax modules: nnx, and bound linen modules, with their parameters in float64."""

from __future__ import annotations

import sys
from typing import Any

from normscope.errors import BadInput
from normscope.identify.adapters.jax_arrays import double_precision, on_arrays, widened
from normscope.identify.box import Array, Box, Boxed, is_shape


def adapt(fn: Any, example: Any) -> Box | None:
    """A module in the mode that it is in. Each call starts from its own variables, and the module is never written.

    Raises BadInput for a linen module without variables.
    """
    flax = sys.modules.get("flax")
    if flax is None or not (is_shape(example) or hasattr(example, "shape")):
        return None
    if "flax.nnx" in sys.modules and isinstance(fn, sys.modules["flax.nnx"].Module):
        return Boxed(f"nnx module {type(fn).__name__}, on JAX float64", 2.0**-53, _nnx(fn))
    if "flax.linen" in sys.modules and isinstance(fn, sys.modules["flax.linen"].Module):
        if fn.scope is None:
            raise BadInput(
                f"a linen module is identified with its variables; {type(fn).__name__} is not bound to any. Pass "
                "module.bind(variables), with variables from module.init(key, x)"
            )
        return Boxed(f"linen module {type(fn).__name__}, on JAX float64", 2.0**-53, _linen(fn))
    return None


def _nnx(module: Any) -> Any:
    from flax import nnx

    graph, state = nnx.split(module)

    def call(x: Array) -> Any:
        with double_precision():
            return on_arrays(nnx.merge(graph, widened(state)), "float64")(x)

    return call


def _linen(module: Any) -> Any:
    unbound, variables = module.unbind()
    stored = [name for name in variables if name != "params"]

    def call(x: Array) -> Any:
        def apply(array: Any) -> Any:
            y = unbound.apply(widened(variables), array, mutable=stored or False)
            return y[0] if stored else y

        with double_precision():
            return on_arrays(apply, "float64")(x)

    return call
