"""What one sample's input does to another sample's output, at one site, in closed form.

Sample j is made a little stronger, x_j -> (1 + t) x_j, and the normalized output of sample i moves at the rate

    dy_i / dt = ([i = j] x_i - A_j - h_i C_j) / s,    A_j = sum_j x / M,    C_j = 2 s' sum_j (x - m) x / N

with m the mean of a statistic set of M elements, s = s(v) its denominator and s' = ds/dv, N = M - correction,
h = (x - m) / s and sums over sample j's elements of the set (without centering m and A are 0). The root mean square of
that rate over sample i's elements needs only each sample's mean and variance, over the channels that vary. All
samples of the batch take part; ``SAMPLES`` of them are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor.moments import SampleMoments, sample_moments
from normscope.doctor.probes import Probe
from normscope.doctor.sets import working_eps
from normscope.reference.moments import denominator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

SAMPLES = 16
"""told, evenly over the batch"""


@dataclass(frozen=True)
class Sensitivity:
    """Training mode: how samples move each other at one site."""

    mode: str
    coupled: bool
    """the statistics that normalize run over several samples"""
    samples: NDArray[np.int64]
    """positions in the batch; empty where nothing is coupled or nothing could be measured"""
    matrix: Array
    """(i, j): root mean square rate of sample i's normalized output, in its standard deviations, per relative change of
    sample j's input"""
    reason: str = ""
    """why a coupled site has no matrix"""


class SensitivityProbe(Probe):
    """site name -> ``Sensitivity``, of its first call."""

    name = "sensitivity"
    runs = ("batch",)
    rides = True

    def start(self, subject: Subject) -> str | None:
        self._samples = subject.batch_size
        self.found: dict[str, Sensitivity] = {}
        return "one sample has no companions" if subject.batch_size < 2 else None

    def observe(self, event: Event) -> None:
        if event.site.name not in self.found and event.spec.scale in ("std", "rms", "l2"):
            self.found[event.site.name] = _measure(event, self._samples)

    def finish(self, subject: Subject) -> dict[str, Sensitivity]:
        return self.found


def _measure(event: Event, samples: int) -> Sensitivity:
    nothing = np.zeros((0, 0)), np.zeros(0, dtype=np.int64)

    def without(coupled: bool, reason: str = "") -> Sensitivity:
        return Sensitivity(event.mode, coupled, nothing[1], nothing[0], reason)

    bound = event.spec.bind(tuple(event.input.shape))
    over = [axis for axis in bound.axes if axis.dim == bound.sample_dim and not axis.kept and axis.size > 1]
    if event.mode in ("running", "frozen") or not over:
        return without(False)
    if any(axis.dim == bound.sample_dim and axis.kept for axis in bound.axes):
        return without(True, "its statistics run over parts of the batch")
    moments = sample_moments(event, samples)
    if isinstance(moments, str):
        return without(True, moments)
    told = np.unique(np.linspace(0, samples - 1, min(samples, SAMPLES)).astype(int))
    matrix = rates(moments, event.spec, working_eps(event.spec, event.input.dtype), told)
    return (
        without(True, "no channel varies") if matrix is None else Sensitivity(event.mode, True, told, matrix)
    )


def rates(moments: SampleMoments, spec: NormSpec, eps: float, told: NDArray[np.int64]) -> Array | None:
    """The matrix for the samples ``told``; None where no channel varies."""
    mean, within = moments.mean[0], moments.var[0]
    samples = len(mean)
    centre = mean.mean(0) if spec.center else np.zeros(mean.shape[1])
    about = within + (mean - centre) ** 2  # mean square distance from the centre, by sample
    size = samples * moments.elements
    divisor = 1.0 if spec.scale == "l2" else size - spec.correction if spec.scale == "std" else float(size)
    if divisor <= 0:
        return None
    s, slope = denominator(about.mean(0) * size / divisor, eps, spec.eps_at)
    live = (about.mean(0) > 0) & np.isfinite(s) & (s > 0)
    if not live.any():
        return None
    mean, within, about, centre = mean[:, live], within[:, live], about[:, live], centre[live]
    s, slope = s[live], slope[live]
    pull = mean / samples if spec.center else np.zeros_like(mean)
    # sum over sample j of (x - m) x, from its mean and variance
    products = moments.elements * (within + mean * (mean - centre))
    stretch = 2 * slope * products / divisor
    h_mean, h_square = ((mean - centre) / s)[told], (about / s**2)[told]
    # rate = constant + h * factor, with h over the elements of sample i and the rest from sample j
    constant, factor = (-pull / s)[told], (-stretch / s)[told]
    channels = len(s)
    squares = (
        (constant**2).sum(1) + 2 * h_mean @ (constant * factor).T + h_square @ (factor**2).T
    ) / channels
    own, full = constant + centre / s, factor + 1
    squares[np.diag_indices(len(told))] = (own**2 + 2 * own * full * h_mean + full**2 * h_square).mean(1)
    out: Array = np.sqrt(np.maximum(squares, 0.0))
    return out
