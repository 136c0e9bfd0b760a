"""Two specifications on one input: the finest axes that both speak of.

Each input axis is cut wherever either pattern cuts it. A unit is one such piece with its roles on both sides.
Two specifications have the same statistic sets exactly where every unit is kept by both or erased by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING

from normscope.spec.bound import BoundSpec
from normscope.spec.pattern import ELLIPSIS, Group, Pattern, tokenize, untokenize

if TYPE_CHECKING:
    from normscope.spec.normspec import NormSpec

PRIMES = ((5, 7, 11, 13, 17, 19, 23, 29, 31, 37), (41, 43, 47, 53, 59, 61, 67, 71, 73, 79))
"""sizes that nothing divides by chance, twice, so that what holds for both holds for all sizes"""


class Misaligned(Exception):
    """No input is read by both, or their axes have no common refinement. The text says why."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring elementary axes of one specification that play the same roles."""

    names: tuple[str, ...]
    size: int
    roles: frozenset[str]
    """among kept, weight, bias, state, whiten"""


@dataclass(frozen=True)
class Unit:
    """A piece longer than 1 that neither specification cuts further."""

    size: int
    a: Piece
    b: Piece

    def differs(self, role: str) -> bool:
        return (role in self.a.roles) != (role in self.b.roles)

    @property
    def name(self) -> str:
        """Its axis in the words of the first specification, and of the second where that has others."""
        first, second = " ".join(self.a.names), " ".join(self.b.names)
        return first if first == second else f"{first} ({second} of the other)"


@dataclass(frozen=True)
class Match:
    """Input axes of two patterns that hold the same data, as groups of elementary names."""

    a: tuple[Group, ...]
    b: tuple[Group, ...]


def match(a: Pattern, b: Pattern, ndim: int, layout: Mapping[str, str] | None) -> list[Match]:
    """Pair the input axes of ``a`` at rank ``ndim`` with those of ``b``.

    Without a layout both read the same tensor and axes are paired by position. With one, ``b`` reads the same
    data with its axes in another order: axes are paired by name, those of ``a`` renamed by the layout, and
    what is left in order.
    """
    left = expand(a, ndim)
    if layout is None:
        return [Match((x,), (y,)) for x, y in zip(left, expand(b, ndim), strict=True)]
    unknown = [name for name, new in layout.items() if name not in a.names or new not in b.names]
    if unknown:
        raise Misaligned(
            f"the layout maps {unknown[0]!r} to {layout[unknown[0]]!r}, which are no axes of the two patterns"
        )
    named = {name: layout.get(name, name) for name in a.names if layout.get(name, name) in b.names}
    named.pop(ELLIPSIS, None)
    targets = set(named.values())
    lone_a = [x for x in left if not any(name in named for name in x)]
    lone_b = [y for y in b.left if y != (ELLIPSIS,) and not targets & set(y)]
    spread = len(lone_a) - len(lone_b)
    if spread < 0 or (spread and not b.has_ellipsis):
        mine, others = (
            ", ".join(untokenize([group]) for group in lone) or "none" for lone in (lone_a, lone_b)
        )
        raise Misaligned(
            f"pairing by name leaves {mine} of one and {others} of the other; name more in the layout"
        )
    right = expand(b, b.min_ndim + spread)
    lone_b = [y for y in right if not targets & set(y)]
    pairs = [Match((x,), (y,)) for x, y in zip(lone_a, lone_b, strict=True)]
    return pairs + _components(
        [x for x in left if x not in lone_a], [y for y in right if y not in lone_b], named
    )


def _components(left: list[Group], right: list[Group], named: Mapping[str, str]) -> list[Match]:
    """Join axes that share a name, however many: (t b) on one side is t and b on the other."""
    found: list[Match] = []
    while left:
        mine, others = [left.pop(0)], list[Group]()
        while True:
            wanted = {named[name] for group in mine for name in group if name in named}
            more = [y for y in right if wanted & set(y)]
            others += more
            right = [y for y in right if y not in more]
            reached = {name for group in others for name in group}
            joined = [x for x in left if any(named.get(name) in reached for name in x)]
            mine += joined
            left = [x for x in left if x not in joined]
            if not more and not joined:
                break
        found.append(Match(tuple(mine), tuple(others)))
    return found


def expand(pattern: Pattern, ndim: int) -> list[Group]:
    """The input axes with the ellipsis written out.

    >>> expand(Pattern.parse("b ... -> b"), 3)
    [('b',), ('...0',), ('...1',)]
    """
    found: list[Group] = []
    for group in pattern.left:
        if group == (ELLIPSIS,):
            found += [(f"{ELLIPSIS}{i}",) for i in range(ndim - pattern.min_ndim)]
        else:
            found.append(group)
    return found


