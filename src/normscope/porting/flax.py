"""Flax's names: ``scale``, ``bias``, ``mean``, ``var``; one tree in nnx, ``params`` and ``batch_stats`` in linen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normscope.porting.arrays import array_of, tensor_of
from normscope.porting.norms import STORED, Found, Left, Norm, checked, grouped, leaves

OWN = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
READ = {own: name for name, own in OWN.items()}
COLLECTIONS = ("params", "batch_stats")


def norms(state: Mapping[Any, Any]) -> Found:
    """The normalizations of an nnx state or of linen variables, and what was left."""
    arrays = leaves(state, "/")
    if arrays and all(path[0] in COLLECTIONS for path in arrays):
        arrays = {path[1:]: array for path, array in arrays.items()}
    found: list[Norm] = []
    left: list[Left] = []
    for path, group in grouped(arrays).items():
        names = {READ[name]: name for name in group if name in READ}
        others = [name for name in group if name not in READ]
        if others or not names:
            left.append(Left(path, tuple(group), "no normalization's"))
        elif list(names) == ["bias"]:
            why = "a bias alone may be anybody's, and a normalization without scale has no other parameter"
            left.append(Left(path, tuple(group), why))
        else:
            tensors = {name: tensor_of(group[own], "/".join((*path, own))) for name, own in names.items()}
            found.append(checked(path, tensors, names))
    return found, left


def written(path: tuple[str, ...], tensors: Mapping[str, Tensor], *, linen: bool) -> dict[str, Any]:
    """The nested tree of one normalization: of nnx, or linen's ``{"params": ..., "batch_stats": ...}``."""
    if not linen:
        return nested(path, {OWN[name]: array_of(tensor) for name, tensor in tensors.items()})
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        collection = COLLECTIONS[1] if name in STORED else COLLECTIONS[0]
        parts.setdefault(collection, {})[OWN[name]] = array_of(tensor)
    return {collection: nested(path, held) for collection, held in parts.items()}


def nested(path: tuple[str, ...], held: dict[str, Any]) -> dict[str, Any]:
    for part in reversed(path):
        held = {part: held}
    return held


def merged(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees as one."""
    for name, value in other.items():
        one[name] = merged(one.get(name, {}), value) if isinstance(value, Mapping) else value
    return one
