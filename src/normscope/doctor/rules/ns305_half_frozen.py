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

A warning where the declared policy contradicts what happens: statistics move under a policy that fixes them, in a
norm or block whose parameters are frozen, or nothing is frozen at all. Without a policy, a warning where the whole
block around the norm is frozen (its weights expect the old statistics), or where this batch's statistics already
differ from the stored ones (NS304); else info. A norm that is in eval until the next `train()` is NS306's.

## Why it matters
A frozen backbone whose statistics drift towards a small fine-tuning set is no longer the backbone that was
trained: its output in eval changes although none of its weights did, and a checkpoint comparison of
parameters shows nothing.

## Known problems
Statistics that follow the new data under frozen weights are a sound way to adapt to a new domain: say so with
`frozen_policy="affine"`. A model in eval mode with no trainable parameter at all is
being used, not trained: one info.

## Example
```python
import torch, normscope

backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
model = torch.nn.Sequential(backbone, torch.nn.Flatten(), torch.nn.Linear(288, 2))
backbone.requires_grad_(False)
report = normscope.check(model.train(), torch.randn(8, 3, 8, 8))
print(report)
```

## Fix
To freeze the statistics too, override `train` so that it puts the norms into eval mode again:

```python
def train(self, mode=True):
    super().train(mode)
    self.backbone.eval()
    return self
```

or replace them by frozen batch norms. To train the gain and bias, turn `requires_grad` on again.

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


FIXED = ("statistics", "both")
"""policies under which the statistics stand still"""


@rule("NS305", "half-frozen", kinds="S", stateful=True, needs=("freeze",))
def check(subject: Subject) -> Iterator[Finding]:
    policy, freeze = subject.frozen_policy, subject.measured["freeze"]
    sites = [(site, freeze[site.name]) for site in subject.sites if site.name in freeze]
    if policy and _nothing_frozen(policy, sites):
        trained = _has_trained_affine if policy == "affine" else _live
        yield from fold(_unfrozen(site, policy) for site, frozen in sites if trained(site, frozen))
        return
    if policy == "affine":
        return
    in_use = not subject.model.training and not any(p.requires_grad for p in subject.model.parameters())
    diagnoses: dict[str, list[Finding]] = {}
    for site, frozen in sites:
        if not _live(site, frozen) or _not_sticky(subject, frozen):
            continue
        no_affine = site.requires_grad("weight") is None and site.requires_grad("bias") is None
        declared = policy in FIXED and frozen.rest_frozen
        if not (frozen.parameters_frozen or (no_affine and frozen.block_frozen) or declared):
            continue
        reason, why = _reason(subject, site, frozen, in_use)
        diagnoses.setdefault(reason, []).append(_finding(site, frozen, reason, why))
    for findings in diagnoses.values():
        yield from fold(findings)


def _live(site: Site, frozen: Any) -> bool:
    """Its running statistics move after the model's own train()."""
    return site.has_running_state and site.mode_train == "batch" and bool(frozen.training_after_train)


def _has_trained_affine(site: Site, _: Any) -> bool:
    return any(map(site.requires_grad, ("weight", "bias")))


def _not_sticky(subject: Subject, frozen: Any) -> bool:
    """Frozen until the next train(), which NS306 tells."""
    return not frozen.training_now and (subject.model.training or subject.frozen_policy in FIXED)


def _nothing_frozen(policy: str, sites: list[tuple[Site, Any]]) -> bool:
    """No norm is as the policy says, not even in part."""
    if policy == "affine":
        return not any(frozen.parameters_frozen for _, frozen in sites)
    fixed = (site.has_running_state and not (_live(site, now) and now.training_now) for site, now in sites)
    return not any(fixed) and not any(now.parameters_frozen or now.rest_frozen for _, now in sites)


def _unfrozen(site: Site, policy: str) -> Finding:
    meant = {"affine": "gain and bias", "statistics": "the running statistics", "both": "all of them"}[policy]
    now = (
        "gain and bias are trained"
        if policy == "affine"
        else "the statistics move with every batch after train()"
    )
    fix = {
        "affine": "set requires_grad to False on gain and bias",
        "statistics": "override train() so that it puts this norm into eval mode again",
        "both": "set requires_grad to False, and override train() so that it puts this norm into eval mode again",
    }[policy]
    return Finding(
        code="NS305",
        site=site.name,
        message=f"the declared policy {policy!r} freezes {meant}, but nothing is frozen in any norm: {now}.",
        evidence={"diagnosis": "nothing frozen", "policy": policy},
        fix=f"{fix}, or declare no policy",
        mode="train",
    )


def _reason(subject: Subject, site: Site, frozen: Any, in_use: bool) -> tuple[str, str]:
    """The diagnosis, and the words for it."""
    from normscope.doctor.significance import matters  # which needs NumPy, and pages are read without it

    if subject.frozen_policy in FIXED:
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
    held = "gain and bias are" if frozen.parameters_frozen else "the parameters around this norm are"
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
        fix="override train() so that it puts this norm into eval mode again, or use a frozen batch norm; if this is "
        "meant, declare frozen_policy='affine'",
        mode="train",
    )
