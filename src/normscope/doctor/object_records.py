"""How to put one Python object back: a record for each kind, as (function that restores, objects it holds).

Containers are compared by identity of their items and changed in place, only where they differ.
"""

from __future__ import annotations

import functools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

Restore = Callable[[], object]
Children = Collection[Any]
Record = tuple[Restore | None, Children]

_DATA = (dict, list, set, deque, bytearray, torch.Tensor, np.ndarray, int, float, str, tuple, type(None))
"""global variables of these types are taken for a function's own state"""


def record_container(obj: Any) -> Record | None:
    for kind, record in _CONTAINERS:
        if isinstance(obj, kind):
            return record(obj)
    return None


def record_dict(obj: dict[Any, Any]) -> Record:
    # the base class's own methods: a subclass may have overridden them, and OrderedDict keeps its order apart
    base: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
    saved = dict(base.items(obj))

    def restore() -> None:
        if not (_same(base.keys(obj), saved.keys()) and _same(base.values(obj), saved.values())):
            base.clear(obj)
            base.update(obj, saved)

    return restore, saved.values()


def record_list(obj: list[Any]) -> Record:
    saved = list.copy(obj)

    def restore() -> None:
        if not _same(obj, saved):
            list.__setitem__(obj, slice(None), saved)

    return restore, saved


def record_deque(obj: deque[Any]) -> Record:
    saved = list(obj)

    def restore() -> None:
        if not _same(obj, saved):
            deque.clear(obj)
            deque.extend(obj, saved)

    return restore, saved


def record_set(obj: set[Any]) -> Record:
    saved = frozenset(obj)

    def restore() -> None:
        if obj != saved:
            set.clear(obj)
            set.update(obj, saved)

    return restore, saved


def record_bytearray(obj: bytearray) -> Record:
    saved = bytes(obj)

    def restore() -> None:
        if obj != saved:
            obj[:] = saved

    return restore, ()


_CONTAINERS: tuple[tuple[type, Callable[[Any], Record]], ...] = (
    (dict, record_dict),
    (list, record_list),
    (deque, record_deque),
    (set, record_set),
    (bytearray, record_bytearray),
)


def record_array(array: np.ndarray[Any, Any]) -> Record:
    saved = array.copy()

    def restore() -> None:
        if array.tobytes() != saved.tobytes():  # by bytes: NaN differs from itself
            array[...] = saved

    return restore, ()


def record_generator(obj: Any) -> Record | None:
    """A random generator of torch, Python or NumPy."""
    if isinstance(obj, torch.Generator):
        return functools.partial(obj.set_state, obj.get_state().clone()), ()
    if isinstance(obj, random.Random):
        return functools.partial(obj.setstate, obj.getstate()), ()
    if isinstance(obj, np.random.RandomState):
        return functools.partial(obj.set_state, obj.get_state()), ()
    if isinstance(obj, np.random.Generator):
        bits = obj.bit_generator
        return functools.partial(setattr, bits, "state", bits.state), ()
    return None


def record_slots(obj: Any) -> Record:
    """Attributes in ``__slots__``, which no ``__dict__`` shows."""
    kind: Any = type(obj)
    names = _slots(kind)
    if not names:
        return None, ()
    saved = {name: getattr(obj, name) for name in names if hasattr(obj, name)}

    def restore() -> None:
        for name in names:
            if name not in saved and hasattr(obj, name):
                object.__delattr__(obj, name)
            elif name in saved and getattr(obj, name, None) is not saved[name]:
                object.__setattr__(obj, name, saved[name])

    return restore, saved.values()


def record_class(kind: type) -> Record:
    """Class attributes: counters and caches that all instances share; and the methods."""
    saved = {name: value for name, value in vars(kind).items() if not name.startswith("__")}

    def restore() -> None:
        now = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
        for name in now.keys() - saved.keys():
            type.__delattr__(kind, name)
        for name, value in saved.items():
            if now.get(name, kind) is not value:
                type.__setattr__(kind, name, value)

    return restore, [*saved.values(), vars(kind).get("__call__")]


def record_function(function: FunctionType) -> Record:
    """A hook or method: its closure, its own attributes, mutable defaults, and the global variables it names."""
    cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if _filled(cell)]
    space = function.__globals__
    variables = {
        name: space[name]
        for name in function.__code__.co_names
        if name in space and isinstance(space[name], _DATA) and not name.startswith("__")
    }

    def restore() -> None:
        for cell, content in cells:
            if not _filled(cell) or cell.cell_contents is not content:
                cell.cell_contents = content
        for name, value in variables.items():
            if space.get(name, space) is not value:
                space[name] = value

    held = [
        *(content for _, content in cells),
        *variables.values(),
        *(function.__defaults__ or ()),
        function.__kwdefaults__,
    ]
    if function.__dict__:
        held.append(function.__dict__)
    return (restore if cells or variables else None), held


def record_script(module: torch.jit.ScriptModule) -> Record:
    """Attributes of a scripted module, which live in C++; lists and dicts come out of it as copies."""
    concrete = module.__dict__.get("_concrete_type")  # a frozen module has none: it has no state left
    names = [] if concrete is None else list(concrete.get_attributes())
    saved = {name: getattr(module, name) for name in names}

    def restore() -> None:
        for name, value in saved.items():
            now = getattr(module, name)
            same = now is value if isinstance(value, torch.Tensor) else _equal(now, value)
            if not same:
                setattr(module, name, value)

    return restore, [value for value in saved.values() if isinstance(value, torch.Tensor)]


def _same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # containers of tensors do not compare
        return False


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in names if not name.startswith("__"))


def _filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
