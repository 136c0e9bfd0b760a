"""The user's batch and its variants: companions replaced, padding refilled, padding longer; and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from normscope.errors import BadInput

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(inputs: Any) -> Inputs:
    """A tensor is passed as ``model(x)``, a tuple as ``model(*args)``, a mapping as ``model(**kwargs)``."""
    if isinstance(inputs, Mapping):
        return (), {str(k): _tensor(v) for k, v in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_tensor(v) for v in inputs), {}
    return (_tensor(inputs),), {}


def validate(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of samples: the size of axis 0 of the first tensor.

    Raises:
        BadInput: without any tensor, with an empty one, or with NaN.
    """
    sizes: list[int] = []
    for where, tensor in named_inputs(args, kwargs):
        if tensor.numel() == 0:
            raise BadInput(
                f"an empty batch: {where} has shape {tuple(tensor.shape)}; pass at least one sample"
            )
        if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
            count = int(torch.isnan(tensor).sum())
            raise BadInput(
                f"{where} holds {count} NaN of {tensor.numel()} values; statistics of NaN say nothing: clean the data"
            )
        if tensor.ndim:
            sizes.append(int(tensor.shape[0]))
    if not sizes:
        raise BadInput(
            "no tensor among the inputs; pass a tensor, a tuple of them, or a dict of keyword arguments"
        )
    return sizes[0]


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every input tensor with the name that a user would give it: ``inputs``, ``inputs[1]``, ``input_ids``."""
    yield from tensors(args)
    yield from tensors(kwargs)


def tensors(value: Any, where: str = "inputs") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists and mappings, with a name for it."""
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, str(key) if where == "inputs" else f"{where}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors(item, where if len(value) == 1 else f"{where}[{i}]")
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from tensors(getattr(value, key), f"{where}.{key}")


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with every tensor changed. Named tuples and dataclasses keep their type where they can."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return value


def detached(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output, without their graph."""
    return [tensor.detach() for _, tensor in tensors(output, "output")]


def impossible(run: str, subject: Subject) -> str:
    """Why this run cannot be made of this batch; "" where it can."""
    if run.endswith("_companions") and subject.batch_size < 2:
        return f"a batch of {subject.batch_size} sample has no companions: pass at least 2 samples"
    if run.startswith("padded"):
        if subject.mask is None:
            return "needs a mask: pass mask= (True at valid positions)"
        if bool(subject.mask.all()):
            return "no position is masked: pass a batch with padding"
    if run == "gradient" and not any(p.requires_grad for p in subject.session.model.parameters()):
        return "no parameter requires a gradient"
    return ""


def inputs_for(run: str, subject: Subject) -> Inputs:
    """The inputs of a run, made from the user's batch."""
    call = (subject.args or (), subject.kwargs)
    if run.endswith("_companions"):
        changed = mapped(call, lambda t: _companions(t, subject.batch_size))
    elif run.startswith("padded"):
        assert subject.mask is not None
        mask = subject.mask
        changed = mapped(call, lambda t: _padding(t, mask, longer=run == "padded_longer", seed=subject.seed))
    else:
        changed = call
    return changed[0], changed[1]


def differentiable(call: Inputs) -> tuple[list[torch.Tensor], Inputs]:
    """Leaves that require gradients, and the inputs made of them (as copies, which a model may write in place)."""
    leaves: list[torch.Tensor] = []

    def leaf(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        leaves.append(t.detach().requires_grad_())
        return leaves[-1].clone()

    with torch.enable_grad():
        changed = mapped(call, leaf)
    return leaves, (changed[0], changed[1])


def loss(subject: Subject, output: Any) -> torch.Tensor:
    """The user's loss, or a fixed random projection of the output: ``sum(r * y) / sqrt(n)``."""
    if subject.loss_fn is not None:
        value = (
            subject.loss_fn(output) if subject.targets is None else subject.loss_fn(output, subject.targets)
        )
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise BadInput(f"loss_fn must return one number, got {shape}")
        return value.reshape(())
    generator = torch.Generator().manual_seed(subject.seed)
    parts = []
    for _, y in tensors(output, "output"):
        if y.requires_grad and y.is_floating_point():
            r = torch.randn(y.shape, generator=generator).to(y)
            parts.append((r * y).sum() / max(1, y.numel()) ** 0.5)
    if not parts:
        raise BadInput("no output of the model depends on a parameter; nothing to differentiate")
    return torch.stack([p.float() for p in parts]).sum()


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _companions(t: torch.Tensor, batch: int) -> torch.Tensor:
    if t.ndim == 0 or t.shape[0] != batch:
        return t
    index = torch.full((batch,), batch - 1, device=t.device)
    index[0] = 0
    if batch == 2:  # the last sample is the only companion: sample 0 keeps company with itself
        index[1] = 0
    return t.index_select(0, index).contiguous(memory_format=_format(t))


def _format(t: torch.Tensor) -> torch.memory_format:
    if t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


def _padding(t: torch.Tensor, mask: torch.Tensor, *, longer: bool, seed: int) -> torch.Tensor:
    """Masked positions refilled with values that occur at valid ones; with ``longer``, a quarter more of them."""
    batch, length = mask.shape
    if t.ndim < 2 or t.shape[0] != batch or length not in (t.shape[1], t.shape[-1]):
        return t
    axis = 1 if t.shape[1] == length else t.ndim - 1
    extra = max(1, length // 4) if longer else 0
    moved = t.movedim(axis, 1)
    is_mask = moved.ndim == 2 and bool((moved.bool() == mask.to(t.device)).all())
    if longer:
        tail = moved[:, -1:].expand(-1, extra, *moved.shape[2:])
        moved = torch.cat([moved, torch.zeros_like(tail) if is_mask else tail], 1)
    if is_mask:  # the mask the model itself takes: it must go on saying what is valid
        return moved.movedim(1, axis).contiguous()
    valid = torch.cat([mask, torch.zeros(batch, extra, dtype=torch.bool)], 1) if longer else mask.clone()
    rows, cols = torch.nonzero(mask.cpu(), as_tuple=True)
    holes = torch.nonzero(~valid.cpu(), as_tuple=True)
    pick = torch.randint(len(rows), (len(holes[0]),), generator=torch.Generator().manual_seed(seed))
    out = moved.clone()
    out[holes[0].to(t.device), holes[1].to(t.device)] = moved[
        rows[pick].to(t.device), cols[pick].to(t.device)
    ]
    return out.movedim(1, axis).contiguous()
