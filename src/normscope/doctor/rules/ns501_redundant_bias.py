"""redundant-bias: a bias that the following norm removes.

## What it does
Finds convolutions and linear layers whose bias stands directly before a norm (only views between, no other
reader) that subtracts each feature's own mean in training: batch norm, instance norm, group norm with one
channel a group. Adding a constant to a feature adds it to the mean, and the norm takes it away. This follows
from the norm's axes. Where a backward pass can run, it is also measured: the gradient of such a bias is
rounding error. Silent where it is not, and where the norm uses stored statistics in training (frozen), since
there the bias acts.

## Why it matters
Nothing breaks. The bias costs memory, optimizer state and communication, takes a random walk under rounding
noise or shrinks under weight decay, and its value means nothing: comparing or averaging it between
checkpoints misleads. If the norm is frozen later, a bias that drifted after the last update of the statistics
starts to count.

## Known problems
Group norm with several channels a group and layer norm over the features remove only the mean of the biases:
silent. In eval mode the running mean contains the bias, so it cannot be dropped from a trained model without
adjusting that mean.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
report = normscope.check(model, torch.randn(8, 3, 8, 8))
print(report)
```

## Fix
Construct the layer with `bias=False`. In a trained model, subtract the bias from `running_mean` and then
remove it: the function in eval stays the same.

## References
- Ioffe and Szegedy 2015, Batch Normalization, section 3.2: the bias is subsumed by the norm's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject

NO_GRADIENT, NO_GRADIENT_ALONE = 1e-3, 1e-4
"""of the weight's gradient, with the norm's axes as a second witness and without. Rounding was seen to leave 3e-9
to 3e-5; biases that act had 4e-4 (behind raw pixels of 0 to 255) to 30, about 1 / (|x| sqrt(fan-in))"""


@rule("NS501", "redundant-bias", kinds="G", needs=("data", "shift"))
def check(subject: Subject) -> Iterator[Finding]:
    seen: dict[tuple[str, str], list[Any]] = {}
    for fed in subject.measured["shift"]:
        seen.setdefault((fed.site, fed.producer), []).append(fed)
    yield from fold(_finding(calls) for calls in seen.values() if all(_redundant(fed) for fed in calls))


def _redundant(fed: Any) -> bool:
    if not math.isfinite(fed.magnitude):
        return False  # NS406's: NaN has an effect
    if fed.gradient is None:
        return bool(fed.removed)
    if fed.removed is None:
        return bool(fed.gradient < NO_GRADIENT_ALONE)
    return bool(fed.removed and fed.gradient < NO_GRADIENT)


def _finding(calls: list[Any]) -> Finding:
    fed = calls[0]
    layer = f"the bias of {fed.producer or fed.op} ({fed.op}, {fed.features} numbers, up to {number(fed.magnitude)})"
    how = []
    if fed.removed:
        how.append("the norm subtracts the mean of each feature")
    if fed.gradient is not None:
        how.append(f"its gradient is {number(fed.gradient)} of the weight's")
    return Finding(
        code="NS501",
        site=fed.site,
        severity="info",
        message=f"{layer} has no effect in training: {' and '.join(how)}.",
        evidence={
            "producer": fed.producer,
            "parameters": fed.features,
            "largest_bias": fed.magnitude,
            "derived": fed.removed,
            "relative_gradient": fed.gradient,
        },
        fix="construct that layer with bias=False; in a trained model subtract its bias from running_mean first, as "
        'report.apply("NS501", model, inputs) does',
        mode="train",
    )
