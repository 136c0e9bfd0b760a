"""Do the other samples of a batch change what a site computes for sample 0?

The batch runs twice with the same size and sample 0 at the same place; in the second run every other sample is
replaced. Whatever differs at sample 0 came from its companions, and the site that first differs in its output but
not in its input is the one that couples. Strength: the change in units of the spread of the output over samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor.change import Change, change, some
from normscope.doctor.probes import Probe

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject


@dataclass(frozen=True)
class Coupling:
    """What companions did to sample 0 at one site (all its calls together)."""

    order: int
    received: bool
    """sample 0 was changed already when it came in"""
    changed: bool
    """sample 0 of the output changed"""
    strength: float
    """root mean square change of the output over its spread (standard deviation over samples)"""
    mode: str
    """statistics in use: batch, running, frozen or input"""

    @property
    def responsible(self) -> bool:
        """It couples by itself, whether or not something before it does too."""
        return self.changed and not self.received


@dataclass(frozen=True)
class Companions:
    """``eval`` and ``batch``: site name -> :class:`Coupling`, in the order of execution; empty where the run failed."""

    eval: dict[str, Coupling]
    batch: dict[str, Coupling]
    output_eval: float | None
    """strength at the model's output; None where it has no sample axis"""
    output_batch: float | None
    pairs: bool
    """every output has a second axis as long as the batch: it may hold pairs of samples, which couple by design"""


@dataclass(frozen=True)
class _View:
    """Sample 0 of one call, along one axis that may be the sample axis."""

    input: NDArray[np.float64]
    output: NDArray[np.float64]
    spread: float
    dtype: torch.dtype


class CompanionsProbe(Probe):
    """``measured["companions"]``: :class:`Companions`."""

    name = "companions"
    runs = ("eval", "batch", "eval_companions", "batch_companions")

    def start(self, subject: Subject) -> str | None:
        self._samples = subject.batch_size
        self._views: dict[str, dict[tuple[str, int], dict[int, _View]]] = {}
        self._couplings: dict[str, dict[str, Coupling]] = {"eval": {}, "batch": {}}
        return None

    def observe(self, event: Event) -> None:
        base, _, replaced = event.run.partition("_")
        key = (event.site.name, event.index)
        views = self._views_of(event, spread=not replaced)
        if not replaced:
            self._views.setdefault(base, {})[key] = views
            return
        before = self._views.get(base, {}).pop(key, None)
        if before:
            self._compare(base, event, before, views)

    def finish(self, subject: Subject) -> Companions:
        return Companions(
            self._couplings["eval"],
            self._couplings["batch"],
            _at_output(subject, "eval"),
            _at_output(subject, "batch"),
            all(subject.batch_size in t.shape[1:] for t in subject.outputs.get("eval", ()) if t.ndim),
        )

    def _views_of(self, event: Event, *, spread: bool) -> dict[int, _View]:
        """By axis, of those that may be the sample axis.

        Row 0 of an axis of k rows a sample belongs to sample 0 whether its rows lie together or apart.
        """
        shape = event.input.shape
        if event.output.shape != shape:
            return {}
        first = event.spec.bind(tuple(shape)).sample_dim
        views = {}
        for axis in sorted(range(len(shape)), key=lambda a: (a != first, a)):
            rows = shape[axis]
            if rows != self._samples and (axis != first or rows < self._samples or rows % self._samples):
                continue
            output = event.output.movedim(axis, 0)
            values = some(output if spread else output[:1], keep=1)
            views[axis] = _View(
                some(event.input.select(axis, 0)),
                values[0],
                _spread(values) if spread else 0.0,
                event.output.dtype,
            )
        return views

    def _compare(self, run: str, event: Event, before: dict[int, _View], after: dict[int, _View]) -> None:
        couplings = self._couplings[run]
        seen = []
        for axis, old in before.items():
            new = after.get(axis)
            if new is None or new.input.shape != old.input.shape:
                continue
            received = change(old.input, new.input, old.dtype).real
            seen.append((received, change(old.output, new.output, old.dtype), old.spread))
        if not seen:
            return
        # The sample axis is the one along which row 0 came in untouched, where there is one.
        received, out, spread = min(seen, key=lambda item: item[0])
        name, known = event.site.name, couplings.get(event.site.name)
        here = Coupling(len(couplings), received, out.real, _strength(out, spread), event.mode)
        if known is None or (here.responsible and not known.responsible):
            order = len(couplings) if known is None else known.order
            couplings[name] = Coupling(order, here.received, here.changed, here.strength, here.mode)


def _spread(values: NDArray[np.float64]) -> float:
    """Standard deviation over samples, root mean square over the elements that are finite in all of them."""
    finite = values[:, np.isfinite(values).all(0)]
    return float(np.sqrt(np.mean(finite.var(0)))) if finite.size else 0.0


def _strength(out: Change, spread: float) -> float:
    return out.rms / spread if spread else out.relative


def _at_output(subject: Subject, run: str) -> float | None:
    """Largest strength over the tensors of the model's output that have a sample axis; 0 where nothing changed."""
    before, after = subject.outputs.get(run), subject.outputs.get(f"{run}_companions")
    if not before or not after:
        return None
    found = []
    for old, new in zip(before, after, strict=False):
        if old.ndim == 0 or old.shape[0] != subject.batch_size or old.shape != new.shape:
            continue
        values = some(old, keep=1)
        out = change(values[0], some(new[0]), old.dtype)
        found.append(_strength(out, _spread(values)) if out.real else 0.0)
    return max(found, default=None)
