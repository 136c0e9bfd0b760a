"""What is carried: the tensors of one normalization under their usual names, whatever framework they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from normscope.errors import BadInput

STORED = ("running_mean", "running_var")
USUAL = ("weight", "bias", *STORED)


@dataclass(frozen=True, eq=False)
class Norm:
    """One normalization of a state."""

    path: tuple[str, ...]
    tensors: dict[str, Tensor]
    """by their usual names"""
    names: dict[str, str]
    """usual name -> the name in the source"""


@dataclass(frozen=True)
class Left:
    """A group of tensors that was not carried, and why."""

    path: tuple[str, ...]
    names: tuple[str, ...]
    reason: str


Found = tuple[list[Norm], list[Left]]


def leaves(state: Mapping[Any, Any], separator: str) -> dict[tuple[str, ...], Any]:
    """Path -> array of nested or flat mappings, whose keys may themselves be paths.

    >>> leaves({"params": {"bn": {"scale": 1}}, "a/b": 2, ("c", 0): 3}, "/")
    {('params', 'bn', 'scale'): 1, ('a', 'b'): 2, ('c', '0'): 3}
    """
    found: dict[tuple[str, ...], Any] = {}
    for key, value in state.items():
        parts = (
            [str(k) for k in key] if isinstance(key, tuple) else str(key).strip(separator).split(separator)
        )
        if isinstance(value, Mapping):
            found |= {(*parts, *rest): leaf for rest, leaf in leaves(value, separator).items()}
        elif value is not None:
            found[tuple(parts)] = value
    return found


def grouped(arrays: Mapping[tuple[str, ...], Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Path of a layer -> its arrays by their last name."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for path, array in arrays.items():
        groups.setdefault(path[:-1], {})[path[-1]] = array
    return groups


def checked(path: tuple[str, ...], tensors: dict[str, Tensor], names: dict[str, str]) -> Norm:
    """The norm of a group, all of it there and of one shape. Raises BadInput naming what is not."""
    where = "/".join(path) or "the layer"
    for one, other in (STORED, STORED[::-1]):
        if one in tensors and other not in tensors:
            raise BadInput(
                f"{where} has {names[one]} and no {other}. Stored statistics are a mean and a variance: pass both, or "
                "neither."
            )
    shapes = {names[name]: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise BadInput(f"the arrays of one normalization have one shape; {where} has {listed}.")
    if "running_var" in tensors and bool((tensors["running_var"] < 0).any()):
        raise BadInput(f"{where}: {names['running_var']} has negative entries, and a variance has none.")
    return Norm(path, tensors, names)
