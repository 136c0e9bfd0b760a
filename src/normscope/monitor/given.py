"""What a monitor is given: optimizers, in whatever wrapping, and the modules whose call is a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normscope.doctor import arguments
from normscope.doctor.refusals import Refused
from normscope.doctor.wording import clean_path
from normscope.errors import BadInput


def optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """One, several or none, out of the wrappers of accelerate and Lightning, which pass their steps on.

    Raises:
        BadInput: something else, or one that calls no hooks.
    """
    found = []
    for optimizer in [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]:
        while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = optimizer.optimizer
        arguments.settings(optimizer, None, None, "")
        if not hasattr(optimizer, "register_step_post_hook"):
            raise BadInput(
                f"{type(optimizer).__name__} has no register_step_post_hook: leave it out and call step() after each "
                "of its steps"
            )
        found.append(optimizer)
    return found


def strangers(model: nn.Module, given: list[torch.optim.Optimizer]) -> list[str]:
    """What to say of optimizers that hold none of the model's parameters: their steps are no steps of it."""
    own = {id(p) for p in model.parameters()}
    return [
        f"{type(optimizer).__name__} holds none of the model's parameters, so its steps say nothing of this model: "
        "pass the optimizer that trains it"
        for optimizer in given
        if own and not any(id(p) in own for group in optimizer.param_groups for p in group["params"])
    ]


def refuse_shards(model: nn.Module) -> None:
    """Raise Refused for parameters of which this rank holds a piece: to gather them would be a collective operation."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise Refused(
                f"{clean_path(name)} is sharded (FSDP or tensor parallelism): this rank holds a piece of it. Monitor a "
                "run that is not sharded, or check the model before it is"
            )


def roots(model: nn.Module) -> list[nn.Module]:
    """The modules whose call is a forward pass: the model, or what a mere container of modules holds."""
    if isinstance(model, (nn.ModuleDict, nn.ModuleList)):
        return [root for child in model.children() for root in roots(child)]
    return [] if isinstance(model, torch.jit.ScriptModule) else [model]
