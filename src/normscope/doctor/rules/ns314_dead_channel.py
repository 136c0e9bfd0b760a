"""dead-channel: a stored variance of about 0 under a gain that is not 0, or gains of about 0 in many channels.

## What it does
Two findings from the state alone:

- **no variance**: the running variance is 0, or less than a millionth of eps, and the gain is not 0. The
  channel's factor is then gain / sqrt(eps), whatever the data: compared with the median factor of the live
  channels of the same norm. A warning from 10 times the median on, else info.
- **no gain**: a quarter or more of the gains of a norm are below 0.001 in size: info, these channels carry
  nothing.

## Why it matters
A channel that was constant in training (dead filter, unused input) is harmless as long as it stays constant.
Any other input, another preprocessing, another rounding, a quantized or folded weight, is multiplied by up to
1/sqrt(eps): 316 at 1e-5. After folding, one such channel sets the range of the whole tensor for per-tensor
quantization.

## Known problems
Gains that are all exactly 0 (the last norm of a residual branch, initialized so) are meant, and silent.
Statistics in float16 underflow to 0 below 6e-8 and look dead. In a checkpoint without its code eps is not known: only
variances of exactly 0 count then, as info.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8, momentum=1.0)
)
with torch.no_grad():
    model[0].weight[2] = 0  # a dead filter
model(torch.randn(16, 3, 8, 8))
report = normscope.check(model)
print(report)
```

## Fix
Set gain (and the filter before) of such channels to 0 and keep the bias, or remove the channels; do so before
folding or quantizing. Many dead channels call for a look at the learning rate and the activation before the
norm.

## References
- Jacob et al. 2018, Quantization and Training of Neural Networks, section 3.2: folding, and ranges that
  differ by channel.
- Goyal et al. 2017, Accurate, Large Minibatch SGD, section 5.1: gains initialized to 0 at the end of a
  residual branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, listed, number, percent, plural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

NO_GAIN = 1e-3
MANY = 0.25
HAZARD = 10.0


@rule("NS314", "dead-channel", kinds="C")
def check(subject: Subject) -> Iterator[Finding]:
    still: list[Finding] = []
    silent: list[Finding] = []
    stored = 0
    for site in subject.known():
        var = site.array("running_var")
        if var is not None and site.mode_eval in ("running", "frozen"):
            stored += var.size
            still += (_zero_variance if "eps" in site.unknown else _no_variance)(site, var.ravel())
        silent += _no_gain(site)
    total = sum(finding.evidence["dead_channels"] for finding in still)
    for finding in fold(still):
        yield replace(
            finding, evidence={**finding.evidence, "dead_channels_total": total, "channels_total": stored}
        )
    yield from fold(silent)


def _gains(site: Site, size: int) -> NDArray[np.float64] | None:
    """|offset + weight| for each channel; None where gains do not stand one to a channel."""
    import numpy as np

    assert site.spec is not None
    weight = site.array("weight")
    if weight is None:
        return np.ones(size)
    gains: NDArray[np.float64] = np.abs((site.spec.weight_offset + weight).ravel() * site.spec.gain)
    return gains if gains.size == size else None


def _no_variance(site: Site, var: NDArray[np.float64]) -> Iterator[Finding]:
    import numpy as np

    assert site.spec is not None
    gains = _gains(site, var.size)
    if gains is None or site.spec.eps_at != "variance":
        return
    eps = site.spec.eps or 0.0
    live = np.isfinite(var) & (var > 1e-6 * eps) & (var > 0)
    dead = np.isfinite(var) & ~live & (var >= 0) & (gains > NO_GAIN)
    if not dead.any():
        return
    with np.errstate(divide="ignore"):
        factors = gains / np.sqrt(var + eps)
    usual = float(np.median(factors[live])) if live.any() else 0.0
    largest = float(factors[dead].max())
    ratio = largest / usual if usual > 0 else float("inf")
    compared = (
        f", {number(ratio)} times the median of the live ones" if usual > 0 else "; no channel is alive"
    )
    channels = [str(c) for c in np.flatnonzero(dead)]
    yield Finding(
        code="NS314",
        site=site.name,
        severity="warning" if ratio >= HAZARD else "info",
        message=f"{len(channels)} of {plural(var.size, 'channel')} ({listed(channels)}) had no variance in training "
        f"({int((var[dead] == 0).sum())} exactly 0) and keep a gain: whatever reaches them is multiplied by up to "
        f"{number(largest)}{compared}.",
        evidence={
            "dead_channels": len(channels),
            "exactly_zero": int((var[dead] == 0).sum()),
            "channels": int(var.size),
            "largest_factor": largest,
            "median_live_factor": usual,
            "amplification": ratio,
            "indices": [int(c) for c in channels[:32]],
        },
        fix="set the gain of these channels to 0, or remove them, before folding or quantizing",
        mode="eval",
    )


def _zero_variance(site: Site, var: NDArray[np.float64]) -> Iterator[Finding]:
    """Of a checkpoint that does not tell eps: only exact zeros are sure, and their factor is not known."""
    import numpy as np

    gains = _gains(site, var.size)
    if gains is None or not (dead := (var == 0) & (gains > NO_GAIN)).any():
        return
    channels = [str(c) for c in np.flatnonzero(dead)]
    largest = float(gains[dead].max())
    yield Finding(
        code="NS314",
        site=site.name,
        severity="info",
        message=f"{len(channels)} of {plural(var.size, 'channel')} ({listed(channels)}) had no variance in training "
        f"and keep a gain of up to {number(largest)}: whatever reaches them is multiplied by gain / sqrt(eps). State "
        "eps to compare that with the live channels.",
        evidence={
            "dead_channels": len(channels),
            "exactly_zero": len(channels),
            "channels": int(var.size),
            "largest_gain": largest,
            "indices": [int(c) for c in channels[:32]],
        },
        fix="set the gain of these channels to 0, or remove them, before folding or quantizing",
        mode="eval",
    )


def _no_gain(site: Site) -> Iterator[Finding]:
    import numpy as np

    weight = site.array("weight")
    if weight is None or weight.size < 2:
        return
    gains = _gains(site, weight.size)
    assert gains is not None
    small = gains < NO_GAIN
    if not gains.any() or small.mean() < MANY:
        return
    left = "nothing" if site.array("bias") is None else "only their bias"
    yield Finding(
        code="NS314",
        site=site.name,
        severity="info",
        message=f"{int(small.sum())} of {gains.size} gains ({percent(float(small.mean()))}) are below "
        f"{number(NO_GAIN)}: these channels carry {left}.",
        evidence={
            "small_gains": int(small.sum()),
            "channels": int(gains.size),
            "median_gain": float(np.median(gains)),
        },
        fix="these channels can be pruned; many of them hint at a weight decay on gains or at an oversized layer",
    )
