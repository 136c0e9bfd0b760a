"""What one rank, or one micro-batch, holds of a normalization: moments, elements about their own mean, and sums.

By native kernels where they serve the call, else in plain torch; in both, sums are in float64 or as exact. What is here
knows nothing of other ranks, and nothing of gradients.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from normscope.kernels import dispatch, library
from normscope.kernels.composite import Moments
from normscope.kernels.elementary import Elementary, wide
from normscope.kernels.formulas import DBIAS, DWEIGHT
from normscope.kernels.layout import Call, call
from normscope.spec import NormSpec
from normscope.spec.pattern import ELLIPSIS


class Share(NamedTuple):
    """Elements t with x = mean + scale t, and the moments of each set, flat."""

    t: Tensor
    """0 where a mask is False"""
    table: Tensor
    """(3, sets): count, mean, sum of squared deviations"""
    scale: Tensor
    """(sets,)"""


class Plain:
    """In plain torch: any specification, any device, under masks."""

    def __init__(self, view: Elementary) -> None:
        self.view = view
        self.kept = [axis.size if axis.kept else 1 for axis in view.axes]

    def place(self, values: Tensor) -> Tensor:
        """One value a set, to stand beside the elements, in their dtype."""
        return values.reshape(self.kept).to(self.view.x.dtype)

    def share(self) -> Share:
        """Of the input."""
        m = Moments.of(self.view)
        m2 = self.view.total(m.centered.to(wide(m.centered)).square())
        count = torch.as_tensor(m.count, dtype=m2.dtype, device=m2.device).expand_as(m2)
        table = torch.stack([count.flatten(), m.mean.expand_as(m2).flatten(), m2.flatten()])
        return Share(m.centered, table, torch.ones_like(table[0]))

    def affine(self, t: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        """gain t + shift, each one value a set."""
        return self.view.only(torch.addcmul(self.place(shift), t, self.place(gain)))

    def sums(self, dy: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """sum(dy) and sum(dy t) of each set."""
        dy = self.view.only(dy)
        return self.view.total(dy).flatten(), self.view.total(dy.to(wide(dy)) * t).flatten()

    def combined(self, dy: Tensor, t: Tensor, for_dy: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        """for_dy dy + gain t + shift, each one value a set."""
        return self.view.only(self.affine(t, gain, shift).addcmul_(self.view.only(dy), self.place(for_dy)))


class Native(Plain):
    """By the kernels of `normscope.kernels`: where axes are not factored, and everything counts."""

    def __init__(self, view: Elementary) -> None:
        super().__init__(view)
        codes = _call(view.spec, view.x.dim())
        self.codes = (codes.axes, codes.split, codes.options)

    @staticmethod
    def serves(view: Elementary) -> bool:
        """Whether it can be asked at all."""
        kept = view.spec.pattern.kept
        plain = view.mask is None and ELLIPSIS not in kept and len(view.axes) == len(view.shape)
        return (
            plain
            and library.LIBRARY is not None
            and view.x.is_cpu
            and view.x.dtype in dispatch.DTYPES
            and view.x.numel() > 0
            and not _call(view.spec, view.x.dim()).unserved
        )

    def share(self) -> Share:
        """Of the input: t is normalized with an eps of 1, which divides by no less than 1."""
        t, stats = torch.ops.normscope.norm(self.view.x, None, None, *self.codes, 1.0, 1.0, 0.0)
        high, low, r = stats.double()
        count = prod(axis.size for axis in self.view.axes if not axis.kept)
        squares = r.square()
        return Share(
            t,
            torch.stack([torch.full_like(r, count), high + low, squares * count]),
            (squares + 1.0).sqrt(),
        )

    def affine(self, t: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        mean, var = t.new_zeros(gain.shape), t.new_ones(gain.shape)
        y: Tensor = torch.ops.normscope.fixed(
            t, mean, var, gain.to(t.dtype), shift.to(t.dtype), *self.codes, 0.0, 1.0, 0.0
        )
        return y

    def sums(self, dy: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        one = t.new_ones(int(prod(self.kept)))
        stats = torch.stack([torch.zeros_like(one), torch.zeros_like(one), one])
        _, along, total = torch.ops.normscope.norm_backward(
            dy, None, t, stats, None, *self.codes, 0.0, 1.0, 0.0, DWEIGHT | DBIAS
        )
        return total.double(), along.double()


@lru_cache(maxsize=1024)
def _call(spec: NormSpec, ndim: int) -> Call:
    """The codes of the sets of a specification, each with a weight and a bias of its own."""
    kept = " ".join(spec.pattern.kept)
    return call(NormSpec(spec.stats, weight=kept, bias=kept), ndim)


def arithmetic(view: Elementary) -> Plain:
    """The fastest that serves the call."""
    return Native(view) if Native.serves(view) else Plain(view)
