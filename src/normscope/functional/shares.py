"""What one rank, or one micro-batch, does of a normalization: moments, and what follows once those of all are known.

By native kernels where they serve the call, else in plain torch; in both, sums are in float64 or as exact. What is here
knows nothing of other ranks, and nothing of gradients.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from normscope.functional.shared_mask import shared_mask
from normscope.kernels import dispatch, library
from normscope.kernels.composite import Moments
from normscope.kernels.elementary import Elementary, wide
from normscope.kernels.formulas import DBIAS, DWEIGHT, statistics_dtype
from normscope.kernels.layout import CENTER, Call, call
from normscope.spec import NormSpec
from normscope.spec.pattern import ELLIPSIS


class Share(NamedTuple):
    """Of one rank: its elements t with x = t + shift, and the moments of each set, flat."""

    t: Tensor
    """0 where a mask is False"""
    shift: Tensor | None
    """(sets,), None where it is 0"""
    table: Tensor
    """(3, sets): count, mean, sum of squared deviations"""


class Of(NamedTuple):
    """The statistics that all normalize by, (sets,) in float64, and eps that stands beside the variance."""

    mean: Tensor
    var: Tensor
    eps: float

    @property
    def root(self) -> Tensor:
        return (self.var + self.eps).sqrt()


class Plain:
    """In plain torch: any specification, any device, under masks. xhat = (t + shift - mean) / root."""

    def __init__(self, view: Elementary) -> None:
        self.view, self.source = view, view.x
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
        return Share(m.centered, table[1], table)

    def normalized(
        self, t: Tensor, shift: Tensor | None, of: Of, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """(offset + weight) * gain * xhat + bias"""
        factor = self.factor(weight)
        scale, level = factor / of.root, factor * self._level(shift, of)
        if bias is not None:
            level = level + bias.flatten()
        return self.view.only(torch.addcmul(self.place(level), t, self.place(scale)))

    def sums(self, dy: Tensor, t: Tensor, shift: Tensor | None, of: Of) -> tuple[Tensor, Tensor]:
        """sum(dy) and sum(dy xhat) of each set."""
        dy = self.view.only(dy)
        total = self.view.total(dy).flatten()
        along = self.view.total(dy.to(wide(dy)) * t).flatten()
        return total, along / of.root + total * self._level(shift, of)

    def gradient(
        self,
        dy: Tensor,
        t: Tensor,
        shift: Tensor | None,
        of: Of,
        weight: Tensor | None,
        level: Tensor,
        along: Tensor,
    ) -> Tensor:
        """factor / root * (dy - level - xhat along), level and along each one value a set."""
        slope = self.factor(weight) / of.root
        constant = -slope * (level + along * self._level(shift, of))
        dx = torch.addcmul(self.place(constant), t, self.place(-slope * along / of.root))
        return self.view.only(dx.addcmul_(self.view.only(dy), self.place(slope)))

    def factor(self, weight: Tensor | None) -> Tensor:
        """(offset + weight) * gain, one value a set."""
        spec = self.view.spec
        if weight is None:
            return torch.full((), float(spec.gain), dtype=wide(self.view.x), device=self.view.x.device)
        return (weight.flatten().to(wide(self.view.x)) + spec.weight_offset) * spec.gain

    def _level(self, shift: Tensor | None, of: Of) -> Tensor:
        return ((0.0 if shift is None else shift) - of.mean) / of.root


class Native(Plain):
    """By the kernels of `normscope.kernels`, in the dtype of the input."""

    def __init__(self, view: Elementary, source: Tensor, mask: Tensor | None) -> None:
        super().__init__(view)
        self.source, self.mask = source, mask
        codes = _call(view.spec, source.dim())
        self.codes = (codes.axes, codes.split, codes.options | CENTER, float(view.eps))
        self.gains = (float(view.spec.gain), float(view.spec.weight_offset))

    @staticmethod
    def of(view: Elementary, input: Tensor) -> Native | None:
        """None where it cannot be asked: axes are factored, or a mask is no kernel's."""
        kept = view.spec.pattern.kept
        plain = ELLIPSIS not in kept and len(view.axes) == len(view.shape) and view.filled is None
        if (
            not plain
            or library.LIBRARY is None
            or not input.is_cpu
            or input.dtype not in dispatch.DTYPES
            or (input.dtype is torch.float64 and view.x.dtype is not torch.float64)
            or input.numel() == 0
        ):
            return None
        codes = _call(view.spec, input.dim())
        if codes.unserved:
            return None
        if view.mask is None:
            return Native(view, input, None)
        thin = view.mask[tuple(slice(None, 1 if step == 0 else None) for step in view.mask.stride())]
        mask = shared_mask(thin, input, codes)
        return None if mask is None else Native(view, view.x, mask)

    def share(self) -> Share:
        """Of the input, as it is."""
        stats = torch.ops.normscope.moments(self.source, self.mask, *self.codes, 1.0, 0.0).double()
        high, low, r = stats[:3]
        erased = [axis.dim for axis in self.view.axes if not axis.kept]
        if self.mask is None:
            count = torch.full_like(r, prod(self.view.axes[dim].size for dim in erased))
        else:
            count = self.mask.sum(erased, keepdim=True, dtype=torch.float64).expand(self.kept).flatten()
        return Share(self.source, None, torch.stack([count, high + low, r.square() * count]))

    def normalized(
        self, t: Tensor, shift: Tensor | None, of: Of, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        y: Tensor = torch.ops.normscope.fixed(t, of.mean, of.var, weight, bias, *self.codes, *self.gains)
        return self._only(y)

    def sums(self, dy: Tensor, t: Tensor, shift: Tensor | None, of: Of) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(of.mean)  # its dtype is that of the sums
        _, along, total = torch.ops.normscope.norm_backward(
            self._only(dy), None, t, self._stats(t, of), one, *self.codes, 1.0, 0.0, DWEIGHT | DBIAS
        )
        return total, along

    def gradient(
        self,
        dy: Tensor,
        t: Tensor,
        shift: Tensor | None,
        of: Of,
        weight: Tensor | None,
        level: Tensor,
        along: Tensor,
    ) -> Tensor:
        factor = self.factor(weight)
        sums = torch.stack([factor * level, factor * along])
        dx: Tensor = torch.ops.normscope.norm_backward_by(
            self._only(dy), t, self._stats(t, of), sums, weight, *self.codes, *self.gains
        )
        return self._only(dx)

    def _only(self, values: Tensor) -> Tensor:
        return values if self.mask is None else values.masked_fill(~self.mask, 0.0)

    @staticmethod
    def _stats(t: Tensor, of: Of) -> Tensor:
        high = of.mean.to(statistics_dtype(t.dtype))
        return torch.stack([high, (of.mean - high).to(high.dtype), of.var.sqrt().to(high.dtype)])


@lru_cache(maxsize=1024)
def _call(spec: NormSpec, ndim: int) -> Call:
    """The codes of the sets of a specification, each with a weight and a bias of its own."""
    kept = " ".join(spec.pattern.kept)
    return call(NormSpec(spec.stats, weight=kept, bias=kept), ndim)


def arithmetic(view: Elementary, input: Tensor | None = None) -> Plain:
    """The fastest that serves the call; ``input`` is what the view is of, whose dtype the native kernels take."""
    return Native.of(view, view.x if input is None else input) or Plain(view)
