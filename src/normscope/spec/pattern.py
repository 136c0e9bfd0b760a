"""The axis language: which axes of a tensor a statistic keeps, and which it runs over.

A pattern is an einops reduction, ``left -> right``. What stands on the right is kept, what vanishes is
erased. ``...`` stands for any number of axes; it stands at most once on the left, and on the right where all
of its axes are kept. A group ``(g c)`` says that one input axis is made of several, outermost first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

ELLIPSIS = "..."
_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z][A-Za-z0-9_]*|[()]|\S)")

Group = tuple[str, ...]
"""One axis of a tensor as its factors, outermost first; ``("...",)`` stands for the ellipsis."""


class PatternError(ValueError):
    """A pattern that means nothing, or that a shape does not fit. The text names pattern, shape and sizes."""


@dataclass(frozen=True)
class Axis:
    """One elementary axis of a bound pattern.

    Axes of the ellipsis are named ``...0``, ``...1`` and so on.
    """

    name: str
    size: int
    kept: bool
    dim: int
    """input dimension that it came from"""


def tokenize(text: str) -> tuple[Group, ...]:
    """Split one side of a pattern into axes.

    >>> tokenize("b (g c) ...")
    (('b',), ('g', 'c'), ('...',))

    Raises PatternError on unbalanced, empty or nested parentheses, and on what is no axis name.
    """
    groups: list[Group] = []
    inside: list[str] | None = None
    for token in _TOKEN.findall(text):
        if token == "(":
            if inside is not None:
                raise PatternError(f"parentheses cannot be nested in {text.strip()!r}")
            inside = []
        elif token == ")":
            if not inside:
                what = "closes nothing" if inside is None else "holds no axis"
                raise PatternError(f"a parenthesis {what} in {text.strip()!r}")
            groups.append(tuple(inside))
            inside = None
        elif token == ELLIPSIS:
            if inside is not None:
                raise PatternError(f"'...' cannot stand in parentheses in {text.strip()!r}")
            groups.append((ELLIPSIS,))
        elif token[0].isalpha() and token.isascii():
            if inside is None:
                groups.append((token,))
            else:
                inside.append(token)
        else:
            raise PatternError(
                f"{token!r} in {text.strip()!r} is no axis name: a letter, then letters, digits or '_'"
            )
    if inside is not None:
        raise PatternError(f"a parenthesis is not closed in {text.strip()!r}")
    return tuple(groups)


def untokenize(groups: Sequence[Group]) -> str:
    """The inverse of `tokenize`, with single spaces."""
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: the input axes on the left, and the names that are kept.

    >>> p = Pattern.parse("b (g c) ... -> b g")
    >>> str(p), p.names, p.kept, p.erased
    ('b (g c) ... -> b g', ('b', 'g', 'c', '...'), ('b', 'g'), ('c', '...'))
    """

    left: tuple[Group, ...]
    kept: tuple[str, ...]
    """in the order of the left side, in which the pattern prints too: the order on the right has no meaning"""

    @staticmethod
    def parse(text: str) -> Pattern:
        """Read ``left -> right``. Raises PatternError naming the pattern and the rule it breaks."""
        return _parse(text)

    @property
    def names(self) -> tuple[str, ...]:
        """All elementary names of the left side in order, ``...`` among them."""
        return tuple(name for group in self.left for name in group)

    @property
    def erased(self) -> tuple[str, ...]:
        """The names that vanish, in order."""
        return tuple(name for name in self.names if name not in self.kept)

    @property
    def has_ellipsis(self) -> bool:
        return (ELLIPSIS,) in self.left

    @property
    def min_ndim(self) -> int:
        """The least number of input axes that fits."""
        return len(self.left) - self.has_ellipsis

    @property
    def usual_samples(self) -> str:
        """The name whose input axis holds the samples by custom: ``b``, else a leading ``...``, else "" for none."""
        if "b" in self.names:
            return "b"
        return ELLIPSIS if self.left[0] == (ELLIPSIS,) else ""

    def group_of(self, name: str) -> Group:
        """The input axis that the name is a factor of."""
        return next(group for group in self.left if name in group)

    def __str__(self) -> str:
        return f"{untokenize(self.left)} -> {' '.join(self.kept)}".rstrip()

    def bind(self, shape: Sequence[int], sizes: Mapping[str, int] | None = None) -> tuple[Axis, ...]:
        """Give every elementary axis its size.

        Arguments: ``shape`` of the input, and ``sizes`` of named axes. In each group at most one size may be
            missing.
        Raises PatternError with pattern, shape and sizes.

        >>> [(a.name, a.size, a.kept) for a in Pattern.parse("b (g c) ... -> b g").bind((8, 6, 5), {"g": 2})]
        [('b', 8, True), ('g', 2, True), ('c', 3, False), ('...0', 5, False)]
        """
        sizes = dict(sizes or {})
        shape = tuple(int(n) for n in shape)
        if len(shape) < self.min_ndim or (len(shape) > self.min_ndim and not self.has_ellipsis):
            some = "at least " if self.has_ellipsis else ""
            raise self.misfit(
                shape, sizes, f"the pattern has {some}{self.min_ndim} axes, the shape has {len(shape)}"
            )
        axes: list[Axis] = []
        dim = 0
        for group in self.left:
            if group == (ELLIPSIS,):
                for i in range(len(shape) - self.min_ndim):
                    axes.append(Axis(f"{ELLIPSIS}{i}", shape[dim], ELLIPSIS in self.kept, dim))
                    dim += 1
                continue
            for name, size in zip(group, self._factor(group, shape, dim, sizes), strict=True):
                axes.append(Axis(name, size, name in self.kept, dim))
            dim += 1
        return tuple(axes)

    def _factor(self, group: Group, shape: tuple[int, ...], dim: int, sizes: Mapping[str, int]) -> list[int]:
        whole = shape[dim]
        missing = [name for name in group if name not in sizes]
        known = prod(sizes[name] for name in group if name in sizes)
        if len(missing) > 1:
            raise self.misfit(
                shape,
                sizes,
                f"sizes of {', '.join(missing)} in {untokenize([group])!r} cannot be told apart",
            )
        if not missing:
            if known != whole:
                raise self.misfit(
                    shape, sizes, f"axis {dim} is {whole}, but {untokenize([group])!r} is {known}"
                )
            return [sizes[name] for name in group]
        if known == 0 or whole % known:
            given = "*".join(f"{name}={sizes[name]}" for name in group if name in sizes)
            raise self.misfit(
                shape,
                sizes,
                f"axis {dim} is {whole}, which {given} does not divide; no size of {missing[0]} fits",
            )
        return [sizes.get(name, whole // known) for name in group]

    def misfit(self, shape: Sequence[int], sizes: Mapping[str, int], what: str) -> PatternError:
        """The error that a shape does not fit: what is wrong, then pattern, shape and sizes."""
        return PatternError(f"{what}.\n  pattern: {self}\n  shape: {tuple(shape)}\n  sizes: {dict(sizes)}")


@lru_cache(maxsize=1024)
def _parse(text: str) -> Pattern:
    def wrong(what: str) -> PatternError:
        return PatternError(f"{what}.\n  pattern: {text}")

    sides = text.split("->")
    if len(sides) != 2:
        raise wrong(f"a pattern has exactly one '->', this has {len(sides) - 1}")
    try:
        left, right = tokenize(sides[0]), tokenize(sides[1])
    except PatternError as error:
        raise wrong(str(error)) from None
    for group in right:
        if len(group) > 1:
            raise wrong(
                f"{untokenize([group])!r} on the right: kept axes are named one by one, without parentheses"
            )
    names = [name for group in left for name in group]
    kept = [name for group in right for name in group]
    for side, where in ((names, "left"), (kept, "right")):
        twice = sorted({name for name in side if side.count(name) > 1})
        if twice:
            raise wrong(f"{twice[0]!r} occurs twice on the {where}; each axis has its own name")
    strangers = [name for name in kept if name not in names]
    if strangers:
        raise wrong(f"{strangers[0]!r} on the right does not occur on the left; only input axes can be kept")
    if not left:
        raise wrong("the left side is empty; name the input axes")
    return Pattern(left, tuple(name for name in names if name in kept))
