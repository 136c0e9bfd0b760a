"""Keras's names: ``path/gamma``, ``beta``, ``moving_mean``, ``moving_variance``; ``scale`` of RMSNormalization.

Weight files number their arrays (``layers/batch_normalization/vars/0``); they are told by the name of the layer and
their number where these leave one reading, and left otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normscope.porting.arrays import array_of, tensor_of
from normscope.porting.norms import Found, Left, Norm, checked, grouped, leaves

OWN = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
READ = {**{own: name for name, own in OWN.items()}, "scale": "weight"}
BATCH = ("weight", "bias", "running_mean", "running_var")
NUMBERED = {
    ("batch", 4): BATCH,
    ("batch", 2): BATCH[2:],
    ("layer", 2): BATCH[:2],
    ("group", 2): BATCH[:2],
    ("rms", 1): BATCH[:1],
}
"""kind of layer and number of its variables -> their usual names in order; other numbers have several readings"""
RENORM = ("renorm_mean", "renorm_stddev", "moving_stddev")


def norms(state: Mapping[Any, Any]) -> Found:
    """The normalizations of a state ``{path: array}``, nested or flat, and what was left."""
    found: list[Norm] = []
    left: list[Left] = []
    for path, group in grouped(leaves(state, "/")).items():
        arrays = {name.partition(":")[0]: array for name, array in group.items()}
        why = ""
        names = {READ[name]: name for name in arrays if name in READ}
        if path and path[-1] == "vars" and all(name.isdigit() for name in arrays):
            names, why = _numbered(path, len(arrays))
            path = path[:-1]
        elif any(name in RENORM for name in arrays):
            why = "batch renormalization keeps a second pair of statistics, which no other layer has"
        elif not names:
            why = "no normalization's"
        elif len(names) < len(arrays):
            others = ", ".join(name for name in arrays if name not in READ)
            why = f"beside {next(iter(names.values()))} it holds {others}, as no normalization of Keras does"
        if why:
            left.append(Left(path, tuple(arrays), why))
            continue
        tensors = {name: tensor_of(arrays[key], "/".join((*path, key))) for name, key in names.items()}
        found.append(checked(path, tensors, names))
    return found, left


def _numbered(path: tuple[str, ...], count: int) -> tuple[dict[str, str], str]:
    layer = path[-2] if len(path) > 1 else ""
    kind = re.fullmatch(r"(batch|layer|group|rms)_normalization(_\d+)?", layer)
    if kind is None:
        return {}, "no normalization's by its name"
    known = NUMBERED.get((kind[1], count))
    if known is None:
        return {}, (
            f"{count} numbered arrays of a {kind[1]} normalization can be read in more than one way. Name them: "
            "{v.path: v for v in model.variables}"
        )
    return {name: str(number) for number, name in enumerate(known)}, ""


def written(path: tuple[str, ...], tensors: Mapping[str, Tensor], *, only_scale: bool) -> dict[str, Any]:
    """``{path/name: array}`` of one normalization; a layer by itself has no path."""
    names = own(only_scale=only_scale)
    return {"/".join((*path, names[name])): array_of(tensor) for name, tensor in tensors.items()}


def own(*, only_scale: bool) -> dict[str, str]:
    """Usual name -> Keras's; ``only_scale`` of an RMS normalization."""
    return {**OWN, "weight": "scale"} if only_scale else OWN
