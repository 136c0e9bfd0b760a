"""Batch statistics beside running statistics, channel by channel: what ``gap`` judges, for people to look at.

Of a site with more than ``CHANNELS`` channels one half of that number are those that lie farthest apart, in units of
the stored denominator or of the logarithm of the variance; the other half stand for the rest, evenly over its order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor.history import statistics_at_start
from normscope.doctor.moments import SampleMoments, sample_moments
from normscope.doctor.probes import Probe
from normscope.doctor.probes.gap import within_samples
from normscope.doctor.sets import working_eps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

    Array = NDArray[np.float64]

CHANNELS = 64
"""told of one site"""


@dataclass(frozen=True)
class ChannelStatistics:
    """Some channels of one site, the farthest apart first; arrays have one entry a channel told."""

    channels: int
    """how many there are"""
    samples: int
    index: NDArray[np.int64]
    batch_mean: Array
    batch_var: Array
    running_mean: Array
    running_var: Array


class ChannelStatisticsProbe(Probe):
    """site name -> ``ChannelStatistics``, for the sites that keep running statistics."""

    name = "channel_statistics"
    runs = ("batch",)
    rides = True

    def start(self, subject: Subject) -> str | None:
        self._samples = subject.batch_size
        self._seen: dict[str, list[tuple[Array, Array]]] = {}
        self._eps: dict[str, float] = {}
        return "the inputs are random numbers; needs real data" if subject.synthetic else None

    def observe(self, event: Event) -> None:
        site = event.site
        if not {"running_mean", "running_var"} <= set(site.tensors):
            return
        moments = sample_moments(event, self._samples)
        if isinstance(moments, SampleMoments):
            within = within_samples(event.spec)
            variance = moments.var[0].mean(0) if within else moments.batch_var
            self._seen.setdefault(site.name, []).append((moments.batch_mean, variance))
            self._eps[site.name] = working_eps(event.spec, event.input.dtype)

    def finish(self, subject: Subject) -> dict[str, ChannelStatistics]:
        found = {}
        for site in subject.known():
            # Only now: in the run itself the statistics were moving.
            mean, var = site.array("running_mean"), site.array("running_var")
            calls = self._seen.get(site.name)
            if not calls or mean is None or var is None or mean.size != calls[0][0].size:
                continue
            if statistics_at_start(site):
                continue
            batch = tuple(np.mean([call[part] for call in calls], axis=0) for part in (0, 1))
            table = np.stack([*batch, mean.ravel(), var.ravel()])
            index = _chosen(table, self._eps[site.name])
            if len(index):
                found[site.name] = ChannelStatistics(mean.size, self._samples, index, *table[:, index])
        return found


def _chosen(table: Array, eps: float) -> NDArray[np.int64]:
    """Which channels to tell, the farthest apart first."""
    batch_mean, batch_var, mean, var = table
    usable = np.flatnonzero(np.isfinite(table).all(0) & (var + eps > 0) & (batch_var + eps > 0))
    with np.errstate(all="ignore"):
        shift = np.abs(batch_mean - mean) / np.sqrt(var + eps)
        ratio = np.abs(np.log((batch_var + eps) / (var + eps)))
    order = usable[np.argsort(-np.maximum(shift, ratio)[usable], kind="stable")]
    if len(order) <= CHANNELS:
        return order
    worst, rest = order[: CHANNELS // 2], order[CHANNELS // 2 :]
    return np.concatenate([worst, rest[np.linspace(0, len(rest) - 1, CHANNELS // 2).astype(int)]])
