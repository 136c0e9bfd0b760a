"""ill-conditioned: the mean is so large against the deviation that digits are lost.

## What it does
Centering subtracts two nearly equal numbers where kappa = |mean| / standard deviation is large. Two losses follow, and
both are given in standard deviations of the output:

- predicted: the input's own rounding, |mean| / sqrt(v + eps) times the unit roundoff of its dtype (6e-8 in float32,
  0.004 in bfloat16). No implementation can bring that back;
- measured: the running implementation against the float64 reference on the activations that really occur, at the
  worst set and others.

It fires where the measured error reaches 0.001 and the mean explains it (info; warning from 0.01, error from 0.1), or
where the prediction reaches 0.05 (info; warning from 0.3).

## Why it matters
`E[x^2] - E[x]^2` loses kappa squared where the two-pass formula loses kappa: a group norm in channels-last layout on
CPU that computes it so is off by 0.02 at kappa 100 and by more than 1 at kappa 1000. In bfloat16 a kappa of 100 leaves
steps of half a standard deviation.

## Known problems
The prediction is an upper bound: inputs that lie on a grid (integers, quantized values) are not rounded at all.
At most 20 000 elements a call are compared, the set that is hardest to center always among them.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.GroupNorm(4, 16))
x = 1000 + 0.05 * torch.randn(8, 16, 16, 16)  # 0.05 is 820 float32 steps at 1000
report = normscope.check(model, x)
print(report)
```

## Fix
Remove the large mean before this layer: center the input, or drop the bias that makes it. Where the measured error is
far above what the dtype explains, NS405 fires too, and another kernel helps (`x.contiguous()`, float64).

## References
- Chan, Golub, LeVeque 1983, Algorithms for Computing the Sample Variance: errors of order kappa and kappa squared.
- Higham 2002, Accuracy and Stability of Numerical Algorithms, section 1.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import number

if TYPE_CHECKING:
    from normscope.doctor.probes.precision import Precision
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

MEASURED = ((0.1, "error"), (0.01, "warning"), (0.001, "info"))
PREDICTED = ((0.3, "warning"), (0.05, "info"))


@rule("NS403", "ill-conditioned", kinds="D", needs=("precision",), real_data=True)
def check(subject: Subject) -> Iterator[Finding]:
    for site in subject.known():
        seen = subject.measured["precision"].get(site.name)
        if seen is None:
            continue
        measured = seen.error if seen.mean_explains_it and seen.error > 2 * seen.rounding else 0.0
        severity = _first(MEASURED, measured) or _first(PREDICTED, seen.predicted)
        if severity:
            yield _finding(site, seen, severity, measured)


def _first(scale: tuple[tuple[float, str], ...], value: float) -> str:
    return next((name for limit, name in scale if value >= limit), "")


def _finding(site: Site, seen: Precision, severity: str, measured: float) -> Finding:
    level = seen.amplification if measured else seen.predicted / seen.input_roundoff
    where = (seen.worst_set if measured else seen.predicted_set) or "its only set"
    lost = f"{number(seen.error if measured else seen.predicted)} standard deviations"
    if measured:
        said = f"the output is off by up to {lost} from the float64 reference"
    else:
        said = f"rounding the input to {seen.input_dtype} may have cost up to {lost} before this norm saw it"
    return Finding(
        code="NS403",
        site=site.name,
        severity=severity,
        message=f"at {where} the mean is {number(level)} times the denominator: {said}.",
        evidence={
            "kappa": seen.kappa,
            "mean_over_denominator": level,
            "measured_error": seen.error,
            "typical_error": seen.typical_error,
            "allowed_error": seen.explained,
            "predicted_error": seen.predicted,
            "set": where,
            "dtype": seen.input_dtype,
            "memory_format": seen.memory_format,
            "sets_compared": seen.sets,
        },
        fix="remove the large mean before this norm (center the input, drop the bias that makes it), or keep this part "
        "of the network in a wider dtype",
        mode="train" if seen.run == "batch" else "eval",
    )
