"""gain-convention: the gains of the whole model look as if they belonged to the other convention, w or 1 + w.

## What it does
Some norms multiply by w and start at w = 1; others (Gemma's, and those of models derived from it) multiply by 1 + w
and start at w = 0. A checkpoint of one kind in a norm of the other loads without a word. Gains hardly ever cross zero
in training, and that tells the kinds apart. The rule reads the weights of all norms without running statistics (batch
norms have one convention) that share an offset, and fires where at least nine in ten of these sites, and at least
two, agree:

- **missing** (offset 0): a quarter or more of a site's weights are below zero, and their median is within 1 of it.
  The offset 1 would make them positive. A site where most weights have faded to 0 beside a few that work (median of
  |w| below a tenth of its 95 % quantile), as weight decay leaves it, does not count for this.
- **doubled** (offset 1): the median weight is within 0.2 of 1 and the middle half of the weights spreads over less
  than 0.4. The effective gain is then about 2 at every site, where training from w = 0 leaves it near 1.

Norms whose weights are exactly 0 begin as no branch at all (zero-initialized residual branches); they count only
where every norm is like that and a forward shows that they do not end a residual branch.

## Why it matters
Without the offset every norm scales by almost nothing and flips signs; with it twice, every norm doubles. The loss
starts far from where the checkpoint was, and finetuning may even recover, so that nobody looks.

## Known problems
Weights that were drawn at random around 0, by an initialization that treats gains like matrices, look like a missing
offset; they are wrong too. Gains well below 1 of a model with large weights, loaded where 1 is added, lie between 1
and 2 and cannot be told from ordinary ones: silent. A single site decides nothing. In a checkpoint without its
code a missing offset is info: a norm that adds 1 may be meant.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(*(torch.nn.RMSNorm(64) for _ in range(4)))
for norm in model:
    # weights of a norm that multiplies by 1 + w
    torch.nn.init.normal_(norm.weight, std=0.1)
report = normscope.check(model)
print(report)
```

## Fix
Convert the weights once: w + 1 where the offset is missing, w - 1 where it is doubled; or use the norm class of the
checkpoint's own model.

## References
- Gemma Team 2024, Gemma: Open Models Based on Gemini Research and Technology; `GemmaRMSNorm` in transformers: the
  output is the normalized input times (1 + weight).
- Zhang and Sennrich 2019, Root Mean Square Layer Normalization: gains start at 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import number, percent, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

AGREE = 0.9
"""of the sites"""
NEGATIVE = 0.25
"""of a site's weights: of 78 trained sites of 5 models three had more, all of them faded"""
FADED = 0.1
"""a normal distribution has 0.34; those had 0.0003 to 0.06"""
NEAR_ONE, NARROW = 0.2, 0.4
LEAST = 8
"""weights of a site from which quartiles say something"""


@dataclass(frozen=True)
class _Gains:
    site: Site
    offset: float
    median: float
    spread: float
    """between the quartiles"""
    negative: float
    faded: bool
    """most weights are next to nothing beside the largest"""
    zero: bool
    count: int


@rule("NS107", "gain-convention", kinds="C")
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    found = [gains for site in subject.known() if (gains := _gains(site)) is not None]
    for offset in sorted({gains.offset for gains in found}):
        yield from _judged(subject, [gains for gains in found if gains.offset == offset], offset)


def _gains(site: Site) -> _Gains | None:
    import numpy as np  # pages are read without it

    spec, weight = site.spec, site.array("weight")
    if (
        spec is None
        or weight is None
        or spec.weight is None
        or spec.running is not None
        or weight.size < LEAST
    ):
        return None
    if not np.isfinite(weight).all() or spec.weight_offset not in (0.0, 1.0):
        return None
    low, median, high = (float(value) for value in np.quantile(weight, (0.25, 0.5, 0.75)))
    middle, large = (float(value) for value in np.quantile(np.abs(weight), (0.5, 0.95)))
    return _Gains(
        site=site,
        offset=spec.weight_offset,
        median=median,
        spread=high - low,
        negative=float((weight < 0).mean()),
        faded=middle < FADED * large,
        zero=not weight.any(),
        count=weight.size,
    )


def _judged(subject: Subject, gains: list[_Gains], offset: float) -> Iterator[Finding | NotRun]:
    if len(gains) < 2:
        return
    if offset == 1:
        yield from _fired(
            gains, [g for g in gains if abs(g.median - 1) < NEAR_ONE and g.spread < NARROW], offset
        )
    elif all(g.zero for g in gains):
        if not subject.has_data:
            yield NotRun("NS107", "every gain is 0: whether these norms end residual branches needs data")
            return
        yield from _fired(gains, [g for g in gains if not _ends_branch(g.site)], offset)
    else:
        moved = [g for g in gains if not g.zero]
        crossing = [g for g in moved if g.negative >= NEGATIVE and abs(g.median) < 1 and not g.faded]
        yield from _fired(moved, crossing, offset)


def _ends_branch(site: Site) -> bool:
    """Its output goes into a residual sum."""
    return any(neighbour.kind == "add" for call in site.calls for neighbour in call.feeds)


def _fired(gains: list[_Gains], odd: list[_Gains], offset: float) -> Iterator[Finding]:
    import numpy as np

    if len(odd) < 2 or len(odd) < AGREE * len(gains):
        return
    medians = [g.median for g in odd]
    negative = sum(g.negative * g.count for g in odd) / sum(g.count for g in odd)
    middle = float(np.median(medians))
    unsure = "weight_offset" in odd[0].site.unknown  # a checkpoint: right in a norm that adds 1
    if offset == 1:
        what = (
            f"their weights have a median of {number(middle)} and the norm adds 1, so they multiply by about "
            f"{number(1 + middle)}: the 1 seems to be in the weights already"
        )
        fix = "subtract 1 from these weights, or use a norm that multiplies by the weight itself"
    else:
        what = (
            f"their weights have a median of {number(middle)} and {percent(negative)} of them are negative"
            + ("" if unsure else ", and the norm multiplies by them as they are")
            + ": they look like weights of a norm that multiplies by 1 + w"
        )
        if all(g.zero for g in odd):
            what = "their weights are all 0, where a norm that multiplies by 1 + w begins: here only a bias is left"
        fix = "add 1 to these weights, or use a norm that multiplies by 1 + w, as the checkpoint's model does"
    if unsure:
        fix = "load them only into norms that multiply by 1 + w"
    yield Finding(
        code="NS107",
        site=odd[0].site.name,
        severity="info" if unsure else "warning" if offset else "error",
        message=f"{plural(len(odd), 'norm')} of {len(gains)} agree: {what}.",
        evidence={
            "offset": offset,
            "sites": len(odd),
            "sites_with_gains": len(gains),
            "median_weight": middle,
            "smallest_median": min(medians),
            "largest_median": max(medians),
            "negative_share": negative,
            "weights": sum(g.count for g in odd),
        },
        fix=fix,
    )
