"""unsynchronized-ranks: each rank normalizes by its own few samples.

## What it does
In data-parallel training every rank normalizes by the samples it holds, unless the norm is synchronized. Fires, as a
warning, where a rank has fewer than four samples, or where its batch statistics rest on fewer than 16 independent
values (see NS203), which leaves the batch mean off by more than a quarter of a standard deviation. The evidence gives
samples and independent values of a rank, and what all ranks together would have. Virtual batches (ghost batch norm),
whose size was asked for, and batch renormalization, which is made for small batches, stay silent.

## Why it matters
The loss is averaged over a large batch, but normalization sees only a small part of it: adding ranks does not make
the statistics better. In detection and segmentation, with one to four images a rank, this costs accuracy and makes
train and eval differ.

## Known problems
Independent values are estimated in training, where they come out too high rather than too low. Small batches per
rank are sometimes wanted for their noise (Goyal et al. 2017 keep 32 images a rank): those have far more than 16.

## Example
```python
import torch, normscope

# one process that stands for the first of two
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with normscope.Monitor(model, optimizer, world=2) as monitor:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
print(monitor.report())
```

## Fix
`normscope.nn.SyncBatchNorm.convert_sync_batchnorm(model)`, which runs on CPUs too, more samples a rank, or a
norm that does not use the batch.

## References
- Peng et al. 2018, MegDet: A Large Mini-Batch Object Detector, section 3.3: batch normalization over ranks.
- Wu and He 2018, Group Normalization, section 4.1: error against batch size.
- Goyal et al. 2017, Accurate, Large Minibatch SGD, section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.training_record import NEEDS_TRAINING, training_of
from normscope.doctor.wording import fold, number, plural

if TYPE_CHECKING:
    from normscope.doctor.subject import Subject
    from normscope.doctor.training_record import SiteTraining, TrainingRecord
    from normscope.spec import NormSpec

FEW_SAMPLES = 4
FEW_VALUES = 16.0


@rule("NS206", "unsynchronized-ranks", kinds="T")
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    record = training_of(subject)
    if record is None:
        yield NotRun("NS206", NEEDS_TRAINING)
        return
    if record.world < 2:
        yield NotRun("NS206", "there is one rank only")
        return
    found = []
    for site in subject.known():
        seen = record.sites.get(site.name)
        if seen is None or site.mode_train != "batch" or seen.synchronized or not seen.samples:
            continue
        if site.spec is None or not _by_all_of_a_rank(site.spec):
            continue
        values = seen.effective
        if seen.samples < FEW_SAMPLES or (values is not None and values < FEW_VALUES):
            found.append(_finding(site.name, seen, record))
    yield from fold(found)


def _by_all_of_a_rank(spec: NormSpec) -> bool:
    virtual = len(spec.sample_group or ()) == 2 and "t" not in (spec.sample_group or ())
    renormalized = spec.running is not None and spec.running.renorm is not None
    return "b" not in spec.stats.partition("->")[2].split() and not virtual and not renormalized


def _finding(name: str, seen: SiteTraining, record: TrainingRecord) -> Finding:
    values = seen.effective
    known = f", about {number(values)} independent values," if values is not None else ""
    return Finding(
        code="NS206",
        site=name,
        message=f"each of {record.world} ranks normalizes by its own {plural(seen.samples, 'sample')}{known} though "
        f"all together hold {record.world * seen.samples}.",
        evidence={
            "ranks": record.world,
            "samples_per_rank": seen.samples,
            "elements_per_set": seen.elements,
            "effective_values_per_rank": values,
            "effective_values_together": None if values is None else values * record.world,
        },
        fix="normscope.nn.SyncBatchNorm.convert_sync_batchnorm(model), more samples a rank, or a norm without the "
        "batch",
        mode="train",
    )
