"""Reader for the normalization modules of flax.linen, which are descriptions: their variables are kept elsewhere.

A bound module (``module.bind(variables)``) is read with its parameters and statistics, any other without. A module
says with ``use_running_average`` which statistics it normalizes by, or leaves that to each call.
"""

from __future__ import annotations

from typing import Any

from normscope.reading.base import Reader, Reading, qualified_name
from normscope.reading.by_class import home_of, refuse_other_methods
from normscope.reading.flax_layers import NAMES, remarks_on, spec_of_layer

PACKAGE = "flax.linen."
VARIABLES = {
    "weight": ("params", "scale"),
    "bias": ("params", "bias"),
    "running_mean": ("batch_stats", "mean"),
    "running_var": ("batch_stats", "var"),
}


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    home = home_of(obj, PACKAGE, NAMES)
    if home is None:
        return None
    refuse_other_methods(obj, home, ("__call__", "_l2_normalize"))
    kind = home.__qualname__
    spec = spec_of_layer(obj, kind, input_ndim, nnx=False)
    remarks = remarks_on(obj, kind)
    if kind == "WeightNorm":
        return Reading(spec, qualified_name(type(obj)), remarks=remarks)
    held = {} if obj.scope is None else obj.variables
    tensors = {
        name: held[collection][own]
        for name, (collection, own) in VARIABLES.items()
        if own in held.get(collection, {})
    }
    if kind != "BatchNorm":
        return Reading(spec, qualified_name(type(obj)), tensors, remarks=remarks)
    return Reading(
        spec,
        qualified_name(type(obj)),
        tensors,
        "running" if obj.use_running_average else "batch",
        "batch",
        "running",
        ("train",),
        obj.axis_name is not None,
        remarks,
    )


READER = Reader(
    needs="flax",
    knows=("flax.linen.BatchNorm, LayerNorm, RMSNorm, GroupNorm, InstanceNorm, WeightNorm",),
    read=_read,
)
