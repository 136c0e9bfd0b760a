"""Which elements share statistics: one element is moved far, and the outputs that follow are its set.

In every member of the family the sets cut the elements into parts of one shape: along each input axis a set holds
either all positions, or one, or the positions that agree on some factors of the axis. ``(g c)`` with c erased is a run
of neighbours, ``(c g)`` every g-th position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import numpy as np
from numpy.typing import NDArray

from normscope.identify.probing import Contradiction, Pair, Prober

Mask = NDArray[np.bool_]
Labels = NDArray[np.int64]
Joined = dict[tuple[int, int], Mask]
"""axis and position -> positions along that axis"""
LOOKED_AT = 512
"""positions of an axis up to which dead ones are looked at one by one"""
POINTWISE = (
    "every output follows its own input alone, and no straight line: an activation, or a norm whose statistic sets "
    "have one element each (then pass an example with longer axes)"
)
MOVED = 64
"""roundings by which an output has to change to have moved; what shares a set moves by a large part of itself less the
bias"""


@dataclass(frozen=True)
class Factor:
    """One factor of an input axis, outermost first in `Partition.dims`."""

    size: int
    kept: bool


@dataclass(frozen=True)
class Partition:
    """The statistic sets of one input shape."""

    shape: tuple[int, ...]
    dims: tuple[tuple[Factor, ...], ...]
    """the factors of each input axis; an axis of size 1 counts as kept, though nobody can tell"""
    segments: tuple[int, ...] = ()
    """lengths of the virtual batches along `ragged` where they differ; that axis is one erased factor in `dims`"""
    ragged: int | None = None

    @property
    def labels(self) -> Labels:
        """The number of its set for every element, in the shape of the input."""
        label = np.zeros((1,) * len(self.shape), dtype=np.int64)
        for dim, factors in enumerate(self.dims):
            place = np.arange(self.shape[dim])
            number = np.zeros_like(place)
            inner = self.shape[dim]
            for factor in factors:
                inner //= factor.size
                if factor.kept:
                    number = number * factor.size + place // inner % factor.size
            if dim == self.ragged:
                number = np.repeat(np.arange(len(self.segments)), self.segments)
            along = [-1 if d == dim else 1 for d in range(len(self.shape))]
            label = label * (int(number.max()) + 1) + number.reshape(along)
        return np.asarray(np.broadcast_to(label, self.shape), dtype=np.int64)

    @property
    def set_size(self) -> int:
        """elements of a set, of the largest where virtual batches differ"""
        size = prod(f.size for factors in self.dims for f in factors if not f.kept)
        return size // sum(self.segments) * max(self.segments) if self.segments else size

    @property
    def pointwise(self) -> bool:
        """Every output follows its own input alone."""
        return self.set_size == 1


def find_partition(f: Prober, pairs: Sequence[Pair]) -> Partition:
    """Find the sets, by moving elements of the first input.

    Raises Contradiction where what moves together is no such partition.
    """
    base, live = pairs[0], _telling(f, pairs)
    shape = base.x.shape
    places = _places(live)
    moved = {place: _moved_by(f, base, place) for place in places}
    joined = _joined(f, base, places[0], live)
    found = _product(shape, moved, live, joined) or _ragged(f, base, moved, live, joined)
    if found is None:
        raise Contradiction(_why_not(moved, live))
    _say(f, found, places)
    return found


def _telling(f: Prober, pairs: Sequence[Pair]) -> Mask:
    """Outputs that have to move with their set: those that stand clear of the bias, where the gain is not 0."""
    outputs = [y for one in pairs for y in (one.plus, one.minus)]
    apart, size = np.abs(outputs[0] - np.mean(outputs, axis=0)), np.abs(outputs).max(axis=0)
    clear = np.asarray(apart > 16 * MOVED * f.roundoff * size)
    faint = (apart > 16 * f.roundoff * size) & ~clear
    if faint.sum() > clear.sum():
        share = float(np.median(apart[faint] / size[faint]))
        finer = ". Pass a callable and an example of float64" if f.roundoff > 2.0**-50 else ""
        raise Contradiction(
            f"its outputs vary by {share:.2g} of their level only, too little to be told from rounding: the bias hides "
            f"the rest{finer}"
        )
    return clear


def _places(live: Mask) -> list[tuple[int, ...]]:
    """The first, the last and some live elements between them."""
    flat = np.flatnonzero(live)
    picked = [flat[0], flat[-1], flat[len(flat) * 5 // 13], flat[len(flat) * 3 // 4]]
    return [tuple(int(i) for i in np.unravel_index(k, live.shape)) for k in dict.fromkeys(picked)]


def _joined(f: Prober, base: Pair, place: tuple[int, ...], live: Mask) -> Joined:
    """Of positions along an axis at which all is dead: the live positions that an input there moves, as it is of their
    sets. A regular pattern of gains of 0 looks like a factor of the axis to those who see live outputs only."""
    found: Joined = {}
    for dim, size in enumerate(live.shape):
        others = tuple(d for d in range(live.ndim) if d != dim)
        dead = np.flatnonzero(~live.any(axis=others))
        # beyond that a pattern is not worth a call for each position
        for at in dead if size <= LOOKED_AT else ():
            mask = _moved_by(f, base, (*place[:dim], int(at), *place[dim + 1 :])) & live
            found[dim, int(at)] = np.asarray(mask.any(axis=others))
    return found


def _moved_by(f: Prober, base: Pair, place: tuple[int, ...]) -> Mask:
    """Outputs that change when one input moves by 3 sqrt(N) standard deviations up or down: a mean square then grows
    tenfold at least, as a set has at most all N elements. Two elements only ever swap signs, which one of both does."""
    moved: Mask = np.zeros(base.x.shape, dtype=np.bool_)
    far = 3 * sqrt(base.x.size) * float(base.x.std() or 1.0)
    for step in (far, -far):
        x = base.x.copy()
        x[place] += step
        y = f(x)
        moved |= ~(np.abs(y - base.plus) <= MOVED * f.roundoff * np.maximum(base.size, np.abs(y)))
    return moved


# Sets that are products of factors ----------------------------------------------------------------------------------


def _product(
    shape: tuple[int, ...], moved: dict[tuple[int, ...], Mask], live: Mask, joined: Joined
) -> Partition | None:
    """The factors, where every place tells the same ones and they explain exactly what moved."""
    dims = [_factors(moved, live, joined, dim, size) for dim, size in enumerate(shape)]
    if None in dims:
        return None
    found = Partition(shape, tuple(factors for factors in dims if factors is not None))
    return found if _explains(found, moved, live) else None


def _explains(found: Partition, moved: dict[tuple[int, ...], Mask], live: Mask) -> bool:
    labels = found.labels
    return all(((labels == labels[place]) & live == mask & live).all() for place, mask in moved.items())


def _factors(
    moved: dict[tuple[int, ...], Mask], live: Mask, joined: Joined, dim: int, size: int
) -> tuple[Factor, ...] | None:
    """The factors of one axis that fit what every place shows."""
    readings = [_readings(mask, live, joined, place, dim, size) for place, mask in moved.items()]
    return next((factors for factors in readings[0] if all(factors in other for other in readings[1:])), None)


def _readings(
    mask: Mask, live: Mask, joined: Joined, place: tuple[int, ...], dim: int, size: int
) -> list[tuple[Factor, ...]]:
    """Factors of one axis that the set of ``place`` may stand for."""
    others = tuple(d for d in range(mask.ndim) if d != dim)
    along: Mask = np.asarray(mask.any(axis=others))
    along[place[dim]] = True
    # a position where everything that could have moved is dead says nothing: it may be in or out
    silent = ~(live & mask.any(axis=dim, keepdims=True)).any(axis=others)
    told = along.copy()
    for at in range(size):
        if (dim, at) in joined and at != place[dim]:
            told[at] = (joined[dim, at] & along).any()
    found = [factors_of(np.asarray(guess), size) for guess in (told, along, along | silent)]
    return [factors for factors in found if factors is not None]


def factors_of(along: Mask, size: int) -> tuple[Factor, ...] | None:
    """Factors of an axis, outermost first, such that ``along`` holds the positions that agree on the kept ones.

    >>> two = np.array([0, 0, 1, 1, 0, 0], bool)
    >>> factors_of(two, 6)
    (Factor(size=3, kept=True), Factor(size=2, kept=False))
    >>> factors_of(~two, 6) is None
    True
    """
    if size == 1:
        return (Factor(1, True),)
    factors: list[Factor] = []
    while len(along) > 1:
        n = len(along)
        divisors = [d for d in range(n, 1, -1) if n % d == 0]
        # the longest run of neighbours that are in or out together: an erased factor
        run = next((d for d in divisors if (along.reshape(-1, d) == along.reshape(-1, d)[:, :1]).all()), 1)
        if run > 1:
            factors.append(Factor(run, False))
            along = along[::run]
            continue
        at = np.flatnonzero(along)
        # the largest stride on which all of them lie: a kept factor
        stride = next((d for d in divisors if (at % d == at[0] % d).all()), 1)
        if stride == 1:
            return None
        factors.append(Factor(stride, True))
        along = along[at[0] % stride :: stride]
    return tuple(reversed(factors)) if along.all() else None


# Virtual batches of different sizes ---------------------------------------------------------------------------------


def _ragged(
    f: Prober, base: Pair, moved: dict[tuple[int, ...], Mask], live: Mask, joined: Joined
) -> Partition | None:
    """Sets that differ along one axis only, and are runs of neighbours there: walk along it from run to run."""
    shape = base.x.shape
    whole = [_factors(moved, live, joined, dim, size) for dim, size in enumerate(shape)]
    open_dims = [dim for dim, factors in enumerate(whole) if factors is None]
    if len(open_dims) != 1:
        return None
    dim, at, segments = open_dims[0], 0, []
    others = tuple(d for d in range(len(shape)) if d != dim)
    alive = np.flatnonzero(live.any(axis=others))
    while at < shape[dim]:
        if at not in alive:
            return None
        rest = np.argwhere(np.take(live, at, axis=dim))[0]
        place = tuple(int(i) for i in np.insert(rest, dim, at))
        moved = {**moved, place: _moved_by(f, base, place)}
        run = np.flatnonzero(moved[place].any(axis=others))
        if run.size == 0 or run[0] != at or not np.array_equal(run, np.arange(at, at + run.size)):
            return None
        segments.append(int(run.size))
        at += int(run.size)
    dims = tuple(factors or (Factor(shape[dim], False),) for factors in whole)
    found = Partition(shape, dims, tuple(segments), dim)
    return found if _explains(found, moved, live) else None


# Words --------------------------------------------------------------------------------------------------------------


def _say(f: Prober, found: Partition, places: Sequence[tuple[int, ...]]) -> None:
    kept = [_axes_in_words(found, True), _axes_in_words(found, False)]
    what = f"statistics run over {kept[1] or 'no axis'} and are kept on {kept[0] or 'no axis'}"
    probe = f"one element moved far up and down, at {len(places)} places"
    sets = int(found.labels.max()) + 1
    f.conclude(what, probe, sets=sets, elements_of_a_set=found.set_size)


def _axes_in_words(found: Partition, kept: bool) -> str:
    said = []
    for dim, factors in enumerate(found.dims):
        if found.shape[dim] == 1:
            continue
        if dim == found.ragged:
            said.append(f"axis {dim} in runs of {', '.join(map(str, found.segments))}")
            continue
        own = [factor for factor in factors if factor.kept == kept]
        if own:
            part = "" if len(factors) == 1 else f" (a factor of {' times '.join(str(x.size) for x in own)})"
            said.append(f"axis {dim}{part}")
    return ", ".join(said)


def _why_not(moved: dict[tuple[int, ...], Mask], live: Mask) -> str:
    counts = {place: int((mask & live).sum()) for place, mask in moved.items()}
    said = ", ".join(f"the one at {place} moves {count}" for place, count in counts.items())
    if len(set(counts.values())) == 1:
        return f"the outputs that follow one input do not form equal blocks of whole axes or factors: {said} outputs"
    return f"inputs do not fall into sets that share statistics: {said} outputs"
