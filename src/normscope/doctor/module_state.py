"""What a model is made of besides tensors: the Python objects it owns, and how to put their contents back."""

from __future__ import annotations

import enum
import functools
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

_PLAIN_STDLIB = frozenset({"collections", "types", "argparse", "weakref"})
"""standard library modules whose instances only hold data"""

_SERVICES = frozenset(
    {"wandb", "tensorboard", "tensorboardX", "mlflow", "lightning", "pytorch_lightning", "ray"}
)
_TORCH_SERVICES = ("torch.utils.", "torch.fx", "torch.distributed", "torch._", "torch.jit")
"""packages whose objects work for the model but are no part of its state: trainers, loggers, process groups"""

_MAX_HOPS = 3
"""how many plain objects deep the search goes: a model may point at the whole program that trains it"""
_MAX_ITEMS = 100_000
_MAX_ARRAY_BYTES = 256 * 2**20

Restore = Callable[[], object]
Children = Iterable[Any]


class ObjectState:
    """Shallow copies of the contents of every mutable object reachable from ``roots``.

    Modules (registered or not), dicts, lists, sets, deques, NumPy arrays, random generators, closures of hooks and
    plain objects are put back in place by ``restore``. Tensors are only collected, in ``tensors``; their memory is
    copied on write elsewhere. ``skipped`` names what was too large to copy.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.skipped: list[str] = []
        self._restores: list[Restore] = []
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

    def __contains__(self, obj: Any) -> bool:
        return id(obj) in self._seen

    def restore(self) -> None:
        for restore in self._restores:
            restore()

    def _record(self, obj: Any) -> Children:
        """Remember how to put ``obj`` back, and return what it holds."""
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            grad = obj.grad if obj.is_leaf else None
            return self._attributes(obj, [] if grad is None else [grad])
        if isinstance(obj, np.ndarray):
            return self._array(obj)
        if isinstance(obj, (tuple, frozenset)):
            return obj
        if isinstance(obj, FunctionType):
            return self._function(obj)
        if isinstance(obj, MethodType):
            return (obj.__self__, obj.__func__)
        if isinstance(obj, functools.partial):
            return (obj.func, obj.args, obj.keywords)
        for kind, record in _CONTAINERS:
            if isinstance(obj, kind):
                container: Any = obj
                restore, children = record(container)
                self._restores.append(restore)
                if len(container) > _MAX_ITEMS:
                    self.skipped.append(f"a {type(obj).__name__} of {len(container)} items: not looked into")
                    children = ()
                return self._attributes(obj, children)
        if (state := _generator_state(obj)) is not None:
            self._restores.append(state)
            return ()
        if isinstance(obj, torch.nn.Module) or _is_plain_object(obj):
            return self._attributes(obj, ())
        return ()

    def _attributes(self, obj: Any, children: Children) -> Children:
        """Attributes in ``__dict__`` and ``__slots__``, besides ``children``."""
        found = list(children)
        attributes = getattr(obj, "__dict__", None)
        if isinstance(attributes, dict):
            restore, values = _record_dict(attributes)
            self._restores.append(restore)
            found += values
        slots = {name: getattr(obj, name) for name in _slots(type(obj)) if hasattr(obj, name)}
        if slots:
            self._restores.append(lambda: _set_slots(obj, slots))
            found += slots.values()
        return found

    def _array(self, array: np.ndarray[Any, Any]) -> Children:
        if array.dtype.hasobject:
            return ()
        if not array.flags.writeable:
            return ()
        self._array_bytes += array.nbytes
        if self._array_bytes > _MAX_ARRAY_BYTES:
            self.skipped.append(f"a NumPy array of {array.nbytes / 2**20:.0f} MiB: too large to copy")
            return ()
        saved = array.copy()

        def restore() -> None:
            if array.tobytes() != saved.tobytes():
                array[...] = saved

        self._restores.append(restore)
        return ()

    def _function(self, function: FunctionType) -> Children:
        """A hook: what its closure holds, and mutable defaults."""
        if function.__module__ and function.__module__.split(".")[0] == "torch":
            return ()
        cells = [cell for cell in function.__closure__ or () if _filled(cell)]
        contents = [cell.cell_contents for cell in cells]

        def restore() -> None:
            for cell, content in zip(cells, contents, strict=True):
                if not _filled(cell) or cell.cell_contents is not content:
                    cell.cell_contents = content

        self._restores.append(restore)
        return self._attributes(
            function, [*contents, *(function.__defaults__ or ()), function.__kwdefaults__]
        )


_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, enum.Enum, range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(sys),
)  # fmt: skip


def _record_dict(obj: dict[Any, Any]) -> tuple[Restore, Children]:
    # the base class's own methods: a subclass may have overridden them, and OrderedDict keeps its order apart
    base: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
    saved = dict(base.items(obj))

    def restore() -> None:
        if not (_same(base.keys(obj), saved.keys()) and _same(base.values(obj), saved.values())):
            base.clear(obj)
            base.update(obj, saved)

    return restore, saved.values()


def _record_list(obj: list[Any]) -> tuple[Restore, Children]:
    saved = list.copy(obj)

    def restore() -> None:
        if not _same(obj, saved):
            list.__setitem__(obj, slice(None), saved)

    return restore, saved


def _record_deque(obj: deque[Any]) -> tuple[Restore, Children]:
    saved = list(obj)

    def restore() -> None:
        if not _same(obj, saved):
            deque.clear(obj)
            deque.extend(obj, saved)

    return restore, saved


def _record_set(obj: set[Any]) -> tuple[Restore, Children]:
    saved = frozenset(obj)

    def restore() -> None:
        if obj != saved:
            set.clear(obj)
            set.update(obj, saved)

    return restore, saved


def _record_bytearray(obj: bytearray) -> tuple[Restore, Children]:
    saved = bytes(obj)

    def restore() -> None:
        if obj != saved:
            obj[:] = saved

    return restore, ()


_CONTAINERS: tuple[tuple[type, Callable[[Any], tuple[Restore, Children]]], ...] = (
    (dict, _record_dict),
    (list, _record_list),
    (deque, _record_deque),
    (set, _record_set),
    (bytearray, _record_bytearray),
)


def _generator_state(obj: Any) -> Restore | None:
    """How to put a random generator back, None for anything else."""
    if isinstance(obj, torch.Generator):
        torch_state = obj.get_state().clone()
        return functools.partial(obj.set_state, torch_state)
    if isinstance(obj, random.Random):
        python_state = obj.getstate()
        return lambda: obj.setstate(python_state)
    if isinstance(obj, np.random.RandomState):
        return functools.partial(obj.set_state, obj.get_state())
    if isinstance(obj, np.random.Generator):
        bits = obj.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return None


def _is_plain_object(obj: Any) -> bool:
    """An instance that holds data: its class is neither a service's nor the standard library's."""
    if isinstance(obj, (torch.nn.Module, torch.Tensor, FunctionType, MethodType, functools.partial)):
        return False
    module = type(obj).__module__
    package = module.split(".")[0]
    if package in sys.stdlib_module_names and package not in _PLAIN_STDLIB:
        return False
    return package not in _SERVICES and not module.startswith(_TORCH_SERVICES) and package != "numpy"


def _slots(kind: type) -> list[str]:
    names = []
    for base in kind.__mro__:
        declared = base.__dict__.get("__slots__", ())
        names += [declared] if isinstance(declared, str) else list(declared)
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _set_slots(obj: Any, slots: dict[str, Any]) -> None:
    for name, value in slots.items():
        if getattr(obj, name, None) is not value:
            object.__setattr__(obj, name, value)


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    now, before = list(now), list(before)
    return len(now) == len(before) and all(map(operator.is_, now, before))
