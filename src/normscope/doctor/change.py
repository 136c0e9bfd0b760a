"""Did something that should have stayed the same change between two runs? Sizes of changes, on a few elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

ELEMENTS = 1024
"""elements kept of each tensor, evenly spaced"""


@dataclass(frozen=True)
class Change:
    """The difference between two views of one quantity."""

    rms: float
    """root mean square of the difference"""
    scale: float
    """root mean square of the first view"""
    tolerance: float
    """relative; below it the two count as the same"""

    @property
    def relative(self) -> float:
        """The change in units of the quantity itself."""
        return self.rms / self.scale if self.scale else float(self.rms > 0)

    @property
    def real(self) -> bool:
        return not self.relative <= self.tolerance


def change(before: NDArray[np.float64], after: NDArray[np.float64], dtype: torch.dtype) -> Change:
    """Compare the same elements in two runs.

    Equal inputs of equal shape give equal bits, but another length or another packing of ragged rows may reorder
    sums; so the tolerance is 1e-5, some eighty roundings of float32, and a few roundings of a shorter type.

    >>> x = np.array([1.0, -1.0])
    >>> change(x, x, torch.float32).real, change(x, x + 0.1, torch.float32).real
    (False, True)
    """
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    same = (before == after) | (np.isnan(before) & np.isnan(after))  # equal infinities have no difference
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, after - before)
    finite = np.where(np.isfinite(before), before, 0.0)
    return Change(
        rms=float(np.sqrt(np.mean(np.square(off)))) if off.size else 0.0,
        scale=float(np.sqrt(np.mean(np.square(finite)))) if off.size else 0.0,
        tolerance=max(1e-5, 4 * eps),
    )


def some(t: torch.Tensor, keep: int = 0) -> NDArray[np.float64]:
    """At most ``ELEMENTS`` values, evenly spaced over the axes behind the first ``keep``; (kept..., values).

    Gathers only those, whatever the strides, so that an activation is never copied.

    >>> some(torch.arange(6).reshape(2, 3)), some(torch.arange(6).reshape(2, 3), keep=1).shape
    (array([0., 1., 2., 3., 4., 5.]), (2, 3))
    """
    t = t.detach()
    shape = t.shape[keep:]
    count = shape.numel()
    if count > ELEMENTS:
        t = t[(slice(None),) * keep + _places(shape, t.device)]
    else:
        t = t.reshape(*t.shape[:keep], count)
    out: NDArray[np.float64] = t.double().cpu().numpy()
    return out


@lru_cache(maxsize=256)
def _places(shape: torch.Size, device: torch.device) -> tuple[torch.Tensor, ...]:
    chosen = torch.linspace(0, shape.numel() - 1, ELEMENTS, dtype=torch.float64, device=device).long()
    return tuple(torch.unravel_index(chosen, shape))
