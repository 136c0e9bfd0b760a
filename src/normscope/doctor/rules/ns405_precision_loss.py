"""precision-loss: the output is further from the float64 reference than the dtype allows.

## What it does
Recomputes whole statistic sets of your batch in float64 and compares. What a sound implementation may be off by
follows from the dtypes of input, arithmetic and output, the number of elements summed and the level of the mean; the
rule fires from four times that, and only where the difference matters: more than 0.001
standard deviations of the output (more than 16 roundings of a half-precision output). Info; warning from 0.01, error
from 0.1. Squares that overflow are told by NS404.

## Why it matters
The site computes something else than its specification says: statistics accumulated in half precision, an
approximate reciprocal root, a kernel that computes E[x^2] - E[x]^2. PyTorch's group norm on CPU does
so in channels-last layout (up to version 2.13 at least): off by 0.02 where the mean is 100 deviations, and float32
explains 0.0001.

## Known problems
The comparison holds the site to the specification that was read from it; a subclass that computes something else on
purpose is told here as an error of that size. At most 20 000 elements a call are compared.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 1), torch.nn.GroupNorm(4, 16))
torch.nn.init.constant_(model[0].bias, 50.0)
# in the usual layout there is nothing to find
x = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last)
report = normscope.check(model, x)
print(report)
```

## Fix
Compute the statistics in float32 or float64; compare the site with PyTorch's own layer on `x.contiguous()`.

## References
- Higham 2002, Accuracy and Stability of Numerical Algorithms, chapter 4: pairwise summation errs by log2(n) roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import number

if TYPE_CHECKING:
    from normscope.doctor.probes.precision import Precision
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

MATTERS = ((0.1, "error"), (0.01, "warning"), (0.001, "info"))
TIMES_ALLOWED = 4
"""the bound counts typical roundings, not the worst of each"""
HALF_ROUNDINGS = 16


@rule("NS405", "precision-loss", kinds="D", needs=("precision", "ranges"))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    if not subject.measured["precision"]:
        yield NotRun("NS405", "nothing was compared: no site had statistic sets whose exact output is finite")
    for site in subject.known():
        seen = subject.measured["precision"].get(site.name)
        if seen is None or _overflows(subject, site):
            continue
        severity = next((name for limit, name in MATTERS if seen.error >= limit), "")
        if severity and seen.error > max(
            TIMES_ALLOWED * seen.explained, HALF_ROUNDINGS * seen.output_roundoff
        ):
            yield _finding(site, seen, severity)


def _overflows(subject: Subject, site: Site) -> bool:
    seen = subject.measured["ranges"].get(site.name)
    return seen is not None and (seen.squares > seen.working_max or seen.broken)


def _finding(site: Site, seen: Precision, severity: str) -> Finding:
    where = f" at {seen.worst_set}" if seen.worst_set else ""
    unusual = seen.memory_format not in ("", "contiguous")
    where += f" in {seen.memory_format} layout" if unusual else ""
    return Finding(
        code="NS405",
        site=site.name,
        severity=severity,
        message=f"the output is off by up to {number(seen.error)} standard deviations from the float64 reference{where}"
        f"; {seen.working} arithmetic and {seen.dtype} output explain {number(seen.explained)}.",
        evidence={
            "measured_error": seen.error,
            "typical_error": seen.typical_error,
            "allowed_error": seen.explained,
            "kappa": seen.kappa,
            "set": seen.worst_set,
            "dtype": seen.dtype,
            "working_dtype": seen.working,
            "memory_format": seen.memory_format,
            "sets_compared": seen.sets,
        },
        fix="call this norm on x.contiguous(), which takes another kernel"
        if unusual
        else "compute the statistics in float32 or float64, and compare with PyTorch's own layer",
        mode="train" if seen.run == "batch" else "eval",
    )
