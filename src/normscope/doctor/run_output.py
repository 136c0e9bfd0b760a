"""What a run hands out: an output that no restoration reaches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def independent(output: Any, shared: Callable[[torch.Tensor], bool]) -> Any:
    """``output`` with every tensor cloned for which ``shared`` holds, and with containers of its own.

    A model may return its own input, buffer or list, which are about to be put back to what they held before.
    Tensors in tuples, lists, dicts and dataclasses (transformers' outputs among them) are reached.
    """
    if isinstance(output, torch.Tensor):
        return output.clone() if shared(output) else output
    if isinstance(output, tuple):
        items = [independent(item, shared) for item in output]
        if all(new is old for new, old in zip(items, output, strict=True)):
            return output
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if type(output) is list:
        return [independent(item, shared) for item in output]
    if isinstance(output, dict):
        own = copy.copy(output)
        for key, value in output.items():
            own[key] = independent(value, shared)
        return own
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        other: Any = copy.copy(output)
        for field in dataclasses.fields(other):
            value = independent(getattr(other, field.name), shared)
            object.__setattr__(other, field.name, value)
        return other
    return output
