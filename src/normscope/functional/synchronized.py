"""Batch norm over the ranks of a process group: by the statistics of all that the ranks hold together.

    y = weight * xhat + bias,    xhat = (x - mean) / D,    D = sqrt(m2 / N + eps)
    dx = weight / D * (dy - sum(dy) / N - xhat * sum(dy xhat) / N)

N, mean and m2 (the sum of squared deviations) and, in the backward pass, both sums are over all ranks: one collective
each way. Counts travel with the moments, so ranks may hold different numbers of samples, none, or masks of their own.
Gradients of weight and bias are of what a rank holds, as DistributedDataParallel wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from normscope.distributed import pooled, summed
from normscope.errors import BadInput
from normscope.functional.outside_programs import outside_programs
from normscope.functional.shares import Plain, arithmetic
from normscope.kernels.composite import Moments
from normscope.kernels.elementary import Elementary, divisor, shape_on, wide
from normscope.kernels.follow import follow
from normscope.spec import NormSpec, RunningState


@outside_programs
def synchronized(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None,
    bias: Tensor | None,
    state: RunningState | None,
    mask: Tensor | None,
    group: Any,
) -> Tensor:
    """As `normscope.normalize` in training, over the ranks of ``group``; all of them make the same calls.

    Raises BadInput for a specification that has no such form, or where a parameter is not on the kept axes, and
    ModelError where another rank has gone.
    """
    _check(spec)
    view = Elementary.of(input, spec, mask)
    local = arithmetic(view)
    flat = [_flat(kind, value, view) for kind, value in (("weight", weight), ("bias", bias))]
    if flat[0] is not None:
        flat[0] = (flat[0] + spec.weight_offset) * spec.gain
    elif spec.gain != 1:
        flat[0] = torch.full((), spec.gain, dtype=wide(view.x), device=view.x.device).expand(_sets(view))
    y, table = over_ranks(view.x, *flat, local, view.eps, group)
    if state is not None and spec.running is not None:
        count, mean, m2 = (row.reshape(local.kept) for row in table)
        follow(state, view, OfRanks(count, mean, y, m2), spec.running.momentum)
    return view.close(y)


class OverRanks(Function):
    """The normalization, and the moments of all ranks, which have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        local: Plain,
        eps: float,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        t, own, scale = local.share()
        table = pooled(own, group)
        count, mean, m2 = table
        count = count.clamp(min=1)
        root = (m2 / count + eps).sqrt()
        a, c = scale / root, (own[1] - mean) / root  # xhat = a t + c
        gain, shift = (a, c) if weight is None else (a * weight, c * weight)
        y = local.affine(t, gain, shift if bias is None else shift + bias)
        ctx.save_for_backward(t, weight, count, root, a, c)
        ctx.local, ctx.group = local, group
        ctx.mark_non_differentiable(table)
        return y, table

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BadInput(
                "a norm over several ranks has first derivatives only; got a backward pass with create_graph=True. "
                "Normalize without a group there, or by stored statistics (eval())."
            )
        t, weight, count, root, a, c = ctx.saved_tensors
        total, along = ctx.local.sums(dy, t)
        along = a * along + c * total  # sum(dy xhat) of this rank
        totals, alongs = summed(torch.stack([total, along]), ctx.group) / count
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        dx = None
        if for_x:
            slope = 1 / root if weight is None else weight / root
            dx = ctx.local.combined(dy, t, slope, -slope * alongs * a, -slope * (alongs * c + totals))
        return dx, along if for_weight else None, total if for_bias else None, None, None, None


over_ranks: Callable[..., tuple[Tensor, Tensor]] = OverRanks.apply


@dataclass(frozen=True)
class OfRanks(Moments):
    """Moments of all ranks, as running statistics follow them."""

    m2: Tensor

    def variance(self, view: Elementary, correction: float) -> Tensor:
        return self.m2 / divisor(self.count, correction)


def _check(spec: NormSpec) -> None:
    by_samples = "b" in {axis for group in spec.pattern.left for axis in group} - set(spec.pattern.kept)
    virtual = spec.remainder != "error" or "v" in spec.pattern.kept
    renorm = spec.running is not None and spec.running.renorm is not None
    usual = spec.scale == "std" and spec.center and spec.eps_at == "variance" and not spec.correction
    if not by_samples or virtual or renorm or not usual or spec.cast.weight != "before":
        raise BadInput(
            "normalize(group=) merges means and variances of norms whose sets run over the samples 'b', centered, with "
            "the biased variance and eps under the root, without virtual batches and renormalization; got "
            f"{spec}. Leave group out."
        )


def _flat(kind: str, value: Tensor | None, view: Elementary) -> Tensor | None:
    """A parameter as one value a set."""
    if value is None:
        return None
    where = getattr(view.spec, kind)
    kept = " ".join(view.spec.pattern.kept)
    wanted = shape_on(kept, view.axes)
    if where != kept or value.shape != wanted:
        raise BadInput(
            f"normalize(group=) takes a {kind} on the kept axes {kept!r}, of shape {wanted}; got one of shape "
            f"{tuple(value.shape)} on {where!r}. Multiply and add outside."
        )
    return value.flatten().to(wide(view.x))


def _sets(view: Elementary) -> int:
    return int(torch.Size([axis.size for axis in view.axes if axis.kept]).numel())
