"""Reader for the normalization modules of flax.nnx, which hold their own variables.

``use_running_average`` is the mode: ``module.eval()`` sets it, ``module.train()`` clears it. An abstract module is read
with its shapes for values.
"""

from __future__ import annotations

from typing import Any

from normscope.reading.base import Reader, Reading, qualified_name
from normscope.reading.by_class import home_of, refuse_other_methods
from normscope.reading.flax_layers import NAMES, remarks_on, spec_of_layer

PACKAGE = "flax.nnx."
VARIABLES = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
IN_PLACE = "each call overwrites the kernel with the normalized one"
ROUNDED = "stored statistics are rounded to the dtype of the output before they normalize"


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    home = home_of(obj, PACKAGE, NAMES)
    if home is None:
        return None
    refuse_other_methods(obj, home, ("__call__", "_weightnorm_inplace"))
    kind = home.__qualname__
    spec = spec_of_layer(obj, kind, input_ndim, nnx=True)
    remarks = remarks_on(obj, kind)
    if kind == "WeightNorm":
        return Reading(spec, qualified_name(type(obj)), remarks=(*remarks, IN_PLACE))
    tensors = {
        name: value
        for name, own in VARIABLES.items()
        if (variable := getattr(obj, own, None)) is not None and (value := held(variable)) is not None
    }
    if kind != "BatchNorm":
        return Reading(spec, qualified_name(type(obj)), tensors, remarks=remarks)
    if obj.dtype is not None:
        remarks = (*remarks, ROUNDED)
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


def held(variable: Any) -> Any:
    """The array of an nnx variable; an array is itself."""
    if hasattr(variable, "get_value"):
        return variable.get_value()
    return getattr(variable, "value", variable)


READER = Reader(
    needs="flax",
    knows=("flax.nnx.BatchNorm, LayerNorm, RMSNorm, GroupNorm, InstanceNorm, WeightNorm",),
    read=_read,
)
