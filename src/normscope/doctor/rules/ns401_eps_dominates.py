"""eps-dominates: eps is a large part of the variance for a share of the sets.

## What it does
Compares eps with the variance of every set that has any: measured on your batch where the batch or the input gives
the statistics, and the stored variances where those normalize. The shrinkage sqrt(v / (v + eps)) is the standard
deviation that comes out in place of 1. Constant sets are counted apart (NS402, NS314 are about those) and never make
this rule fire.

It is a warning where eps exceeds the variance in half of the live sets, over the first 16 calls of a site: the layer
then scales by a constant and hardly normalizes. It is info from a tenth of all sets on.

## Why it matters
Where eps rules, the layer is no longer invariant to the scale of its input, small inputs stay small, and the result
changes when the model is ported to a framework with another default eps. Common causes: inputs that were never
scaled (raw values around 1e-3), a layer behind near-zero initialization, an eps of 1e-3 or 0.1 taken over from
elsewhere, fp16-friendly large eps.

## Known problems
A network trained with a large eps has learned with it: then it is no fault, but part of the function, and the info
says how much of it. Sparse channels (a few active pixels) have small variances for good reasons.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.LayerNorm(16))
# variances near 3e-7, eps 1e-5
report = normscope.check(model, 1e-3 * torch.randn(8, 16))
print(report)
```

## Fix
Scale the input of the model, or of this layer, to a standard deviation near 1; else lower eps if the dtype and the
deployed runtime allow it. Do not change the eps of a trained network without retraining or comparing outputs.

## References
- The output variance of a normalization is v / (v + eps) before gain and bias.
- Defaults: PyTorch 1e-5, Keras 1e-3 (batch and layer norm), Flax 1e-5 and 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import eps_text, number, percent, plural

if TYPE_CHECKING:
    from normscope.doctor.probes.statistics import SetStatistics
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

MANY = 0.5
"""share of live sets with eps above their variance that is a warning"""
SOME = 0.1
"""share of all sets that is worth a word"""


@rule("NS401", "eps-dominates", kinds="CD", needs=("stored",), uses=("statistics",))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    for site in subject.known():
        measured = subject.measured.get("statistics", {}).get(site.name, ())
        stored = subject.measured["stored"].get(site.name)
        seen = [s for s in measured or ([stored] if stored else []) if s.set_size != 1 and s.live]
        worst = max(seen, key=lambda s: s.eps_all * s.live / s.sets, default=None)
        worst = worst and worst.over_calls(measured)
        if worst is not None and worst.eps_all * worst.live / worst.sets >= SOME:
            yield _finding(site, worst)
    if any("eps" in site.unknown and site.has_running_state for site in subject.known()):
        yield NotRun("NS401", "eps is not in the file: state it, eps=1e-5")


def _finding(site: Site, seen: SetStatistics) -> Finding:
    assert site.spec is not None
    stored = seen.mode in ("running", "frozen")
    low, middle, _ = seen.shrinkage
    many = seen.eps_all >= MANY
    others = seen.sets - seen.live
    counted = f" in {seen.calls} calls" if seen.calls > 1 else ""
    counted += f" ({plural(others, 'constant set')} not counted)" if others else ""
    what = "stored variance" if stored else "statistic set"
    which, size = ("median", middle) if many else ("lowest 5 %", low)
    where = f"{which} of the sets" + (" in the worst call" if seen.calls > 1 else "")
    return Finding(
        code="NS401",
        site=site.name,
        severity="warning" if many else "info",
        message=f"eps {eps_text(site.spec.eps)} is larger than the variance in {percent(seen.eps_all)} of "
        f"{plural(seen.live, what)}{counted}: before the gain the output has a standard deviation of {number(size)} "
        f"instead of 1 ({where}).",
        evidence={
            "eps": site.spec.eps,
            "share_over_variance": seen.eps_all,
            "share_over_tenth_of_variance": seen.eps_tenth,
            "live_sets": seen.live,
            "sets": seen.sets,
            "calls": seen.calls,
            "median_variance": seen.variance[1],
            "median_shrinkage": middle,
            "low_shrinkage": low,
            "smallest_set": seen.smallest,
        },
        fix="if the model was trained like this, keep eps as it is when porting; else scale the layer's input to a "
        "standard deviation near 1, or lower eps",
        mode="train" if seen.run == "batch" else "eval",
    )
