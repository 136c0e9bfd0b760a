"""Reader for ``FrozenBatchNorm2d`` as in torchvision: batch norm whose four vectors are all buffers and never move.

Recognized by what it is made of, since each detection package has its own class: a class of that name in the
hierarchy, ``weight``, ``bias``, ``running_mean`` and ``running_var`` as buffers, no parameters, and an ``eps``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normscope.reading.base import Reader, Reading, UnknownNormalization, qualified_name
from normscope.reading.by_class import has_put_on, put_on
from normscope.spec import families

if TYPE_CHECKING:
    import torch

NAME = "FrozenBatchNorm2d"
VECTORS = ("weight", "bias", "running_mean", "running_var")


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    from torch import nn

    if not isinstance(obj, nn.Module):
        return None
    home = next((cls for cls in type(obj).__mro__ if cls.__name__ == NAME), None)
    if home is None:
        return None
    fault = _fault(obj, home)
    if fault:
        raise UnknownNormalization(
            f"{qualified_name(type(obj))} is called {NAME}, but {fault}. Expected: buffers weight, bias, running_mean "
            f"and running_var, no parameters, and an attribute eps, as in torchvision.ops.{NAME}."
        )
    buffers: dict[str, torch.Tensor] = dict(obj.named_buffers(recurse=False))
    tensors = {name: buffers[name] for name in (*VECTORS, "num_batches_tracked") if name in buffers}
    eps: Any = obj.eps
    spec = families.batch_norm(eps=float(eps), momentum=0.0, ndim=(4, 4))
    return Reading(spec, qualified_name(type(obj)), tensors, "frozen", "frozen", "frozen")


def _fault(obj: torch.nn.Module, home: type) -> str:
    buffers = dict(obj.named_buffers(recurse=False))
    missing = [name for name in VECTORS if name not in buffers]
    if missing:
        return f"has no buffer {missing[0]}"
    parameters = [name for name, _ in obj.named_parameters()]
    if parameters:
        return f"has a parameter {parameters[0]}, so it is not frozen"
    if not isinstance(getattr(obj, "eps", None), (int, float)):
        return "has no attribute eps: the constant in its forward cannot be read"
    if type(obj).forward is not home.forward:  # type: ignore[attr-defined]
        return "overrides forward"
    if found := put_on(obj, ("forward", "_call_impl")):
        return has_put_on(found)
    return ""


READER = Reader(needs="torch", knows=(f"torchvision-style {NAME}",), read=_read)
