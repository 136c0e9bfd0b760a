"""The user's batch as each run takes it: as it is, companions replaced, padding refilled or of another length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normscope.doctor.arguments import Inputs
from normscope.doctor.nested import mapped

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject


def impossible(run: str, subject: Subject) -> str:
    """Why this run cannot be made of this batch; "" where it can."""
    if run.endswith("_companions") and subject.batch_size < 2:
        return f"a batch of {subject.batch_size} sample has no companions: pass at least 2 samples"
    if run in ("padded", "other_length"):
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
    elif run in ("padded", "other_length"):
        assert subject.mask is not None
        mask = subject.mask
        changed = mapped(
            call, lambda t: _padding(t, mask, changed_length=run == "other_length", seed=subject.seed)
        )
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


def other_length(mask: torch.Tensor) -> int:
    """Shorter where all samples have padding to spare, since models may be bounded in length; else a quarter longer."""
    length = mask.shape[1]
    used = int(mask.any(0).nonzero().max()) + 1
    return used if used < length else length + max(1, length // 4)


def _mask_value(t: torch.Tensor, mask: torch.Tensor) -> float | None:
    """What a mask that the model takes says at padding; None for what is no mask (of whatever convention): one value
    at all valid positions, another at all padded ones."""
    if t.shape != mask.shape:
        return None
    valid, padded = t[mask], t[~mask]
    constant = bool((valid == valid[0]).all()) and bool((padded == padded[0]).all())
    return padded[0].item() if constant and bool(valid[0] != padded[0]) else None


def _companions(t: torch.Tensor, batch: int) -> torch.Tensor:
    if t.ndim == 0 or t.shape[0] != batch:
        return t
    # half of the others stand in for all of them; of two samples, sample 0 keeps company with itself
    others = torch.arange(batch - 1, device=t.device) % max(1, (batch - 1) // 2) + (1 if batch > 2 else 0)
    others = others.roll(-1)  # those next to sample 0 too, which may share a virtual batch with it
    index = torch.cat([torch.zeros(1, dtype=others.dtype, device=t.device), others])
    return t.index_select(0, index).contiguous(memory_format=_format(t))


def _format(t: torch.Tensor) -> torch.memory_format:
    if t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


def _padding(t: torch.Tensor, mask: torch.Tensor, *, changed_length: bool, seed: int) -> torch.Tensor:
    """Masked positions refilled with values of valid ones; with ``changed_length``, fewer or more of them."""
    batch, length = mask.shape
    if t.ndim < 2 or t.shape[0] != batch or length not in (t.shape[1], t.shape[-1]):
        return t
    axis = 1 if t.shape[1] == length else t.ndim - 1
    moved, valid = t.movedim(axis, 1), mask
    padding = _mask_value(moved, mask.to(t.device))
    if changed_length:
        extra = other_length(mask) - length
        if extra < 0:
            moved, valid = moved[:, :extra], mask[:, :extra]
        else:
            tail = moved[:, -1:] if padding is None else torch.full_like(moved[:, -1:], padding)
            moved = torch.cat([moved, tail.expand(-1, extra, *moved.shape[2:])], 1)
            valid = torch.cat([mask, torch.zeros(batch, extra, dtype=torch.bool)], 1)
    if padding is not None:  # the mask the model itself takes: it must go on saying what is valid
        return moved.movedim(1, axis).contiguous()
    rows, cols = torch.nonzero(mask.cpu(), as_tuple=True)
    holes = torch.nonzero(~valid.cpu(), as_tuple=True)
    pick = torch.randint(len(rows), (len(holes[0]),), generator=torch.Generator().manual_seed(seed))
    out = moved.clone()
    out[holes[0].to(t.device), holes[1].to(t.device)] = moved[
        rows[pick].to(t.device), cols[pick].to(t.device)
    ]
    return out.movedim(1, axis).contiguous()
