"""Mean and variance of every statistic set of a tensor.

The tensor is read twice, in pieces that stay in the processor's cache, and reduced to one mean and one variance a set.
The second reading sums the distances from the first mean and their squares, so a variance is right to a few float32
ulp whatever the level of the input; ``E[x^2] - E[x]^2`` would lose it, and with it every number that is judged here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

PIECE = 1 << 17
"""elements that are reduced at a time; 512 kB of float32"""


def measured(x: torch.Tensor, erased: list[int]) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Mean, variance and constancy of every set."""
    if not erased:  # sets of one element
        mean: Array = x.double().cpu().numpy().ravel()
        return mean, np.where(np.isfinite(mean), 0.0, np.nan), np.isfinite(mean)
    mean, variance = _moments(x, erased)
    constant = _constant(x, erased, mean, variance)
    variance[constant] = 0.0
    return mean, variance, constant


def _moments(x: torch.Tensor, erased: list[int]) -> tuple[Array, Array]:
    size = prod(x.shape[i] for i in erased)
    wide = torch.promote_types(x.dtype, torch.float32)
    first = x.sum(erased, keepdim=True, dtype=wide) / size
    total = torch.zeros_like(first, dtype=torch.float64)
    squares = torch.zeros_like(total)
    for piece in _pieces(x.shape):
        at = tuple(slice(None) if i in erased else where for i, where in enumerate(piece))
        distance = x[piece] - first[at]
        total[at] += distance.sum(erased, keepdim=True)
        squares[at] += distance.mul_(distance).sum(erased, keepdim=True)
    drift = total / size
    mean = first.double() + drift
    variance = (squares / size - drift**2).clamp_min(0)
    return mean.cpu().numpy().ravel(), variance.cpu().numpy().ravel()


def _pieces(shape: torch.Size) -> Iterator[tuple[slice, ...]]:
    """Slices of at most about ``PIECE`` elements that cut the leading axes."""
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    if inner <= PIECE:
        step = max(1, PIECE // max(1, inner))
        for start in range(0, shape[0], step):
            yield (slice(start, start + step), *(slice(None) for _ in shape[1:]))
        return
    for index in range(shape[0]):
        for rest in _pieces(shape[1:]):
            yield (slice(index, index + 1), *rest)


def _constant(x: torch.Tensor, erased: list[int], mean: Array, variance: Array) -> NDArray[np.bool_]:
    """Which sets hold one number only. Exact: largest equals smallest; looked at only where it is possible."""
    # Rounded to its dtype, the mean of a constant set is off by at most a few ulp, which is all the variance it shows.
    ulp = np.abs(mean) * torch.finfo(torch.float32).eps
    if not bool((np.sqrt(variance) <= 8 * ulp + 1e-18).any()):
        return np.zeros(len(mean), dtype=bool)
    same = x.amax(erased, keepdim=True) == x.amin(erased, keepdim=True)
    out: NDArray[np.bool_] = same.cpu().numpy().ravel()
    return out
