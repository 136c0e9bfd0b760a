"""tiny-statistic: sets so small that the output carries almost only signs or noise.

## What it does
Looks for centered sets of 2 to 4 elements on your batch. After centering and scaling n numbers keep n - 2 degrees of
freedom: two elements always become +1 and -1, whatever they were; three lie on a circle. The output's size is
measured: where eps is larger than the variance the sets are not forced onto these values and the rule is silent.

Two elements are a warning where the site is deployed like this (eval), and info where only this batch, in training,
is so small. Three and four elements are info, and only in eval.

## Why it matters
With two elements the layer is a comparison: one bit a set is kept, and the gradient is almost zero everywhere and
huge where the two are close. The standard deviation estimated from n elements is itself off by a share of about
1 / sqrt(2 (n - 1)): 71 % for two elements, 41 % for four.

## Known problems
A layer norm over two to four features can be meant; the info says what it costs. Set sizes depend on the input's
size: check with the smallest inputs you use.

## Example
```python
import torch, normscope

pooled = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.AdaptiveAvgPool2d(1))
# two channels at one place per group
model = torch.nn.Sequential(pooled, torch.nn.GroupNorm(8, 16))
report = normscope.check(model, torch.randn(8, 3, 8, 8))
print(report)
```

## Fix
Larger sets: fewer groups, a layer norm over all channels, normalization before the pooling, larger inputs; for batch
statistics a larger batch.

## References
- `(a - b) / 2` over `|a - b| / 2` is the sign of `a - b`.
- The standard error of a standard deviation, 1 / sqrt(2 (n - 1)) for Gaussian values: any text on statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import number, percent, plural

if TYPE_CHECKING:
    from normscope.doctor.probes.statistics import SetStatistics
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

LARGEST = 4
FORCED = 0.9
"""median standard deviation of the output above which eps leaves the values on their few places"""


@rule("NS102", "tiny-statistic", kinds="D", needs=("statistics",))
def check(subject: Subject) -> Iterator[Finding]:
    for site in subject.known():
        assert site.spec is not None
        tiny = [s for s in subject.measured["statistics"].get(site.name, ()) if site.spec.center and _tiny(s)]
        if tiny:
            yield _finding(site, min(tiny, key=lambda s: s.set_size))


def _tiny(seen: SetStatistics) -> bool:
    largest = LARGEST if seen.run == "eval" else 2
    return 2 <= seen.set_size <= largest and seen.live > 0 and seen.shrinkage[1] > FORCED


def _finding(site: Site, seen: SetStatistics) -> Finding:
    n, deployed = seen.set_size, seen.run == "eval"
    size = number(seen.shrinkage[1])
    noise = (1 / (2 * (n - 1))) ** 0.5
    if n == 2:
        what = f"every pair comes out as +{size} and -{size}, so only which of the two is larger is kept"
    else:
        what = f"{n} numbers keep {plural(n - 2, 'degree')} of freedom, and their scale is known to {percent(noise)}"
    return Finding(
        code="NS102",
        site=site.name,
        severity="warning" if n == 2 and deployed else "info",
        message=f"its {plural(seen.sets, 'statistic set')} have {n} elements"
        f"{'' if deployed else ' on this batch in training'} (input {seen.shape}): {what}.",
        evidence={
            "set_size": n,
            "sets": seen.sets,
            "shape": list(seen.shape),
            "output_standard_deviation": seen.shrinkage[1],
            "scale_noise": noise,
        },
        fix="larger sets: fewer groups, another axis, before the pooling, larger inputs"
        if deployed
        else "train with larger batches, or normalize over axes that do not include the batch",
        mode="eval" if deployed else "train",
    )
