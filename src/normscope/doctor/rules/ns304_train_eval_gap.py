"""train-eval-gap: batch statistics differ from running statistics beyond sampling error and by an effect that matters.

## What it does
At every site with running statistics, the batch's own means and variances are compared with the stored ones, with
norms in batch mode and dropout off. The unit is the sample: pixels of one image are far from independent, and a test
over pixels alarms in every healthy network. Fires where two things hold together, over the channels with a stored
variance above 0:

- significance: more than 10 % of the channels, and two at least, differ beyond sampling error (Student's t over
  samples, p = 0.001);
- effect: the means are off by more than 0.25 standard deviations (root mean square over channels), or the
  variances by a factor of more than 1.5 (median channel).

Four times the effect is an error, less a warning. An effect twice as large as the bound that this few samples
cannot prove is told as info. The first site in the order of execution is the finding; later sites are listed under
it, because they may only follow.

## Why it matters
In eval mode the network computes another function than the one that was trained: preprocessing that differs between
training and deployment, statistics from other data, a momentum too large or updates too few, dropout before the norm.
Nothing raises; accuracy falls.

## Known problems
Fewer than four samples cannot tell. More are better: means off by half a standard deviation at the stem of small
networks were found in 15 of 80 runs with 4 samples, 32 with 8 and 50 with 16; variances off by a factor of 4 in
55, 68 and 80. The same table (docs/false-alarms.md) has 5 false alarms in 504 innocent runs, most of them on raw
features with heavy tails, of which 16 samples are easily unlike the rest: pass more of such. Samples must be
independent: copies and overlapping crops of one image are noticed and the finding becomes info, crops without
overlap are not. A batch of one class, sorted data, or several rows of one user is not noticed and differs truly.
Statistics that are still at their initial values are left to NS302. A norm that is frozen, or in eval in a model
that is being trained, uses its stored statistics in training too: there is no gap, and recomputing them would do
harm. It is listed as not run. The norm of a graph that was exported for inference does not say how it was trained:
it is compared, and a gap of one that was frozen in training too means only that this data is not what its statistics
were collected on.

## Example
```python
import torch, normscope

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
)
for _ in range(100):
    model(torch.randn(32, 1, 8, 8))
# trained on numbers around 0, deployed on raw pixels
inputs = 255 * torch.rand(16, 1, 8, 8)
report = normscope.check(model, inputs)
print(report)
```

## Fix
Feed what the network was trained on: the same scaling, mean and standard deviation, channel order. If the data is
what you want, recompute the statistics on it: reset, momentum None, some hundred batches in train mode. Where earlier
norms agree with the batch, the inputs are right: this norm's statistics, or the weights between, are not those of the
checkpoint.

## References
- Ioffe and Szegedy 2015, Batch Normalization, section 3.1.
- Wu and Johnson 2021, Rethinking "Batch" in BatchNorm, sections 3 and 5.
- Li et al. 2019, Understanding the Disharmony between Dropout and Batch Normalization by Variance Shift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from normscope.doctor.handed_over import in_training, stored_in_training
from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.significance import matters
from normscope.doctor.wording import number, percent, plural

if TYPE_CHECKING:
    from normscope.doctor.probes.gap import SiteGap
    from normscope.doctor.subject import Subject

UNPROVEN = 2.0
"""an effect this many times the bound is worth a word even where it is not significant"""
GRAVE = 4.0


@rule("NS304", "train-eval-gap", kinds="D", stateful=True, needs=("gap",), real_data=True)
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    live = set()
    training = in_training(subject)
    for site in subject.sites:
        stored = stored_in_training(site, training)
        if stored and site.kind == "node":  # of a graph for inference: its training is not in the file
            live.add(site.name)
        elif stored:
            yield NotRun(
                "NS304",
                f"{stored}: training uses the stored statistics too, so there is no gap to measure",
                site.name,
            )
        elif site.spec is None and site.has_running_state:
            yield NotRun("NS304", site.reason, site.name)
        elif site.mode_train == "batch" and site.mode_eval == "running":
            live.add(site.name)
    gaps: dict[str, SiteGap] = {n: g for n, g in subject.measured["gap"].items() if n in live}
    for name, gap in gaps.items():
        if gap.reason:
            yield NotRun("NS304", gap.reason, name)
    ordered = sorted((gap.order, name, gap) for name, gap in gaps.items() if gap.gap is not None)
    found = [f for _, name, gap in ordered if (f := _judge(name, gap, subject.inputs_dependent)) is not None]
    proven = [f for f in found if f.evidence["significant"]]
    chosen = proven or found[:1]
    if chosen:
        first, doubted = gaps[chosen[0].site], {f.site for f in found}
        earlier = [name for name, gap in gaps.items() if gap.order < first.order]
        agree = all(not gaps[name].reason and name not in doubted for name in earlier)
        yield replace(
            chosen[0], fix=_fix(subject, chosen[0].site, len(earlier), agree), also=tuple(chosen[1:])
        )


def _fix(subject: Subject, name: str, earlier: int, agree: bool) -> str:
    """By where the first norm stands that differs: what is wrong with the inputs shows at the first of all."""
    site = next(site for site in subject.known() if site.name == name)
    source = " in the model that the graph was exported from" if site.kind == "node" else ""
    recompute = f"or recompute the running statistics on this data{source}"
    if site.spec is not None and site.spec.running is not None and site.spec.running.average == "cumulative":
        since = "they average every batch since training began, also those that earlier weights gave"
        recompute += f" (momentum is None: {since})"
    if not earlier:
        return f"feed what the network was trained on (scaling, mean, standard deviation), {recompute}"
    if not agree:
        return f"compare the inputs, and the statistics of this norm, with those of training, {recompute}"
    several = len(subject.args or ()) + len(subject.kwargs) > 1
    clear = (
        f"{plural(earlier, 'earlier norm')} agree{'s' if earlier == 1 else ''} with this batch, so the inputs and "
        f"their preprocessing are not the cause{' (unless this norm reads another of the inputs)' if several else ''}"
    )
    if any(maker.dropout > 0 for call in site.calls for maker in call.fed_by):
        return f"{clear}: move the dropout behind this norm (see NS601), {recompute}"
    return (
        f"{clear}: compare the running_mean and running_var of this norm, and the weights between the norm before it "
        f"and this one, with the checkpoint, {recompute}"
    )


def _judge(name: str, site: SiteGap, dependent: str) -> Finding | None:
    gap = site.gap
    assert gap is not None
    effect, significant = matters(gap)
    if not significant and effect <= UNPROVEN:
        return None
    message = (
        f"this batch does not look like the stored statistics: means are off by {number(gap.shift)} standard "
        f"deviations, variances by a factor of {number(math.exp(gap.log_var))} (beyond sampling error in "
        f"{percent(gap.share_mean)} and {percent(gap.share_var)} of {plural(site.channels, 'channel')}, "
        f"{plural(site.samples, 'sample')})."
    )
    severity = "error" if effect > GRAVE else "warning"
    if not significant:
        severity, message = "info", f"{message} Large, but not significant with so few samples: pass more."
    elif dependent:
        severity, message = (
            "info",
            f"{message} The samples are not independent, so this may be chance: {dependent}.",
        )
    return Finding(
        code="NS304",
        site=name,
        severity=severity,
        message=message,
        mode="eval",
        evidence={
            "shift_in_standard_deviations": gap.shift,
            "variance_ratio": math.exp(gap.log_var),
            "share_of_channels_mean": gap.share_mean,
            "share_of_channels_variance": gap.share_var,
            "channels": site.channels,
            "samples": site.samples,
            "significant": significant,
        },
    )
