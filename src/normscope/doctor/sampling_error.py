"""Statistics of a batch against given ones, with the sampling error of the batch.

Unit of sampling: the sample. With m_i and q_i the mean and the mean square about the running mean of sample i in one
channel, B samples, running mean mu, running variance V and update fraction a:

    t   = (mean_i m_i - mu) / (sd_i(m_i) / sqrt(B) * f)        f = sqrt(1 + noise(a) * B / B_train)
    t_v = (mean_i q_i - V)  / (sd_i(q_i) / sqrt(B) * f)

compared with Student's t at B - 1 degrees of freedom, two-sided p = 0.001. f is the noise that the running state
itself carries: a / (2 - a) of one training batch for an exponential average, 1 / k for the mean of k batches.

Where a sample gives one element (vectors, unlike images, average nothing within a sample) features are often skewed,
and few samples without the rare large ones look quiet and too sure of it. There the standard error of the mean is at
least sqrt(V / B), and for a mean square below V that of the mean square is at least a Gaussian's,
mean_i q_i * sqrt(2 / B), and the numerator of t_v is mean_i q_i * log(mean_i q_i / V), which is nearer to 0.

Significance is not enough, since with many samples a harmless difference is significant too; so the size of the
difference in units of the running denominator is measured beside it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor.significance import Difference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.moments import SampleMoments

P_VALUE = 0.001


def difference(
    batch: SampleMoments,
    mean: NDArray[np.float64],
    var: NDArray[np.float64],
    live: NDArray[np.bool_],
    eps: float,
    noise: float = 1.0,
    within: bool = False,
    paired: bool = False,
) -> Difference:
    """The test above, of a batch against given statistics.

    ``within``: the variance is that within samples. ``paired``: the means are differences between calls, whose spread
    V does not tell.
    """
    critical = t_critical(batch.mean.shape[1] - 1)
    off = batch.batch_mean - mean
    square = batch.var if within else batch.var + np.square(batch.mean - mean)
    now = batch.var[0].mean(0) if within else batch.batch_var
    mean_square, samples = square[0].mean(0), batch.mean.shape[1]
    away, error, error_square = np.abs(mean_square - var), *map(batch.standard_error, (batch.mean, square))
    with np.errstate(divide="ignore", invalid="ignore"):
        if batch.elements == 1 and not paired:
            error = np.maximum(error, np.sqrt(var / samples))
            quiet = mean_square < var
            gaussian = np.maximum(error_square, mean_square * np.sqrt(2 / samples))
            error_square = np.where(quiet, gaussian, error_square)
            away = np.where(quiet, mean_square * np.log(var / mean_square), away)
        t, t_var = np.abs(off) / (error * noise), away / (error_square * noise)
        ratio = (now + eps) / (var + eps)
    return Difference(
        share_mean=float(np.mean(t[live] > critical)),
        share_var=float(np.mean(t_var[live] > critical)),
        shift=float(np.sqrt(np.mean(np.square(off[live]) / (var[live] + eps)))),
        channels=int(live.sum()),
        log_var=_nearer_to_zero(float(np.log(np.median(ratio[live]))), float(np.log(np.mean(ratio[live])))),
    )


def _nearer_to_zero(a: float, b: float) -> float:
    if a * b <= 0:
        return 0.0
    return a if abs(a) < abs(b) else b


@lru_cache(maxsize=256)
def t_critical(dof: int, p: float = P_VALUE) -> float:
    """Two-sided critical value of Student's t, to about 1e-4 relative.

    With t = sqrt(dof) tan(u) the density becomes cos(u)^(dof - 1), which is summed on a grid.

    >>> round(t_critical(3), 2), round(t_critical(7), 2)
    (12.92, 5.41)
    """
    angle = np.linspace(0.0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (dof - 1)
    steps = np.cumsum((density[1:] + density[:-1]) / 2)
    at = float(np.interp((1.0 - p) * steps[-1], steps, angle[1:]))
    return float(np.sqrt(dof) * np.tan(at))
