"""Stored statistics in torch: read for a normalization, and moved by a batch.

run <- (1 - m) run + m batch, with m the momentum, or 1 / (number of updates) where the average is cumulative. Sets
that share an entry are averaged; virtual batches update one after the other; sets without an element are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling

from normscope.errors import BadInput
from normscope.kernels import whitening
from normscope.kernels.elementary import Elementary, names_of, place, shape_on, state_axes, wide
from normscope.spec import RunningState

if TYPE_CHECKING:
    from normscope.kernels.composite import Moments


def stored(view: Elementary, running: RunningState | None) -> tuple[Tensor, Tensor]:
    """Mean and variance, broadcastable along the elementary axes; a whitening's matrices, one for each group.

    Raises BadInput where there are none, or where their shapes are not those of the axes they live on.
    """
    mean, var = _checked(view, running)
    mean, var = mean.to(wide(view.x)), var.to(wide(view.x))
    where = state_axes(view.spec)
    spread = whitening.spread(view, var, where) if view.spec.whiten else place(var, where, view.axes)
    return place(mean, where, view.axes), spread


@torch.no_grad()
def follow(running: RunningState, view: Elementary, m: Moments, momentum: float | Tensor | None) -> None:
    """Move the stored statistics by one batch, in place; ``momentum`` None is 1 / (number of updates).

    Raises BadInput where a set has too few elements for the correction of the stored variance.
    """
    mean, var = _checked(view, running)
    spec = view.spec
    assert spec.running is not None  # or there is nothing to follow
    kept = {axis.name: axis.size for axis in view.axes if axis.kept}
    sizes, lives = list(kept.values()), names_of(state_axes(spec), view.axes)
    turn = "v" if "v" in kept and "v" not in lives else None
    turns = 1 if turn is None else kept[turn]
    _enough(view, m.count)
    if isinstance(m.count, Tensor):
        some = (m.count > 0).expand(_ones_for_erased(view)).reshape(sizes)
        present: Tensor | None = some
        happened = _turns_first(some, [*kept].index(turn)) if turn else some.any().reshape(1)
        updates = happened.to(wide(view.x)).unbind() if is_compiling() else happened.tolist()
    else:
        present, updates = None, [m.count > 0] * turns

    fractions: list[float | Tensor] = []
    for update in updates:
        running.batches += (
            1 if isinstance(update, Tensor) else update
        )  # in a program every batch has elements
        fractions.append((1 / max(running.batches, 1) if momentum is None else momentum) * update)

    _move(mean, m.mean.reshape(sizes), present, [*kept], lives, turn, fractions)
    if spec.whiten:
        correction = float(spec.running.correction if spec.whiten_state == "covariance" else spec.correction)
        batch = whitening.to_store(view, m.centered, m.count, correction)
        groups = whitening.group_names(view)
        for name in spec.whiten.split():  # a mask is one for all channels that are whitened together
            present = None if present is None else present.select([*kept].index(name), 0)
            del kept[name]
        _move(var, batch, present, groups, [name for name in lives if name in groups], turn, fractions)
    else:
        batch = (
            m.variance(view, float(spec.running.correction)) if spec.scale == "std" else m.under_root(view)
        ).reshape(sizes)
        if spec.running.averages == "variance":
            _move(var, batch, present, [*kept], lives, turn, fractions)
        else:
            before = (var.to(batch.dtype) + view.eps).sqrt()
            after = before.clone()
            _move(after, (batch + view.eps).sqrt(), present, [*kept], lives, turn, fractions)
            moved = (after.square() - view.eps).clamp(
                min=0
            )  # below 0 is rounding: no root is under sqrt(eps)
            var.copy_(torch.where(after == before, var, moved))  # what did not move keeps its bits


def _ones_for_erased(view: Elementary) -> list[int]:
    return [axis.size if axis.kept else 1 for axis in view.axes]


def _turns_first(present: Tensor, turn: int) -> Tensor:
    """For each virtual batch, whether any of its sets has an element."""
    return present.movedim(turn, 0).flatten(1).any(1) if present.ndim > 1 else present


def _move(
    run: Tensor,
    batch: Tensor,
    present: Tensor | None,
    dims: Sequence[str],
    lives: Sequence[str],
    turn: str | None,
    fractions: Sequence[float | Tensor],
) -> None:
    """``batch`` has the axes ``dims``, then those of an entry that is a matrix; ``present`` (all: None) ``dims``."""
    entry = range(len(dims), batch.ndim)
    first = [dims.index(name) for name in ([turn, *lives] if turn else lives)]
    shared = [i for i in range(len(dims)) if i not in first]
    shape = (len(fractions), *run.shape, prod([batch.shape[i] for i in shared]))
    order = (*first, *entry, *shared)
    if present is None:
        number = None
        mean = batch.permute(order).reshape(shape).mean(-1)
    else:
        present = present.reshape((*present.shape, *(1 for _ in entry))).expand(batch.shape)
        number = present.permute(order).reshape(shape).sum(-1)
        total = batch.masked_fill(~present, 0.0).permute(order).reshape(shape).sum(-1)
        mean = total / number.clamp(min=1)
    state = run.to(batch.dtype)
    for i, fraction in enumerate(fractions):
        # without elements there is nothing to follow, not even NaN
        if number is not None or isinstance(fraction, Tensor) or fraction:
            moved = (1 - fraction) * state + fraction * mean[i]
            state = moved if number is None else torch.where(number[i] > 0, moved, state)
    run.copy_(state)


def _enough(view: Elementary, count: int | Tensor) -> None:
    spec = view.spec
    assert spec.running is not None
    if spec.scale in ("rms", "l2") or (spec.whiten and spec.whiten_state == "whitening"):
        return
    correction = float(spec.running.correction)
    if isinstance(count, Tensor):
        lacking = (count > 0) & (count <= correction)
        if is_compiling():
            said = f"a stored variance divides by M - {correction:g}, so every set needs M > {correction:g} elements"
            torch._assert_async(~lacking.any(), said)
            return
        few = count[lacking].tolist()
    else:
        few = [count] if 0 < count <= correction else []
    if few:
        raise BadInput(
            f"a stored variance divides by M - {correction:g}, so every set needs M > {correction:g} elements; got "
            f"M = {int(min(few))} under {spec.stats!r} in an input of shape {view.shape}. Take larger batches, or "
            "Running(correction=0)"
        )


def _checked(view: Elementary, running: RunningState | None) -> tuple[Tensor, Tensor]:
    spec, where = view.spec, state_axes(view.spec)
    shape = wide_shape = shape_on(where, view.axes)
    if spec.whiten:
        wide_shape = whitening.stored_shape(view, where)
    if running is None:
        raise BadInput(
            "normalizing by stored statistics needs them; got none. Pass running=RunningState(mean, var), with a mean "
            f"of shape {shape}"
        )
    for name, value, wanted in (("mean", running.mean, shape), ("var", running.var, wide_shape)):
        if not isinstance(value, Tensor):
            raise BadInput(
                f"running.{name} is a tensor here; got {type(value).__name__}. Convert with torch.as_tensor"
            )
        if value.shape != wanted:
            raise BadInput(
                f"running.{name} has shape {wanted} under {spec.stats!r} on an input of shape {view.shape}; got "
                f"{tuple(value.shape)}"
            )
    return running.mean, running.var
