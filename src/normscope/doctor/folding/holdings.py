"""Which module and which tensor has which names in a model, and what shares its memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn


class Holdings:
    """Names as ``named_modules`` gives them, under each path a module has."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[int, list[str]] = {}
        self._tensors: dict[int, list[str]] = {}
        self._memory: dict[int, set[int]] = {}
        """storage -> ids of the tensors in it"""
        for path, module in model.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(module), []).append(path)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._tensors.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
                    self._memory.setdefault(_storage(tensor), set()).add(id(tensor))
            for tensor in _plain_tensors(module):
                self._memory.setdefault(_storage(tensor), set()).add(id(tensor))

    def paths(self, module: nn.Module) -> list[str]:
        return self._modules.get(id(module), [])

    def names(self, tensor: Tensor) -> list[str]:
        return self._tensors.get(id(tensor), [])

    def alone(self, tensor: Tensor) -> bool:
        """No other tensor or array of the model lies in the same memory."""
        return len(self._memory.get(_storage(tensor), ())) == 1


def _plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Attributes that are neither parameters nor buffers, and what they hold; of an array the tensor it views."""
    for held in vars(module).values():
        items = held.values() if isinstance(held, dict) else held
        for item in items if isinstance(held, (dict, list, tuple)) else (held,):
            while isinstance(item, np.ndarray):
                item = item.base
            if isinstance(item, Tensor):
                yield item


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)  # of an empty tensor: 0
    except (NotImplementedError, RuntimeError):  # no memory to speak of: sparse, quantized by a subclass
        return id(tensor)
