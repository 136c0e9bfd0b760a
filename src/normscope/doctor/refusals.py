"""The model inside its wrappers, and what a session refuses to run: what it is, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from normscope.doctor.wording import clean_path
from normscope.errors import NormscopeError
from normscope.identify.memory import freed


class Refused(NormscopeError):
    """The model cannot be run without changing it, or at all; ``reason`` says what, where and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def unwrap(model: Any) -> nn.Module:
    """The user's own module: a data-parallel wrapper would synchronize buffers, a compiled one would recompile."""
    while True:
        kind = type(model).__name__
        if kind == "OptimizedModule":
            model = model._orig_mod
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif kind == "FullyShardedDataParallel":
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                raise Refused(
                    "the model is sharded by FSDP over several ranks: its own modules hold pieces of their "
                    "parameters. Check the model before wrapping it, or load its full state dict into a plain copy"
                )
            model = model.module
        else:
            unwrapped: nn.Module = model
            return unwrapped


def refuse_unmaterialized(model: nn.Module) -> None:
    """Refuse a model whose tensors have no values here: reading freed memory would end the process."""
    for path, module in model.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise Refused(
                f"{clean_path(path) or 'the model'} is sharded by fully_shard: its parameters are pieces of the "
                f"model's, and freed between runs. {_UNSHARD}"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers(), *_attributes(model)]:
        if torch.nn.parameter.is_lazy(tensor):
            raise Refused(
                f"{clean_path(name)} is lazy: it gets its shape in the first forward pass, which also changes the "
                f"module's class. Run the model once on a batch, then check it"
            )
        if tensor.is_meta:
            raise Refused(
                f"{clean_path(name)} is on the meta device: it has a shape but no values. Load the weights "
                f"(model.to_empty(device=...), then load_state_dict), then check the model"
            )
        if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
            raise Refused(
                f"{clean_path(name)} is a DTensor, a piece of a parameter that a device mesh shares. {_UNSHARD}"
            )
        if freed(tensor):
            raise Refused(
                f"{clean_path(name)} has shape {tuple(tensor.shape)}, but its memory was freed or made smaller than "
                f"that. Load the weights again, or build the model anew and load its state dict, then check it"
            )


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes, neither parameters nor buffers (a frozen weight, a cache)."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".lstrip("."), value


_UNSHARD = "Check the model before it is distributed, or load its full state dict into a plain copy"


def refuse_inference_tensors(model: nn.Module, mode: str, grad: bool) -> None:
    tensors: list[tuple[str, torch.Tensor]] = []
    if mode in ("batch", "train"):
        tensors += model.named_buffers()
    if grad:
        tensors += model.named_parameters()
    for name, tensor in tensors:
        if tensor.is_inference():
            what = "differentiate" if grad else "update"
            raise Refused(
                f"{clean_path(name)} is an inference tensor, which torch does not let a training run {what}. "
                f"Build or load the model outside torch.inference_mode(), or check it in eval mode"
            )
