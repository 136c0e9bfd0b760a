"""Stored statistics moved by those of a call under a mask, whose sets have numbers of elements of their own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from normscope.errors import BadInput
from normscope.kernels import ops
from normscope.kernels.dispatch import changed
from normscope.kernels.elementary import wide


@torch.no_grad()
def follow_counted(
    mean: Tensor, var: Tensor, stats: Tensor, fraction: float, correction: float, whose: str
) -> bool:
    """run <- (1 - fraction) run + fraction batch, averaged over sets that share an entry, those without an element left
    out; whether any set has one.

    Arguments: ``stats`` of `normscope::norm_masked`, of centered sets; they share entries as `update_running` says.
        ``whose`` are they, for errors.

    Raises BadInput where a set has too few elements for the correction; a program fails by an assertion there, and says
    of every call that it has one.
    """
    count = stats[3]
    few = (count > 0) & (count <= correction)
    said = f"a stored variance divides by M - {correction:g}, so every set needs M > {correction:g} elements"
    if is_compiling():
        torch._assert_async(~few.any(), said)
        some = True
    else:
        least, most = (float(value) for value in count.aminmax())
        if least <= correction and bool(few.any()):
            raise BadInput(
                f"{said}; got M = {int(count[few].min())} under {whose}. Take larger batches, or Running(correction=0)"
            )
        some = most > 0
        if some and least == most and count.numel() == mean.numel():
            ops.update_running(mean, var, stats[:3], fraction, most, correction)
            changed(mean)
            changed(var)
            return True
    high, low, r, count = stats.to(wide(stats)).reshape(4, -1, mean.numel())
    present = count > 0
    number = present.sum(0)
    variance = r.square() * (count / (count - correction).clamp(min=1))
    for run, batch in ((mean, high + low), (var, variance)):
        average = batch.masked_fill(~present, 0.0).sum(0) / number.clamp(min=1)
        state = run.to(average.dtype).flatten()
        moved = torch.where(number > 0, (1 - fraction) * state + fraction * average, state)
        run.copy_(moved.view(run.shape))
    return some
