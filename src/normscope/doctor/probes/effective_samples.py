"""How many independent values the batch statistics of a site rest on.

Neighbouring pixels say nearly the same, so the mean over B samples of H x W pixels varies like the mean of far fewer
independent values. How many follows from how much the per-sample means m_i really vary:

    n_eff = v / (s^2 / B)        v: variance of all elements;  s^2: variance of m_i over samples

with s^2 / v averaged over channels. A few samples, or copies of some, have no s^2 worth the name: then it cannot tell.
Measured in eval mode, where a site's input does not depend on the batch. Never more than there are elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor.moments import SampleMoments, sample_moments
from normscope.doctor.probes import Probe
from normscope.doctor.wording import SAMPLES_UNKNOWN, label, listed

if TYPE_CHECKING:
    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

FEW = 4


@dataclass(frozen=True)
class EffectiveSamples:
    """What was measured at one site; ``reason`` says why nothing was."""

    order: int
    effective: float = 0.0
    """independent values behind each batch mean, in this batch"""
    per_sample: float = 0.0
    """the same for one sample: between 1 and ``elements``"""
    elements: int = 0
    """elements of one sample in one channel"""
    samples: int = 0
    reason: str = ""


class EffectiveSamplesProbe(Probe):
    """``measured["effective_samples"]``: site name -> :class:`EffectiveSamples`, where training uses the batch."""

    name = "effective_samples"
    runs = ("eval",)

    def start(self, subject: Subject) -> str | None:
        self._samples = subject.batch_size
        self._seen: dict[str, SampleMoments | str] = {}
        if not any(site.mode_train == "batch" for site in subject.known()):
            unknown = [label(site) for site in subject.sites if site.spec is None]
            of = f" of those identified (not {listed(unknown)})" if unknown else ""
            return f"no site{of} normalizes by batch statistics in training"
        if not subject.batch_size:
            return SAMPLES_UNKNOWN
        if subject.batch_size < 2:
            return "one sample is no training batch: pass one like those in training"
        if subject.batch_size < FEW:
            return f"cannot tell with {subject.batch_size} samples: pass a batch like those in training, 8 or more"
        if subject.inputs_dependent:
            return f"cannot tell: the samples are not independent, {subject.inputs_dependent}"
        return None

    def observe(self, event: Event) -> None:
        site = event.site
        couples = "b" not in event.spec.stats.partition("->")[2].split()
        if site.mode_train == "batch" and couples and site.name not in self._seen:
            self._seen[site.name] = sample_moments(event, self._samples)

    def finish(self, subject: Subject) -> dict[str, EffectiveSamples]:
        return {name: _measure(order, moments) for order, (name, moments) in enumerate(self._seen.items())}


def _measure(order: int, moments: SampleMoments | str) -> EffectiveSamples:
    if isinstance(moments, str):
        return EffectiveSamples(order, reason=moments)
    samples = moments.mean.shape[1]
    if moments.elements == 1:  # nothing within a sample to be correlated
        return EffectiveSamples(order, float(samples), 1.0, 1, samples)
    between = moments.mean.var(1, ddof=1).max(0)
    total = moments.batch_var
    live = total > 0
    if not live.any():
        return EffectiveSamples(order, reason="its input is constant on this batch")
    share = float(np.mean(between[live] / total[live]))
    per_sample = float(np.clip(1.0 / max(share, 1e-12), 1.0, moments.elements))
    return EffectiveSamples(order, per_sample * samples, per_sample, moments.elements, samples)
