"""shared-norm-shifted-inputs: one batch norm is called several times in a forward, on different distributions.

## What it does
Where a batch norm with running statistics is called more than once in a forward, the statistics of each call are
compared with their average over the calls, sample by sample, by the test of NS304: beyond sampling error in more
than 10 % of the channels, and by more than 0.25 standard deviations or a factor of 1.5 in variance. The call farthest
from the average is named.

## Why it matters
Running statistics average over the calls. In training each call is normalized by its own batch; in eval all by the
one average, which fits none of them. Typical: two kinds of input through one encoder, a detection head shared over
the levels of a pyramid, a recurrent step.

## Known problems
Siamese calls on like distributions are silent, as they should be. Fewer than four samples cannot tell, and dependent
samples make it info. So do separate forward passes of one optimizer step, which a monitor sees together: that real and
generated samples are normalized apart is the usual recipe of adversarial training.

## Example
```python
import torch, normscope

class Shared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, image, text):
        return self.norm(image) + self.norm(text)

model = Shared()
inputs = torch.randn(16, 8), 3 + torch.randn(16, 8)
for _ in range(100):
    model(torch.randn(16, 8), 3 + torch.randn(16, 8))
report = normscope.check(model, inputs)
print(report)
```

## Fix
One norm for each kind of input, with the other weights shared; or one call on the concatenated inputs; or a norm
without running statistics.

## References
- Xie et al. 2020, Adversarial Examples Improve Image Recognition, section 3: one batch norm for each distribution.
- Cooijmans et al. 2017, Recurrent Batch Normalization, section 3: statistics for each time step.
- Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.significance import matters
from normscope.doctor.training_record import training_of
from normscope.doctor.wording import fold, number, percent

if TYPE_CHECKING:
    from normscope.doctor.probes.gap import SiteGap
    from normscope.doctor.subject import Subject


@rule("NS205", "shared-norm-shifted-inputs", kinds="D", needs=("gap",), real_data=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    live = {s.name for s in subject.known() if s.mode_train == "batch" and s.mode_eval == "running"}
    found = []
    for name, site in sorted(subject.measured["gap"].items(), key=lambda item: item[1].order):
        if name not in live or site.calls < 2:
            continue
        if site.reason:
            yield NotRun("NS205", site.reason, name)
        elif site.between is not None and matters(site.between)[1]:
            found.append(_finding(name, site, subject.inputs_dependent, _separate(subject, name)))
    yield from fold(found)


def _separate(subject: Subject, name: str) -> bool:
    """A monitor saw the calls of one optimizer step, in several forward passes."""
    record = training_of(subject)
    seen = None if record is None else record.sites.get(name)
    return seen is not None and seen.forwards > 1


def _finding(name: str, site: SiteGap, dependent: str, separate: bool) -> Finding:
    between = site.between
    assert between is not None
    where = "in an optimizer step, by separate forward passes," if separate else "in a forward"
    chance = f" The samples are not independent, so this may be chance: {dependent}." if dependent else ""
    return Finding(
        code="NS205",
        site=name,
        severity="info" if dependent or separate else "warning",
        message=f"called {site.calls} times {where} on different distributions: in call {site.call} means are "
        f"{number(between.shift)} standard deviations, variances a factor of {number(math.exp(between.log_var))} from "
        f"the average over the calls, which is what eval uses (beyond sampling error in "
        f"{percent(between.share_mean)} and {percent(between.share_var)} of the channels).{chance}",
        mode="eval",
        evidence={
            "calls": site.calls,
            "call": site.call,
            "shift_in_standard_deviations": between.shift,
            "variance_ratio": math.exp(between.log_var),
            "share_of_channels_mean": between.share_mean,
            "share_of_channels_variance": between.share_var,
            "samples": site.samples,
        },
        fix="give each kind of input its own norm, or call it once on the concatenated inputs",
    )
