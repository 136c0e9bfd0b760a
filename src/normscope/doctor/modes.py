"""Training flags of modules, and which modules normalize by running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def has_running_state(module: nn.Module) -> bool:
    """Whether the module itself owns running statistics: a buffer named like one."""
    return any(
        buffer is not None and ("running_" in name or "moving_" in name)
        for name, buffer in module.__dict__.get("_buffers", {}).items()
    )


def is_training(module: nn.Module) -> bool:
    return bool(getattr(module, "training", False))


def set_training(module: nn.Module, flag: bool) -> None:
    """Set one module's flag, past an overridden ``train`` or ``__setattr__``."""
    if not isinstance(module, torch.jit.ScriptModule):
        module.__dict__["training"] = flag
    elif hasattr(module, "training"):  # it lives in C++; a frozen script has none
        module.training = flag


class NoFunctionalDropout(torch.overrides.TorchFunctionMode):
    """Turns off ``F.dropout`` and its kin, which a module in training mode for its statistics would switch on.

    So it does with the dropout inside attention.
    """

    _DROPOUTS = frozenset(
        getattr(nn.functional, name)
        for name in (
            "dropout", "dropout1d", "dropout2d", "dropout3d",
            "alpha_dropout", "feature_alpha_dropout",
        )
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DROPOUTS:
            return func(args[0] if args else kwargs["input"], training=False)
        if func is nn.functional.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        elif func is nn.functional.multi_head_attention_forward and "training" in kwargs:
            kwargs = {**kwargs, "training": False}
        return func(*args, **kwargs)
