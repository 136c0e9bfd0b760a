"""updated-more-than-once: running statistics move more than once per optimizer step.

## What it does
Counts the updates of each norm's running statistics between two optimizer steps, and tells the causes apart:

- **recomputed**: updates made while the backward pass runs. Activation checkpointing runs the norm twice on one
  batch, whose statistics come again to the last digit; the evidence counts these. A warning, with the momentum that
  this amounts to; info where the average is cumulative, which a batch counted twice does not change.
- **repeated**: several forward passes of the model before a step that have the same batch statistics: info.
- **accumulation**: several forward passes of the model before a step, each with statistics of its own, whose gradients
  add up to the one that is used: info, with the samples each of them has. Batch statistics do not add up.
- **closure**: the optimizer's own step runs the model several times, as L-BFGS does: info.
- **several**: other forward passes before a step, such as two views of a batch, the steps of an adversarial attack, the
  turn of another network, or a pass that is thrown away: info.
- **accumulating**: `normscope.nn.accumulating` moves them, but more than once in a step: info.
- **counted**: the counter moved more than once where no call could be seen (compiled code): info.

Several calls within one forward pass (siamese branches, unrolled steps) are how such a model works: silent. So are
norms that no sample shares with another, where accumulation changes nothing, and gradients that add up over passes of
different distributions, as of real and generated samples, which NS205 tells.

## Why it matters
A norm that is updated twice with momentum 0.1 averages as with 0.19: over half as many batches, so the statistics
used in eval are noisier than the momentum says. With accumulation the norm sees small batches however many are
accumulated.

## Known problems
What adds up is seen in the steps that are looked at closely. Compiled code hides its calls. A step that a gradient
scaler skips counts with the next one; medians over the steps are judged.

## Example
```python
import torch, normscope
from torch.utils.checkpoint import checkpoint

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with normscope.Monitor(model, optimizer) as monitor:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
print(monitor.report())
```

## Fix
Recomputed: `normscope.nn.accumulating(model)` leaves recomputations out; or keep the norm outside of the checkpointed
part, or give it the momentum 1 - sqrt(1 - m). Accumulation: `normscope.nn.accumulating(model, 4)` moves the statistics
once in four forwards, by all of them; each is still normalized by its own samples, which larger batches, synchronized
statistics or a norm that does not use the batch change.

## References
- Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost: recomputation of activations.
- The documentation of `torch.utils.checkpoint`: the forward pass is run again during the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.significance import matters
from normscope.doctor.training_record import NEEDS_TRAINING, training_of
from normscope.doctor.wording import fold, number, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject
    from normscope.doctor.training_record import SiteTraining

FEWEST = 2
"""steps: one may have been begun before the monitor was"""


@rule("NS310", "updated-more-than-once", kinds="T", stateful=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    record = training_of(subject)
    if record is None:
        yield NotRun("NS310", NEEDS_TRAINING)
        return
    if not record.knows_steps:
        yield NotRun(
            "NS310", "needs the optimizer's steps: pass optimizer to the monitor, or call its step()"
        )
        return
    diagnoses: dict[str, list[Finding]] = {}
    for site in subject.known():
        seen = record.sites.get(site.name)
        if seen is not None and seen.steps >= FEWEST and seen.per_step > 1:
            diagnosis = _diagnosis(subject, site, seen)
            if diagnosis:
                diagnoses.setdefault(diagnosis, []).append(_finding(site, seen, diagnosis))
    for findings in diagnoses.values():
        yield from fold(findings)


def _diagnosis(subject: Subject, site: Site, seen: SiteTraining) -> str:
    assert site.spec is not None
    if seen.accumulated:
        return "accumulating"
    if seen.counted_only:
        return "counted"
    if seen.in_backward >= 1:
        return "recomputed"
    if seen.forwards <= 1 or "b" in site.spec.stats.partition("->")[2].split():
        return ""
    if seen.inside > 1:
        return "closure"
    if seen.repeated:
        return "repeated"
    if seen.added < 2 or seen.per_step % seen.added:
        return "several"
    gap = subject.measured.get("gap", {}).get(site.name)
    apart = gap is not None and gap.between is not None and matters(gap.between)[1]
    return "" if apart else "accumulation"


def _finding(site: Site, seen: SiteTraining, diagnosis: str) -> Finding:
    assert site.spec is not None
    running = site.spec.running
    momentum = running.momentum if running is not None and running.average == "ema" else None
    often = f"the running statistics move {number(seen.per_step)} times per optimizer step"
    evidence: dict[str, Any] = {
        "diagnosis": diagnosis,
        "updates_per_step": seen.per_step,
        "in_backward_per_step": seen.in_backward,
        "forward_passes_per_step": seen.forwards,
        "of_the_optimizer": seen.inside,
        "backward_passes_that_add_up": seen.added,
        "repeated_batch_statistics": seen.repeated,
        "steps": seen.steps,
        "momentum": momentum,
    }
    severity = "info"
    if diagnosis == "recomputed":
        times = max(2.0, seen.per_step / max(1.0, seen.forwards))
        said = "the forward pass is run again in the backward pass (activation checkpointing)"
        if seen.repeated:
            said += f", {number(seen.repeated)} of the updates with the batch statistics of an earlier one"
        fix = "normscope.nn.accumulating(model) leaves recomputations out; or keep the norm out of what is checkpointed"
        if momentum is not None and 0 < momentum < 1:
            severity = "warning"
            evidence["effective_momentum"] = 1 - (1 - momentum) ** times
            said += f": momentum {number(momentum)} acts like {number(evidence['effective_momentum'])}"
            fix += f", or set momentum to {number(1 - (1 - momentum) ** (1 / times))}"
    elif diagnosis == "repeated":
        said = f"{number(seen.forwards)} forward passes come before each step, some on one and the same batch"
        fix = "if only the gradients of the repeated passes matter, run them with the norms in eval mode"
    elif diagnosis == "accumulation":
        samples = f"its own {seen.samples} samples" if seen.samples else "its own batch"
        said = (
            f"{number(seen.forwards)} forward passes come before each step, and each is normalized by {samples}: "
            "accumulating gradients does not enlarge the batch of this norm"
        )
        fix = (
            f"normscope.nn.accumulating(model, {number(seen.forwards)}) moves them once per step; for larger sets use "
            "larger batches, synchronized statistics, or a norm that does not use the batch (group, layer)"
        )
    elif diagnosis == "accumulating":
        said = (
            f"normscope.nn.accumulating moves them after fewer forward passes than the {number(seen.forwards)} "
            "that come before each step"
        )
        fix = f"normscope.nn.accumulating(model, {number(seen.forwards)})"
    elif diagnosis == "closure":
        said = f"the optimizer's own step runs the model {number(seen.inside)} times, and each run moves them"
        fix = "none where this optimizer is meant"
    elif diagnosis == "several":
        added = f", whose gradient comes from {plural(seen.added, 'backward pass')}" if seen.added else ""
        said = (
            f"{number(seen.forwards)} forward passes come before each step{added}; views of one batch, an attack, the "
            "turn of another network or a pass thrown away move them too"
        )
        fix = "run passes that should not count in eval with the norms in eval mode, or give them norms of their own"
    else:
        said = (
            "their counter says so, but the calls cannot be seen (compiled code), nor why there are so many"
        )
        fix = "monitor some steps without torch.compile, which tells recomputation from accumulation"
    return Finding(
        code="NS310",
        site=site.name,
        severity=severity,
        message=f"{often}: {said}.",
        evidence=evidence,
        fix=fix,
        mode="train",
    )
