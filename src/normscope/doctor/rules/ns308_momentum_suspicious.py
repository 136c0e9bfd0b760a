"""momentum-suspicious: 0, above one half, outside 0 to 1, or cumulative in a long training.

## What it does
In PyTorch momentum is the fraction by which each batch moves the running statistics; Keras, Flax and ONNX
write the fraction that stays. Fires on:

| momentum | what it does | severity |
|---|---|---|
| below 0, above 1 | the average diverges; a variance can become negative | error |
| 0 | the statistics never move | warning |
| above 0.5 (0.9, 0.99) | an average over about one batch: the other convention | warning |
| None | the plain average over all batches ever seen | info in a long training, or beside norms with a number |

## Why it matters
0.99 copied from Keras keeps 1 % of the past: the statistics used in eval are those of the last batch, and the
validation loss jumps with whichever batch came last. 0 keeps whatever was there: right only if nothing is to
move, and then eval mode or a frozen norm says it better.

## Known problems
`momentum=None` is right for a recalibration pass: it is not reported for a model in eval, nor for a trained
norm with a short count. Momentum 1 is right for a single recalibration batch.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8, momentum=0.99)
)
report = normscope.check(model)
print(report)
```

## Fix
Take 1 - m of a number from Keras, Flax or ONNX: 0.99 becomes 0.01, 0.9 becomes 0.1. In place of 0 use eval
mode.

## References
- The documentation of `torch.nn.BatchNorm2d` (note on momentum), `keras.layers.BatchNormalization`, and of
  the ONNX operator BatchNormalization.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.history import affine_at_start, updates
from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

RECALIBRATION = 1000
"""batches up to which a cumulative average may be a recalibration pass"""


@rule("NS308", "momentum-suspicious", kinds="S", stateful=True)
def check(subject: Subject) -> Iterator[Finding]:
    sites = [
        site
        for site in subject.known()
        if site.spec is not None and site.spec.running is not None and site.mode_train == "batch"
    ]
    numbers = any(site.spec is not None and site.spec.running.momentum is not None for site in sites)  # type: ignore[union-attr]
    diagnoses: dict[str, list[Finding]] = {}
    for site in sites:
        diagnosis = _diagnose(site, numbers)
        if diagnosis is not None:
            diagnoses.setdefault(diagnosis[0], []).append(_finding(site, *diagnosis[1:]))
    for findings in diagnoses.values():
        yield from fold(findings)


def _diagnose(site: Site, beside_numbers: bool) -> tuple[str, str, str, str] | None:
    """The diagnosis, severity, message and fix; None where momentum is in order."""
    assert site.spec is not None
    assert site.spec.running is not None
    momentum = site.spec.running.momentum
    if momentum is None:
        return _cumulative(site, beside_numbers)
    told = f"momentum is {number(momentum)}"
    if momentum < 0 or momentum > 1:
        return (
            "outside", "error", f"{told}, outside 0 to 1: the running average diverges.", "use a number such as 0.1",
        )  # fmt: skip
    if momentum == 0:
        if getattr(site.module, "momentum", momentum) is None:
            return None  # no counter to average by: NS303's
        return (
            "zero", "warning", f"{told}: the running statistics can never move, whatever is trained or recalibrated.",
            "set momentum to 0.1 before training or recalibrating; to freeze a norm, use eval mode",
        )  # fmt: skip
    if momentum > 0.5:
        batches = (2 - momentum) / momentum  # 1 / sum of the squared weights of an exponential average
        return (
            "convention", "warning",
            f"{told}, so each batch replaces that share and the statistics average only {number(batches)} batches; it "
            "looks like the convention of Keras, Flax and ONNX, where the number is the share that stays.",
            f'set momentum to {number(1 - momentum)}: report.apply("NS308", model)'
            if momentum < 1
            else "set momentum to 0.1",
        )  # fmt: skip
    return None


def _cumulative(site: Site, beside_numbers: bool) -> tuple[str, str, str, str] | None:
    count = updates(site) or 0
    recalibrated = affine_at_start(site) is False and count <= RECALIBRATION
    if site.mode_now != "batch" or (recalibrated and not beside_numbers):
        return None
    past = f" after {plural(count, 'batch')} the next one counts 1 / {count + 1}."
    return (
        "cumulative",
        "info",
        f"momentum is None: the statistics average all batches ever seen and never forget the early ones;{past}",
        "give momentum a number such as 0.1 for training; None is for recalibration passes",
    )


def _finding(site: Site, severity: str, message: str, fix: str) -> Finding:
    assert site.spec is not None
    assert site.spec.running is not None
    evidence = {"momentum": site.spec.running.momentum, "updates": updates(site)}
    return Finding("NS308", site.name, message, severity, evidence, fix, mode="train")
