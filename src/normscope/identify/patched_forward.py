"""A forward that was put on one module and holds that module: in a copy it would run on, and write, the original.

What torch.compile wraps is such a module too, and is copied without the wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

from torch import nn

WRAPPED = "_orig_mod"
"""where a module that torch.compile made holds the one that it was made of"""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given; any other module itself."""
    while WRAPPED in module._modules:
        module = module.get_submodule(WRAPPED)
    return module


def runs_on_the_original(module: nn.Module) -> str | None:
    """The path of the first part whose own ``forward`` holds a part of ``module``; None where there is none.

    A bound method is copied with its module. A plain function is not copied at all, and what it holds (its closure,
    its defaults, the globals that it names) stays the original.
    """
    parts = {id(part) for part in module.modules()}
    for path, part in module.named_modules():
        own = None if WRAPPED in part._modules else part.__dict__.get("forward")
        if isinstance(own, FunctionType) and any(id(held) in parts for held in held_modules(own)):
            return str(path)
    return None


def held_modules(value: Any) -> Iterator[nn.Module]:
    """Modules that a function, or a list of anything, reaches."""
    return _held(value, set())


def _held(value: Any, seen: set[int]) -> Iterator[nn.Module]:
    """Modules that a function reaches: directly, by bound methods, and through other functions and collections."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        return
    inside: list[Any] = []
    if isinstance(value, FunctionType):
        names = value.__code__.co_names
        inside = [value.__globals__[name] for name in names if name in value.__globals__]
        inside = [one for one in inside if isinstance(one, nn.Module)]  # whole programs hang on other globals
        inside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inside += _closed_over(value)
    elif isinstance(value, MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    for one in inside:
        yield from _held(one, seen)


def _closed_over(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that nothing was put into yet
            found.append(cell.cell_contents)
    return found
