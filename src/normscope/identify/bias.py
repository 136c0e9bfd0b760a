"""The bias: half of ``f(x) + f(-x)``, seen best where the input is so small that little else is left of the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from normscope.identify.affine import Values
from normscope.identify.fit import Fit, denominator, lay_out
from normscope.identify.partition import POINTWISE, Partition
from normscope.identify.probing import Contradiction, Pair, Prober, pair
from normscope.identify.scan import NOISE, STANDARD, Observation, smallest


def find_bias(f: Prober, pairs: Sequence[Pair], partition: Partition) -> Values:
    """Half of ``f(x) + f(-x)``. Raises Contradiction where it is not the same for all x."""
    size = np.maximum.reduce([one.size for one in pairs])
    apart = np.ptp([one.even for one in pairs], axis=0)
    if (apart > 64 * f.roundoff * size.max()).any():
        if partition.pointwise:
            raise Contradiction(POINTWISE)
        share = float(apart.max() / size.max())
        raise Contradiction(
            "f(x) + f(-x) is twice the bias for every normalization; here it changes with x, by up to "
            f"{share:.2g} of the largest output",
            share,
        )
    f.conclude("an odd function of the input plus a bias", "f(x) + f(-x) for several x", inputs=len(pairs))
    return half_sums(f, pairs)


def half_sums(f: Prober, pairs: Sequence[Pair]) -> Values:
    """Half of ``f(x) + f(-x)``, which rounds like the larger of both: of usual inputs, and of one so small that eps
    rules. Only the bias is left of that one, so that a gain of 1e12 hides no bias of 1."""
    size = np.maximum.reduce([one.size for one in pairs])
    seen = Values(np.mean([one.even for one in pairs], axis=0), STANDARD * NOISE * f.roundoff * size)
    small = pair(f, pairs[0].x * 2.0 ** smallest(f)[-1])
    error = STANDARD * NOISE * f.roundoff * small.size
    # where it is another one there, no bias fits both, and the fit will say so
    better = np.isfinite(small.even) & (error < seen.error)
    return Values(np.where(better, small.even, seen.value), np.where(better, error, seen.error))


def better_bias(one: Fit, observed: Sequence[Observation], bias: Values, partition: Partition) -> Values:
    """The bias from the smallest input, where it is next to all of the output; what the fit says of the rest is taken
    off."""
    if one.root_eps == 0:
        return bias
    least = min(observed, key=lambda o: float(np.abs(o.x).max()))
    data = lay_out([least], partition, one.shape)
    lever = (data.u / denominator(data.root, one.root_eps, one.form)).reshape(one.gain.shape)
    value = least.z + bias.value - one.gain * lever
    # the error of the bias that was taken off is none of this sum's; that of the gain, and of eps, is
    own = least.sigma - bias.error / STANDARD
    error = STANDARD * (own + np.abs(lever) * (one.gain_error + one.error * np.abs(one.gain)))
    better = error < bias.error
    return Values(np.where(better, value, bias.value), np.where(better, error, bias.error))
