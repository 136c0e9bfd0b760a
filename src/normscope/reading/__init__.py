"""Reading: the exact specification of an existing normalization, taken from its class, arguments and buffers.

One reader a file; a new one is a new file here with a ``READER`` (see ``base.Reader``), found by itself. What a
reader cannot read exactly is an error that says what to do, never a guess.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from normscope.reading.base import CallReading, Reader, Reading, UnknownNormalization, qualified_name

if TYPE_CHECKING:
    from normscope.spec import NormSpec

__all__ = ["CallReading", "Reading", "UnknownNormalization", "read", "read_call", "readers", "spec_of"]


@cache
def readers() -> tuple[Reader, ...]:
    """Every reader, from the files of this package."""
    modules = (import_module(f"{__name__}.{info.name}") for info in iter_modules(__path__))
    return tuple(module.READER for module in modules if hasattr(module, "READER"))


def spec_of(obj: Any, *, input_ndim: int | None = None, parameter: str | None = None) -> NormSpec:
    """The specification of a normalization: axes, variance, eps and every other convention.

    Arguments: ``obj``, a module of torch.nn, a torchvision-style ``FrozenBatchNorm2d`` or an ``onnx.NodeProto``;
    ``input_ndim``, the number of axes of its input where that changes the meaning: an instance norm reads (C, L) as
    one sample, and some ONNX attributes count axes from the front; ``parameter``, the name of a parameter of a torch
    module, for the weight norm or weight standardization of that parameter.

    Raises UnknownNormalization for anything else, and where a subclass computes something of its own.

    >>> import torch
    >>> spec = spec_of(torch.nn.BatchNorm2d(8, eps=1e-3))
    >>> spec.stats, spec.eps, spec.running.momentum
    ('b c ... -> c', 0.001, 0.1)
    >>> spec_of(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3)), parameter="weight").scale
    'l2'
    """
    if parameter is not None:
        from normscope.reading.parameters import parameter_spec

        return parameter_spec(obj, parameter)
    return read(obj, input_ndim=input_ndim).spec


def read(obj: Any, *, input_ndim: int | None = None) -> Reading:
    """The specification of a normalization with the tensors it holds and its mode, now, in train and in eval.

    Arguments and errors as for `spec_of`.

    >>> import torch
    >>> norm = read(torch.nn.BatchNorm1d(3))
    >>> norm.type_name, norm.mode_train, norm.mode_eval, norm.tensors["running_var"].shape
    ('torch.nn.BatchNorm1d', 'batch', 'running', torch.Size([3]))
    """
    from normscope.spec import SpecError

    for reader in readers():
        if reader.read is not None and reader.needs in sys.modules:
            try:
                reading = reader.read(obj, input_ndim)
            except SpecError as error:  # a module built with a number that no specification can hold
                name = qualified_name(type(obj))
                raise UnknownNormalization(
                    f"{name} has no valid specification: {error}", invalid=True
                ) from error
            if reading is not None:
                return reading
    raise UnknownNormalization(_unknown(obj), recognized=False)


def read_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallReading | None:
    """What a call of ``func`` normalizes, or None where it is no call of a normalization of the family.

    Arguments: a function of ``torch.nn.functional``, of ``torch``, or an operator of ``torch.ops.aten``, as seen by a
    torch function or dispatch mode, with the arguments as passed.

    >>> import torch
    >>> call = read_call(torch.nn.functional.layer_norm, (torch.zeros(2, 5), (5,)), {"eps": 1e-6})
    >>> call.type_name, call.spec.stats, call.spec.eps, call.mode
    ('F.layer_norm', '... d -> ...', 1e-06, 'input')
    """
    from normscope.spec import SpecError

    for reader in readers():
        if reader.read_call is not None and reader.needs in sys.modules:
            try:
                reading = reader.read_call(func, args, kwargs)
            except SpecError:  # called with a number that no specification can hold
                return None
            if reading is not None:
                return reading
    return None


def _unknown(obj: Any) -> str:
    name = qualified_name(obj if isinstance(obj, type) else type(obj))
    known = ", ".join(name for reader in readers() for name in reader.knows)
    if isinstance(obj, type):
        fix = "This is a class: make an object of it first."
    elif hasattr(obj, "named_modules") and any(True for _ in obj.children()):
        fix = "It holds other modules: normscope.check(model) finds the normalizations inside a model."
    else:
        fix = "If it normalizes, say what it computes with normscope.NormSpec(...)."
    return f"{name} is not a normalization that can be read. {fix} What can be read: {known}."
