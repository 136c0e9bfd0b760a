"""Names of torch operations: one name for each, however it was written."""

from __future__ import annotations

from functools import cache
from typing import Any

REFLECTED = {
    "radd": "add",
    "rmul": "mul",
    "rtruediv": "rdiv",
    "truediv": "div",
    "rpow": "rpow",
    "matmul": "matmul",
}
SAME = {
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "itruediv": "div",
    "idiv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "ipow": "pow",
    "rmatmul": "matmul",
    "imatmul": "matmul",
    **REFLECTED,
}


@cache
def op_name(func: Any) -> str:
    """Name of a torch function without its form: ``add`` for ``Tensor.add_``, ``+``, ``+=`` and ``aten.add.Tensor``.

    >>> import torch
    >>> op_name(torch.Tensor.add_), op_name(torch.Tensor.__radd__), op_name(torch.ops.aten.add.Tensor)
    ('add', 'add', 'add')
    """
    name = str(getattr(func, "__name__", type(func).__name__))
    if name == "__get__":  # a property such as Tensor.T
        name = str(getattr(func.__self__, "__name__", name))
    name = name.split(".")[0].strip("_")
    return SAME.get(name, name)
