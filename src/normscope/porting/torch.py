"""PyTorch's names: ``path.weight``, ``bias``, ``running_mean``, ``running_var``, ``num_batches_tracked``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normscope.porting.arrays import tensor_of
from normscope.porting.norms import STORED, USUAL, Found, Left, Norm, checked, grouped, leaves

COUNTER = "num_batches_tracked"


def norms(state: Mapping[Any, Any]) -> Found:
    """The normalizations of a state dict, by their names and shapes, and what was left."""
    found: list[Norm] = []
    left: list[Left] = []
    for path, group in grouped(leaves(state, ".")).items():
        arrays = {name: array for name, array in group.items() if name != COUNTER}
        others = [name for name in arrays if name not in USUAL]
        why = ""
        if others or not arrays:
            why = "no normalization's"
        elif not set(STORED) & set(arrays):
            axes = len(getattr(arrays.get("weight"), "shape", ()))
            if "weight" not in arrays:
                why = "a bias alone may be anybody's"
            elif axes != 1:
                why = f"its weight has {axes} axes, as other layers' have. Port the layer itself"
        if why:
            left.append(Left(path, tuple(group), why))
            continue
        tensors = {name: tensor_of(array, ".".join((*path, name))) for name, array in arrays.items()}
        found.append(checked(path, tensors, {name: name for name in tensors}))
    return found, left


def written(path: tuple[str, ...], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict entries; running statistics with a counter of 0, as other frameworks count no batches."""
    held = dict(tensors)
    if STORED[0] in held:
        held[COUNTER] = torch.tensor(0)
    return {".".join((*path, name)): tensor for name, tensor in held.items()}
