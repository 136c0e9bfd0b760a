"""half-precision-overflow: squares or sums exceed what the dtype holds.

## What it does
Takes the largest |x|, x^2 and sum of squares on your batch and compares them with the largest number of the dtype the
site works in (65504 for float16, 3.4e38 for bfloat16 and float32). PyTorch's own layers square in float32 whatever
they are given; hand-written norms square in the dtype of their input unless they cast first.

- an error where it has happened: the input is finite and the output is not, or squares overflowed and the output is
  nothing like the float64 reference (1 / sqrt(inf) is 0, so an RMS norm goes silent without a NaN);
- a warning where squares exceed the working dtype and the damage could not be measured;
- info where a site that works in float32 now could not run in float16: activations above 65504, or a norm that
  squares in the dtype of its input and meets |x| above 256.

## Why it matters
In float16 a value of 256 has a square that is infinite. Under a loss scaler the step is skipped again and again; in
inference the sample is lost.

## Known problems
Only your batch is seen: the next may be larger. Whether autocast will reach a hand-written norm depends on the
operations it is written with, so the last kind is info.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.LayerNorm(16))
x = torch.randn(8, 16)
x[0] *= 1e20  # squares of 1e40 in float32
report = normscope.check(model, x)
print(report)
```

## Fix
Cast to float32 before squaring (`x.float()`, and back after the gain), or scale x by its largest magnitude first; find
what makes the activations so large.

## References
- IEEE 754 binary16: largest number 65504.
- Micikevicius et al. 2018, Mixed Precision Training: reductions and norms in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import number

if TYPE_CHECKING:
    from normscope.doctor.probes.precision import Precision
    from normscope.doctor.probes.ranges import Ranges
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

FLOAT16_MAX = 65504.0
LOST = 0.5
"""error in standard deviations from which the output is nothing like the reference"""


@rule("NS404", "half-precision-overflow", kinds="D", needs=("ranges", "precision"), real_data=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    found = subject.measured["ranges"]
    if found and not any(math.isfinite(seen.largest) for seen in found.values()):
        yield NotRun(
            "NS404", "every input that was seen holds NaN or infinities, and has no size (see NS406)"
        )
    for site in subject.known():
        seen = subject.measured["ranges"].get(site.name)
        if seen is not None and math.isfinite(seen.largest):  # NS406 tells of inputs that are not
            finding = _judged(site, seen, subject.measured["precision"].get(site.name))
            if finding is not None:
                yield finding


def _judged(site: Site, seen: Ranges, precision: Precision | None) -> Finding | None:
    too_large, limit = seen.squares > seen.working_max, number(seen.working_max)
    squares = f"squares of the input (largest |x| {number(seen.largest)}) exceed {limit}, the most {seen.working} holds"
    broken = "the input is finite and the output is not"
    if too_large and seen.broken:
        return _finding(site, seen, "error", f"{squares}: {broken}.")
    if precision is not None and precision.beyond_output and seen.broken:
        return _finding(
            site, seen, "error", f"{broken}: the exact output exceeds the largest {precision.dtype}."
        )
    if too_large and precision is not None and precision.error >= LOST:
        return _finding(
            site,
            seen,
            "error",
            f"{squares}: the output is off by {number(precision.error)} standard deviations from the reference.",
        )
    if too_large:
        return _finding(site, seen, "warning", f"{squares}.")
    if seen.dtype != "float32":
        return None
    if seen.largest > FLOAT16_MAX:
        said = f"the largest |x| is {number(seen.largest)}: it would be infinite in float16"
    elif seen.squares_as_input and seen.squares > FLOAT16_MAX:
        said = (
            f"squares reach {number(seen.squares)}: in float16 (largest number 65504) they would be infinite"
        )
    else:
        return None
    return _finding(site, seen, "info", f"{said}. In {seen.dtype}, as it runs now, it is fine.")


def _finding(site: Site, seen: Ranges, severity: str, message: str) -> Finding:
    return Finding(
        code="NS404",
        site=site.name,
        severity=severity,
        message=message,
        evidence={
            "largest": seen.largest,
            "largest_square": seen.square,
            "largest_sum_of_squares": seen.sum_of_squares,
            "set_size": seen.set_size,
            "dtype": seen.dtype,
            "working_dtype": seen.working,
            "working_max": seen.working_max,
            "output_not_finite": seen.broken,
        },
        fix="keep this norm, and what feeds it, in float32 or bfloat16 (x.float() before the squares, back after the "
        "gain), or bring the activations down",
        mode="train" if seen.run == "batch" else "eval",
    )
