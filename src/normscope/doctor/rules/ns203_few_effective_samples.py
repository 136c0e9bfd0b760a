"""few-effective-samples: batch statistics rest on few independent values, however many pixels there are.

## What it does
Estimates, at every site that normalizes by the batch in training, how many independent values stand behind a batch
mean: n_eff = v / (s^2 / B), with v the variance of all elements, s^2 the variance of the per-sample means and B the
number of samples. Spatial correlation is in it. Below 16, the batch mean strays by more than a quarter of a
standard deviation. That is info, since a batch for training may be larger. With fewer than four samples, or with
copies, near copies or overlapping crops among them, it cannot tell and says so: such a batch is none for training.

## Why it matters
Noise of the statistics is noise in every output of training, and in the running statistics collected from it.

## Known problems
It speaks of the batch that was passed: pass one like those in training. From eight samples the estimate is good to
about a third. Crops of one image without overlap are not noticed.

## Example
```python
import torch, normscope

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
report = normscope.check(model, torch.randn(8, 8))  # a batch as in training
print(report)
```

## Fix
Larger batches, batches mixed over sources, synchronized statistics over devices (`normscope.nn.SyncBatchNorm`), or a
norm that does not use the batch (group, layer); batch renormalization (`normscope.nn.BatchRenorm2d`) normalizes by
corrected statistics of small batches. Gradient accumulation does not help.

## References
- Wu and He 2018, Group Normalization, section 4.1: error against batch size.
- Bayley and Hammersley 1946, The effective number of independent observations in an autocorrelated time series.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number

if TYPE_CHECKING:
    from normscope.doctor.probes.effective_samples import EffectiveSamples
    from normscope.doctor.subject import Subject

FEW = 16


@rule("NS203", "few-effective-samples", kinds="D", needs=("effective_samples",), real_data=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    found = []
    for name, site in subject.measured["effective_samples"].items():
        if site.reason:
            yield NotRun("NS203", site.reason, name)
        elif site.effective < FEW:
            found.append(_finding(name, site))
    yield from fold(sorted(found, key=lambda f: float(f.evidence["effective_values"])))


def _finding(name: str, site: EffectiveSamples) -> Finding:
    error = site.effective**-0.5
    return Finding(
        code="NS203",
        site=name,
        severity="info",
        message=f"in training on batches like this one, statistics of {site.samples} x {site.elements} elements rest "
        f"on about {number(site.effective)} independent values, so a batch mean strays by {number(error)} standard "
        "deviations.",
        mode="train",
        evidence={
            "effective_values": site.effective,
            "effective_values_per_sample": site.per_sample,
            "elements": site.samples * site.elements,
            "samples": site.samples,
            "error_of_mean_in_standard_deviations": error,
        },
        fix="train with larger or better mixed batches, synchronize statistics, or use a norm without the batch",
    )
