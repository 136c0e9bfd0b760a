"""ONNX Runtime sessions of one input."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from normscope.errors import BadInput
from normscope.identify.box import Array, Box, Boxed, is_shape, roundoff_of

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
}


def adapt(fn: Any, example: Any) -> Box | None:
    """A session with one input, called in the dtype of that input; its first output is read.

    Raises BadInput for a session of several inputs, or of one that is no floating tensor.
    """
    runtime = sys.modules.get("onnxruntime")
    if runtime is None or not isinstance(fn, runtime.InferenceSession):
        return None
    inputs, output = fn.get_inputs(), fn.get_outputs()[0].name
    if len(inputs) != 1:
        names = ", ".join(entry.name for entry in inputs)
        raise BadInput(
            f"a session to identify has one input; this one has {len(inputs)}: {names}. Pass a function that fixes the "
            "others: lambda x: session.run(None, {...: x, ...})[0]"
        )
    if inputs[0].type not in _DTYPES:
        raise BadInput(
            f"a session to identify takes a floating tensor; {inputs[0].name} is {inputs[0].type}. Cut the graph down "
            "to the normalization"
        )
    if not is_shape(example) and not hasattr(example, "shape"):
        return None
    dtype = _DTYPES[inputs[0].type]
    roundoff = roundoff_of(dtype)
    name = inputs[0].name

    def call(x: Array) -> Any:
        return fn.run([output], {name: x.astype(np.dtype(dtype))})[0]

    return Boxed(f"ONNX Runtime session, on {dtype}", roundoff, call)
