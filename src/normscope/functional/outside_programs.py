"""Functions that torch.compile leaves out: the graph ends before their call, and a new one begins after it.

What ``torch.compiler.disable`` does, which at the time of import would load the whole compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from normscope.kernels.elementary import constant

F = TypeVar("F", bound=Callable[..., Any])
_SHELF = SimpleNamespace()
"""functions as attributes, by which a compiler finds them again"""


def outside_programs(function: F) -> F:
    """Mark a function that a compiler does not look into."""
    name = f"{function.__module__}.{function.__qualname__}".replace(".", "_")

    @constant
    def shelved() -> str:
        if not hasattr(_SHELF, name):
            setattr(_SHELF, name, torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return name

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return getattr(_SHELF, shelved())(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, run)
