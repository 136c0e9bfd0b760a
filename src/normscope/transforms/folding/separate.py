"""Modules and parameters that are shared get copies of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn


def separate(model: nn.Module, names: Iterable[str]) -> None:
    """Give each of these names, of a module or parameter, a copy of what it shares with others."""
    for name in names:
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, last, copy.deepcopy(getattr(owner, last)))
