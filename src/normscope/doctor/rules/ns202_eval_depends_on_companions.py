"""eval-depends-on-companions: in eval mode a sample's output still depends on the other samples of its batch.

## What it does
Runs the batch twice in eval mode, with the same size and sample 0 at the same place; the other samples are replaced
by copies of the last. The output of sample 0 must not change: with equal sizes it is equal to the last bit, so
last-bit differences between batch sizes play no part. Names the first site whose output changes for an unchanged
input. Where the model's output changes and no site is responsible, it says so.

Also asks, with or without data, for norms that were handed over in train mode inside a model in eval mode: their
stored statistics would be used after `model.eval()`, and are not. An error where the batch run shows that companions
change the output there by more than a twentieth of its spread over samples, else a warning. A model that is in train
mode as a whole is no fault.

## Why it matters
Predictions then depend on what else was in the batch: they change with batch size and order, a served model answers
differently from an evaluated one, and one odd sample moves its neighbours. A norm left in train mode moves its running
statistics with every request, too.

## Known problems
Operations that are no normalization can couple samples too, some on purpose (attention over a set, contrastive
heads). Test-time adaptation keeps norms in train mode on purpose: ignore the rule there. Hand-written norms whose
specification is unknown are not watched.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    torch.nn.BatchNorm1d(16, track_running_stats=False),
    torch.nn.ReLU(),
)
report = normscope.check(model, torch.randn(16, 8))
print(report)
```

## Fix
Keep running statistics (`track_running_stats=True`) and train or recalibrate them; pass `training=self.training` to
functional batch norm; look for an overridden `train()` or `eval()`. For a norm
left in train mode, call `model.eval()` last, after everything that calls `train()` on a part of the model.

## References
- Ioffe and Szegedy 2015, Batch Normalization, algorithm 2: inference with population statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, listed, number

if TYPE_CHECKING:
    from normscope.doctor.probes.companions import Companions
    from normscope.doctor.subject import Subject


MATTERS = 0.05
"""of the spread over samples"""


@rule("NS202", "eval-depends-on-companions", kinds="SD", uses=("companions",))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    measured: Companions | None = subject.measured.get("companions")
    yield from fold(_left_in_train(subject, measured))
    if measured is None:
        return
    if subject.runs.get("eval_companions"):
        yield NotRun("NS202", subject.runs["eval_companions"])
        return
    output = measured.output_eval
    found = sorted(
        ((c.order, name, c) for name, c in measured.eval.items() if c.responsible), key=lambda f: f[0]
    )
    strength = found[0][2].strength if found else 0.0
    if not math.isfinite(strength + (output or 0.0)):
        yield NotRun("NS202", "outputs hold NaN or infinities, so their change has no size (see NS406)")
    elif found:
        name = found[0][1]
        node = any(site.kind == "node" and site.name == name for site in subject.sites)
        yield _at_site(name, strength, found[0][2].mode, output, node)
    elif output:
        by = _by_design(subject, measured)
        yield Finding(
            code="NS202",
            site="",
            severity="info" if by else "warning",
            message=f"in eval, other samples of the batch change the model's output by {number(output)} of its spread "
            f"over samples; no normalization that was found does it by itself{by}.",
            mode="eval",
            evidence={"strength_at_output": output},
            fix="look for operations over the batch axis: means, softmax, attention, or a reshape that mixes samples",
        )


def _by_design(subject: Subject, measured: Companions) -> str:
    """What else couples samples on purpose, in words."""
    if measured.pairs:
        return " (right where the output compares pairs of samples)"
    modules = subject.session.modules.items()
    quantized = [path for path, module in modules if ".quantized.dynamic" in type(module).__module__]
    if quantized:
        return f" (dynamically quantized layers take their scale from the whole batch: {listed(quantized)})"
    return ""


def _left_in_train(subject: Subject, measured: Companions | None) -> Iterator[Finding]:
    """Norms that normalize by the batch now and would not after ``model.eval()``, in a model that is in eval."""
    if getattr(subject.model, "training", True):  # a frozen script has no modes
        return
    for site in subject.sites:
        if not (site.has_running_state and site.mode_now == "batch" and site.mode_eval == "running"):
            continue
        coupling = None if measured is None else measured.batch.get(site.name)
        # Where companions changed the input already, the change is not this norm's own.
        known = coupling is not None and coupling.responsible and math.isfinite(coupling.strength)
        strength = coupling.strength if coupling is not None and known else None
        by = "" if strength is None else f", by {number(strength)} of its spread over samples"
        yield Finding(
            code="NS202",
            site=site.name,
            severity="error" if strength is not None and strength > MATTERS else "warning",
            message="the model is in eval mode and this norm is in train mode: as handed over it normalizes by the "
            f"batch, so other samples change its output{by}, and every forward moves its running statistics.",
            mode="eval",
            evidence={"mode_now": site.mode_now, "mode_after_eval": site.mode_eval, "strength": strength},
            fix="call model.eval() before use, after everything that calls train() on a part of the model",
        )


def _at_site(name: str, strength: float, mode: str, output: float | None, node: bool) -> Finding:
    evidence: dict[str, float | str] = {"strength": strength, "mode_in_eval": mode}
    if output is not None:
        evidence["strength_at_output"] = output
    uses = " (it normalizes by the batch in eval)" if mode == "batch" else ""
    reaches = f", and the model's output by {number(output)}" if output else ""
    return Finding(
        code="NS202",
        site=name,
        severity="info" if output == 0 else "error",
        message=f"in eval, other samples of the batch change this output by {number(strength)} of its spread over "
        f"samples{reaches}{uses}.",
        mode="eval",
        evidence=evidence,
        fix="export the graph again from the model in eval mode, with running statistics"
        if node
        else "keep running statistics and use them in eval (track_running_stats=True, training=self.training)",
    )
