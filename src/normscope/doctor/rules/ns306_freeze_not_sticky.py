"""freeze-not-sticky: the next train() thaws a norm that is in eval.

## What it does
Looks for norms with running statistics that are in eval mode while the model around them is in train mode:
somebody froze their statistics. Then it calls the model's own `train()`, reads the modes and puts everything
back. A norm that is in train mode afterwards was frozen only until the next epoch. With
`frozen_policy="statistics"` or `"both"` the rule also judges models handed over in eval mode.

## Why it matters
Training loops call `model.train()` at the start of every epoch and after every validation. From then on the
statistics move, at 1 - (1 - momentum)^k of the way after k batches, and the frozen backbone changes without a
trace in its weights.

## Known problems
A loop that freezes again after every `train()` is right, and cannot be seen from the model: ignore the rule
there. A model that is in eval as a whole is silent, since there `train()` is meant to thaw it; so is one in
eval inside a wrapper, where only modules without parameters, buffers or dropout are in train mode.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).train()
model[1].eval()  # frozen, until the next model.train()
report = normscope.check(model)
print(report)
```

## Fix
Override `train` in the model, or in a subclass of the norm:

```python
def train(self, mode=True):
    super().train(mode)
    self.backbone_norm.eval()
    return self
```

Or replace the norm by one that has no batch mode (a frozen batch norm).

## References
- The documentation of `torch.nn.Module.train`: it sets the mode of all children.
- Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, section 3.2: frozen batch norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.handed_over import in_training
from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number, percent

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


@rule("NS306", "freeze-not-sticky", kinds="S", stateful=True, needs=("freeze",))
def check(subject: Subject) -> Iterator[Finding]:
    declared = subject.frozen_policy in ("statistics", "both")
    if not (declared or in_training(subject)):
        return
    found = []
    for site in subject.sites:
        frozen = subject.measured["freeze"].get(site.name)
        live = site.has_running_state and site.mode_train == "batch"
        if frozen is not None and live and not frozen.training_now and frozen.training_after_train:
            found.append(_finding(site, subject.frozen_policy if declared else ""))
    yield from fold(found)


def _finding(site: Site, policy: str) -> Finding:
    running = site.spec.running if site.spec is not None else None
    momentum = running.momentum if running is not None else None
    moved = None if momentum is None else 1 - (1 - momentum) ** 100
    speed = "" if moved is None else (
        f" With momentum {number(momentum or 0.0)} they are {percent(moved)} new after 100 batches."
    )  # fmt: skip
    intent = (
        f"the declared policy {policy!r} freezes its statistics"
        if policy
        else "it is in eval in a training model"
    )
    return Finding(
        code="NS306",
        site=site.name,
        severity="warning",
        message=f"{intent}, but the next train() puts it back into train mode and its statistics move.{speed}",
        evidence={
            "training_now": False,
            "training_after_train": True,
            "momentum": momentum,
            "moved_after_100": moved,
        },
        fix="override train() so that it puts this norm into eval mode again, or use a frozen batch norm; a loop that "
        "calls eval() on it after every train() is right: ignore NS306 there",
        mode="train",
    )
