"""A callable as a function from arrays to arrays, whatever library it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from normscope.errors import BadInput

Array = NDArray[np.float64]

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24}
"""unit roundoff: half the gap between 1 and the next number"""

ADAPTERS = (
    "onnxruntime_sessions",
    "flax_modules",
    "keras_layers",
    "jax_arrays",
    "torch_functions",
    "numpy_functions",
)
"""files of `adapters`, in the order in which they are asked; each has ``adapt(fn, example) -> Box | None``"""


class Box(Protocol):
    """A function on arrays under identification. Every call starts from the same state."""

    @property
    def name(self) -> str:
        """what it is, for a report: ``"function layer_norm, on torch float32"``"""

    @property
    def roundoff(self) -> float:
        """unit roundoff of the arithmetic: 2**-53 for float64, 2**-24 for float32"""

    def __call__(self, x: Array) -> Array:
        """One call. Raises what the callable raises, and BadInput where it returns no single real array."""


@dataclass(frozen=True)
class Boxed:
    """A `Box` made of a name, a precision and a function from float64 arrays to arrays."""

    name: str
    roundoff: float
    function: Callable[[Array], Any]
    note: str = ""
    """what to know about how it is called"""

    def __call__(self, x: Array) -> Array:
        y = self.function(x)
        if not isinstance(y, np.ndarray) or y.dtype.kind not in "fiub":
            what = f"an array of {y.dtype}" if isinstance(y, np.ndarray) else f"a {type(y).__name__}"
            raise BadInput(
                f"a callable to identify returns one array of real numbers; {self.name} returned {what}. "
                "Wrap it in a function that picks the array out."
            )
        return y.astype(np.float64)


def box_of(fn: Any, example: Any) -> Box:
    """A callable as a `Box`, with inputs of the kind, dtype and device of the example.

    Arguments:
        fn: a function of one array or tensor, a torch module as it is, or what an adapter reads.
        example: an array or a tensor of float32 or float64; or a shape, which is tried in float64 as a NumPy
            array, then as a tensor.

    Raises BadInput where the example has another dtype or is no array, or nobody can call ``fn``.

    >>> box_of(np.tanh, (2, 3)).name
    'function tanh, on NumPy float64'
    """
    if not callable(fn) and not hasattr(fn, "run"):
        raise BadInput(
            f"a callable is identified; got a {type(fn).__name__}. Pass a function, a layer or a session."
        )
    for file in ADAPTERS:
        box: Box | None = import_module(f"normscope.identify.adapters.{file}").adapt(fn, example)
        if box is not None:
            return box
    raise BadInput(
        f"an example is a NumPy array, a tensor or a shape; got a {type(example).__name__}. "
        "Pass one input of the kind that the callable takes."
    )


def shape_of(example: Any) -> tuple[int, ...]:
    """Shape of an array, a tensor, or the shape itself."""
    return tuple(int(n) for n in (example if is_shape(example) else example.shape))


def is_shape(example: Any) -> bool:
    """Whether the example is a tuple or list of sizes."""
    return isinstance(example, tuple | list) and all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) for n in example
    )


def roundoff_of(dtype: str) -> float:
    """Unit roundoff of ``"float32"`` or ``"float64"``. Raises BadInput for every other dtype, saying why."""
    if dtype in ROUNDOFF:
        return ROUNDOFF[dtype]
    why = (
        "In half precision the rounding of one element hides what tells normalizations apart. "
        if dtype in ("float16", "bfloat16")
        else ""
    )
    raise BadInput(
        f"identification needs an example of float32 or float64; got {dtype}. {why}"
        "Pass the example in float32, and the callable in float32 too."
    )


def name_of(fn: Any) -> str:
    """A callable in words.

    >>> name_of(np.mean), name_of(lambda x: x)
    ('function mean', 'function <lambda>')
    """
    name = getattr(fn, "__name__", None)
    return f"function {name}" if isinstance(name, str) else type(fn).__name__
