"""statistics-move-without-grad: a forward pass without gradients, or in eval mode, changes running statistics.

## What it does
Watches the running statistics (their values, not version counters, which PyTorch does not move here) and reports:

- **teacher**: a norm that never runs with gradients, whose parameters stand still, and whose statistics move with
  every batch: a frozen network (distillation teacher, feature extractor, critic) left in train mode. A warning.
- **between steps**: a norm that is trained, and whose statistics also move in forward passes without gradients: a
  validation or generation loop without `model.eval()`. A warning, with how far the statistics went.
- **every step**: the same, about once a step, as where a generator makes samples for its discriminator without
  gradients. That is many a recipe's way, and each such pass updates the statistics: for information.
- **eval**: statistics that move in eval mode. A warning.

Silent: a recalibration (momentum None set for the pass, as `torch.optim.swa_utils.update_bn` does, or statistics
that were just reset); the first pass of checkpointing, which runs without gradients and again in the backward; a
network whose parameters follow another's (moving averages, momentum encoders), which is often run in train mode on
purpose; a single pass, and all passes before the first training forward (dry runs, initializations).

## Why it matters
A teacher in train mode normalizes by the companions of each sample: its targets depend on the batch, and its
statistics drift away from what its weights expect. A validation loop in train mode measures another function than
the one that is deployed, and leaks validation data into the statistics.

## Known problems
Only modules of the monitored model are seen: monitor teacher and student together, `Monitor({"student": student,
"teacher": teacher}, optimizer)`. A moving-average teacher left in train mode by mistake is taken for one that is
meant to be, and a target network that is copied now and then for a teacher until its first copy. Compiled code is not
seen.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with normscope.Monitor(model, optimizer) as monitor:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():  # validation without model.eval()
        for _ in range(3):
            model(torch.randn(16, 8))
print(monitor.report())
```

## Fix
`teacher.eval()` after every `train()` of what holds it; `model.eval()` before the loop and `model.train()` after it.

## References
- Ioffe and Szegedy 2015, Batch Normalization, section 3.1.
- Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.training_record import NEEDS_TRAINING, training_of
from normscope.doctor.wording import fold, number, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject
    from normscope.doctor.training_record import SiteTraining

FEWEST = 2
"""passes: one is a dry run"""
MANY = 6
"""steps that tell a habit from a loop that came by"""


@rule("NS315", "statistics-move-without-grad", kinds="T", stateful=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    record = training_of(subject)
    if record is None:
        yield NotRun("NS315", NEEDS_TRAINING)
        return
    if not record.trained:
        yield NotRun("NS315", "no forward pass with gradients was seen, so nothing is trained yet")
        return
    diagnoses: dict[str, list[Finding]] = {}
    for site in subject.sites:
        seen = record.sites.get(site.name)
        diagnosis = "" if seen is None else _diagnosis(seen, record.steps)
        if seen is not None and diagnosis:
            diagnoses.setdefault(diagnosis, []).append(_finding(site, seen, diagnosis))
    for findings in diagnoses.values():
        yield from fold(findings)


def _diagnosis(seen: SiteTraining, steps: int) -> str:
    if seen.in_eval >= FEWEST:
        return "eval"
    if seen.without_grad < FEWEST:
        return ""
    if seen.with_grad:
        # of three optimizers taking turns, one has such a pass in each third stretch
        each = 3 * seen.stretches >= steps and seen.without_grad <= 2 * seen.stretches
        return "between steps" if not each else "every step" if steps >= MANY else ""
    # a moving average shows as one only after its first step
    return "" if seen.follows or seen.stretches < 2 else "teacher"


def _finding(site: Site, seen: SiteTraining, diagnosis: str) -> Finding:
    effect = (
        f"within one stretch the means moved by up to {number(seen.shift)} standard deviations, the variances by up "
        f"to a factor of {number(math.exp(seen.log_var))}"
    )
    passes = plural(seen.without_grad, "pass")
    said, fix = {
        "eval": (
            f"the running statistics moved in {plural(seen.in_eval, 'forward pass')} in eval mode; {effect}.",
            "a norm in eval must not write: set track_running_stats back, or write to the buffers in train mode only",
        ),
        "teacher": (
            f"this norm never runs with gradients, yet it is in train mode: its running statistics moved in {passes}, "
            f"and its output depends on the batch; {effect}.",
            "put this part into eval mode, also after every train() of what holds it",
        ),
        "between steps": (
            f"the running statistics moved in {passes} without gradients, in {plural(seen.stretches, 'stretch')} "
            f"beside {plural(seen.with_grad, 'update')} in training; {effect}.",
            "call model.eval() before validating or generating, and model.train() after it",
        ),
        "every step": (
            f"the running statistics are also moved about once a step without gradients, in {passes} beside "
            f"{plural(seen.with_grad, 'update')} in training; {effect}.",
            "none where these samples should count too; else put this part into eval mode for such a pass",
        ),
    }[diagnosis]
    return Finding(
        code="NS315",
        site=site.name,
        severity="info" if diagnosis == "every step" else "warning",
        message=said,
        evidence={
            "diagnosis": diagnosis,
            "updates_without_grad": seen.without_grad,
            "stretches": seen.stretches,
            "updates_with_grad": seen.with_grad,
            "updates_in_eval": seen.in_eval,
            "shift_in_standard_deviations": seen.shift,
            "variance_factor": math.exp(seen.log_var),
        },
        fix=fix,
        mode="eval" if diagnosis == "eval" else "train",
    )
