"""Gain and bias of every element, and the axes that they live on."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from normscope.identify.box import Array
from normscope.identify.spelling import Spelling
from normscope.spec.pattern import ELLIPSIS, tokenize, untokenize


@dataclass(frozen=True)
class Values:
    """One number an element, and how far it may be off."""

    value: Array
    error: Array

    def scaled(self, factor: float) -> Values:
        return Values(self.value * factor, self.error * factor)

    def is_everywhere(self, number: float) -> bool:
        return bool((np.abs(self.value - number) <= self.error).all())

    def constant_along(self, axis: int) -> bool:
        """Whether one number per line along the axis is as good as all of them."""
        low = (self.value - self.error).max(axis=axis)
        high = (self.value + self.error).min(axis=axis)
        return bool((low <= high).all())

    def reshaped(self, shape: tuple[int, ...]) -> Values:
        return Values(self.value.reshape(shape), self.error.reshape(shape))


def place(values: Values, spelling: Spelling) -> tuple[str, Array] | None:
    """The axes that the values need, in the words of the spelling, and the values there.

    None where the spelling has no word for them: for one axis out of ``...``, or a factor of a ragged axis.
    """
    bound = spelling.bound
    if bound.ragged:
        # virtual batches of different sizes have no common shape: only axes beside them can carry values
        elementary = [(axis.name, axis.dim) for axis in bound.axes if axis.dim != bound.sample_dim]
        at = [dim for dim in range(values.value.ndim) if dim != bound.sample_dim]
        if bound.sample_dim is None or not values.constant_along(bound.sample_dim):
            return None
        split = values
    else:
        elementary = [(axis.name, axis.dim) for axis in bound.axes]
        at = list(range(len(elementary)))
        split = values.reshaped(bound.shape)
    needed = [i for i, axis in zip(range(len(at)), at, strict=True) if not split.constant_along(axis)]
    where = _words([elementary[i][0] for i in needed], spelling)
    if where is None:
        return None
    others = tuple(axis for axis in range(split.value.ndim) if axis not in {at[i] for i in needed})
    # the mean by how well each is known
    trust = 1 / (split.error**2 + 1e-150)  # far below any error, and sums of its inverse are still numbers
    mean = (split.value * trust).sum(axis=others) / trust.sum(axis=others)
    return where, mean.reshape(_shape(where, spelling))


def _words(names: list[str], spelling: Spelling) -> str | None:
    """Axes as the pattern writes them, whole groups where all factors are there; the family's own place where that
    differs by axes of one element only."""
    own = {name for group in tokenize(spelling.own or "") for name in group}
    long = {axis.name for axis in spelling.bound.axes if axis.size > 1}
    if names and set(names) == own & long:
        return spelling.own
    groups: list[tuple[str, ...]] = []
    for group in spelling.spec.pattern.left:
        if group == (ELLIPSIS,):
            continue
        there = [name for name in group if name in names]
        groups += [group] if len(there) == len(group) else [(name,) for name in there]
    covered = {name for group in groups for name in group}
    return untokenize(groups) if covered == set(names) else None


def _shape(where: str, spelling: Spelling) -> tuple[int, ...]:
    return tuple(prod(spelling.bound.size_of(name) for name in group) for group in tokenize(where))
