"""The number whose gradients are taken: the user's loss, or a fixed random projection of the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from normscope.doctor.nested import tensors
from normscope.errors import BadInput, told

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject


def loss(subject: Subject, output: Any) -> torch.Tensor | None:
    """The user's loss, or a fixed random projection of the output: ``sum(r * y) / sqrt(n)``.

    None where no output depends on a parameter.

    Raises:
        BadInput: the user's loss raises, or gives what cannot be differentiated.
    """
    if subject.loss_fn is not None:
        return _own_loss(subject.loss_fn, output, subject.targets)
    generator = torch.Generator().manual_seed(subject.seed)
    parts = []
    for _, y in tensors(output, "output"):
        if y.is_complex():
            y = torch.view_as_real(y)
        if y.requires_grad and y.is_floating_point():
            r = torch.randn(y.shape, generator=generator).to(y)
            parts.append((r * y).sum() / max(1, y.numel()) ** 0.5)
    if not parts:
        return None
    return torch.stack([p.float() for p in parts]).sum()


def _own_loss(loss_fn: Callable[..., Any], output: Any, targets: Any) -> torch.Tensor:
    called = "loss_fn(output)" if targets is None else "loss_fn(output, targets)"
    try:
        value = loss_fn(output) if targets is None else loss_fn(output, targets)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{called} raised {told(error)}") from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise BadInput(
            f"{called} must return a tensor of one number, got {shape}; reduce it, by mean() for one"
        )
    if not value.requires_grad:
        raise BadInput(f"{called} returned a number that no gradient flows from; does it detach the output?")
    return value.reshape(())
