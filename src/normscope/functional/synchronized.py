"""Batch norm over the ranks of a process group: by the statistics of all that the ranks hold together.

    y = weight * xhat + bias,    xhat = (x - mean) / D,    D = sqrt(m2 / N + eps)
    dx = weight / D * (dy - sum(dy) / N - xhat * sum(dy xhat) / N)

N, mean and m2 (the sum of squared deviations) and, in the backward pass, both sums are over all ranks: one collective
each way. Counts travel with the moments, so ranks may hold different numbers of samples, none, or masks of their own.
Gradients of weight and bias are of what a rank holds, as DistributedDataParallel wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from normscope.distributed import pooled, summed
from normscope.errors import BadInput
from normscope.functional.moved import moved
from normscope.functional.outside_programs import outside_programs
from normscope.functional.shares import Of, Plain, arithmetic
from normscope.kernels.composite import finish
from normscope.kernels.elementary import Elementary, shape_on
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

    Raises BadInput for a specification that has no such form, or a parameter of another shape, and ModelError where
    another rank has gone.
    """
    _check(spec)
    view = Elementary.of(input, spec, mask)
    for kind, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            _fits(kind, value, view)
    kept = " ".join(spec.pattern.kept)
    if all(where in (None, kept) for where in (spec.weight, spec.bias)):
        local = arithmetic(view, input)
        y, table = over_ranks(local.source, weight, bias, local, group)
        y = view.close(y)
    else:  # one value a set is not what they are: they come after
        local = arithmetic(replace(view, spec=spec.replace(gain=1.0)))
        y, table = over_ranks(local.source, None, None, local, group)
        y = finish(y, view, weight, bias)
    if state is not None and spec.running is not None:
        momentum = spec.running.momentum
        fraction = 1 / (state.batches + 1) if momentum is None else momentum
        correction = float(spec.running.correction)
        whose = f"{spec.stats!r} in an input of shape {tuple(input.shape)}"
        state.batches += moved(state.mean, state.var, table, fraction, correction, whose, "all ranks")
    return y


class OverRanks(Function):
    """The normalization, and the moments of all ranks, which have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, local: Plain, group: Any
    ) -> tuple[Tensor, Tensor]:
        share = local.share()
        table = pooled(share.table, group)
        count, mean, m2 = table
        count = count.clamp(min=1)
        of = Of(mean, m2 / count, local.view.eps)
        y = local.normalized(share.t, share.shift, of, weight, bias)
        ctx.save_for_backward(share.t, share.shift, mean, of.var, count, weight)
        ctx.local, ctx.group = local, group
        ctx.like = [None if p is None else (p.shape, p.dtype) for p in (weight, bias)]
        ctx.mark_non_differentiable(table)
        return y, table

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BadInput(
                "a norm over several ranks has first derivatives only; got a backward pass with create_graph=True. "
                "Normalize without a group there, or by stored statistics (eval())."
            )
        t, shift, mean, var, count, weight = ctx.saved_tensors
        of = Of(mean, var, ctx.local.view.eps)
        total, along = ctx.local.sums(dy, t, shift, of)  # of this rank
        totals, alongs = summed(torch.stack([total, along]), ctx.group) / count
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ctx.local.gradient(dy, t, shift, of, weight, totals, alongs)
        sums = (along * ctx.local.view.spec.gain, total)
        dweight, dbias = (
            value.view(like[0]).to(like[1]) if like is not None and wanted else None
            for value, like, wanted in zip(sums, ctx.like, ctx.needs_input_grad[1:3], strict=True)
        )
        return dx, dweight, dbias, None, None


over_ranks: Callable[..., tuple[Tensor, Tensor]] = OverRanks.apply


@lru_cache(maxsize=1024)
def _check(spec: NormSpec) -> None:
    by_samples = "b" in {axis for group in spec.pattern.left for axis in group} - set(spec.pattern.kept)
    virtual = spec.remainder != "error" or "v" in spec.pattern.kept
    renorm = spec.running is not None and spec.running.renorm is not None
    usual = (
        not spec.whiten
        and spec.scale == "std"
        and spec.center
        and spec.eps_at == "variance"
        and not spec.correction
    )
    elsewhere = spec.running is not None and spec.running_axes.split() != list(spec.pattern.kept)
    if elsewhere or not by_samples or virtual or renorm or not usual or spec.cast.weight != "before":
        raise BadInput(
            "normalize(group=) merges means and variances of norms whose sets run over the samples 'b', centered, with "
            "the biased variance and eps under the root, without virtual batches and renormalization; got "
            f"{spec}. Leave group out."
        )


def _fits(kind: str, value: Tensor, view: Elementary) -> None:
    where = getattr(view.spec, kind)
    wanted = None if where is None else shape_on(where, view.axes)
    if value.shape != wanted:
        takes = f"no {kind}" if where is None else f"a {kind} on {where!r}, of shape {wanted}"
        raise BadInput(
            f"normalize(group=) takes {takes}, by its specification; got one of shape {tuple(value.shape)}. "
            f"Name its axes in spec.{kind}."
        )
