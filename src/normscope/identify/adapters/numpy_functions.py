"""Functions of NumPy arrays, and functions of anything array-like where the example is only a shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from normscope.identify.box import Array, Box, Boxed, is_shape, name_of, roundoff_of


def adapt(fn: Any, example: Any) -> Box | None:
    """A function called with NumPy arrays of the example's dtype; a shape means float64."""
    if is_shape(example):
        example = np.zeros(tuple(example))
    if not isinstance(example, np.ndarray) or not callable(fn):
        return None
    dtype = example.dtype
    roundoff = roundoff_of(dtype.name)

    def call(x: Array) -> Any:
        with np.errstate(all="ignore"):  # 0/0 at a constant input is what is looked for
            return fn(x.astype(dtype))  # a copy: a callable that writes into its input hurts nobody

    return Boxed(f"{name_of(fn)}, on NumPy {dtype.name}", roundoff, call)
