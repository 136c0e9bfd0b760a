"""Moments of each sample at a site: what every statistical probe starts from.

Pixels of one image are not independent draws, samples are. So a call's input is reduced at once to one mean and
one variance per sample and channel; everything after that works on those few numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.spec.bound import BoundSpec


@dataclass(frozen=True)
class SampleMoments:
    """Per-sample statistics of one call, float64.

    Where a site sees k rows for every sample of the batch (frames, views, crops folded into the batch axis), the
    rows of a sample are pooled. They may lie next to each other or one whole batch apart; both readings are kept,
    and whoever estimates a sampling error takes the larger.
    """

    mean: NDArray[np.float64]
    """(readings, samples, channels)"""
    var: NDArray[np.float64]
    """(readings, samples, channels): population variance within the sample"""
    elements: int
    """elements of one sample in one channel"""

    @property
    def batch_mean(self) -> NDArray[np.float64]:
        """(channels,): mean over the batch; the readings agree on it."""
        out: NDArray[np.float64] = self.mean[0].mean(0)
        return out

    @property
    def batch_var(self) -> NDArray[np.float64]:
        """(channels,): variance that all elements would have over many samples, from those within and between.

        The part between samples is the one that few samples underestimate; it is taken without that bias.
        """
        out: NDArray[np.float64] = self.var[0].mean(0) + self.mean[0].var(
            0, ddof=min(1, self.mean.shape[1] - 1)
        )
        return out

    def standard_error(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Standard error of the mean over samples of ``values`` (readings, samples, channels), the larger reading."""
        samples = values.shape[1]
        out: NDArray[np.float64] = values.std(1, ddof=1).max(0) / np.sqrt(samples)
        return out


def sample_moments(event: Event, samples: int) -> SampleMoments | str:
    """Reduce the input of one call to per-sample moments over the channels its running state lives on.

    Args:
        event: a call whose specification keeps channels across samples, such as batch norm.
        samples: number of samples in the user's batch.

    Returns:
        the moments, or the reason why there are none: samples that cannot be told apart, numbers that are not finite.
        Made once a call, shared by all probes.
    """
    if "sample_moments" not in event.extra:
        event.extra["sample_moments"] = _sample_moments(event, samples)
    found: SampleMoments | str = event.extra["sample_moments"]
    return found


def _sample_moments(event: Event, samples: int) -> SampleMoments | str:
    shape = tuple(event.input.shape)
    bound = event.spec.bind(shape)
    if bound.sample_dim is None:
        return "its input has no sample axis"
    x = event.input.detach()
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    mean, var, elements = _per_row(x, bound)
    if len(mean) < samples or len(mean) % samples:
        return f"its input has {len(mean)} rows for {samples} samples, so rows cannot be matched to samples"
    if not (np.isfinite(mean).all() and np.isfinite(var).all()):
        return "its input holds NaN or infinities on this batch"
    return _pooled(mean, var, samples, elements)


def _per_row(x: torch.Tensor, bound: BoundSpec) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Mean and variance per row of the sample axis and channel, (rows, channels) each."""
    if bound.ragged:  # virtual batches share one running state: they are one batch of rows here
        first = next(i for i, axis in enumerate(bound.axes) if axis.dim == bound.sample_dim)
        axes = [a for i, a in enumerate(bound.axes) if a.dim != bound.sample_dim or i == first]
        rows_at = [first]
        sizes = [x.shape[a.dim] if a.dim == bound.sample_dim else a.size for a in axes]
    else:
        axes = list(bound.axes)
        # Time folded beside the samples, "(t b) c ...", belongs to the sample.
        rows_at = [i for i, a in enumerate(axes) if a.dim == bound.sample_dim and a.name != "t"]
        sizes = [a.size for a in axes]
    channels_at = [i for i, a in enumerate(axes) if a.kept and i not in rows_at]
    over = [i for i in range(len(axes)) if i not in rows_at and i not in channels_at]
    x = x.reshape(sizes)
    elements = 1
    if over:
        elements = int(np.prod([sizes[i] for i in over]))
        mean, var = _mean_and_variance(x, over)
    else:
        mean, var = x, torch.zeros_like(x)
    rows = int(np.prod([sizes[i] for i in rows_at]))

    def table(t: torch.Tensor) -> NDArray[np.float64]:
        flat = t.permute(*rows_at, *channels_at, *over).reshape(rows, -1)
        out: NDArray[np.float64] = flat.double().cpu().numpy()
        return out

    return table(mean), table(var), elements


def _mean_and_variance(x: torch.Tensor, over: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and population variance over some axes, kept at size 1.

    Two sums without a temporary of the input's size, 20 times faster than ``var_mean``. Where the mean is so large
    that E[x^2] - mean^2 has lost digits, which it seldom is within a sample, the exact form is taken instead.
    """
    mean = x.mean(over, keepdim=True).double()
    n = 1
    for i in over:
        n *= x.shape[i]
    square = torch.linalg.vector_norm(x, dim=over, keepdim=True).double().square() / n
    var = square - mean.square()
    # The sums are good to about 1e-6 relative, so above this bound the variance is good to 1e-3.
    lost = var < 1e-3 * square
    if bool(lost.any()):
        if float(lost.double().mean()) > 0.1:
            exact, _ = torch.var_mean(x, dim=over, correction=0, keepdim=True)
            return mean, exact.double()
        kept = [i for i in range(x.ndim) if i not in over]
        rows = x.permute(*kept, *over)[
            tuple(lost.permute(*kept, *over).flatten(len(kept))[..., 0].nonzero().T)
        ]
        var[lost] = rows.double().flatten(1).var(1, correction=0)
    return mean, var


def _pooled(
    mean: NDArray[np.float64], var: NDArray[np.float64], samples: int, elements: int
) -> SampleMoments:
    k = len(mean) // samples
    if k <= 1:
        return SampleMoments(mean[None], var[None], elements)
    readings = (
        (mean.reshape(samples, k, -1), var.reshape(samples, k, -1), 1),
        (mean.reshape(k, samples, -1), var.reshape(k, samples, -1), 0),
    )
    means = np.stack([m.mean(axis) for m, _, axis in readings])
    variances = np.stack([v.mean(axis) + m.var(axis) for m, v, axis in readings])
    return SampleMoments(means, variances, elements * k)
