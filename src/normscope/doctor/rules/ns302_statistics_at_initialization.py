"""statistics-at-initialization: running mean exactly 0 and variance exactly 1, never updated or reset.

## What it does
Finds norms whose stored statistics are the values they are born with in every channel, and tells two faults
apart by the counter of updates:

- counter 0 or absent: **never updated**. An error where the gain or bias of that norm was trained: training
  ran in eval mode, or the statistics were lost on loading (`strict=False`). A warning where other norms of
  the model were trained, or the optimizer remembers steps. A freshly built model, with nothing trained
  anywhere, gets one info for all its norms.
- counter above 0: **reset, or momentum 0**. Updates were counted and left no trace: an error.

A frozen norm (one that can only use stored statistics) with mean 0 and variance 1 is a plain gain and bias:
info, since some converters merge the statistics into gain and bias and leave exactly this.

## Why it matters
In eval mode such a norm subtracts nothing and divides by 1: activations pass unnormalized. Training looks
healthy, since there the batch normalizes; the same model in eval is far off.

## Known problems
A counter that was not saved (ported checkpoints) makes a reset look like "never updated". Norms without gain
and bias show no trace of training themselves; then the rest of the model decides, or the optimizer, where it is
given and keeps a memory (Adam, momentum). The counter of an instance
norm is never touched by PyTorch and counts as absent.

## Example
```python
import torch, normscope

# trained in eval mode
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(16, 8)).square().sum().backward()
optimizer.step()
report = normscope.check(model)
print(report)
```

## Fix
Never updated: load the checkpoint with `strict=True` and read what was missing, or run some hundred training
batches in train mode without an optimizer step. Reset or momentum 0: restore the buffers from the last good
checkpoint, or give momentum a value (0.1) and recompute.

## References
- Ioffe and Szegedy 2015, Batch Normalization, section 3.1: inference uses population statistics.
- The documentation of `torch.nn.BatchNorm2d`: `running_mean` starts at 0, `running_var` at 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.history import (
    affine_at_start,
    looks_trained,
    momentum_of,
    statistics_at_start,
    updates,
    would_tell,
)
from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

RECOMPUTE = "recompute the statistics: forward passes over training data in train mode, or load them strictly"


@rule("NS302", "statistics-at-initialization", kinds="C", stateful=True)
def check(subject: Subject) -> Iterator[Finding]:
    diagnoses: dict[str, list[Finding]] = {}
    trained = looks_trained(subject)
    told = trained or would_tell(subject)
    for site in subject.sites:
        # Where eval normalizes by the batch or the input, stored statistics harm nobody.
        if statistics_at_start(site) and site.mode_eval in ("running", "frozen"):
            diagnosis, finding = _diagnose(site, trained, told)
            diagnoses.setdefault(diagnosis, []).append(finding)
    for findings in diagnoses.values():
        yield from fold(findings)


def _diagnose(site: Site, model_trained: bool, told: bool) -> tuple[str, Finding]:
    count = updates(site)
    momentum = momentum_of(site)
    own = affine_at_start(site)
    evidence = {"updates": count, "affine_at_start": own, "momentum": momentum}

    def finding(severity: str, message: str, fix: str) -> Finding:
        return Finding("NS302", site.name, f"running mean is 0 and variance 1 in every channel: {message}", severity,
                       evidence, fix, mode="eval")  # fmt: skip

    if site.mode_train == "frozen":
        return "frozen", finding(
            "info",
            "this frozen norm is a plain gain and bias. Right if its statistics were merged into them, else "
            "they were never loaded.",
            "compare with the checkpoint: it should hold running_mean and running_var for this norm",
        )
    if count:
        if momentum == 0:
            why = f"momentum is 0, so {plural(count, 'counted update')} moved nothing."
        else:
            or_zero = ", or momentum is 0" if "momentum" in site.unknown else ""
            why = f"they were reset after {plural(count, 'counted update')}{or_zero}."
        return "reset", finding(
            "error", why, "restore the buffers, or set momentum to 0.1; then " + RECOMPUTE
        )
    counted = "no counter" if count is None else "counter 0"
    if own is False:
        why = f"never updated ({counted}), although gain and bias of this norm were trained."
        return "never", finding("error", why, RECOMPUTE)
    if model_trained:
        why = f"never updated ({counted}), while this model was trained."
        return "unused", finding("warning", why, RECOMPUTE + "; or remove this norm if nothing uses it")
    seen = (
        "nothing in this model looks trained, so this is"
        if told
        else "no norm here would show a training: it is"
    )
    why = f"never updated ({counted}); {seen} right before training{'' if told else ', and wrong after one'}."
    return "fresh", finding("info", why, "train before using eval mode")
