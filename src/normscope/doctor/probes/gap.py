"""Batch statistics against running statistics, with the sampling error of the batch.

See :mod:`normscope.doctor.sampling_error` for the test.

Measured with batch statistics in use and dropout off: each site then sees inputs that the batch upstream has
standardized, and one stale site stays one site. An eval forward would spread it over everything behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor import initial_values
from normscope.doctor.history import statistics_at_start
from normscope.doctor.moments import SampleMoments, sample_moments
from normscope.doctor.probes import Probe
from normscope.doctor.sampling_error import difference
from normscope.doctor.significance import Difference
from normscope.doctor.wording import SAMPLES_UNKNOWN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event, Site
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

MIN_SAMPLES = 4
"""Student's t at three degrees of freedom is the least that separates anything"""
SMALLEST_TRAIN_BATCH = 4
"""the training batch size is not known; a small one is assumed, which grants the running state more noise"""


SPREADS = {"running_var", "running_covariance", "running_whitening"}


@dataclass(frozen=True)
class SiteGap:
    """What was measured at one site; ``reason`` says why nothing was."""

    order: int
    """position of the site's first call in the run"""
    samples: int = 0
    channels: int = 0
    """live channels: a stored variance above 0"""
    gap: Difference | None = None
    """batch against running statistics"""
    calls: int = 1
    between: Difference | None = None
    """with several calls: of the one farthest from the average over calls, against that average"""
    call: int = 0
    """index of that call"""
    cold: float | None = None
    """how much of the distortion that initial values 0 and 1 would still cause this batch shows: about 1 where they are
    in the running statistics, about 0 where they are not; None where the counter predicts none"""
    reason: str = ""


class GapProbe(Probe):
    """``measured["gap"]``: site name -> :class:`SiteGap`, for the sites with running statistics."""

    name = "gap"
    runs = ("batch",)

    def start(self, subject: Subject) -> str | None:
        self._seen: dict[str, list[SampleMoments | str]] = {}
        self._sites: dict[str, Site] = {}
        self._specs: dict[str, NormSpec] = {}
        self._samples = subject.batch_size
        if not any(site.has_running_state for site in subject.known()):
            return subject.stateless()
        if subject.synthetic:
            return "the inputs are random numbers; needs real data"
        if not subject.batch_size:
            return SAMPLES_UNKNOWN
        if subject.batch_size < MIN_SAMPLES:
            return f"cannot tell with {_count(subject.batch_size)}: pass at least 8"
        return None

    def observe(self, event: Event) -> None:
        site = event.site
        if "running_mean" not in site.tensors or not site.tensors.keys() & SPREADS:
            return
        self._sites[site.name] = site
        self._specs[site.name] = event.spec
        self._seen.setdefault(site.name, []).append(sample_moments(event, self._samples))

    def finish(self, subject: Subject) -> dict[str, SiteGap]:
        return {
            name: _measure(order, self._sites[name], self._specs[name], calls)
            for order, (name, calls) in enumerate(self._seen.items())
        }


def _measure(order: int, site: Site, spec: NormSpec, calls: list[SampleMoments | str]) -> SiteGap:
    moments = [call for call in calls if isinstance(call, SampleMoments)]
    if len(moments) < len(calls):
        return SiteGap(order, calls=len(calls), reason=next(call for call in calls if isinstance(call, str)))
    mean, var = site.array("running_mean"), _stored_variance(site)
    if mean is None or var is None or mean.size != moments[0].mean.shape[-1]:
        return SiteGap(order, calls=len(calls), reason="its running statistics do not match its channels")
    mean, var = mean.ravel(), var.ravel()
    if statistics_at_start(site):
        return SiteGap(
            order,
            calls=len(calls),
            reason="its running statistics are at their initial values, there is nothing to compare",
        )
    live = np.isfinite(mean) & np.isfinite(var) & (var > 0)
    if not live.any():
        return SiteGap(order, calls=len(calls), reason="no channel has a finite running variance above 0")
    eps = spec.eps or 0.0
    noise = _state_noise(site, spec, moments[0].mean.shape[1])
    within = within_samples(spec)
    batch = _joined(moments)
    gap = difference(batch, mean, var, live, eps, noise, within)
    between, worst = None, 0
    if len(moments) > 1:
        between, worst = _between(moments, live, eps, within)
    samples = moments[0].mean.shape[1]
    now = batch.var[0].mean(0) if within else batch.batch_var
    stored, seen = (mean[live], var[live]), (batch.batch_mean[live], now[live])
    cold = initial_values.shown(initial_values.share(site, spec), stored, seen, eps)
    return SiteGap(order, samples, int(live.sum()), gap, len(moments), between, worst, cold)


def _stored_variance(site: Site) -> NDArray[np.float64] | None:
    """Of each channel, also where covariances are stored, or matrices that whiten (w s w' = 1)."""
    covariance, whitening = site.array("running_covariance"), site.array("running_whitening")
    if whitening is not None:
        try:
            back = np.linalg.inv(whitening)
        except np.linalg.LinAlgError:
            return None
        covariance = back @ back.swapaxes(-2, -1)
    if covariance is not None:
        return np.diagonal(covariance, 0, -2, -1).ravel()
    return site.array("running_var")


def _joined(calls: list[SampleMoments]) -> SampleMoments:
    """Several calls of one site as one: running statistics are the average over the calls' own batch statistics."""
    if len(calls) == 1:
        return calls[0]
    centre = np.mean([call.batch_mean for call in calls], axis=0)
    aligned = np.stack([call.mean - call.batch_mean + centre for call in calls])
    mean = aligned.mean(0)
    # Within the average over calls, what a sample's calls differ by is variance within the sample.
    var = np.mean([call.var for call in calls], axis=0) + aligned.var(0)
    return SampleMoments(mean, var, calls[0].elements * len(calls))


def _between(
    calls: list[SampleMoments], live: NDArray[np.bool_], eps: float, within: bool
) -> tuple[Difference, int]:
    """The call farthest from the average over calls. Paired by sample: what its calls share cancels."""
    means = np.stack([call.mean for call in calls])
    average_mean = means.mean(0)
    average_var = np.mean([call.var[0].mean(0) if within else call.batch_var for call in calls], axis=0)
    centre = average_mean[0].mean(0)
    found = []
    for index, call in enumerate(calls):
        shifted = SampleMoments(call.mean - average_mean + centre, call.var, call.elements)
        paired = difference(
            shifted, centre, average_var, live & (average_var > 0), eps, within=within, paired=True
        )
        whole = difference(call, centre, average_var, live & (average_var > 0), eps, within=within)
        both = replace(whole, share_mean=paired.share_mean)
        found.append((max(both.shift, abs(both.log_var)), index, both))
    _, worst, result = max(found, key=lambda item: item[0])
    return result, worst


def within_samples(spec: NormSpec) -> bool:
    """Whether the stored variance is the mean of the variances within samples, as instance norm keeps it."""
    kept = spec.stats.partition("->")[2].split()
    return "b" in kept


def _state_noise(site: Site, spec: NormSpec, samples: int) -> float:
    running = spec.running
    fraction = running.momentum if running is not None else 0.1
    if running is not None and running.average == "cumulative":
        batches = site.array("num_batches_tracked")
        relative = 1.0 / max(1.0, float(batches.max())) if batches is not None and batches.size else 1.0
    else:
        a = min(max(float(fraction or 0.0), 0.0), 1.0)
        relative = a / (2.0 - a)
    return float(np.sqrt(1.0 + relative * samples / SMALLEST_TRAIN_BATCH))


def _count(samples: int) -> str:
    return "one sample" if samples == 1 else f"{samples} samples"
