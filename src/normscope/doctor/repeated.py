"""Which of two norms in a row is redundant, by algebra on their axes.

Along each axis of the input a statistic set is a run of neighbours: K sets, one after the other (K = 1: the axis is
erased; K = its size: it is kept; between: groups). The sets of one norm are unions of sets of another where K divides
the other's K on every axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.site import Call, Neighbour, Site
    from normscope.spec import BoundSpec, NormSpec

UNIFORM = 1e-3
"""largest spread of a gain, relative to its size, that counts as one number"""
PLAIN = ("std", "rms", "l2")


@dataclass(frozen=True)
class Redundancy:
    which: str
    """first | second"""
    while_uniform: bool
    """it rests on a gain or bias of the first norm that is one number now"""
    centered: bool
    """what the first norm puts out has mean 0, so that the second's centering has nothing to do either"""


def redundancy(first: Site, before: Call, second: Site, call: Call, between: Neighbour) -> Redundancy | None:
    """What one of two norms adds nothing to; None where both do something, or it cannot be told.

    ``before`` and ``call`` are a call of the first norm and the call of the second that its output went to, with
    ``between.places`` mapping the axes of the second's input to those of the first's output.
    """
    one, two = before.spec or first.spec, call.spec or second.spec
    if one is None or two is None or one.scale not in PLAIN or two.scale not in PLAIN:
        return None
    cut_one, cut_two = _cuts(one.bind(before.shape)), _cuts(two.bind(call.shape))
    if cut_one is None or cut_two is None:
        return None
    # the axes of the first norm's tensor, as the second one sees them
    seen = {place: cut_two[i] for i, place in enumerate(between.places) if place is not None}
    if any(axis not in seen and size > 1 for axis, size in enumerate(before.shape)):
        return None
    seen = {axis: seen.get(axis, 1) for axis in range(len(before.shape))}
    gathers = all(cut_one[axis] % sets == 0 for axis, sets in seen.items())
    divides = all(sets % cut_one[axis] == 0 for axis, sets in seen.items())
    common = _common(first, one, before, seen)
    if common is None:
        return None
    shifts = one.bias is not None or one.center
    bias = None if one.bias is None else first.array("bias")
    unshifted = two.center or one.bias is None or (bias is not None and not bias.any())
    if gathers and (one.center or not two.center) and unshifted:
        # without centering the bias must be 0, and training may move it
        return Redundancy("second", common == "uniform" or not (two.center or one.bias is None), one.center)
    if divides and (two.center or not shifts):
        return Redundancy("first", common == "uniform", False)
    return None


def _cuts(bound: BoundSpec) -> dict[int, int] | None:
    """Input axis -> number of runs it is cut into; None where sets are not runs along some axis."""
    if bound.ragged:
        return None
    cuts: dict[int, int] = {}
    erased: set[int] = set()
    for axis in bound.axes:
        if axis.kept and axis.dim in erased and axis.size > 1:
            return None  # erased, then kept: every n-th element
        cuts[axis.dim] = cuts.get(axis.dim, 1) * (axis.size if axis.kept else 1)
        if not axis.kept and axis.size > 1:
            erased.add(axis.dim)
    return cuts


def _common(first: Site, spec: NormSpec, call: Call, seen: dict[int, int]) -> str | None:
    """Whether the first norm's gain and bias are common to each set of the second: "axes" where they must be,
    "uniform" where they are because they are one number, None where they are not."""
    found = "axes"
    axes = spec.bind(call.shape).axes
    for what, where in (("weight", spec.weight), ("bias", spec.bias)):
        if not where:
            continue
        if spec.source == "input":
            return None  # computed anew for every input
        names = set(where.replace("(", " ").replace(")", " ").split())
        dims = {a.dim for a in axes if a.name in names or ("..." in names and a.name.startswith("..."))}
        if all(seen[dim] == call.shape[dim] for dim in dims):
            continue
        if not _uniform(first, what):
            return None
        found = "uniform"
    return found


def _uniform(site: Site, what: str) -> bool:
    values = site.array(what)
    if values is None or values.size == 0:
        return False
    return float(values.max() - values.min()) <= UNIFORM * float(abs(values).max())
