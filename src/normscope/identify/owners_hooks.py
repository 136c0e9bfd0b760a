"""Copies of a module with its forward hooks, and of what those hold: one that records writes into no list of its
owner.

``copy.deepcopy`` takes functions as they are, so that what a hook reaches would stay the original. Here its closure,
its defaults and the globals of its own file that it names are copied too, in one memo with the module.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from normscope.identify.patched_forward import held_modules, uncompiled

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks", "_full_backward_hooks")
HOW = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
CONTAINERS = ("builtins", "collections", "torch", "numpy")
"""where the types are defined that a hook may record into, besides those of its own file"""
Memo = dict[int, Any]


def own_hooks(module: nn.Module) -> list[Any]:
    """The forward hooks that somebody put on a module, and torch did not."""
    return [
        hook
        for part in module.modules()
        for name in FORWARD
        for hook in part.__dict__.get(name, {}).values()
        if not _of_torch(hook)
    ]


def copy_of(module: nn.Module, memo: Memo, *, owners: bool) -> nn.Module:
    """A deep copy, without what torch.compile wraps around modules and without backward hooks.

    Hooks of torch itself (weight norm, spectral norm, pruning) are part of the function and stay; ``owners``: all do.
    """
    hooks, wrapped = [], []
    for part in module.modules():
        for name in (*FORWARD, *BACKWARD):
            if table := part.__dict__.get(name):
                # filled at the end, as a hook may hold the module
                fresh: dict[int, Any] = OrderedDict()
                memo[id(table)] = fresh
                hooks += [
                    (fresh, key, hook)
                    for key, hook in table.items()
                    if _of_torch(hook) or (owners and name in FORWARD)
                ]
        if (inner := uncompiled(part)) is not part:
            wrapped.append((part, inner))
    for part, inner in wrapped:
        memo[id(part)] = copy.deepcopy(inner, memo)
    made: nn.Module = copy.deepcopy(module, memo)
    for fresh, key, hook in hooks:
        _share_other_weights(hook, memo)
        fresh[key] = _copied(hook, memo)
    for part, inner in wrapped:
        for name in (*FORWARD, *HOW):
            table = part.__dict__[name]
            memo[id(inner)].__dict__[name].update(memo.get(id(table), table))
    return made


def _of_torch(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils")


def _share_other_weights(hook: Any, memo: Memo) -> None:
    """What holds a whole model, as a recorder of its features does, is copied without the weights of that model."""
    owner = getattr(hook, "__self__", hook)
    held = [hook, owner, *getattr(owner, "__dict__", {}).values()]
    for module in held_modules(held):
        for weight in module.parameters():
            memo.setdefault(id(weight), weight)


def _copied(value: Any, memo: Memo) -> Any:
    if isinstance(value, FunctionType):
        return _function(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, copy.deepcopy(value.__self__, memo))
    if isinstance(value, functools.partial):
        keywords = {name: _copied(one, memo) for name, one in value.keywords.items()}
        return functools.partial(
            _copied(value.func, memo), *(_copied(one, memo) for one in value.args), **keywords
        )
    return value if isinstance(value, ModuleType) else copy.deepcopy(value, memo)


def _function(function: FunctionType, memo: Memo) -> Any:
    if id(function) in memo or (function.__module__ or "").startswith(("torch.", "numpy.")):
        return memo.get(id(function), function)
    scope, cells = dict(function.__globals__), function.__closure__
    fresh = None if cells is None else tuple(CellType() for _ in cells)
    made = FunctionType(function.__code__, scope, function.__name__, None, fresh)
    memo[id(function)] = made
    for name in _names(function.__code__):
        if name in scope and _own(scope[name], function):
            scope[name] = _copied(scope[name], memo)
    for cell, empty in zip(cells or (), fresh or (), strict=True):
        with suppress(ValueError):  # a cell that nothing was put into yet
            empty.cell_contents = _copied(cell.cell_contents, memo)
    if function.__defaults__ is not None:
        made.__defaults__ = tuple(_copied(value, memo) for value in function.__defaults__)
    if function.__kwdefaults__ is not None:
        made.__kwdefaults__ = {name: _copied(value, memo) for name, value in function.__kwdefaults__.items()}
    made.__dict__.update(function.__dict__)
    return made


def _own(value: Any, function: FunctionType) -> bool:
    """What a hook may write into: whole libraries hang on the rest of its globals."""
    if isinstance(value, FunctionType):
        return value.__globals__ is function.__globals__
    home = type(value).__module__
    return isinstance(value, nn.Module) or home in CONTAINERS or home == function.__globals__.get("__name__")


def _names(code: CodeType) -> Iterator[str]:
    """Names that code, and what is defined inside it, may look up among the globals."""
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _names(inside)
