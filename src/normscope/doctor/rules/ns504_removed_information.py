"""removed-information: a norm takes away what predicts the targets, and nothing carries it past.

## What it does
Layer, group, instance and RMS norm take the mean or the scale of each sample away. On a batch with targets,
cross-validated linear probes predict them from what each such norm removes, from what it lets through, and from
the network's output. The rule fires where the removed numbers predict the targets beyond chance and better than
both others: each difference beyond chance (p < 0.001 over all sites), and what it gains over guessing more than
twice what they gain. Where a residual
sum, a concatenation or a gain computed from the input keeps the information, the output's probe shows it: silent.

## Why it matters
Brightness, loudness, total counts, the length of an embedding: a sample's level or scale can be the answer. Behind
an instance norm of the input no network can know it any more, however long it trains, and the loss just stays.

## Known problems
Linear probes see what is linear in the statistics and in averages of the output. A network whose output is worse
than a linear probe for another reason, untrained ones among them, is compared by what its output holds, which is
usually enough; where it is not, the message gives all three numbers. In a chain of norms the last that removes the
information is named, since what still reached it had been carried past the others. Needs 32 samples and at least 5 of
each class: a task of two classes was found 12 times in 30 with 32 samples and always with 64, one of numbers always;
274 innocent runs gave no alarm. Batch statistics and stored statistics remove nothing of a single sample.

## Example
```python
import torch, normscope

level = torch.randn(128, 1, 1, 1)
images = level + torch.randn(128, 3, 8, 8)
bright = (level.flatten() > 0).long()
model = torch.nn.Sequential(
    torch.nn.InstanceNorm2d(3), torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten()
)
report = normscope.check(model, images, bright)
print(report)
```

## Fix
Give the removed numbers to a later layer (concatenate each sample's mean and log standard deviation, as
`torch.cat([features, x.mean((1, 2, 3))[:, None]], 1)`), move the norm behind the layers that read them, or normalize
the input by constants of the whole data set.

## References
- Ulyanov, Vedaldi and Lempitsky 2016, Instance Normalization: contrast is removed on purpose, for stylization.
- Nam and Kim 2018, Batch-Instance Normalization, section 1: where style is the answer, removing it hurts.
- Alain and Bengio 2017, Understanding Intermediate Layers Using Linear Classifier Probes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, percent

if TYPE_CHECKING:
    from normscope.doctor.probes.removed import Removed
    from normscope.doctor.subject import Subject

SIGNIFICANCE = 0.001
LEAST, TIMES = 0.1, 2.0
"""what is removed must gain more than this over guessing, and this many times what the other probes gain"""


@rule("NS504", "removed-information", kinds="D", needs=("removed",), real_data=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    measured: dict[str, Removed] = subject.measured["removed"]
    if not measured:
        yield NotRun("NS504", "no norm here takes the statistics of a sample away")
    level = SIGNIFICANCE / max(1, len(measured))
    found = [(site.order, name) for name, site in measured.items() if _lost(site, level)]
    centered = {site.name for site in subject.known() if site.spec is not None and site.spec.center}
    yield from fold(
        _finding(name, measured[name], name in centered) for _, name in sorted(found, reverse=True)
    )


def _lost(site: Removed, level: float) -> bool:
    if site.kept is None or site.output is None:
        return False
    proofs = (site.against_chance, site.against_kept, site.against_output)
    gain, other = site.removed - site.chance, max(site.kept, site.output) - site.chance
    return max(proofs) < level and gain > max(LEAST, TIMES * other)


def _finding(name: str, site: Removed, centered: bool) -> Finding:
    assert site.kept is not None
    assert site.output is not None
    what = "mean and scale" if centered else "scale"
    score = percent if site.classes else lambda value: f"R² {value:.2f}"
    measure = "right predictions" if site.classes else "of the targets' variance"
    chance = f", {percent(site.chance)} by chance" if site.classes else ""
    return Finding(
        code="NS504",
        site=name,
        severity="warning",
        message=f"the {what} of each sample, which this norm removes, tell the targets, and nothing behind it does: a "
        f"linear probe reaches {score(site.removed)} {measure} from what is removed, {score(site.kept)} from this "
        f"norm's output and {score(site.output)} from the model's ({site.samples} samples, cross-validated{chance}).",
        evidence={
            "removed": site.removed,
            "kept": site.kept,
            "output": site.output,
            "chance": site.chance,
            "samples": site.samples,
            "classes": site.classes,
            "p_against_chance": site.against_chance,
            "p_against_kept": site.against_kept,
            "p_against_output": site.against_output,
        },
        fix="pass each sample's mean and log standard deviation on to a later layer, or normalize by constants of the "
        "whole data set",
    )
