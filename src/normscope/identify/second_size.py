"""What another shape tells: how the spread is measured, and what of a factored axis is fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from normscope.identify.bias import half_sums
from normscope.identify.fit import Fit, fit
from normscope.identify.partition import Factor, Partition, find_partition
from normscope.identify.probing import Contradiction, Prober, direction, pair
from normscope.identify.scan import Scan, observations


@dataclass(frozen=True)
class Second:
    """The gain at two set sizes, as one canonical fit each sees it."""

    sizes: tuple[int, int]
    gain_ratio: float
    error: float
    eps_ratio: float | None
    """of the constants in units of the root, as the canonical fits see them; None without"""
    eps_error: float
    """relative, at most"""
    shape: tuple[int, ...]


def second_gain(f: Prober, partition: Partition, one: Fit, start: float | None) -> Second | None:
    """Measure the gain once more with longer sets, along an axis on which neither it nor the sets depend."""
    for dim, factors in enumerate(partition.dims):
        size = partition.shape[dim]
        if len(factors) > 1 or factors[0].kept or size == 1 or dim == partition.ragged:
            continue
        for longer in (size + 1, 2 * size):
            shape = with_size(partition.shape, dim, longer)
            if f.takes(shape):
                dims = (*partition.dims[:dim], (Factor(longer, False),), *partition.dims[dim + 1 :])
                found = _ratio(f, replace(partition, shape=shape, dims=dims), partition, one, start)
                if found is not None:
                    return found
    return None


def _ratio(
    f: Prober, longer: Partition, partition: Partition, one: Fit, start: float | None
) -> Second | None:
    pairs = [pair(f, direction(longer.shape, seed)) for seed in (10, 11, 12)]
    s = Scan(f, pairs, half_sums(f, pairs))
    s.at(0)
    for k in () if start is None else range(round(start) - 3, round(start) + 4):
        s.at(k)
    again = next(
        found for found in fit(observations(s, start), longer, start, [one.shape]) if found.form == one.form
    )
    kept = tuple(slice(0, n) for n in partition.shape)
    before, after = one.gain, again.gain[kept]
    clear = np.abs(before) > 0.1 * np.abs(before).max()
    if not (after[clear] / before[clear] > 0).all():
        return None
    ratios = np.log(after[clear] / before[clear])
    middle = float(np.median(ratios))
    if float(np.abs(ratios - middle).max()) > 1e-4 or again.misfit > 1e4:  # the gain is another one there
        return None
    error = 1e-6 if f.roundoff < 2.0**-50 else 1e-4
    sizes = partition.set_size, longer.set_size
    eps_ratio = again.root_eps / one.root_eps if one.root_eps else None
    eps_error = 8 * (one.error + again.error) + error
    return Second(sizes, float(np.exp(middle)), error, eps_ratio, eps_error, longer.shape)


def fixed_factors(f: Prober, partition: Partition, start: float | None) -> dict[int, str]:
    """Of each factored axis, whether the number of blocks (``"outer"``) or their size (``"inner"``) stays when the axis
    doubles; nothing where the callable takes no other size.

    ``start`` is the octave at which eps takes over: the sets show above it.
    """
    scale = 2.0 ** max(0, round(start or 0) + 4)
    found = {}
    for dim, factors in enumerate(partition.dims):
        blocks = len(partition.segments) if dim == partition.ragged else _blocks(factors)
        if blocks is None:
            continue
        shape = with_size(partition.shape, dim, 2 * partition.shape[dim])
        again = _partition_at(f, shape, scale) if f.takes(shape) else None
        if again is None:
            continue
        now = len(again.segments) if dim == again.ragged else _blocks(again.dims[dim])
        if now is not None:
            found[dim] = "outer" if now == blocks else "inner"
            f.conclude(
                f"the {'number' if now == blocks else 'size'} of the blocks along axis {dim} is fixed",
                "that axis at twice its size",
                blocks_before=blocks,
                blocks_after=now,
            )
    return found


def _blocks(factors: Sequence[Factor]) -> int | None:
    return factors[0].size if len(factors) == 2 and factors[0].kept else None


def _partition_at(f: Prober, shape: tuple[int, ...], scale: float) -> Partition | None:
    pairs = [pair(f, scale * direction(shape, seed)) for seed in (0, 1)]
    quiet = Prober(f.box, f.roundoff)  # its conclusions are those of the first shape
    try:
        return find_partition(quiet, pairs)
    except Contradiction:
        return None


def with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """The shape with another size of one axis."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def roomy(f: Prober, shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The example's shape, with axes of size 1 made longer and long ones shorter where the callable takes that.

    Along an axis of one element nobody can tell what is kept; ``most`` elements are more than enough.
    """
    for dim in range(len(shape)):
        if shape[dim] == 1 and f.takes(with_size(shape, dim, 3)):
            shape = with_size(shape, dim, 3)
    for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
        if int(np.prod(shape)) > most and shape[dim] > 8 and f.takes(with_size(shape, dim, 6)):
            shape = with_size(shape, dim, 6)
    return shape
