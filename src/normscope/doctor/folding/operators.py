"""Operators below PyTorch's functions: those that compute layers, and those that only hand values on."""

from __future__ import annotations

from functools import cache
from typing import Any

from normscope.doctor.tracing.ops import DROPOUTS, words

LAYERS = words(
    "convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear addmm mm "
    "bmm baddbmm addbmm matmul mv addmv"
)
"""operators that a linear layer or convolution arrives at"""

_COPIES = words("clone _to_copy copy_ contiguous lift_fresh _unsafe_view")


def takes_no_values(op: str) -> bool:
    """It follows a tensor's shape only."""
    return op.startswith("new_") or op.endswith("_like")


@cache
def moves(func: Any, op: str) -> bool:
    """The same values in other places, of another dtype or beside others: what reads them is what comes after.

    Dropout is here since it does nothing in evaluation.

    >>> import torch
    >>> aten = torch.ops.aten
    >>> moves(aten.permute.default, "permute"), moves(aten.clone.default, "clone"), moves(aten.add.Tensor, "add")
    (True, True, False)
    """
    schema = getattr(func, "_schema", None)
    views = schema is not None and any(
        made.alias_info is not None and not made.alias_info.is_write for made in schema.returns
    )
    return views or op in _COPIES or op in DROPOUTS or "_pad" in op or op == "pad"
