"""Where a tensor's values lie, and whether that memory is still there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that hold the values of a tensor: itself, or those inside a sparse or a wrapped one."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        inner = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
        # torch lists other parts too: a DTensor's are its local tensor and its device mesh
        parts = [part for part in inner if isinstance(part, torch.Tensor)]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        yield tensor
        return
    for part in parts:
        yield from strided_parts(part)


def freed(tensor: torch.Tensor) -> bool:
    """Whether an element lies behind the end of the memory that the tensor says it is in."""
    try:
        return any(_reach(part) > part.untyped_storage().nbytes() for part in strided_parts(tensor))
    except (NotImplementedError, RuntimeError):  # torch gives no access to it: an opaque layout
        return False


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the start of the memory to the end of the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())
