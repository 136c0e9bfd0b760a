"""training-mode-export: a batch norm in an exported, traced or scripted model that runs in training mode.

## What it does
Finds operators inside an exported program, a traced or a scripted module, and nodes of an ONNX graph, that
normalize by the batch after `model.eval()`, although running statistics are passed to them. Tracing and export
write the training flag down as a constant: a model that was exported in training mode stays there. Where the check
may run several batches, the effect of the companions is given with it.

Silent: instance norm, which always takes its input's own statistics and is called "in training mode" in many formats;
a batch norm that keeps no running statistics, whose batch is meant (NS202 tells what follows).

## Why it matters
The deployed model predicts differently for each batch, fails or destroys its input on single samples, and no call can
put it into eval mode any more.

## Known problems
Below its name an instance norm is a batch norm whose channels are samples times channels. With one sample the two
cannot be told apart; such a site is listed as not checked. A program that was exported for training is right in
training mode: ignore the rule there.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
x = torch.randn(16, 8)
# should be model.eval()
traced = torch.jit.trace(model.train(), x, check_trace=False)
report = normscope.check(traced, x)
print(report)
```

## Fix
Call `model.eval()` before tracing, scripting or exporting, and export again. In an ONNX file the node's attribute
`training_mode` may be set to 0 instead; it then has one output.

## References
- The documentation of `torch.jit.trace`: it records the mode the module is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.coupled import by_batch_in_eval, effect_in_eval
from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


@rule("NS802", "training-mode-export", kinds="G")
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    nodes = [site for site in subject.sites if site.kind == "node"]
    # what a program holds shows in a run; what a graph holds is written down
    if not subject.has_data and not nodes:
        yield NotRun("NS802", "needs data: pass inputs")
        return
    written = [site for site in subject.sites if site.kind in ("hidden", "node")]
    yield from fold(_finding(subject, site) for site in written if by_batch_in_eval(site))


def _finding(subject: Subject, site: Site) -> Finding:
    effect, told = effect_in_eval(subject, site)
    node = site.kind == "node"
    what = f"{site.type_name}, a node of a graph" if node else site.type_name
    when = "whoever runs the graph, it" if node else "after model.eval() it still"
    fix = "call model.eval() before tracing, scripting or exporting, and export again"
    if node:
        fix += "; or set training_mode of this node to 0, which leaves it one output"
    return Finding(
        code="NS802",
        site=site.name,
        severity="warning",
        message=f"this batch norm ({what}) is written down in training mode: {when} normalizes by the batch{told}.",
        evidence={"mode_in_train": site.mode_train, "mode_in_eval": "batch", **effect},
        fix=fix,
        mode="eval",
    )
