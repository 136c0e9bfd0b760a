"""eval-depends-on-companions: in eval mode a sample's output still depends on the other samples of its batch.

## What it does
Runs the batch twice in eval mode, with the same size and sample 0 at the same place; the other samples are replaced
by copies of the last. The output of sample 0 must not change: with equal sizes it is equal to the last bit, so
last-bit differences between batch sizes play no part. Names the first site whose output changes for an unchanged
input. Where the model's output changes and no site is responsible, it says so.

## Why it matters
Predictions then depend on what else was in the batch: they change with batch size and order, a served model answers
differently from an evaluated one, and one odd sample moves its neighbours.

## Known problems
Operations that are no normalization can couple samples too, some on purpose (attention over a set, contrastive
heads). Hand-written norms whose specification is unknown are not watched.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16, track_running_stats=False), torch.nn.ReLU()
)
report = normscope.check(model, torch.randn(16, 8))
print(report)
```

## Fix
Keep running statistics (`track_running_stats=True`) and train or recalibrate them; pass `training=self.training` to
functional batch norm; look for an overridden `train()` or `eval()`.

## References
- Ioffe and Szegedy 2015, Batch Normalization, algorithm 2: inference with population statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import number

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject


@rule("NS202", "eval-depends-on-companions", kinds="D", needs=("companions",))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    if subject.runs.get("eval_companions"):
        yield NotRun("NS202", subject.runs["eval_companions"])
        return
    measured = subject.measured["companions"]
    output = measured.output_eval
    found = [
        _at_site(name, coupling.strength, coupling.mode, output)
        for name, coupling in sorted(measured.eval.items(), key=lambda item: item[1].order)
        if coupling.responsible
    ]
    if found:
        yield from found[:1]
    elif output:
        yield Finding(
            code="NS202",
            site="",
            severity="warning",
            message=f"in eval, other samples of the batch change the model's output by {number(output)} of its spread "
            "over samples; no normalization that was found does it by itself.",
            mode="eval",
            evidence={"strength_at_output": output},
            fix="look for operations over the batch axis: means, softmax, attention, or a reshape that mixes samples",
        )


def _at_site(name: str, strength: float, mode: str, output: float | None) -> Finding:
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
        fix="keep running statistics and use them in eval (track_running_stats=True, training=self.training)",
    )
