"""The operators in plain torch: what `native/normscope.h` says, read from the same codes, on any device.

A program that was exported where there are native kernels runs by these where there are none. They compute in float64
and take no part in what `normscope.functional` does by itself: where that does not use native kernels it goes to
`normscope.kernels.composite`, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from normscope.kernels.elementary import wide
from normscope.kernels.layout import (
    CENTER,
    CORRECTION_SHIFT,
    EPS_AT,
    EPS_SHIFT,
    INNER_GIVEN,
    KEPT,
    PARAMETER,
    ROUND_FIRST,
    SCALE_SHIFT,
    SCALES,
    SPLIT_SHIFT,
    axis_code,
)
from normscope.spec import Cast, NormSpec

DX, DWEIGHT, DBIAS = 1, 2, 4
"""bits of ``want``"""


@dataclass(frozen=True)
class Recipe:
    """The codes of one call, taken apart."""

    axes: int
    split: int
    options: int
    eps: float
    gain: float
    offset: float

    @property
    def center(self) -> bool:
        return bool(self.options & CENTER)

    @property
    def scale(self) -> str:
        return list(SCALES)[self.options >> SCALE_SHIFT & 3]

    @property
    def eps_at(self) -> str:
        return list(EPS_AT)[self.options >> EPS_SHIFT & 3]

    @property
    def round_first(self) -> bool:
        return bool(self.options & ROUND_FIRST)

    @property
    def correction(self) -> int:
        return self.options >> CORRECTION_SHIFT

    def shape(self, x: Tensor) -> list[int]:
        """Sizes of the elementary axes."""
        dim, given = (self.split >> SPLIT_SHIFT) - 1, self.split & (INNER_GIVEN - 1)
        sizes: list[int] = []
        for d, size in enumerate(x.shape):
            if d != dim:
                sizes.append(size)
            else:
                rest = size // given
                sizes += [rest, given] if self.split & INNER_GIVEN else [given, rest]
        return sizes

    def sets(self, x: Tensor) -> int:
        return prod(n for i, n in enumerate(self.shape(x)) if axis_code(self.axes, i) & KEPT)

    def parameters(self, x: Tensor) -> int:
        return prod(n for i, n in enumerate(self.shape(x)) if axis_code(self.axes, i) & PARAMETER)


class View:
    """One input along its elementary axes, in float64; under a mask 0 where that is False."""

    def __init__(self, x: Tensor, recipe: Recipe, mask: Tensor | None = None) -> None:
        self.x, self.recipe, self.shape = x, recipe, recipe.shape(x)
        self.mask = None if mask is None else mask.expand(x.shape).reshape(self.shape)
        kinds = [axis_code(recipe.axes, i) for i in range(len(self.shape))]
        self.erased = [i for i, kind in enumerate(kinds) if not kind & KEPT]
        self.unshared = [i for i, kind in enumerate(kinds) if not kind & PARAMETER]
        self.value = self.open(x)
        self.count: int | Tensor = prod(self.shape[i] for i in self.erased)
        if self.mask is not None:
            self.count = self.sum(self.mask.to(self.value.dtype))

    def open(self, t: Tensor) -> Tensor:
        return self.only(t.to(wide(t)).reshape(self.shape))

    def only(self, t: Tensor) -> Tensor:
        return t if self.mask is None else t.masked_fill(~self.mask, 0.0)

    def close(self, t: Tensor) -> Tensor:
        """Back to the input's shape, dtype and strides."""
        return torch.empty_like(self.x).copy_(t.reshape(self.x.shape))

    def per_set(self, t: Tensor) -> Tensor:
        """One value for each set, to stand beside the elements."""
        return t.to(wide(t)).reshape([1 if i in self.erased else n for i, n in enumerate(self.shape)])

    def per_parameter(self, t: Tensor) -> Tensor:
        return t.to(wide(t)).reshape([1 if i in self.unshared else n for i, n in enumerate(self.shape)])

    @property
    def n(self) -> int | Tensor:
        """Elements of a set; 1 where a mask leaves none."""
        return self.count.clamp(min=1) if isinstance(self.count, Tensor) else self.count

    def mean(self, t: Tensor) -> Tensor:
        return self.sum(t) / self.n

    def sum(self, t: Tensor) -> Tensor:
        return t.sum(self.erased, keepdim=True) if self.erased else t

    def shared(self, t: Tensor) -> Tensor:
        """Summed over what a parameter is shared by, flat."""
        return (t.sum(self.unshared, keepdim=True) if self.unshared else t).flatten()

    def factor(self, weight: Tensor | None) -> Tensor | float:
        """(offset + weight) * gain."""
        if weight is None:
            return self.recipe.gain
        return (self.per_parameter(weight) + self.recipe.offset) * self.recipe.gain

    # N of normscope.h: what the sum of squares is divided by
    @property
    def divisor(self) -> int | Tensor:
        r = self.recipe
        return {"std": self.n - r.correction, "rms": self.n, "l2": 1}[r.scale]

    @property
    def share(self) -> float | Tensor:
        """n / N, NaN where N is 0."""
        if isinstance(self.divisor, Tensor):
            return torch.where(self.divisor == 0, torch.nan, self.n / self.divisor)
        return self.n / self.divisor if self.divisor else torch.nan

    def denominator(self, s: Tensor) -> Tensor:
        """D for the deviation s."""
        eps = self.recipe.eps
        at = self.recipe.eps_at
        return (s.square() + eps).sqrt() if at == "variance" else s + eps if at == "std" else s.clamp(min=eps)

    def by_root(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """D and q for the stored root r."""
        root = r if self.recipe.scale == "l2" else r * self.share**0.5
        d = self.denominator(root)
        if self.recipe.eps_at == "variance":
            return d, torch.ones_like(d)
        if self.recipe.eps_at == "std":
            return d, torch.where(root == 0, 0.0, d / root)
        return d, (root > self.recipe.eps).to(d.dtype)

    def finish(self, xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.recipe.round_first:
            xhat = xhat.to(self.x.dtype).to(xhat.dtype)
        y = self.factor(weight) * self.only(xhat)
        return self.close(y if bias is None else self.only(y + self.per_parameter(bias)))


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float) -> tuple[Tensor, Tensor]:
    return _norm(View(x, recipe_of(codes)), weight, bias)


def norm_masked(
    x: Tensor, mask: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> tuple[Tensor, Tensor]:
    return _norm(View(x, recipe_of(codes), mask), weight, bias)


def moments(x: Tensor, mask: Tensor | None, *codes: float) -> Tensor:
    return _norm(View(x, recipe_of(codes), mask), None, None)[1]


def _norm(view: View, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    recipe, dtype = view.recipe, statistics_dtype(view.x.dtype)
    mean = view.mean(view.value) if recipe.center else torch.zeros_like(view.sum(view.value))
    centered = view.only(view.value - mean)
    squares = view.sum(centered.square())
    r = (squares if recipe.scale == "l2" else squares / view.n).sqrt()
    y = view.finish(centered / view.by_root(r)[0], weight, bias)
    high = mean.to(dtype)
    rows = [high, (mean - high).to(dtype), r.to(dtype)] if recipe.center else [r.to(dtype)]
    if isinstance(view.count, Tensor):
        rows.append(view.count.to(dtype))
    return y, torch.stack([row.flatten() for row in rows])


def norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, *codes_and_want: float
) -> tuple[Tensor, Tensor, Tensor]:
    *codes, want = codes_and_want
    return _norm_backward(View(x, recipe_of(codes)), dy, dsum, stats, weight, int(want))


def norm_masked_backward(
    dy: Tensor, x: Tensor, mask: Tensor, stats: Tensor, weight: Tensor | None, *codes_and_want: float
) -> tuple[Tensor, Tensor, Tensor]:
    *codes, want = codes_and_want
    return _norm_backward(View(x, recipe_of(codes), mask), dy, None, stats, weight, int(want))


def norm_backward_by(
    dy: Tensor, x: Tensor, stats: Tensor, sums: Tensor, weight: Tensor | None, *codes: float
) -> Tensor:
    """``sums``: of g over n and of g xhat over N, of each set."""
    return _norm_backward(View(x, recipe_of(codes)), dy, None, stats, weight, DX, sums)[0]


def _norm_backward(
    view: View,
    dy: Tensor,
    dsum: Tensor | None,
    stats: Tensor,
    weight: Tensor | None,
    want: int,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    center = view.recipe.center
    d, q = view.by_root(view.per_set(stats[2 if center else 0]))
    mean = view.per_set(stats[0]) + view.per_set(stats[1]) if center else 0.0
    xhat = view.only((view.value - mean) / d)
    g = view.factor(weight) * view.open(dy)
    if sums is None:
        level, along = view.mean(g), view.sum(g * xhat) / view.divisor
    else:
        level, along = (view.per_set(row) for row in sums)
    dx = g - xhat * q * along
    dx = view.only((dx - level if center else dx) / d)
    if dsum is not None:
        dx = dx + view.open(dsum)
    return _wanted(view, want, weight, dx, view.open(dy), xhat)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(x).copy_(x + residual)
    y, stats = norm(total, weight, bias, *codes)
    return y, total, stats


def fixed(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, *codes: float
) -> Tensor:
    view = View(x, recipe_of(codes))
    return view.finish(_by_state(view, mean, var)[0], weight, bias)


def fixed_backward(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, *codes_and_want: float
) -> tuple[Tensor, Tensor, Tensor]:
    *codes, want = codes_and_want
    view = View(x, recipe_of(codes))
    xhat, d = _by_state(view, mean, var)
    return _wanted(view, int(want), weight, view.factor(weight) * view.open(dy) / d, view.open(dy), xhat)


def norm_out(x: Tensor, weight: Tensor | None, bias: Tensor | None, *codes_and_out: Any) -> None:
    *codes, out = codes_and_out
    out.copy_(norm(x, weight, bias, *codes)[0])


def update_running(
    mean: Tensor, var: Tensor, stats: Tensor, momentum: float, count: float, correction: float
) -> None:
    """Sets that share a stored value are averaged; they follow one another in steps of the number of stored values."""
    high, low, r = (row.to(wide(row)).reshape(-1, mean.numel()) for row in stats)
    unbias = count / (count - correction) if count != correction else torch.nan
    for state, batch in ((mean, high + low), (var, unbias * r.square())):
        new = (1 - momentum) * state.to(batch.dtype) + momentum * batch.mean(0).reshape(state.shape)
        state.copy_(new)


def _by_state(view: View, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    d = view.per_set(var)
    if view.recipe.eps_at == "variance":
        d = (d + view.recipe.eps).sqrt()
    else:
        d = view.denominator(d.sqrt())
    centered = view.value - view.per_set(mean) if view.recipe.center else view.value
    return centered / d, d


def _wanted(
    view: View, want: int, weight: Tensor | None, dx: Tensor, dy: Tensor, xhat: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = statistics_dtype(view.x.dtype) if weight is None else weight.dtype

    def given(bit: int, make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        return make() if want & bit else view.x.new_empty(0, dtype=dtype)

    return (
        given(DX, lambda: view.close(dx), view.x.dtype),
        given(DWEIGHT, lambda: (view.recipe.gain * view.shared(dy * xhat)).to(dtype), dtype),
        given(DBIAS, lambda: view.shared(dy).to(dtype), dtype),
    )


def recipe_of(codes: Sequence[float]) -> Recipe:
    axes, split, options, eps, gain, offset = codes
    return Recipe(int(axes), int(split), int(options), float(eps), float(gain), float(offset))


@lru_cache(maxsize=4096)
def spec_of(recipe: Recipe, ndim: int, weight: bool, bias: bool) -> NormSpec:
    """A specification that these codes are those of; a parameter axis for each elementary axis."""
    dim, given = (recipe.split >> SPLIT_SHIFT) - 1, recipe.split & (INNER_GIVEN - 1)
    left, names = [], []
    sizes: dict[str, int] = {}
    for d in range(ndim):
        names += [f"a{d}", f"i{d}"] if d == dim else [f"a{d}"]
        left.append(f"(a{d} i{d})" if d == dim else f"a{d}")
        if d == dim:
            sizes[f"i{d}" if recipe.split & INNER_GIVEN else f"a{d}"] = given
    kept = [name for i, name in enumerate(names) if axis_code(recipe.axes, i) & KEPT]
    where = " ".join(name for i, name in enumerate(names) if axis_code(recipe.axes, i) & PARAMETER)
    return NormSpec(
        f"{' '.join(left)} -> {' '.join(kept)}",
        sizes=sizes,
        weight=where if weight else None,
        bias=where if bias else None,
        center=recipe.center,
        scale=recipe.scale,
        correction=recipe.correction,
        eps=recipe.eps,
        eps_at=recipe.eps_at,
        gain=recipe.gain,
        weight_offset=recipe.offset if weight else 0.0,
        cast=Cast(weight="after") if recipe.round_first else Cast(),
    )


def parameter_shape(x: Tensor, recipe: Recipe, kind: int) -> list[int]:
    """Of what lives on the axes of one kind, `PARAMETER` or `KEPT`, an axis for each elementary axis."""
    return [n for i, n in enumerate(recipe.shape(x)) if axis_code(recipe.axes, i) & kind]
