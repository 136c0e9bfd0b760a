"""ranks-diverged: running statistics differ between ranks.

## What it does
Compares the running statistics of the ranks as a forward pass finds them, after any broadcast of buffers and before
its own update. Where buffers are broadcast or statistics synchronized they agree. Beyond 2 % of a standard deviation
or of a variance they have drifted apart: a warning where means differ by more than a quarter of a standard deviation or
variances by a factor of more than 1.5, else info.

## Why it matters
Each rank evaluates another model, and the checkpoint holds the statistics of the rank that wrote it, which has seen a
fraction of the data. Metrics averaged over ranks describe no model that exists.

## Known problems
At most 16 channels of a site are compared. The ranks tell each other through the store of the process group, never by
a collective operation: a rank without a monitor is not compared, and nothing waits. The last comparison is that of the
last look that both ranks have reached.

## Example
```python
import torch, normscope

# one process plays both ranks
store = torch.distributed.HashStore()
monitors = []
for rank in range(2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with normscope.Monitor(
        model, optimizer, every=1, world=2, rank=rank, store=store
    ) as monitor:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(16, 8) + 3 * rank).square().mean().backward()
            optimizer.step()
    monitors.append(monitor)
print(monitors[1].report())
```

## Fix
Leave `broadcast_buffers=True` in `DistributedDataParallel`, or synchronize the statistics (`SyncBatchNorm`); before
saving or evaluating, average the buffers over the ranks.

## References
- The documentation of `torch.nn.parallel.DistributedDataParallel`: `broadcast_buffers`.
- Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.significance import LOG_VAR, SHIFT
from normscope.doctor.training_record import NEEDS_TRAINING, training_of
from normscope.doctor.wording import fold, number

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject
    from normscope.doctor.training_record import RankGap

NEGLIGIBLE = 0.02
"""what a slow average moves by between two broadcasts; float32 roundings are far below"""


@rule("NS312", "ranks-diverged", kinds="T", stateful=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    record = training_of(subject)
    if record is None:
        yield NotRun("NS312", NEEDS_TRAINING)
        return
    if record.world < 2:
        yield NotRun("NS312", "there is one rank only")
        return
    compared = {name: seen.ranks for name, seen in record.sites.items() if seen.ranks}
    if not compared:
        yield NotRun("NS312", "no other rank has told its statistics yet: run a monitor on every rank")
        return
    found = []
    for site in subject.sites:
        gaps = compared.get(site.name, ())
        worst = max(gaps, key=lambda gap: max(gap.shift / SHIFT, gap.log_var / LOG_VAR), default=None)
        if worst is not None and max(worst.shift, worst.log_var) > NEGLIGIBLE:
            found.append(_finding(site.name, worst, record.world))
    yield from fold(found)


def _finding(name: str, gap: RankGap, world: int) -> Finding:
    return Finding(
        code="NS312",
        site=name,
        severity="warning" if gap.shift > SHIFT or gap.log_var > LOG_VAR else "info",
        message=f"the running statistics of rank {gap.rank} differ from those of rank {gap.other}: means by "
        f"{number(gap.shift)} standard deviations, variances by a factor of up to {number(math.exp(gap.log_var))} "
        f"(step {gap.step}).",
        evidence={
            "rank": gap.rank,
            "compared_with": gap.other,
            "ranks": world,
            "step": gap.step,
            "shift_in_standard_deviations": gap.shift,
            "variance_factor": math.exp(gap.log_var),
        },
        fix="leave broadcast_buffers=True in DistributedDataParallel, or use SyncBatchNorm",
        mode="eval",
    )
