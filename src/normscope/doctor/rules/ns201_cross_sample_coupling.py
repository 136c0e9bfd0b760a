"""cross-sample-coupling: companions change a sample's output in training, by a measured amount.

## What it does
Runs the batch twice with norms in batch mode and dropout off. Sample 0 stays at its place, all others are replaced
by copies of the last. Whatever changes at sample 0 came from its companions. The finding names the first site that
changes its output for an unchanged input, and the strength: the root mean square change in units of the spread of
that output over the samples. 0 is no influence; near 1, the companions decide as much as the sample itself.

## Why it matters
Batch norm does this by design, and it is no fault: the finding is info. It decides what may be done: gradient
accumulation is no longer the same as a larger batch, per-sample gradients and differential privacy do not exist,
negatives leak into positives in contrastive learning, and a batch of one class trains another network.

## Known problems
Replacing all companions by one sample is a harsh change; the strength within ordinary batches is smaller. With two
samples, sample 0 keeps company with itself.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()
)
report = normscope.check(model, torch.randn(16, 8))
print(report)
```

## Fix
None is needed where the coupling is wanted. Otherwise: group, layer or instance norm, batch norm in eval mode, or
virtual batches of a fixed size.

## References
- Ioffe and Szegedy 2015, Batch Normalization, section 3.4: a sample is seen in conjunction with its batch.
- He et al. 2020, Momentum Contrast, section 3.3: companions leak the answer.
- Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import number, plural

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject


@rule("NS201", "cross-sample-coupling", kinds="D", needs=("companions",))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    if subject.runs.get("batch_companions"):
        yield NotRun("NS201", subject.runs["batch_companions"])
        return
    measured = subject.measured["companions"]
    ordered = sorted(measured.batch.items(), key=lambda item: item[1].order)
    first = next(((name, c) for name, c in ordered if c.responsible), None)
    if first is None:
        return
    name, coupling = first
    if not math.isfinite(coupling.strength + (measured.output_batch or 0.0)):
        yield NotRun("NS201", "outputs hold NaN or infinities, so their change has no size (see NS406)", name)
        return
    couple = [other for other, c in ordered if c.changed and c.mode == "batch"]
    evidence = {"strength": coupling.strength, "sites": len(couple)}
    message = (
        f"in training, other samples of the batch change this output by {number(coupling.strength)} of its spread "
        f"over samples"
    )
    if measured.output_batch is not None:
        evidence["strength_at_output"] = measured.output_batch
        message += f", and the model's output by {number(measured.output_batch)}"
    if len(couple) > 1:
        message += f"; {plural(len(couple), 'site')} normalize by the batch"
    yield Finding(
        code="NS201",
        site=name,
        severity="info",
        message=message + ".",
        mode="train",
        evidence=evidence,
        fix="none where this is meant; group, layer or instance norm do not couple samples",
    )
