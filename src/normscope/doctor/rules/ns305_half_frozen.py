"""half-frozen: gain and bias are frozen, while the running statistics still move in training.

## What it does
`requires_grad = False` stops the optimizer, not the running statistics: in train mode they follow every
batch. The rule finds norms whose gain and bias are frozen and whose statistics move after `model.train()`
(probed on the model's own `train()`, then undone). Three policies are possible, and only you know which one
is meant:

| policy | gain and bias | statistics | `frozen_policy=` |
|---|---|---|---|
| frozen affine | fixed | follow the data | `"affine"`: silent |
| frozen statistics | trained | fixed | `"statistics"` |
| fully frozen | fixed | fixed | `"both"` |

A warning where the declared policy contradicts what happens, where the whole block around the norm is frozen
(its weights expect the old statistics), or where this batch's statistics already differ from the stored ones
(NS304). Else info.

## Why it matters
A frozen backbone whose statistics drift towards a small fine-tuning set is no longer the backbone that was
trained: its output in eval changes although none of its weights did, and a checkpoint comparison of
parameters shows nothing.

## Known problems
Letting statistics follow the new data under frozen weights is a sound way to adapt to a new domain. If that
is meant, say so with `frozen_policy="affine"`. A model in eval mode with no trainable parameter at all is
being used, not trained: one info.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(288, 2)
)
for parameter in [*model[0].parameters(), *model[1].parameters()]:
    parameter.requires_grad_(False)
report = normscope.check(model.train(), torch.randn(8, 3, 8, 8))
print(report)
```

## Fix
To freeze the statistics too, put the norms in eval mode after every `model.train()` (override `train`), or
replace them by frozen batch norms. To train the gain and bias, turn `requires_grad` on again.

## References
- Li et al. 2017, Revisiting Batch Normalization for Practical Domain Adaptation: statistics of the new
  domain, on purpose.
- Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, section 3: which statistics a norm uses in
  fine-tuning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


@rule("NS305", "half-frozen", kinds="S", stateful=True, needs=("freeze",))
def check(subject: Subject) -> Iterator[Finding]:
    if subject.frozen_policy == "affine":
        return
    in_use = not subject.model.training and not any(p.requires_grad for p in subject.model.parameters())
    diagnoses: dict[str, list[Finding]] = {}
    for site in subject.sites:
        frozen = subject.measured["freeze"].get(site.name)
        live = site.has_running_state and site.mode_train == "batch"
        if frozen is None or not (live and frozen.training_after_train):
            continue
        no_affine = site.requires_grad("weight") is None and site.requires_grad("bias") is None
        if not (frozen.parameters_frozen or (no_affine and frozen.block_frozen)):
            continue
        reason, why = _reason(subject, site, frozen, in_use)
        diagnoses.setdefault(reason, []).append(_finding(site, frozen, reason, why))
    for findings in diagnoses.values():
        yield from fold(findings)


def _reason(subject: Subject, site: Site, frozen: Any, in_use: bool) -> tuple[str, str]:
    """The diagnosis, and the words for it."""
    from normscope.doctor.significance import matters  # which needs NumPy, and pages are read without it

    if subject.frozen_policy in ("statistics", "both"):
        return "policy", f"the declared policy is {subject.frozen_policy!r}, which fixes them."
    if in_use:
        return (
            "in use",
            "the model is in eval and nothing in it is trained, so this only concerns a later train().",
        )
    measured = subject.measured.get("gap", {}).get(site.name)
    if measured is not None and measured.gap is not None and matters(measured.gap)[1]:
        difference = measured.gap
        return "moving", (
            f"this batch already differs from them (means by {number(difference.shift)} standard deviations, "
            f"variances {number(math.exp(difference.log_var))} times)."
        )
    if frozen.block_frozen:
        return (
            "block",
            "every parameter of the block around it is frozen too, so its weights expect them unchanged.",
        )
    return "open", (
        "right if only gain and bias are to be frozen (affine); to freeze the statistics alone or both, this is "
        "not it."
    )


def _finding(site: Site, frozen: Any, reason: str, why: str) -> Finding:
    running = site.spec.running if site.spec is not None else None
    held = "gain and bias are" if frozen.parameters_frozen else "the block around this norm is"
    return Finding(
        code="NS305",
        site=site.name,
        severity="info" if reason in ("open", "in use") else "warning",
        message=f"{held} frozen, but after train() the running statistics move with every batch; {why}",
        evidence={
            "parameters_frozen": bool(frozen.parameters_frozen),
            "block_frozen": bool(frozen.block_frozen),
            "statistics_live": True,
            "momentum": None if running is None else running.momentum,
            "diagnosis": reason,
        },
        fix="keep this norm in eval mode after every train(), or declare frozen_policy='affine' if this is meant",
        mode="train",
    )
