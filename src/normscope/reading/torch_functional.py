"""Reader for calls of normalization functions: ``F.layer_norm``, ``torch.batch_norm``, ``aten.native_group_norm``, ...

Functions are looked up by identity, and arguments are named by the function's own signature or operator schema, so
that positional, keyword and default arguments read alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from normscope.reading.base import CallReading, Reader
from normscope.spec import NormSpec, families
from normscope.spec.axes import erase, last_axes

if TYPE_CHECKING:
    from torch import Tensor

FUNCTIONAL = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm", "normalize")
# operator of torch and torch.ops.aten -> its kind and, where the name says it, whether it normalizes by the batch
OPERATORS: dict[str, tuple[str, bool | None]] = {
    "batch_norm": ("batch_norm", None),
    "_batch_norm_impl_index": ("batch_norm", None),
    "native_batch_norm": ("batch_norm", None),
    "cudnn_batch_norm": ("batch_norm", None),
    "miopen_batch_norm": ("batch_norm", None),
    "_native_batch_norm_legit": ("batch_norm", None),
    "_native_batch_norm_legit_functional": ("batch_norm", None),
    "_native_batch_norm_legit_no_training": ("batch_norm", False),
    "_batch_norm_with_update": ("batch_norm", True),
    "_batch_norm_with_update_functional": ("batch_norm", True),
    "_batch_norm_no_update": ("batch_norm", False),
    "instance_norm": ("instance_norm", None),
    "layer_norm": ("layer_norm", None),
    "native_layer_norm": ("layer_norm", None),
    "group_norm": ("group_norm", None),
    "native_group_norm": ("group_norm", None),
    "rms_norm": ("rms_norm", None),
    "_fused_rms_norm": ("rms_norm", None),
}
ONE_NAME = {
    "use_input_stats": "training",
    "exponential_average_factor": "momentum",
    "epsilon": "eps",
    "group": "num_groups",
}


@dataclass(frozen=True)
class Function:
    """A function of a kind of normalization, and how its arguments are called."""

    label: str
    kind: str
    names: tuple[str, ...]
    defaults: dict[str, Any]
    training: bool | None = None

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, the names made one for all functions of a kind."""
        given = {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
        named = {ONE_NAME.get(name, name): value for name, value in given.items()}
        if self.training is not None:
            named["training"] = self.training
        return named


def _read_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallReading | None:
    function = _functions().get(func)
    return None if function is None else read_as(function, args, kwargs)


def read_as(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallReading | None:
    """What a call of a function with these arguments normalizes."""
    named = function.arguments(args, kwargs)
    names = ("weight", "bias", "running_mean", "running_var")
    tensors = {name: named[name] for name in names if named.get(name) is not None}
    found = _KINDS[function.kind](named, tensors)
    if found is None:
        return None
    spec, mode = found
    return CallReading(spec, function.label, named["input"], tensors, mode)


@cache
def _functions() -> dict[Any, Function]:
    return dict(_listed())


def _listed() -> Iterator[tuple[Any, Function]]:
    import torch
    from torch.nn import functional

    for name in FUNCTIONAL:
        function = getattr(functional, name)
        yield function, written_in_python(function, f"F.{name}", name)
    for name, (kind, training) in OPERATORS.items():
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:  # not in this torch
            continue
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            arguments = operator._schema.arguments
            defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
            names = tuple(a.name for a in arguments if not a.kwarg_only)
            yield operator, Function(f"aten.{name}", kind, names, defaults, training)
            if overload == "default" and hasattr(torch, name):
                yield getattr(torch, name), Function(f"torch.{name}", kind, names, defaults, training)


def written_in_python(function: Callable[..., Any], label: str, kind: str) -> Function:
    parameters = inspect.signature(function).parameters
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    return Function(label, kind, tuple(parameters), defaults)


_Found = tuple[NormSpec, str]


def _batch_norm(named: dict[str, Any], tensors: dict[str, Tensor]) -> _Found:
    spec = families.batch_norm(eps=named["eps"], **_state(named, tensors), **_affine(tensors))
    return spec, "batch" if named["training"] else "running"


def _instance_norm(named: dict[str, Any], tensors: dict[str, Tensor]) -> _Found:
    spec = families.instance_norm(eps=named["eps"], **_state(named, tensors), **_affine(tensors))
    by_input = "batch" if spec.running else "input"
    return spec, by_input if named["training"] else "running"


def _layer_norm(named: dict[str, Any], tensors: dict[str, Tensor]) -> _Found:
    return families.layer_norm(_axes(named), eps=named["eps"], **_affine(tensors)), "input"


def _rms_norm(named: dict[str, Any], tensors: dict[str, Tensor]) -> _Found:
    return families.rms_norm(_axes(named), eps=named["eps"], weight="weight" in tensors), "input"


def _group_norm(named: dict[str, Any], tensors: dict[str, Tensor]) -> _Found:
    return families.group_norm(named["num_groups"], eps=named["eps"], **_affine(tensors)), "input"


def _normalize(named: dict[str, Any], tensors: dict[str, Tensor]) -> _Found | None:
    if named["p"] != 2:  # other norms are outside the family
        return None
    dim = named["dim"]
    stats = erase((dim,) if isinstance(dim, int) else tuple(dim), named["input"].dim())
    if stats is None:
        return None
    return NormSpec(stats, center=False, scale="l2", eps=named["eps"], eps_at="max"), "input"


def _state(named: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {"running": "running_mean" in tensors, "momentum": float(named["momentum"])}


def _affine(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {"weight": "weight" in tensors, "bias": "bias" in tensors}


def _axes(named: dict[str, Any]) -> str:
    shape = named["normalized_shape"]
    return last_axes(1 if isinstance(shape, int) else len(shape))


_KINDS: dict[str, Callable[[dict[str, Any], dict[str, Any]], _Found | None]] = {
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "normalize": _normalize,
}

READER = Reader(needs="torch", knows=(), read_call=_read_call)
