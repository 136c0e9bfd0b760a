"""constant-training-flag: a functional batch norm whose training flag is hard-wired.

## What it does
Finds calls of `F.batch_norm` (or `torch.batch_norm`) that take batch statistics in eval mode although running
statistics of the model are passed: the flag is the constant `training=True`, or it never learned of `model.eval()`.
Where the check may run several batches, the effect of the companions in eval is given with it.

Silent: a flag that follows `self.training`; `training=False` (frozen on purpose); `F.instance_norm`, whose statistics
are the sample's own; a call without running statistics, or with ones made for that call: there the batch is meant,
and NS202 tells what follows.

## Why it matters
In eval the prediction for a sample depends on its batch, a single sample may fail or be normalized away, and the
stored statistics, which somebody keeps for exactly this purpose, go on moving and are never read.

## Known problems
A model that is meant to adapt to the test batch does this on purpose; say so with an ignore.

## Example
```python
import torch, normscope
from torch.nn import functional as F

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=True)

report = normscope.check(Own(), torch.randn(16, 8))
print(report)
```

## Fix
Pass `training=self.training`. Where batch statistics are meant in eval too, pass `None` for the running statistics.

## References
- The documentation of `torch.nn.functional.batch_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.coupled import by_batch_in_eval, effect_in_eval
from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


@rule("NS803", "constant-training-flag", kinds="G", needs=("data",))
def check(subject: Subject) -> Iterator[Finding]:
    sites = [site for site in subject.known() if site.kind == "functional" and by_batch_in_eval(site)]
    yield from fold(_finding(subject, site) for site in sites)


def _finding(subject: Subject, site: Site) -> Finding:
    effect, told = effect_in_eval(subject, site)
    return Finding(
        code="NS803",
        site=site.name,
        severity="warning",
        message=f"this call normalizes by the batch in eval mode too, although running statistics are passed{told}.",
        evidence={"mode_in_train": site.mode_train, "mode_in_eval": "batch", **effect},
        fix="pass training=self.training; where the batch is meant in eval too, pass None for the running statistics",
        mode="eval",
    )
