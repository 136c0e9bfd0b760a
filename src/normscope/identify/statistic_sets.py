"""The statistic sets, at inputs of ordinary size or, where a high floor rules those, at large ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from normscope.identify.bias import half_sums
from normscope.identify.fixed import LINEAR
from normscope.identify.partition import Partition, find_partition
from normscope.identify.probing import Contradiction, Pair, Prober, pair
from normscope.identify.scan import Scan, growing, is_linear, require_shown, scan

FARTHEST = 2.0**200
"""the size of outputs whose squares, over those of their roundings, float64 still holds; and one over it"""


def sets(f: Prober, pairs: list[Pair]) -> Partition:
    """The sets, by inputs of ordinary size; where those show none, by large ones.

    Raises Contradiction where outputs are not finite, out of range or constant, and where what moves together forms no
    sets.
    """
    outputs = [y for one in pairs for y in (one.plus, one.minus)]
    bad = int(sum((~np.isfinite(y)).sum() for y in outputs))
    if bad:
        raise Contradiction(
            f"ordinary inputs give {bad} outputs of {sum(y.size for y in outputs)} that are NaN or infinite"
        )
    largest = float(np.abs(outputs).max())
    if largest and not 1 / FARTHEST < largest < FARTHEST:
        raise Contradiction(
            f"its outputs reach {largest:.2g}: squares of such numbers leave the range of float64, so that no fit "
            "tells what they are. Scale the output in a function around it"
        )
    live = np.ptp(outputs, axis=0) > 16 * f.roundoff * np.abs(outputs).max(axis=0)
    if not live.any():
        raise Contradiction(
            "the output does not depend on the input: it is a constant, a gain of 0, one that is lost in the rounding "
            "of the bias, or a centered norm whose statistic sets have one element each (then pass an example with "
            "longer axes)"
        )
    dead = int((~live).sum())
    if dead:
        f.notes.append(
            f"{dead} of {live.size} outputs never change: their gain is 0, or lost in the rounding of their bias; "
            "their sets were told by the others"
        )
    try:
        return find_partition(f, pairs)
    except Contradiction:
        s = scan(f, pairs, half_sums(f, pairs))
        if is_linear(s):
            require_shown(s)
            raise Contradiction(LINEAR) from None
        if (found := sets_of_large(s)) is None:
            raise
        return found


def sets_of_large(s: Scan) -> Partition | None:
    """The sets at inputs so large that the output stays: under a floor of 1000 outputs follow their own inputs alone.

    None where they show none there either.
    """
    top = max(s.found)
    if growing(s):
        return None
    quiet = Prober(s.f.box, s.f.roundoff)
    try:
        found = find_partition(quiet, [pair(quiet, one.x * 2.0**top) for one in s.pairs])
    except Contradiction:
        found = None
    s.f.calls += quiet.calls
    if found is None or found.pointwise:
        return None
    s.f.evidence += [
        replace(one, probe=f"{one.probe} of inputs of the size 2^{top}") for one in quiet.evidence
    ]
    return found
