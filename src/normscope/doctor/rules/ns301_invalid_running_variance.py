"""invalid-running-variance: NaN, infinite, negative, or so close to -eps that the gain explodes.

## What it does
Reads the stored mean and variance of every norm that keeps them. NaN, an infinity or a negative variance is
an error wherever the stored statistics normalize (in eval, or frozen), and a warning where they are only
kept.

## Why it matters
The output in eval mode is (x - mean) / sqrt(var + eps). One NaN channel turns the whole image NaN two
convolutions later; a variance below -eps has no real root; one just above -eps multiplies its channel by
thousands. Training mode shows nothing of it, since it does not read these numbers.

## Known problems
None known. The rule reads the numbers themselves and estimates nothing.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
# one bad batch in training mode is enough
model(torch.full((8, 3, 8, 8), float("nan")))
report = normscope.check(model)
print(report)
```

## Fix
Find the batch that was NaN or overflowed (a loss scale that is too large, a division by 0 in the
augmentation), and recompute the statistics: `reset_running_stats()`, then forward passes over clean training
data in train mode. A negative variance comes from arithmetic on checkpoints (averages with negative weights,
extrapolation, momentum outside 0 to 1) or from quantization: recompute it likewise, never average it.

## References
- Ioffe and Szegedy 2015, Batch Normalization, algorithm 2: the running variance in inference.
- Izmailov et al. 2018, Averaging Weights Leads to Wider Optima, section 3: after averaging weights,
  statistics are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import number, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


@rule("NS301", "invalid-running-variance", kinds="C", stateful=True)
def check(subject: Subject) -> Iterator[Finding]:
    for site in subject.sites:
        for name in ("running_mean", "running_var"):
            yield from _not_finite(site, name)
        yield from _negative(site)


def _severity(site: Site) -> str:
    return "error" if {site.mode_eval, site.mode_train} & {"running", "frozen"} else "warning"


def _not_finite(site: Site, name: str) -> Iterator[Finding]:
    import numpy as np

    values = site.array(name)
    if values is None or np.isfinite(values).all():
        return
    nan, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    yield Finding(
        code="NS301",
        site=site.name,
        severity=_severity(site),
        message=f"{name} is NaN in {nan} and infinite in {infinite} of {plural(values.size, 'channel')}.",
        evidence={
            "nan_channels": nan,
            "infinite_channels": infinite,
            "channels": values.size,
            "buffer": name,
        },
        fix="reset the statistics and recompute them on clean data in train mode",
        mode="eval",
    )


def _negative(site: Site) -> Iterator[Finding]:
    var = site.array("running_var")
    if var is None or not (var < 0).any():
        return
    below = int((var < 0).sum())
    lowest = float(var[var < 0].min())
    eps = site.spec.eps if site.spec is not None and site.spec.eps is not None else 0.0
    denominators = var[var < 0] + eps
    rootless = int((denominators <= 0).sum())
    gain = float("inf")
    if site.spec is None or "eps" in site.unknown:
        effect = "where eps, which is not known here, does not make up for it, the output is NaN"
    elif rootless:
        effect = f"{rootless} of them stay at or below 0 with eps {number(eps)}, and their output is NaN or infinite"
    else:
        gain = float(denominators.min() ** -0.5)
        effect = f"with eps {number(eps)} their gain reaches {number(gain)}"
    yield Finding(
        code="NS301",
        site=site.name,
        severity=_severity(site),
        message=f"running_var is negative in {below} of {plural(var.size, 'channel')} "
        f"(lowest {number(lowest)}); {effect}.",
        evidence={
            "negative_channels": below,
            "channels": var.size,
            "lowest": lowest,
            "channels_without_denominator": rootless,
            "largest_gain": gain,
        },
        fix="a variance cannot be negative: reset the statistics and recompute them in train mode",
        mode="eval",
    )
