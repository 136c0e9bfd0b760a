"""Tensors in nested tuples, lists, mappings and dataclasses: what models take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors(value: Any, where: str = "inputs") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, with a name for it."""
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, str(key) if where == "inputs" else f"{where}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors(item, where if len(value) == 1 else f"{where}[{i}]")
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from tensors(getattr(value, key, None), f"{where}.{key}")


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every input tensor with the name that a user would give it: ``inputs``, ``inputs[1]``, ``input_ids``."""
    yield from tensors(args)
    yield from tensors(kwargs)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with every tensor changed. Named tuples and dataclasses keep their type where they can."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return value


def _plain(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and not t.is_nested and not t.is_quantized


def detached(output: Any) -> list[torch.Tensor]:
    """The dense tensors of a model's output, without their graph; complex ones as pairs of real numbers."""
    dense = (t.detach() for _, t in tensors(output, "output") if _plain(t))
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in dense]
