"""Arrays of any framework as tensors of their own, value by value and dtype by dtype, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.errors import BadInput

FLOATS = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def tensor_of(value: Any, name: str) -> Tensor:
    """A copy on the CPU in the dtype that it has: float16, bfloat16, float32 or float64.

    Raises BadInput, naming it, for what holds no values (meta tensors, abstract arrays), Python objects, or numbers of
    another kind.

    >>> tensor_of(np.array([1.0, 2.0]), "gamma")
    tensor([1., 2.], dtype=torch.float64)
    """
    value = _unwrapped(value)
    if isinstance(value, Tensor):
        if value.is_meta:
            raise BadInput(
                f"{name} is a meta tensor, which has a shape and no values. Load its values first."
            )
        if value.layout != torch.strided or value.is_quantized:
            raise BadInput(f"{name} is a sparse or quantized tensor. Pass it dense, in floating point.")
        tensor = value.detach().cpu().clone()
        if tensor.dtype not in (*FLOATS.values(), torch.bfloat16):
            raise BadInput(_kind(name, str(tensor.dtype).removeprefix("torch.")))
        return tensor
    if hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__"):
        raise BadInput(
            f"{name} is abstract, a {type(value).__name__} of shape {tuple(value.shape)} without values. "
            "Build the layer, or load its values, first."
        )
    try:
        array = np.array(value)  # a copy
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{name} is a {type(value).__name__} and no array of numbers. Pass an array."
        ) from error
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.name not in FLOATS:
        raise BadInput(_kind(name, array.dtype.name))
    return torch.from_numpy(array)


def array_of(tensor: Tensor) -> Any:
    """A NumPy array; bfloat16, which NumPy lacks, as float32 of the same values."""
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _unwrapped(value: Any) -> Any:
    """The array in a variable of nnx or Keras."""
    if isinstance(value, Tensor | np.ndarray):
        return value
    if hasattr(value, "get_value"):
        return value.get_value()
    if hasattr(value, "value") and not callable(value.value):
        return value.value
    return value


def _kind(name: str, dtype: str) -> str:
    what = "Python objects" if dtype == "object" else dtype
    wanted = "float16, bfloat16, float32 or float64"
    return f"{name} holds {what}; parameters and statistics are {wanted}. Convert it first."
