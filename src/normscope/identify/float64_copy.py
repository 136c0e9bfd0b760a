"""Copies of a module to experiment on: float64 or another dtype, on the CPU.

A copy shares no memory with the module that it was made of. Casts to float32 inside a forward would leave errors of
1e-7, under which one convention cannot be told from another; in a float64 copy they are redirected to float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from normscope.errors import BadInput, told
from normscope.identify.memory import freed
from normscope.identify.owners_hooks import copy_of
from normscope.identify.patched_forward import runs_on_the_original, uncompiled


class Float32AsFloat64(TorchFunctionMode):
    """Every cast to float32 that a forward asks for gives float64: ``.float()``, ``.to``, ``.type``, ``dtype=``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(
            *(_widened(value) for value in args), **{k: _widened(v) for k, v in (kwargs or {}).items()}
        )


class _Detached(TorchFunctionMode):
    """Tensors that an operation gave, which torch does not copy, are copied as values: a forward left them behind, such
    as a pruned weight, and the next call makes them anew."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    named = isinstance(value, str) and value == "torch.FloatTensor"
    return torch.float64 if value is torch.float32 or named else value


def copied(module: nn.Module, dtype: torch.dtype = torch.float64, *, owners_hooks: bool = False) -> nn.Module:
    """A copy in ``dtype`` on the CPU that shares no memory with ``module``, and runs its owner's forward hooks only
    where asked, as copies.

    Hooks of torch itself (weight norm, spectral norm) are part of the function and stay.

    Raises:
        BadInput: for modules whose parameters have no values yet (lazy, meta), or that cannot be copied, as where a
            forward that was put on the module holds it.
    """
    name = type(uncompiled(module)).__name__
    _refuse_without_values(module, name)
    if (path := runs_on_the_original(module)) is not None:
        raise BadInput(
            f"a module is identified on a copy, and the forward that was put on {path or name} holds "
            "the module itself, so that a copy would run and write the original. Define forward in a subclass, or put "
            "it on as a method: types.MethodType(forward, module)"
        )
    try:
        with _Detached():
            made = copy_of(module, {}, owners=owners_hooks)
    except Exception as error:
        raise BadInput(
            f"a module is identified on a copy, and {name} cannot be copied ({told(error)}). "
            "Drop open handles first, or pass a function of one array"
        ) from error
    made = made.to(device="cpu", dtype=dtype)
    for owner, name, value in plain_tensors(made):
        setattr(owner, name, value.detach().to(device="cpu", dtype=dtype))
    return made


def plain_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Floating tensors that are attributes of a module but neither parameters nor buffers."""
    for part in module.modules():
        for name, value in list(part.__dict__.items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                yield part, name, value


def _refuse_without_values(module: nn.Module, kind: str) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise BadInput(
                f"a module is identified by its values, and {name} of {kind} is not initialized "
                "yet (a lazy module). Run one forward first"
            )
        if tensor.is_meta:
            raise BadInput(
                f"a module is identified by its values, and {name} of {kind} is on the meta device. "
                "Load its values first: module.to_empty(device='cpu'), then load_state_dict"
            )
        if freed(tensor):
            raise BadInput(
                f"a module is identified by its values, and the memory of {name} of {kind} was freed "
                "or made smaller than its shape. Load its values again"
            )
