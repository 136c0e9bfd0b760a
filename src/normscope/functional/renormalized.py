"""Batch renormalization through the kernels of batch norm.

r and d are constants of the backward pass, so y = weight (r x_hat + d) + bias is batch norm with the gain weight r and
the bias weight d + bias. One pass takes the statistics, r and d follow from them, and a second pass normalizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.functional.channels import batch_norm
from normscope.kernels.elementary import wide
from normscope.spec import RunningState

Limit = float | Tensor


def batch_renorm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningState,
    *,
    eps: float,
    momentum: float | Tensor,
    limits: tuple[Limit, Limit],
    averages: str,
) -> Tensor:
    """As `normscope.kernels.composite.normalize` under ``Running(renorm=...)``, of (N, C, ...) that holds samples.

    float32 and float64, parameters of the same dtype. ``running`` is read, then moved.
    """
    with torch.no_grad():
        mean, var = (torch.zeros(x.shape[1], dtype=x.dtype, device=x.device) for _ in range(2))
        batch_norm(x.detach(), mean, var, training=True, momentum=1.0, eps=eps)
        mean, var = mean.to(wide(x)), var.to(wide(x))  # with M / (M - 1)
        held_mean, held_var = running.mean.to(mean.dtype), running.var.to(mean.dtype)
        count = x.numel() // x.shape[1]
        s, sigma = (var * ((count - 1) / count) + eps).sqrt(), (held_var + eps).sqrt()
        (r_max, d_max) = limits
        r = torch.clamp(s / sigma, 1 / r_max, r_max).to(x.dtype)  # type: ignore[arg-type]  # both numbers, or tensors
        d = torch.clamp((mean - held_mean) / sigma, -d_max, d_max).to(x.dtype)  # type: ignore[arg-type]
        running.mean.copy_((1 - momentum) * held_mean + momentum * mean)
        if averages == "variance":
            running.var.copy_((1 - momentum) * held_var + momentum * var)
        else:
            moved = (1 - momentum) * sigma + momentum * s
            running.var.copy_(torch.where(moved == sigma, held_var, (moved.square() - eps).clamp(min=0)))
        running.batches += 1
    gain = r if weight is None else weight * r
    shift = d if weight is None else weight * d
    return batch_norm(x, None, None, gain, shift if bias is None else shift + bias, True, 0.0, eps)
