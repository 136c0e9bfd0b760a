"""Operations that are no function of PyTorch: as they are spelled out there, and as a call of this package."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from normscope.functional import normalize
from normscope.spec import NormSpec, RunningState, families

GAIN = 0.5


def frames(x: Tensor) -> Tensor:
    """A mask of sequences along the last axis, from half to the whole of it long."""
    last = x.shape[-1]
    lengths = torch.linspace(last / 2, last, x.shape[0], device=x.device).round()
    inside = torch.arange(last, device=x.device) < lengths[:, None]
    return inside.view(x.shape[0], *(1 for _ in x.shape[1:-1]), last)


def masked_batch_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, eps: float
) -> Tensor:
    """Batch norm of the elements that count, with running statistics of momentum 0.1; 0 elsewhere."""
    over = [0, *range(2, x.dim())]
    at = [1, -1, *(1 for _ in x.shape[2:])]
    inside = mask.expand(x.shape[0], 1, *x.shape[2:])
    count = inside.sum()
    centre = x.masked_fill(~mask, 0.0).sum(over) / count
    centered = (x - centre.view(at)).masked_fill(~mask, 0.0)
    biased = centered.square().sum(over) / count
    with torch.no_grad():
        mean.lerp_(centre.to(mean.dtype), 0.1)
        var.lerp_((biased * count / (count - 1)).to(var.dtype), 0.1)
    y = centered / (biased.view(at) + eps).sqrt() * weight.view(at) + bias.view(at)
    return y.masked_fill(~mask, 0.0)


def our_masked_batch_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, eps: float
) -> Tensor:
    """The same by `normscope.normalize`."""
    return normalize(
        x, families.batch_norm(eps=eps), weight, bias, running=RunningState(mean, var), mask=mask
    )


def td_batch_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, steps: int, eps: float
) -> Tensor:
    """Threshold-dependent batch norm of (steps, samples, ...): batch norm of both in one axis, with the gain."""
    flat = x.view(steps, -1, *x.shape[1:]).flatten(0, 1)
    return F.batch_norm(flat, mean, var, weight * GAIN, bias, True, 0.1, eps)


def our_td_batch_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, steps: int, eps: float
) -> Tensor:
    """The same by `normscope.normalize`, which the axis of steps costs nothing."""
    sequence = x.view(steps, -1, *x.shape[1:])
    state = RunningState(mean, var)
    return normalize(sequence, _td_spec(eps), weight, bias, running=state).flatten(0, 1)


@lru_cache
def _td_spec(eps: float) -> NormSpec:
    return families.td_batch_norm(GAIN, eps=eps)
