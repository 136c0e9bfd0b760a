"""What a tensor carries besides its memory: where it lies, requires_grad, the gradient's identity, version, hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from normscope.doctor.copy_on_write import storages_of


class TensorState:
    """The record of one tensor, and the way back to it. Bytes are the vault's (``copy_on_write``)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._data = (
            tensor.data
        )  # a second tensor on the same memory: the way back from `tensor.data = other`
        self._layout = _layout(tensor)
        self._leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None
        # torch notes the version when this is made, and winds it back when it is left; inference tensors have none
        self._version = None if tensor.is_inference() else _unsafe_preserve_version_counter(tensor)

    @property
    def grad(self) -> torch.Tensor | None:
        return self._grad

    def restore(self) -> None:
        tensor = self._tensor
        if self._leaf and not tensor.is_leaf:
            tensor.detach_()  # a buffer updated in place from a parameter in grad mode has joined the graph
        if _layout(tensor) != self._layout:
            tensor.data = self._data
        if self._leaf:
            if tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self._grad:
                tensor.grad = self._grad

    def restore_version(self) -> None:
        """Wind the version counter back: the bytes are those of that version, so graphs saved by the user hold.

        Only at the very end: between two runs the counter must go on rising, or a graph that saved a value of the
        first run could be taken to fit the second.
        """
        if self._version is not None:
            self._version.__exit__(None, None, None)


class HookStash:
    """Silences a leaf tensor's gradient hooks by emptying their dicts, which the user's handles keep pointing at."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._dicts: dict[str, Any] = {}
        self._items: dict[str, list[tuple[int, Any]]] = {}
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, attribute, None)
            self._dicts[attribute] = hooks
            if hooks is not None:
                self._items[attribute] = list(hooks.items())

    def silence(self) -> None:
        for attribute in self._items:
            self._dicts[attribute].clear()

    def restore(self) -> None:
        for attribute, hooks in self._dicts.items():
            current = getattr(self._tensor, attribute, None)
            if current is not None and current is not hooks:
                current.clear()  # registered during the run
            if current is not hooks:
                setattr(self._tensor, attribute, hooks)
            if hooks is not None:
                hooks.clear()
                hooks.update(self._items[attribute])


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where the tensor lies: enough to notice ``tensor.data = other``, ``set_``, ``resize_``, ``t_`` and the like."""
    known: tuple[Any, ...] = (tensor.dtype, tensor.device, tensor.shape)
    if tensor.layout is torch.strided:
        known += (tensor.stride(), tensor.storage_offset())
    try:
        # an operation in place on a sparse tensor gives it other memory
        return (*known, *(storage.data_ptr() for storage in storages_of(tensor)))
    except (NotImplementedError, RuntimeError):
        return known
