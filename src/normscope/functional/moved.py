"""Stored statistics moved by moments that were merged: of ranks, or of micro-batches.

run <- (1 - fraction) run + fraction batch, of mean and of m2 / (count - correction); a set without an element stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.errors import BadInput


@torch.no_grad()
def moved(
    mean: Tensor, var: Tensor, table: Tensor, fraction: float, correction: float, whose: str, of: str
) -> bool:
    """Move ``mean`` and ``var`` in place by a table (3, sets) of counts, means and sums of squared deviations.

    Returns whether any set had an element. Raises BadInput, which says ``whose`` statistics ``of`` what they are, where
    a set has too few elements for the correction.
    """
    count, batch, m2 = table
    fewest = float(count.min())
    whole = fewest > correction
    if not whole and bool(((count > 0) & (count <= correction)).any()):
        raise BadInput(
            f"a stored variance divides by M - {correction:g}; got {whose} with M = 1 in {of} together. Take larger "
            "batches."
        )
    variance = m2 / ((count - correction) if whole else (count - correction).clamp(min=1))
    for run, new in ((mean, batch.view(mean.shape)), (var, variance.view(var.shape))):
        following = torch.add(fraction * new, run, alpha=1 - fraction)
        run.copy_(following if whole else torch.where(count.view(run.shape) > 0, following, run))
    return whole or bool(count.any())
