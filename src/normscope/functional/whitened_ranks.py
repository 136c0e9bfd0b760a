"""Batch whitening over the ranks of a process group: by the mean and covariance of all that the ranks hold together.

    n = sum n_r,    mean = sum n_r mean_r / n,    S = sum c_r c_r^T / n,    c_r = x_r - mean

Two collectives forward, and two backward, which add gradients over ranks: those of inputs are of one process on the
whole batch, those of weight and bias of what a rank holds. Ranks may hold different numbers of samples, none, or masks
of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from normscope.distributed import summed
from normscope.errors import BadInput
from normscope.functional.outside_programs import outside_programs
from normscope.kernels import whitening
from normscope.kernels.composite import Moments, finish
from normscope.kernels.elementary import Elementary, wide
from normscope.spec import NormSpec, RunningState


@outside_programs
def whitened_over_ranks(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    state: RunningState | None,
    mask: Tensor | None,
    group: Any,
) -> Tensor:
    """By a specification of `families.batch_whitening`, in training; all ranks make the same calls.

    Raises BadInput where all ranks together hold one value a channel, or with eps 0 too few, and ModelError where
    another rank has gone.
    """
    view = Elementary.of(input, spec, mask)
    if view.mask is not None:
        whitening.one_mask(view)
    own = Moments.of(view)
    count = torch.as_tensor(own.count, dtype=wide(view.x), device=view.x.device).expand_as(own.mean)
    total, level = Summed.apply(torch.stack([count, own.mean * count]), group)  # type: ignore[no-untyped-call]
    total = total.detach()
    _large_enough(view, total)
    mean = level / total.clamp(min=1)
    x = view.only(own.centered + (own.mean - mean).to(view.x.dtype))
    rows = whitening.as_rows(x.to(wide(x)), view)
    sets = whitening.as_rows(total, view)[:, :1, :1]
    s = Summed.apply(rows @ rows.mT, group) / sets.clamp(min=1)  # type: ignore[no-untyped-call]
    w = whitening.matrices(view, s)
    if state is not None and spec.running is not None and bool(total.any()):
        state.batches += 1
        fraction = 1 / state.batches if spec.running.momentum is None else spec.running.momentum
        matrix = w if spec.whiten_state == "whitening" else s
        _move(state.mean, mean.reshape(state.mean.shape), total.reshape(state.mean.shape) > 0, fraction)
        _move(state.var, matrix, sets > 0, fraction)
    return finish(whitening.applied(w, x, view), view, weight, bias)


class Summed(Function):
    """The sum over ranks. What each rank makes of it counts, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed(values.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Summed.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


def _large_enough(view: Elementary, total: Tensor) -> None:
    k = next(axis.size for axis in view.axes if axis.name == view.spec.whiten)
    most = k if view.spec.eps == 0.0 else 1
    least = int(total.masked_fill(total == 0, most + 1).min())
    if least <= most:
        need = f"than the {k} channels that it whitens together with eps=0" if most > 1 else "than one"
        raise BadInput(
            f"whitening over ranks takes more values a channel {need}; all ranks together have {least}. Use larger "
            "batches, smaller groups or an eps, or eval()."
        )


@torch.no_grad()
def _move(run: Tensor, batch: Tensor, seen: Tensor, fraction: float) -> None:
    moved = run + fraction * (batch - run)
    run.copy_(torch.where(seen, moved, run))
