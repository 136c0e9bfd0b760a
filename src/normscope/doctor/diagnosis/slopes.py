"""Gradients of one norm alone beside differences, and statistics that it cuts off from its gradient.

A norm that detaches its mean or its scale has the gradient of a shift and a scale by constants. That is a choice where
autograd agrees with differences in which what was cut off is held fixed; it is a wrong gradient where it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from normscope import reference
from normscope.doctor.diagnosis.alone import Alone
from normscope.doctor.diagnosis.stopped import Stopped
from normscope.doctor.wording import listed, number

DIRECTIONS = 3
STEPS = (1e-3, 5e-4)
ALLOWED = 1e-5
"""of the size of the gradient along a direction; differences themselves are right to 1e-9 where all is float64"""

MEAN, SCALE = "its mean", "its scale"
TINY = 1e-6
"""a slope that is more than the error of differences of sums of numbers of size one"""


@dataclass(frozen=True)
class Slope:
    """A derivative along one direction."""

    of: str
    autograd: float
    difference: float
    doubt: float
    """how much two step sizes disagree"""
    scale: float
    """size that a random direction would show"""
    replaced: tuple[str, ...] = ()
    """functions whose backward is on purpose not their derivative"""
    stopped: str = ""
    """what was held fixed, because the model cuts it off from the gradient"""

    @property
    def error(self) -> float:
        return abs(self.autograd - self.difference) / max(self.scale, 1e-300)

    @property
    def wrong(self) -> bool:
        return not self.replaced and self.apart

    @property
    def apart(self) -> bool:
        if self.autograd != self.autograd:
            return True
        return abs(self.autograd - self.difference) > ALLOWED * self.scale + 10 * self.doubt

    def line(self) -> str:
        return (
            f"along a random direction of {self.of}: autograd {number(self.autograd)}, finite differences "
            f"{number(self.difference)}{self.stopped}"
        )


@dataclass(frozen=True)
class Cut:
    """What a norm alone cuts off from its gradient."""

    by: dict[str, int]
    what: tuple[str, ...]
    """the statistics among it"""
    most: Slope | None
    """where it matters most: the difference moves what was cut off too"""
    without: tuple[str, ...]
    """what the output depends on and no gradient is passed to"""

    def line(self) -> str:
        how = listed([f"{name} ({count})" for name, count in self.by.items()])
        said = []
        if self.without:
            said.append(f"passes no gradient to {listed(self.without)}, on which its output depends ({how})")
        if self.most is not None:
            like = "shift and a scale" if MEAN in self.what else "scale"
            said.append(
                f"cuts {' and '.join(self.what)} off from the gradient ({how}): autograd agrees with "
                f"differences that hold this fixed, which is the gradient of a {like} by constants; along a random "
                f"direction of {self.most.of} it says {number(self.most.autograd)} where what is computed changes by "
                f"{number(self.most.difference)}"
            )
        return "; ".join(said)


def slopes_alone(alone: Alone) -> tuple[list[Slope], Cut | None]:
    """Slopes in the input and in each parameter; differences hold fixed what is cut off, where that explains them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(alone.shape, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(alone.shape, dtype=torch.float64, generator=generator)

    def value(watch: AbstractContextManager[Any]) -> torch.Tensor:
        with watch:
            return (alone(x) * weights).sum()

    first = Stopped()
    named = {"the input": x, **{f"its {name}": p for name, p in alone.module.named_parameters()}}
    leaves = {name: t for name, t in named.items() if t.requires_grad}
    grads: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        value(first), list(leaves.values()), allow_unused=True
    )
    slopes: list[Slope] = []
    apart: list[Slope] = []
    without: list[str] = []
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is None:
            if first.by and _depends(lambda: value(nullcontext()), leaf):
                without.append(name)
            continue
        scale = max(float(grad.norm()) / max(1.0, leaf.numel() ** 0.5), 1e-9)
        for _ in range(DIRECTIONS):
            direction = torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)
            direction /= direction.norm()
            moving = Slope(
                name,
                float((grad * direction).sum()),
                *_difference(lambda: value(nullcontext()), leaf, direction),
                scale,
            )
            held = _held(moving, first, lambda: value(Stopped(first)), leaf, direction)
            slopes.append(held or moving)
            if held is not None:
                apart.append(moving)
    most = max(apart, key=lambda slope: slope.error, default=None)
    if most is None and not without:
        return slopes, None
    return slopes, Cut(first.by, _what(first, alone, x) if most else (), most, tuple(without))


def _held(
    moving: Slope,
    first: Stopped,
    value: Callable[[], torch.Tensor],
    leaf: torch.Tensor,
    direction: torch.Tensor,
) -> Slope | None:
    """The slope with what was cut off held fixed, where it is that which explains a gap."""
    if not moving.apart or not first.by:
        return None
    try:
        first.check()
        difference, doubt = _difference(value, leaf, direction)
    except ValueError:  # it cannot be run again with the same constants
        return None
    held = replace(moving, difference=difference, doubt=doubt)
    return None if held.apart else held


def _depends(value: Callable[[], torch.Tensor], leaf: torch.Tensor) -> bool:
    direction = torch.randn(leaf.shape, dtype=leaf.dtype, generator=torch.Generator().manual_seed(1))
    return abs(_difference(value, leaf, direction / direction.norm())[0]) > TINY


def _difference(
    value: Callable[[], torch.Tensor], leaf: torch.Tensor, direction: torch.Tensor
) -> tuple[float, float]:
    """Central differences of two step sizes, extrapolated, and how much they disagree."""
    sizes = [_central(value, leaf, direction, h) for h in STEPS]
    # the error of the finer is a third of the difference, so the extrapolation leaves next to none
    return sizes[1] + (sizes[1] - sizes[0]) / 3, abs(sizes[1] - sizes[0])


def _central(
    value: Callable[[], torch.Tensor], leaf: torch.Tensor, direction: torch.Tensor, h: float
) -> float:
    def at(distance: float) -> float:
        with torch.no_grad():
            leaf.add_(direction, alpha=distance)
        found = float(value().detach())
        with torch.no_grad():
            leaf.sub_(direction, alpha=distance)
        return found

    return (at(h) - at(-h)) / (2 * h)


def _what(first: Stopped, alone: Alone, x: torch.Tensor) -> tuple[str, ...]:
    """Names of what was cut off: the mean, the scale or what it is made of, or else values."""
    found: dict[str, None] = {}
    for value in first.values:
        found[_name(np.asarray(torch.as_tensor(value).detach().double()), alone, x.detach().numpy())] = None
    return tuple(found)


def _name(value: np.ndarray[Any, Any], alone: Alone, x: np.ndarray[Any, Any]) -> str:
    if alone.spec is None:
        return "values of its own"
    mean, v, _ = reference.statistics(x, alone.spec)
    scales = [v, v + (alone.spec.eps or 0.0)]
    scales += [np.sqrt(scale) for scale in scales]
    scales.append(np.sqrt(v) + (alone.spec.eps or 0.0))
    known = [(MEAN, mean), *((SCALE, s) for s in (*scales, x * x)), *((SCALE, 1 / s) for s in scales)]
    for name, statistic in known:
        if value.size == statistic.size and np.allclose(
            value.ravel(), statistic.ravel(), rtol=1e-6, atol=1e-9
        ):
            return name
    return "values of its own"
