"""What a model is made of besides tensor memory: the Python objects it owns, and the way back to their contents."""

from __future__ import annotations

import enum
import functools
import sys
from collections import deque
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from normscope.doctor.object_records import (
    Children,
    Record,
    Restore,
    record_array,
    record_class,
    record_container,
    record_dict,
    record_function,
    record_generator,
    record_script,
    record_slots,
)

_PLAIN_STDLIB = frozenset({"collections", "types", "argparse", "weakref"})
"""standard library modules whose instances only hold data"""

_SERVICES = frozenset(
    {"numpy", "wandb", "tensorboard", "tensorboardX", "mlflow", "lightning", "pytorch_lightning", "ray"}
)
_TORCH_SERVICES = ("torch.utils.", "torch.fx", "torch.distributed", "torch._", "torch.jit")
"""packages whose objects work for the model but are no part of its state: trainers, loggers, process groups"""

_MAX_HOPS = 3
"""how many plain objects deep the search goes: a model may point at the whole program that trains it"""
_MAX_ITEMS = 100_000
"""a longer container is put back too, but its items are not searched"""
_MAX_ARRAY_BYTES = 64 * 2**20
"""of NumPy arrays together, since they cannot be copied on write"""

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


class ObjectState:
    """Shallow copies of the contents of every mutable object that ``roots`` own, put back in place by ``restores``.

    Modules (registered or not), their classes, dicts, lists, sets, deques, NumPy arrays, random generators, plain
    objects, and what hooks and methods close over or use as global variables. Tensors are only collected, in
    ``tensors``: their memory is copied on write elsewhere. ``skipped`` says what was too large.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.skipped: list[str] = []
        self.restores: list[Restore] = []
        self._array_bytes = 0
        self._seen: dict[int, Any] = {}  # holds the objects, so that their ids stay theirs
        queue = deque((root, 0) for root in roots)
        while queue:
            obj, hops = queue.popleft()
            if isinstance(obj, _ATOMS) or id(obj) in self._seen:
                continue
            self._seen[id(obj)] = obj
            hops += _is_plain_object(obj)
            if hops <= _MAX_HOPS:
                queue.extend((child, hops) for child in self._record(obj))

    def _record(self, obj: Any) -> Children:
        """Remember how to put ``obj`` back, and return what it holds."""
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return [*self._attributes(obj), obj.grad if obj.is_leaf else None]
        if isinstance(obj, torch.nn.Module):
            script = self._keep(record_script(obj)) if isinstance(obj, torch.jit.ScriptModule) else ()
            return [*self._attributes(obj), *script, *(kind for kind in type(obj).__mro__ if _is_users(kind))]
        if isinstance(obj, type):
            return self._keep(record_class(obj)) if _is_users(obj) else ()
        if isinstance(obj, FunctionType):
            return self._keep(record_function(obj)) if _is_users(obj) else ()
        if isinstance(obj, MethodType):
            return (obj.__self__, obj.__func__)
        if isinstance(obj, functools.partial):
            return (obj.func, obj.args, obj.keywords)
        if isinstance(obj, (tuple, frozenset)):
            return obj
        if isinstance(obj, np.ndarray):
            return self._array(obj)
        if (container := record_container(obj)) is not None:
            children = self._keep(container)
            if len(children) > _MAX_ITEMS:
                self.skipped.append(
                    f"a {type(obj).__name__} of {len(children)} items: its items were not searched"
                )
                children = ()
            return [*children, *self._attributes(obj)]
        if (generator := record_generator(obj)) is not None:
            return self._keep(generator)
        return self._attributes(obj) if _is_plain_object(obj) else ()

    def _keep(self, record: Record) -> Children:
        restore, children = record
        if restore is not None:
            self.restores.append(restore)
        return children

    def _attributes(self, obj: Any) -> Children:
        attributes = getattr(obj, "__dict__", None)
        held = self._keep(record_dict(attributes)) if isinstance(attributes, dict) else ()
        return [*held, *self._keep(record_slots(obj))]

    def _array(self, array: np.ndarray[Any, Any]) -> Children:
        if array.dtype.hasobject or not array.flags.writeable:
            return ()
        self._array_bytes += array.nbytes
        if self._array_bytes <= _MAX_ARRAY_BYTES:
            return self._keep(record_array(array))
        note = f"NumPy arrays beyond the first {_MAX_ARRAY_BYTES / 2**20:.0f} MiB: too large to copy"
        if note not in self.skipped:
            self.skipped.append(note)
        return ()


def _is_plain_object(obj: Any) -> bool:
    """An instance that holds data: its class is neither a service's nor the standard library's."""
    if isinstance(obj, (torch.nn.Module, torch.Tensor, type, FunctionType)):
        return False
    module = type(obj).__module__
    package = module.split(".")[0]
    if package in sys.stdlib_module_names:
        return package in _PLAIN_STDLIB
    return package not in _SERVICES and not module.startswith(_TORCH_SERVICES)


def _is_users(obj: type | FunctionType) -> bool:
    """A class or function that PyTorch and the standard library did not define."""
    package = (obj.__module__ or "").split(".")[0]
    return package == "__main__" or (package != "torch" and package not in sys.stdlib_module_names)
