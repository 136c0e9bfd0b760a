"""Specifications that layers build from their attributes: built once, and constants to a compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any, cast

from torch.compiler import is_compiling

from normscope.kernels.elementary import constant
from normscope.spec import NormSpec

_SHELF = SimpleNamespace()
"""specifications as attributes: what torch.compile finds by name it may hand on to functions that it does not enter"""


def fixed(*values: Any) -> tuple[Any, ...]:
    """The values, as constants to a compiler.

    One that has met two layers leaves open the numbers that they differ in; keys of a dictionary it fixes, floats only
    once it has looked at them.
    """
    return tuple([next(iter({float(v) if isinstance(v, float) else v: None})) for v in values])


def remembered(build: Callable[..., NormSpec]) -> Callable[..., NormSpec]:
    """Mark a function from plain values to a specification.

    Each is built once: that takes longer than a small layer.
    """
    kept = lru_cache(maxsize=1024)(build)
    names: dict[tuple[Any, ...], str] = {}

    @constant
    def shelved(*values: Any) -> str:
        if values not in names:
            names[values] = f"{build.__module__.rpartition('.')[2]}{len(names)}"
            setattr(_SHELF, names[values], kept(*values))
        return names[values]

    @wraps(build)
    def specification(*values: Any) -> NormSpec:
        if not is_compiling():
            return kept(*values)
        return cast(NormSpec, getattr(_SHELF, shelved(*fixed(*values))))

    return specification
