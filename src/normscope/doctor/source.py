"""Where the code of a site stands, so that a code host can show a finding beside it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

INSTALLED = ("site-packages", "dist-packages")


def source_of(modules: Mapping[str, nn.Module], path: str) -> str:
    """``file.py:12``, the class of the innermost module at or above ``path`` that is the user's own; "" without one.

    The user's own is what lies below the working directory and is not installed there; paths are relative to it.

    Args:
        modules: every module of the model by path.
        path: a module path, "" for the model.

    >>> source_of({"": nn.LayerNorm(4)}, "")
    ''
    """
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        module = modules.get(".".join(parts[:length]))
        cls: Any = type(module)
        found = "" if module is None else _class(cls, str(Path.cwd()))
        if found:
            return found
    return ""


def own_file(file: str | None, folder: str) -> str:
    """The path of ``file`` below ``folder`` with slashes; "" for what is elsewhere or installed."""
    if not file:
        return ""
    path = Path(file).resolve()
    if not path.is_relative_to(Path(folder).resolve()) or any(name in path.parts for name in INSTALLED):
        return ""
    return path.relative_to(Path(folder).resolve()).as_posix()


@cache
def _class(cls: Any, folder: str) -> str:
    try:
        file = own_file(inspect.getsourcefile(cls), folder)
        return f"{file}:{max(1, inspect.getsourcelines(cls)[1])}" if file else ""
    except (TypeError, OSError):  # built in C, made at run time, or its file is gone
        return ""