def generic_shape(
    a: NormSpec, b: NormSpec, matches: list[Match], ndim: int, layout: Mapping[str, str] | None, trial: int
) -> tuple[int, ...]:
    """A shape for ``a`` that both fit, with sizes that agree only where the specifications force them to.

    Raises Misaligned where their fixed sizes contradict each other.
    """
    sizes: dict[Group, int] = {}
    fresh = iter(PRIMES[trial])
    for pair in matches:
        for group in pair.a:
            prime = next(fresh)
            if len(pair.a) == len(pair.b) == 1:
                sizes[group] = _common_size(group, a.sizes, pair.b[0], b.sizes, prime)
            else:
                theirs = {name: b.sizes.get((layout or {}).get(name, name)) for name in group}
                sizes[group] = prod(a.sizes.get(name) or theirs[name] or prime for name in group)
    return tuple(sizes[group] for group in expand(a.pattern, ndim))


def _common_size(
    a: Group, a_sizes: Mapping[str, int], b: Group, b_sizes: Mapping[str, int], prime: int
) -> int:
    known = [prod(sizes[n] for n in group if n in sizes) for group, sizes in ((a, a_sizes), (b, b_sizes))]
    fixed = [
        size
        for size, group, sizes in zip(known, (a, b), (a_sizes, b_sizes), strict=True)
        if set(group) <= set(sizes)
    ]
    size = fixed[0] if fixed else lcm(*known) * prime
    if any(size % k for k in known) or len(set(fixed)) > 1:
        raise Misaligned(f"no size of {' '.join(a)} fits both {dict(a_sizes)} and {dict(b_sizes)}")
    return size


def shape_of_other(
    matches: list[Match], bound: BoundSpec, b: Pattern, layout: Mapping[str, str] | None
) -> tuple[int, ...]:
    """The shape in which the second specification reads an input that the first is bound to."""
    sizes = {axis.name: axis.size for axis in bound.axes}
    by_target = {(layout or {}).get(name, name): size for name, size in sizes.items()}
    found: dict[Group, int] = {}
    for pair in matches:
        for group in pair.b:
            if len(pair.b) == 1:
                found[group] = prod(sizes[name] for axis in pair.a for name in axis)
                continue
            strangers = [name for name in group if name not in by_target]
            if strangers:
                raise Misaligned(f"the size of {strangers[0]} cannot be told from the other's axes")
            found[group] = prod(by_target[name] for name in group)
    ndim = sum(len(pair.b) for pair in matches)
    return tuple(found[group] for group in expand(b, ndim))


def units(
    a: NormSpec,
    bound_a: BoundSpec,
    b: NormSpec,
    bound_b: BoundSpec,
    matches: list[Match],
    layout: Mapping[str, str] | None,
) -> list[Unit]:
    """Cut all matched axes into units. Raises Misaligned where there is no common refinement."""
    pieces_a, pieces_b = _pieces(a, bound_a), _pieces(b, bound_b)
    found: list[Unit] = []
    for pair in matches:
        left = [pieces_a[name] for group in pair.a for name in group if pieces_a[name].size > 1]
        right = [pieces_b[name] for group in pair.b for name in group if pieces_b[name].size > 1]
        order = [(layout or {}).get(piece.names[0], piece.names[0]) for piece in left]
        if layout is not None and {piece.names[0] for piece in right} == set(order):
            right.sort(key=lambda piece: order.index(piece.names[0]))
        found += _refine(_merge(left), _merge(right))
    return found


def _pieces(spec: NormSpec, bound: BoundSpec) -> dict[str, Piece]:
    places = {"weight": spec.weight, "bias": spec.bias, "whiten": spec.whiten}
    places["state"] = spec.running_axes if spec.running is not None else None
    named = {
        role: {name for group in tokenize(where or "") for name in group} for role, where in places.items()
    }
    named["kept"] = set(spec.pattern.kept)
    found = {}
    for axis in bound.axes:
        written = ELLIPSIS if axis.name.startswith(ELLIPSIS) else axis.name
        roles = frozenset(role for role, names in named.items() if written in names)
        found[axis.name] = Piece((axis.name,), axis.size, roles)
    return found


def _merge(pieces: list[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].roles == piece.roles:
            last = merged.pop()
            piece = Piece(last.names + piece.names, last.size * piece.size, piece.roles)
        merged.append(piece)
    return merged


def _refine(left: list[Piece], right: list[Piece]) -> list[Unit]:
    """The common refinement of two factorizations of one axis, from the innermost factor outwards."""
    mine = [(piece, piece.size) for piece in left]
    others = [(piece, piece.size) for piece in right]
    found: list[Unit] = []
    while mine and others:
        (a, rest_a), (b, rest_b) = mine.pop(), others.pop()
        size = min(rest_a, rest_b)
        if max(rest_a, rest_b) % size:
            raise _uneven(left, right)
        found.append(Unit(size, a, b))
        if rest_a > size:
            mine.append((a, rest_a // size))
        if rest_b > size:
            others.append((b, rest_b // size))
    if mine or others:
        raise _uneven(left, right)
    return found[::-1]


def _uneven(left: list[Piece], right: list[Piece]) -> Misaligned:
    first, second = (", ".join(f"{' '.join(p.names)}={p.size}" for p in side) for side in (left, right))
    return Misaligned(
        f"one cuts an input axis into {first or 'nothing'}, the other into {second or 'nothing'}"
    )
