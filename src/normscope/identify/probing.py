"""Inputs to probe with, calls that are counted, and the exception that ends a probing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from normscope.errors import ModelError, NormscopeError, told
from normscope.identify.box import Array, Box
from normscope.identify.result import Evidence

ORDINARY = (1e-2, 1e2)
"""between them lies the largest number of an input like those that layers are given"""


class Contradiction(Exception):
    """What shows that a callable is no normalization of the family. The text is the reason.

    ``size`` is how far off it is, relative to the output, where that is known: what is off by no more than float32
    rounds may be a member whose arithmetic is float32 in part.
    """

    def __init__(self, reason: str, size: float | None = None) -> None:
        super().__init__(reason)
        self.size = size


class OnlyWhenShortened(Contradiction):
    """It was a member at the shape that was probed, but not at the longer one of the example."""


def said_size(x: Array) -> str:
    """Words for the largest number of an input that no ordinary one is like; "" for others.

    >>> said_size(np.array([1e6, 0.5])), said_size(np.array([2.0]))
    (' with numbers up to 1e+06', '')
    """
    largest = float(np.abs(x).max(initial=0.0))
    return "" if ORDINARY[0] < largest < ORDINARY[1] else f" with numbers up to {largest:.2g}"


@dataclass
class Prober:
    """A box that is called: counts, checks shapes, and collects what was concluded."""

    box: Box
    roundoff: float
    """unit roundoff of the arithmetic as it was found, which may be coarser than the box says"""
    calls: int = 0
    evidence: list[Evidence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: tuple[Array, Array] | None = None
    """an input and what it gave, before all others"""

    def __call__(self, x: Array) -> Array:
        self.calls += 1
        try:
            y = self.box(x)
        except NormscopeError:
            raise
        except (Exception, SystemExit) as error:
            size, fix = said_size(x), "Pass an example of a shape and dtype that it takes."
            if size:
                fix = "Identification calls it with small and with large inputs: pass a callable that takes them."
            raise ModelError(
                f"{self.box.name} raised on an input of shape {x.shape}{size} ({told(error)}). {fix}"
            ) from error
        if y.shape != x.shape:
            raise Contradiction(
                f"an input of shape {x.shape} gives an output of shape {y.shape}; a normalization keeps the shape"
            )
        return y

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an input of this shape gives a finite output of this shape."""
        try:
            return bool(np.isfinite(self(direction(shape, 0))).all())
        except (
            Exception,
            SystemExit,
        ):  # a shape that it does not take is an answer, whatever the callable raises
            return False

    def conclude(self, conclusion: str, probe: str, **numbers: float | int | str | tuple[int, ...]) -> None:
        self.evidence.append(Evidence(conclusion, probe, numbers))


def direction(shape: tuple[int, ...], seed: int) -> Array:
    """A generic input: its mean and its spread differ along every axis, so that no two choices of sets look alike.

    All numbers are float32 numbers, so that a callable of float32 sees exactly what the reference sees.
    """
    rng = np.random.default_rng([seed, *shape])
    x = rng.standard_normal(shape)
    for dim, size in enumerate(shape):
        along = [size if d == dim else 1 for d in range(len(shape))]
        x = x * np.exp(0.3 * rng.standard_normal(along)) + 0.3 * rng.standard_normal(along)
    return x.astype(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Pair:
    """``f(x)`` and ``f(-x)``: every member is its bias plus an odd function, so half the sum is the bias."""

    x: Array
    plus: Array
    minus: Array

    @property
    def odd(self) -> Array:
        return (self.plus - self.minus) / 2

    @property
    def even(self) -> Array:
        return (self.plus + self.minus) / 2

    @property
    def size(self) -> Array:
        """of what was rounded, element by element"""
        return np.maximum(np.abs(self.plus), np.abs(self.minus))


def pair(f: Prober, x: Array) -> Pair:
    return Pair(x, f(x), f(-x))
