"""Whether the initial values 0 and 1 are still in running statistics: what the counter predicts and a batch shows.

After k updates with momentum m, s = (1 - m)^k of each stored statistic is still its initial value; then the data's own
are mean / (1 - s) and (var - s) / (1 - s). The counter cannot prove it: statistics that were averaged cumulatively, or
loaded, have no such share. A batch can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor.history import updates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Site
    from normscope.spec import NormSpec

    Moments = tuple[NDArray[np.float64], NDArray[np.float64]]
    """means and variances of channels"""


def share(site: Site, spec: NormSpec) -> float:
    """(1 - momentum)^k after k counted updates; 0 where that says nothing."""
    momentum, count = spec.running.momentum if spec.running is not None else None, updates(site)
    return float((1 - momentum) ** count) if count and momentum and 0 < momentum < 1 and count > 0 else 0.0


def shown(part: float, stored: Moments, batch: Moments, eps: float) -> float | None:
    """How much of the distortion that ``part`` predicts the batch shows: about 1 where it is there, about 0 where not.

    Projects what is seen on what is predicted, in log gains and shifts of the means over all channels; None where
    nothing is predicted.

    >>> mean, var = np.array([1.0, -2.0]), np.array([4.0, 9.0])
    >>> stored = 0.9 * mean, 0.9 * var + 0.1
    >>> round(shown(0.1, stored, (mean, var), 1e-5), 9), shown(0.1, stored, stored, 1e-5)
    (1.0, 0.0)
    """
    if not 0 < part < 1:
        return None
    mean, var = stored

    def distortion(m: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
        tiny = np.finfo(np.float64).tiny  # without eps a dead channel has no logarithm
        log_gain = np.log(np.maximum(v + eps, tiny) / (var + eps)) / 2
        return np.concatenate([log_gain, (m - mean) / np.sqrt(var + eps)])

    predicted = distortion(mean / (1 - part), np.maximum(var - part, 0.0) / (1 - part))
    size = float(predicted @ predicted)
    return float(predicted @ distortion(*batch)) / size if size > 0 else None
