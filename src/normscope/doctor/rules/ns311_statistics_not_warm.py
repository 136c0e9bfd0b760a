"""statistics-not-warm: the initial values 0 and 1 are still a part of the running statistics.

## What it does
After k updates with momentum m, (1 - m)^k of each stored statistic is still its initial value: mean 0,
variance 1. From that share s the statistics of the data follow,

    mean / (1 - s)   and   (variance - s) / (1 - s),

and with them the error that the initial values cause. The counter alone cannot prove it: statistics that were
averaged otherwise (`update_bn`, momentum None) or loaded have no such share. So the batch decides: how much of the
predicted error in gains and means does it show, 0 for none and 1 for all? Fires where s is above 1 %:

- a warning where the batch shows more than half of it and the median channel's gain is off by more than 5 % or its
  mean by more than 0.1 standard deviations;
- info without a batch of independent samples, where the errors are that large or s is above 5 %;
- silent where the batch shows less than half of them, or they are smaller: sampling noise would decide.

## Why it matters
A short training, a large batch size or a small momentum (0.01 needs 459 batches to come below 1 %) leave an
eval mode that is worse than training for no visible reason. A validation in the first epoch then says little
about the weights.

## Known problems
Where a stored variance is smaller than s, the average cannot have started at 1: the rule is silent. A cumulative
average has no initial share. A norm that is frozen, or in eval in a model that is being trained, has weights that
were trained with these statistics: silent. A handful of samples decide with noise; so does data that differs from
that of training (see NS304).

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8, momentum=0.01)
)
for _ in range(50):  # 60 % of the initial values are left
    model(5 * torch.randn(32, 8))
report = normscope.check(model, 5 * torch.randn(32, 8))
print(report)
```

## Fix
Train longer, or recompute the statistics: `reset_running_stats()`, momentum None, some hundred batches in train
mode, and momentum back to its number. Statistics that are right although the counter is small need nothing.

## References
- Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, section 3: precise statistics against the moving
  average.
- Kingma and Ba 2015, Adam, section 3: the same correction of an average that starts at a fixed value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.handed_over import in_training, stored_in_training
from normscope.doctor.history import momentum_of, statistics_at_start, updates
from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number, percent

if TYPE_CHECKING:
    from normscope.doctor.probes.gap import SiteGap
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

SHARE, SHARE_ALONE = 0.01, 0.05
GAIN_ERROR, MEAN_ERROR = 0.05, 0.1
SHOWN = 0.5
"""of the predicted error; sampling noise lies around 0 without initial values and around 1 with them"""


@rule("NS311", "statistics-not-warm", kinds="SCD", stateful=True, uses=("gap",))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    gaps: dict[str, SiteGap] = {} if subject.inputs_dependent else subject.measured.get("gap", {})
    training = in_training(subject)
    found = []
    for site in subject.known():
        gap = gaps.get(site.name)
        if site.mode_eval == "running" and not stored_in_training(site, training):
            found.append(_diagnose(site, gap.cold if gap is not None else None))
    yield from fold(finding for finding in found if finding is not None)
    if any("momentum" in site.unknown for site in subject.known()):
        yield NotRun("NS311", "momentum is not in the file: state it, momentum=0.1")


def _diagnose(site: Site, shown: float | None) -> Finding | None:
    count, momentum = updates(site), momentum_of(site)
    if not count or count < 0 or momentum is None or not 0 < momentum < 1 or statistics_at_start(site):
        return None
    share = float((1 - momentum) ** count)
    errors = _errors(site, share) if share > SHARE else None
    if errors is None:
        return None
    gain, mean = errors
    matters = gain > GAIN_ERROR or mean > MEAN_ERROR
    if not matters and (shown is not None or share <= SHARE_ALONE):
        return None
    if shown is not None and shown <= SHOWN:
        return None
    effect = f"gains off by {percent(gain)}, means by {number(mean)} standard deviations (medians over the channels)"
    if shown is None:
        said = (
            f"an average that began at 0 and 1 still holds {percent(share)} of them: {effect}. Statistics that were "
            "averaged otherwise (update_bn, momentum None) or loaded are right all the same: a batch of data tells."
        )
    else:
        said = (
            f"{percent(share)} of the running statistics is still their initial 0 and 1: {effect}. This batch shows "
            f"{number(shown)} times that error."
        )
    enough = math.ceil(math.log(SHARE) / math.log(1 - momentum))
    return Finding(
        code="NS311",
        site=site.name,
        severity="info" if shown is None else "warning",
        message=f"after {count} updates with momentum {number(momentum)}, {said}",
        evidence={
            "updates": count,
            "momentum": momentum,
            "initial_share": share,
            "gain_error": gain,
            "mean_error": mean,
            "shown_by_this_batch": shown,
        },
        fix=f"train on, or recompute the statistics with momentum None, over {enough} batches or more",
        mode="eval",
    )


def _errors(site: Site, share: float) -> tuple[float, float] | None:
    """Median over channels of the relative error of the gain and of the error of the mean in standard deviations."""
    import numpy as np

    mean, var = site.array("running_mean"), site.array("running_var")
    if mean is None or var is None or var.size == 0 or not np.all(np.isfinite(mean) & np.isfinite(var)):
        return None
    # Stored in float32: k roundings of half an ulp each stay far below 1e-3 of the share for any k seen here.
    if var.min() < share * (1 - 1e-3):
        return None
    eps = site.spec.eps if site.spec is not None and site.spec.eps is not None else 0.0
    true = np.maximum(var - share, 0.0) / (1 - share)
    denominator = np.sqrt(np.maximum(true + eps, 1e-30))
    gain = np.abs(denominator / np.sqrt(var + eps) - 1)
    off = np.abs(mean) * share / (1 - share) / denominator
    return float(np.median(gain)), float(np.median(off))
