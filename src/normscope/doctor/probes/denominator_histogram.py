"""How the denominators of a site are spread, in logarithmic bins, against the least that eps lets them be.

The bins are the same for every site: ``PER_DECADE`` in each factor of ten, so that histograms of two modes or two sites
lie on one grid. A set whose denominator is near ``floor``, the denominator at variance 0, is held up by eps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor.probes import Probe
from normscope.doctor.probes.statistics import CALLS
from normscope.doctor.sets import denominators, sets_of, working_eps

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

    Array = NDArray[np.float64]

PER_DECADE = 8
DECADES = 12
"""to either side of 1; what lies beyond falls into the last bin"""


@dataclass
class Histogram:
    """The denominators of one site in one mode, all calls together."""

    run: str
    mode: str
    eps: float
    floor: float
    """the denominator at variance 0"""
    sets: int = 0
    """how many denominators, of those at valid positions that are finite and not 0"""
    smallest: float = float("inf")
    held: int = 0
    """how many are within a tenth of ``floor``: there the variance is less than about a fifth of eps"""
    bins: Counter[int] = field(default_factory=Counter)
    """k -> how many lie from 10^(k / PER_DECADE) up to the next"""

    def add(self, values: Array) -> None:
        values = values[np.isfinite(values) & (values > 0)]
        if not len(values):
            return
        self.sets += len(values)
        self.smallest = min(self.smallest, float(values.min()))
        self.held += int((values < 1.1 * self.floor).sum())
        k = np.clip(np.floor(PER_DECADE * np.log10(values)), -PER_DECADE * DECADES, PER_DECADE * DECADES)
        self.bins.update(k.astype(int).tolist())


class DenominatorHistogram(Probe):
    """site name -> mode -> ``Histogram``."""

    name = "denominator_histogram"
    runs = ("eval", "batch")
    rides = True

    def start(self, subject: Subject) -> str | None:
        self.mask: torch.Tensor | None = subject.mask
        self.found: dict[str, dict[str, Histogram]] = {}
        return None

    def observe(self, event: Event) -> None:
        modes = self.found.setdefault(event.site.name, {})
        # A mode is looked at in the first run that shows it.
        if event.index >= CALLS or (event.mode in modes and modes[event.mode].run != event.run):
            return
        if event.spec.scale not in ("std", "rms", "l2"):
            return
        eps = working_eps(event.spec, event.input.dtype)
        values = self._values(event, eps)
        if values is None:
            return
        floor = float(denominators(np.zeros(1), event.spec, eps)[0])
        modes.setdefault(event.mode, Histogram(event.run, event.mode, eps, floor)).add(values)

    def _values(self, event: Event, eps: float) -> Array | None:
        if event.mode in ("running", "frozen"):
            stored = event.tensors.get("running_var")
            if stored is None:
                return None
            return denominators(stored.detach().double().cpu().numpy().ravel(), event.spec, eps)
        sets = sets_of(event)
        return None if isinstance(sets, str) else sets.denominator[sets.finite & sets.valid(self.mask)]

    def finish(self, subject: Subject) -> dict[str, dict[str, Histogram]]:
        known = {
            name: {mode: histogram for mode, histogram in modes.items() if histogram.sets}
            for name, modes in self.found.items()
        }
        return {name: modes for name, modes in known.items() if modes}
