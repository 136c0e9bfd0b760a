"""Whitening, no function of PyTorch: as it is spelled out there with torch.linalg, and as a call of this package."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from normscope.functional import normalize
from normscope.spec import NormSpec, families

TOGETHER = 16
"""channels that are whitened together"""
ITERATIONS = 5


def batch_whitening(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """By the inverse root of the covariance."""
    centered, covariance = _of_groups(x, eps)
    values, vectors = torch.linalg.eigh(covariance)
    return _close(vectors * values.rsqrt()[:, None] @ vectors.mT @ centered, x, weight, bias)


def iter_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """By Newton's iteration."""
    centered, covariance = _of_groups(x, eps)
    trace = covariance.diagonal(0, -2, -1).sum(-1)[:, None, None]
    root = torch.eye(TOGETHER, dtype=centered.dtype, device=x.device)
    for _ in range(ITERATIONS):
        root = (3 * root - root @ root @ root @ covariance / trace) / 2
    return _close(root / trace.sqrt() @ centered, x, weight, bias)


def our_batch_whitening(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`batch_whitening` by `normscope.normalize`, which computes covariances in float64."""
    return normalize(x, _spec("zca", eps), weight, bias)


def our_iter_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`iter_norm` by `normscope.normalize`."""
    return normalize(x, _spec("iternorm", eps), weight, bias)


@lru_cache
def _spec(method: str, eps: float) -> NormSpec:
    return families.batch_whitening(TOGETHER, method=method, iterations=ITERATIONS, eps=eps, running=False)


def _of_groups(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Centered elements of each group, (groups, channels, elements), and covariances; half types in float32."""
    wide = x.float() if x.element_size() < 4 else x
    grouped = wide.transpose(0, 1).reshape(x.shape[1] // TOGETHER, TOGETHER, -1)
    centered = grouped - grouped.mean(-1, keepdim=True)
    diagonal = eps * torch.eye(TOGETHER, dtype=wide.dtype, device=x.device)
    return centered, centered @ centered.mT / centered.shape[-1] + diagonal


def _close(white: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    at = [1, -1, *(1 for _ in x.shape[2:])]
    y = white.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
    return (y * weight.view(at) + bias.view(at)).to(x.dtype)
