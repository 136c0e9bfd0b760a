"""Reader for calls of ``normscope.functional``: the named functions as torch's, ``normalize`` by the spec it is given.

``scale_norm``, ``pixel_norm`` and ``l2_norm`` call ``normalize``. Those that add a residual first are not read: what
they normalize is no tensor that went in.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from normscope.reading.base import CallReading, Reader
from normscope.reading.torch_functional import Function, read_as, written_in_python

if TYPE_CHECKING:
    from torch import Tensor

    from normscope.spec import NormSpec

NAMED = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm")


def _read_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallReading | None:
    from normscope import functional

    if func is functional.normalize:
        return _normalize(*args, **kwargs)
    function = _functions().get(func)
    return None if function is None else read_as(function, args, kwargs)


@cache
def _functions() -> dict[Any, Function]:
    from normscope import functional

    found = {getattr(functional, name): name for name in NAMED}
    return {f: written_in_python(f, f"normscope.functional.{name}", name) for f, name in found.items()}


def _normalize(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    running: Any = None,
    training: bool = True,
    mask: Tensor | None = None,
    group: Any = None,
) -> CallReading | None:
    if mask is not None or group is not None:  # which elements count, here or elsewhere, is no part of a spec
        return None
    held = {"weight": weight, "bias": bias}
    if running is not None:
        held |= {"running_mean": running.mean, "running_var": running.var}
    tensors = {name: tensor for name, tensor in held.items() if tensor is not None}
    couples = spec.properties().couples_samples
    mode = "running" if spec.running and not training else "batch" if spec.running or couples else "input"
    return CallReading(spec, "normscope.functional.normalize", input, tensors, mode)


READER = Reader(needs="normscope.functional", knows=(), read_call=_read_call)
