"""constant-set: statistic sets without any variance on real data.

## What it does
Finds the sets whose elements are all exactly the same number on your batch (all zero, where no mean is subtracted),
and looks at what comes out of them. It should be the bias. The rule tells

- an error where it is not: an eps of 0 gives 0 / 0, and an implementation that rounds the mean or computes
  x * scale - mean * scale lets rounding noise through, multiplied by 1 / sqrt(eps);
- a warning where at least half of the sets of a site, over its first 16 calls, are constant: that much of its input
  is lost;
- info where some are constant and their gain is not 0.

Padded positions, as your mask gives them, are not counted. Sites that normalize by stored statistics have no such sets.

## Why it matters
A constant set carries nothing, and its gradient is the gain over sqrt(eps), about 300 times for eps 1e-5: the first
tiny variation is blown up. Usual causes: channels that a ReLU has shut off, padding that was not masked, an image
border or a constant input channel, a layer whose weights are all zero.

## Known problems
A channel may be silent on this batch only: pass more samples. Rows of zeros from padding are constant by design; pass
`mask=` to leave them out. Where the samples are copies of each other, sets over the batch are constant because of
that: of a norm that uses the batch, only what comes out is then judged.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.InstanceNorm2d(3))
x = torch.randn(8, 3, 8, 8)
x[:, 1] = 0.0  # a channel that the camera does not have
report = normscope.check(model, x)
print(report)
```

## Fix
Remove or revive the dead channels (initialization, learning rate, leaky activation), mask the padding, drop constant
input channels; where the output is wrong, give eps a positive value and keep the input's level near 0.

## References
- y = w (x - mean) / sqrt(0 + eps) + b = b for x = mean; dy/dx has an eigenvalue w / sqrt(eps) about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import number, percent, plural

if TYPE_CHECKING:
    from normscope.doctor.probes.precision import Precision
    from normscope.doctor.probes.statistics import SetStatistics
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

WRONG = 0.01
"""distance from the bias, in units of the gain, that rounding of a sound implementation does not reach"""
MOST = 0.5


@rule("NS402", "constant-set", kinds="D", needs=("statistics", "precision"), real_data=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    for site in subject.known():
        seen = [
            s
            for s in subject.measured["statistics"].get(site.name, ())
            if s.mode in ("batch", "input") and s.set_size > 1
        ]
        if any(s.constant > 0 for s in seen):
            worst = max(seen, key=lambda s: s.constant).over_calls(seen)
            finding = _judged(site, worst, subject.measured["precision"].get(site.name))
            if finding is None:
                continue
            if subject.inputs_dependent and _joins_samples(site) and not _comes_out_wrong(finding):
                why = f"cannot tell: the samples are not independent, {subject.inputs_dependent}"
                yield NotRun("NS402", why, site.name)
            else:
                yield finding


def _joins_samples(site: Site) -> bool:
    return site.spec is not None and "b" not in site.spec.stats.partition("->")[2].split()


def _comes_out_wrong(finding: Finding) -> bool:
    """Rounding noise is the implementation's, whatever made the set constant."""
    return float(finding.evidence["distance_from_bias"]) >= WRONG


def _judged(site: Site, seen: SetStatistics, precision: Precision | None) -> Finding | None:
    assert site.spec is not None
    constant = round(seen.constant * seen.sets)
    sets = plural(seen.sets, "statistic set") + (f" in {seen.calls} calls" if seen.calls > 1 else "")
    what = f"{constant} of {sets} ({percent(seen.constant)}) are constant on this batch"
    wrong = precision.constant_error if precision is not None else 0.0
    fix = "revive or remove what is constant (dead units, constant input channels), and mask padding"
    if site.spec.eps == 0:
        severity, said = "error", "eps is 0, so their output is 0 / 0, not a number."
        fix = "give eps a positive value, such as 1e-5"
    elif precision is not None and wrong >= WRONG:
        severity = "error" if wrong >= 0.1 else "warning"
        said = (
            f"the set at {precision.constant_set} holds only {number(precision.constant_value)} and should give its "
            f"bias, but this implementation is off by {number(wrong)} times the gain: rounding noise over sqrt(eps)."
        )
        fix = "bring the level of the input near 0 before this norm, or drop the constant channel"
    elif seen.constant >= MOST:
        severity, said = "warning", "their output is the bias, whatever the input's level."
    elif seen.constant_gain > 0:
        severity, said = (
            "info",
            "their output is the bias; the first variation is multiplied by gain / sqrt(eps).",
        )
    else:
        return None
    return Finding(
        code="NS402",
        site=site.name,
        severity=severity,
        message=f"{what}: {said}",
        evidence={
            "constant_share": seen.constant,
            "constant_sets": constant,
            "sets": seen.sets,
            "calls": seen.calls,
            "example": seen.constant_set,
            "value": seen.constant_value,
            "gain": seen.constant_gain,
            "distance_from_bias": wrong,
        },
        fix=fix,
        mode="train" if seen.run == "batch" else "eval",
    )
