"""Which layer of normscope.nn computes what a module computes, and making the module one.

The module stays the object it is and only its class changes, so parameters, buffers, hooks, flags, parametrizations,
attributes of the user's and every other reference to it stay by themselves.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

import normscope.nn as own
from normscope.errors import BadInput
from normscope.reading import Reading, UnknownNormalization, read
from normscope.reading.base import qualified_name
from normscope.reading.transformers_norms import Written, identified
from normscope.spec import NormSpec

NAMES = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "GroupNorm",
    "RMSNorm",
)
COUNTERPARTS: dict[type, type] = {getattr(nn, name): getattr(own, name) for name in NAMES}
CONVENTIONS = {"llama": "llama", "t5": "t5", "gemma": "gemma", "before": "torch"}
"""of hand-written norms: how ``normscope.nn.RMSNorm`` calls them"""
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
HALF = (torch.float16, torch.bfloat16)
SCRIPTED = (
    "is scripted or traced, and torch.jit runs torch's code in place of normscope.nn's: accelerate the model it was "
    "made from, and run that, or what torch.compile or torch.export makes of it"
)


@dataclass(frozen=True)
class Replacement:
    """What a module becomes."""

    cls: type
    name: str
    """of the class, for people"""
    attributes: dict[str, Any] = field(default_factory=dict)
    """what the class reads and the module may not have yet"""
    written: NormSpec | None = None
    """what a norm written by hand computes"""


@dataclass(frozen=True)
class Left:
    """A normalization that stays what it is."""

    reason: str
    already: bool = False
    """it is normscope's"""


def replacement(module: nn.Module) -> Replacement | Left | None:
    """What stands for a module; None where it is no normalization."""
    if isinstance(module, torch.jit.ScriptModule):
        return Left(SCRIPTED) if getattr(module, "original_name", "") in NAMES else None
    try:
        found = read(module)
    except UnknownNormalization as error:
        return Left(str(error)) if error.recognized else None
    if any(cls.__module__.startswith(own.__name__) for cls in type(module).__mro__):
        return Left("is a layer of normscope.nn already", already=True)
    for name, tensor in found.tensors.items():
        if type(tensor) not in PLAIN_TENSORS:
            return Left(f"its {name} is a {type(tensor).__name__}, which the kernels do not take apart")
    written = identified(module) if "transformers" in sys.modules else None
    return _torch(module, found) if written is None else _written(module, found, written)


def swap(module: nn.Module, by: Replacement) -> None:
    """Make the module a layer of normscope.nn."""
    vars(module).update(by.attributes)
    module.__class__ = by.cls


def _torch(module: nn.Module, found: Reading) -> Replacement | Left:
    home = next((cls for cls in type(module).__mro__ if cls in COUNTERPARTS), None)
    if found.synchronized:
        return Left("takes its statistics over all ranks: convert(model, 'ours') makes it normscope.nn's")
    if home is None:
        return Left(f"normscope.nn has no counterpart of {found.type_name}")
    ours = COUNTERPARTS[home]
    cls = _class(module, type(module), home, ours)
    if isinstance(cls, Left):
        return cls
    mean = found.tensors.get("running_mean")
    rounded = mean is not None and mean.dtype in HALF  # the user's choice, which a later cast must not undo
    return Replacement(cls, qualified_name_of(ours), {"float32_statistics": False} if rounded else {})


def _written(module: nn.Module, found: Reading, by: Written) -> Replacement | Left:
    if by.convention.name not in CONVENTIONS:
        return Left("has no weight, so it does not know the size that normscope.nn.RMSNorm is made for")
    users = type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)
    home = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    if users is not home:
        return Left(
            f"is a subclass of {qualified_name(home)}, whose forward comes before that of normscope.nn"
        )
    (size,) = found.tensors["weight"].shape
    convention = CONVENTIONS[by.convention.name]
    try:
        made = own.RMSNorm(size, by.eps, device="meta", convention=convention)
    except BadInput as error:
        return Left(str(error))
    attributes = {name: value for name, value in vars(made).items() if name not in vars(nn.Module())}
    clash = next((n for n, value in attributes.items() if vars(module).get(n, value) != value), "")
    if clash:
        return Left(f"has an attribute {clash} of its own, which normscope.nn.RMSNorm would read otherwise")
    cls = _class(module, type(module), home, own.RMSNorm)
    if isinstance(cls, Left):
        return cls
    return Replacement(cls, f"normscope.nn.RMSNorm({convention})", attributes, found.spec)


def _class(module: nn.Module, cls: Any, home: type, ours: Any) -> Any:
    """The class that a module of class ``cls``, which is ``home`` or inherits from it, becomes."""
    if cls is home:
        return ours
    try:
        if cls is type(module) and parametrize.is_parametrized(module):
            # its class is its own, made by torch, and holds the computed tensors as properties
            base = _class(module, cls.__bases__[0], home, ours)
            properties = {
                k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__", "__doc__")
            }
            return base if isinstance(base, Left) else type(cls.__name__, (base,), properties)
        return _joined(cls, ours)
    except TypeError as error:
        return Left(f"its class cannot be joined with {qualified_name_of(ours)} ({error})")


@cache
def _joined(users: Any, ours: Any) -> Any:
    """A user's subclass of a torch layer, on top of ours: what the user overrides comes first, ours comes next, and
    the torch layer, which both inherit from, last."""

    def reduce(self: Any, protocol: int) -> Any:  # a class made here is found by what it was made of
        _, _, *state = super(joined, self).__reduce_ex__(protocol)
        return (_new, (users, ours), *state)

    names = {"__module__": users.__module__, "__qualname__": users.__qualname__, "__doc__": users.__doc__}
    joined: Any = type(users.__name__, (users, ours), {**names, "__reduce_ex__": reduce})
    return joined


def _new(users: Any, ours: Any) -> Any:
    cls = _joined(users, ours)
    return cls.__new__(cls)


def qualified_name_of(ours: type) -> str:
    return f"{own.__name__}.{ours.__name__}"
