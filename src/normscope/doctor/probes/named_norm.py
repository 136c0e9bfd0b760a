"""A norm written by hand beside the norm that its class is named after, on the activations that really occur.

Both are computed by the reference on whole statistic sets of the input: those of the smallest spread, where eps counts,
and others by the check's seed. Where a module holds another eps than it computes with, the other norm has that one.
Differences are those of the normalized values, before weight and bias, so 1 is a standard deviation of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from normscope import reference
from normscope.doctor.named import meant
from normscope.doctor.probes import Probe
from normscope.doctor.probes.precision import _running, rows_spec
from normscope.doctor.sets import Sets, sets_of
from normscope.doctor.stated import other_eps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

CALLS = 4
ELEMENTS = 20_000
"""compared per call; a single set may be larger"""


@dataclass(frozen=True)
class Beside:
    """One site beside the norm of its name, at the call where they differ most."""

    run: str
    difference: float
    """largest difference of the normalized values"""
    typical: float
    """root mean square of the same"""
    where: str
    """the set of the largest difference, ``b=3, l=17``"""
    sets: int
    """sets compared"""
    set_size: int
    constant: int
    """sets of the call without any spread"""
    broken: int
    """sets compared where this norm gives no numbers and the one of its name does"""


class BesideTheNamedNorm(Probe):
    """site name -> ``Beside``, of hand-written norms that were identified (where a name says nothing, beside themselves
    with the eps they hold)."""

    name = "named_norm"
    runs = ("eval", "batch")

    def start(self, subject: Subject) -> str | None:
        self.random = np.random.default_rng(subject.seed)
        self.found: dict[str, Beside] = {}
        return None

    def observe(self, event: Event) -> None:
        if event.site.kind != "hand-written" or event.index >= CALLS or event.spec.source == "input":
            return
        if event.run == "batch" and event.mode != "batch":
            return  # as in the eval run
        _, named = meant(event.site, event.spec) or ("", event.spec)
        held = other_eps(event.site, event.spec)
        named = named if held is None else named.replace(eps=held)
        seen = _beside(event, named, self.random)
        before = self.found.get(event.site.name)
        if seen is not None and (before is None or seen.difference > before.difference):
            self.found[event.site.name] = seen

    def finish(self, subject: Subject) -> dict[str, Beside]:
        return self.found


def _beside(event: Event, named: NormSpec, random: np.random.Generator) -> Beside | None:
    sets = sets_of(event)
    if isinstance(sets, str):
        return None
    chosen = _chosen(sets, random)
    if not len(chosen):
        return None
    own, other = (
        _other_axes(event, sets, named)
        if named.stats != event.spec.stats
        else _rows(event, sets, named, chosen)
    )
    lost = ~np.isfinite(own) & np.isfinite(other)
    gap = np.where(np.isfinite(own) & np.isfinite(other), np.abs(own - other), 0.0)
    row = int(gap.max(1).argmax())
    return Beside(
        run=event.run,
        difference=float(gap.max()),
        typical=float(np.sqrt(np.mean(gap**2))),
        where=sets.label(int(chosen[row])) if len(gap) == len(chosen) else "",
        sets=len(gap),
        set_size=sets.size,
        constant=int(sets.dead.sum()),
        broken=int(lost.any(1).sum()),
    )


def _chosen(sets: Sets, random: np.random.Generator) -> NDArray[np.int64]:
    """The set of least spread that has some, one that has none, and others by chance."""
    usable = np.flatnonzero(sets.finite)
    live, dead = usable[~sets.dead[usable]], usable[sets.dead[usable]]
    first = [*live[np.argsort(sets.variance[live])[:1]], *dead[:1]]
    others = np.setdiff1d(usable, first)
    room = max(0, ELEMENTS // max(1, sets.size) - len(first))
    return np.array([*first, *random.choice(others, min(room, len(others)), replace=False)], dtype=np.int64)


def _rows(event: Event, sets: Sets, named: NormSpec, chosen: NDArray[np.int64]) -> tuple[Array, Array]:
    """The normalized values of some sets, by the two specifications."""
    stored = event.mode in ("running", "frozen")
    x = sets.take(event.input, chosen)
    state = reference.RunningState(*_running(event, sets, chosen)) if stored else None
    own, other = (
        reference.forward(x, rows_spec(spec, eps, stored=stored), running=state, training=not stored)
        for spec, eps in ((event.spec, sets.eps), (named, _eps(named, event, sets)))
    )
    return own * event.spec.gain, other * named.gain


def _other_axes(event: Event, sets: Sets, named: NormSpec) -> tuple[Array, Array]:
    """The same of whole samples, where the two do not share their sets; a row a sample."""
    shape = tuple(event.input.shape)
    few = max(2, min(shape[0], ELEMENTS // max(1, prod(shape[1:]))))
    x = event.input.detach()[:few].double().cpu().numpy()
    own, other = (
        reference.forward(x, spec.replace(weight=None, bias=None, weight_offset=0.0, running=None, eps=eps))
        for spec, eps in ((event.spec, sets.eps), (named, _eps(named, event, sets)))
    )
    return own.reshape(len(x), -1), other.reshape(len(x), -1)


def _eps(named: NormSpec, event: Event, sets: Sets) -> float:
    """Of the other norm: what is None is an epsilon of the dtype for both."""
    return sets.eps if named.eps is None or named.eps == event.spec.eps else named.eps
