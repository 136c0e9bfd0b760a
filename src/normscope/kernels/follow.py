"""Stored statistics in torch: read for a normalization, and moved by a batch.

run <- (1 - m) run + m batch, with m the momentum, or 1 / (number of updates) where the average is cumulative. Sets
that share an entry are averaged; virtual batches update one after the other; sets without an element are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normscope.errors import BadInput
from normscope.kernels import whitening
from normscope.kernels.elementary import Elementary, names_of, place, shape_on, wide
from normscope.spec import RunningState

if TYPE_CHECKING:
    from normscope.kernels.composite import Moments


def stored(view: Elementary, running: RunningState | None) -> tuple[Tensor, Tensor]:
    """Mean and variance, broadcastable along the elementary axes; a whitening's matrices, one for each group.

    Raises BadInput where there are none, or where their shapes are not those of the axes they live on.
    """
    mean, var = _checked(view, running)
    mean, var = mean.to(wide(view.x)), var.to(wide(view.x))
    where = view.spec.running_axes
    spread = whitening.spread(view, var, where) if view.spec.whiten else place(var, where, view.axes)
    return place(mean, where, view.axes), spread


@torch.no_grad()
def follow(running: RunningState, view: Elementary, m: Moments) -> None:
    """Move the stored statistics by one batch, in place.

    Raises BadInput where a set has too few elements for the correction of the stored variance.
    """
    mean, var = _checked(view, running)
    spec = view.spec
    assert spec.running is not None  # or there is nothing to follow
    kept = {axis.name: axis.size for axis in view.axes if axis.kept}
    lives = names_of(spec.running_axes, view.axes)
    turn = "v" if "v" in kept and "v" not in lives else None
    counts = m.count if isinstance(m.count, Tensor) else torch.tensor(m.count, device=view.x.device)
    present = (
        (counts > 0).expand([axis.size if axis.kept else 1 for axis in view.axes]).reshape([*kept.values()])
    )
    _enough(view, counts)

    seen = present.movedim([*kept].index(turn), 0).flatten(1).any(1) if turn else present.any().reshape(1)
    fractions = []
    for some in seen.tolist():
        running.batches += some
        momentum = spec.running.momentum
        fractions.append(1 / max(running.batches, 1) if momentum is None else momentum)

    _move(mean, m.mean.reshape(present.shape), present, [*kept], lives, turn, fractions)
    if spec.whiten:
        correction = float(spec.running.correction if spec.whiten_state == "covariance" else spec.correction)
        batch = whitening.to_store(view, m.centered, m.count, correction)
        groups = whitening.group_names(view)
        for name in spec.whiten.split():  # a mask is one for all channels that are whitened together
            present = present.select([*kept].index(name), 0)
            del kept[name]
        _move(var, batch, present, groups, [name for name in lives if name in groups], turn, fractions)
    elif spec.scale == "std":
        batch = m.variance(view, float(spec.running.correction))
        _move(var, batch.reshape(present.shape), present, [*kept], lives, turn, fractions)
    else:
        batch = m.under_root(view)
        _move(var, batch.reshape(present.shape), present, [*kept], lives, turn, fractions)


def _move(
    run: Tensor,
    batch: Tensor,
    present: Tensor,
    dims: Sequence[str],
    lives: Sequence[str],
    turn: str | None,
    fractions: Sequence[float],
) -> None:
    """``present`` has the axes ``dims``; ``batch`` those, then the axes of an entry that is a matrix."""
    entry = range(len(dims), batch.ndim)
    present = present.reshape(*present.shape, *(1 for _ in entry)).expand(batch.shape)
    first = [dims.index(name) for name in ([turn, *lives] if turn else lives)]
    shared = [i for i in range(len(dims)) if i not in first]
    shape = (len(fractions), *run.shape, -1) if batch.numel() else (len(fractions), *run.shape, 0)
    batch = batch.masked_fill(~present, 0.0).permute(*first, *entry, *shared).reshape(shape)
    number = present.permute(*first, *entry, *shared).reshape(shape).sum(-1)
    mean = batch.sum(-1) / number.clamp(min=1)
    state = run.to(batch.dtype)
    for i, fraction in enumerate(fractions):
        state = torch.where(number[i] > 0, (1 - fraction) * state + fraction * mean[i], state)
    run.copy_(state)


def _enough(view: Elementary, counts: Tensor) -> None:
    spec = view.spec
    assert spec.running is not None
    if spec.scale in ("rms", "l2") or spec.whiten_state == "whitening":
        return
    correction = float(spec.running.correction)
    few = counts[(counts > 0) & (counts <= correction)]
    if few.numel():
        raise BadInput(
            f"a stored variance divides by M - {correction:g}, so every set needs M > {correction:g} elements; got "
            f"M = {int(few.min())} under {spec.stats!r} in an input of shape {view.shape}. Take larger batches, or "
            "Running(correction=0)"
        )


def _checked(view: Elementary, running: RunningState | None) -> tuple[Tensor, Tensor]:
    spec, where = view.spec, view.spec.running_axes
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
