"""low-precision-statistics: running statistics in float16 or bfloat16, whose updates stall.

## What it does
An update moves a statistic by momentum * (batch - stored). Where that is less than half the spacing of the
dtype at the stored value, the sum rounds back and nothing moves: there is a dead zone around each value. The
rule computes its width at the values that are stored:

    dead zone = spacing / (2 * momentum)

of the variance relative to itself, and of the mean in standard deviations. It is a warning where the norm is
in train mode and the median channel's dead zone is above 1 %; in eval mode, where only rounding remains, it
is info.

## Why it matters
bfloat16 has a spacing of 1/256 to 1/128 of a value. With momentum 0.1 a variance must be off by 2 to 4 %
before it moves at all, with 0.01 by 20 to 40 %: the statistics stop at the edge of the zone and never reach
the data. In PyTorch on a CPU, a stored variance of 0.8 under batches of variance 1.5 (momentum 0.01) stops at
1.0 in bfloat16, at 1.45 in float16.

## Known problems
Kernels may round more than once in an update, so the zone is the least that is lost. Single batches scatter,
and a stray one can jump the zone: the statistics then follow the outliers. Half-precision copies made for
inference lose nothing but the last bits, hence info.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, momentum=0.01)
).bfloat16()
report = normscope.check(model.train())
print(report)
```

## Fix
Keep norms in float32: `for m in model.modules(): if isinstance(m, BatchNorm2d): m.float()`, or train under
`torch.autocast`, which leaves parameters and buffers in float32. PyTorch's kernels take a half input with
float32 statistics.

## References
- Micikevicius et al. 2018, Mixed Precision Training, section 3.1: updates smaller than the spacing are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.history import updates
from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number, percent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

FRACTION_BITS = {"float16": 10, "bfloat16": 7}
LEAST_EXPONENT = {"float16": -14, "bfloat16": -126}
MATTERS = 0.01


@rule("NS309", "low-precision-statistics", kinds="SC", stateful=True)
def check(subject: Subject) -> Iterator[Finding]:
    found = []
    for site in subject.sites:
        dtype = site.dtype("running_var") or site.dtype("running_mean")
        if dtype in FRACTION_BITS and site.mode_train != "frozen":
            found.append(_finding(site, dtype))
    yield from fold(found)


def _finding(site: Site, dtype: str) -> Finding:
    momentum = _momentum(site)
    zone_var, zone_mean = _dead_zones(site, dtype, momentum)
    unknown = ", which is not in the file," if "momentum" in site.unknown else ""
    stalls = site.mode_now == "batch" and max(zone_var, zone_mean) > MATTERS
    if momentum == 0:
        effect = "momentum is 0 anyway."
    else:
        effect = (
            f"with momentum {number(momentum)}{unknown} a variance moves only once a batch differs from it by "
            f"{percent(zone_var)}, a mean by {number(zone_mean)} standard deviations (medians over the channels)."
        )
    return Finding(
        code="NS309",
        site=site.name,
        severity="warning" if stalls else "info",
        message=f"the running statistics are {dtype}: {effect}",
        evidence={
            "dtype": dtype,
            "momentum": None if unknown else momentum,
            "dead_zone_variance": zone_var,
            "dead_zone_mean": zone_mean,
        },
        fix="keep running statistics in float32 (module.float()); train in half precision under torch.autocast",
        mode="train",
    )


def _momentum(site: Site) -> float:
    """The update fraction of the next batch."""
    running = site.spec.running if site.spec is not None else None
    if running is None:
        return 0.1
    return running.momentum if running.momentum is not None else 1 / ((updates(site) or 0) + 1)


def _spacing(values: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Distance of neighbouring numbers of the dtype at these values."""
    import numpy as np

    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.abs(values)))
    power: NDArray[np.float64] = np.exp2(np.maximum(exponent, LEAST_EXPONENT[dtype]) - FRACTION_BITS[dtype])
    return power


def _dead_zones(site: Site, dtype: str, momentum: float) -> tuple[float, float]:
    """Median over channels of the dead zone of the variance (relative) and of the mean (in standard deviations)."""
    import numpy as np

    mean, var = site.array("running_mean"), site.array("running_var")
    if var is None or momentum <= 0:
        return 0.0, 0.0
    live = np.isfinite(var) & (var > 0)
    if mean is not None:
        live &= np.isfinite(mean)
    if not live.any():
        return 0.0, 0.0
    zone_var = _spacing(var[live], dtype) / (2 * momentum * var[live])
    zone_mean = (
        np.zeros(1) if mean is None else _spacing(mean[live], dtype) / (2 * momentum * np.sqrt(var[live]))
    )
    return float(np.median(zone_var)), float(np.median(zone_mean))
