"""repeated-norm: a norm directly fed by a norm that makes it redundant, or that it makes redundant.

## What it does
Looks at pairs of norms with nothing but views between them, and compares their axes.

- The **second** is redundant where its statistic sets are made of whole sets of the first, which come in with mean 0
  and mean square 1 already: layer norm after layer norm, RMS norm after layer norm, batch norm after batch norm or
  instance norm. The gain and bias of the first must be common to each of the second's sets.
- The **first** is redundant where each of its sets is cut into whole sets of the second, which removes whatever
  common factor and shift they get: layer norm after RMS norm, instance norm after batch norm or group norm. Nothing
  else may read the first one's output.

Where that follows from the axes whatever the parameters are, it is a warning. It is info where it holds because the
first norm's gain and bias are the same for every feature now (a fresh model), and training may change them; and where
the first norm has other readers, so that it has a purpose of its own and the second is one of many (the first block
behind normalized embeddings). Where gain or bias differ the second norm does something and the rule is silent. The
statistics of the batch confirm it: silent where eps leaves the first norm's output more than 1 % short of unit size,
since the second norm then makes up for it.

## Why it matters
The layer costs time and memory, has a second gain and bias that do the first one's work, and is mostly a leftover of
a change: the two are then not where their author thinks that they are.

## Known problems
Two norms with an activation or a residual sum between them are not redundant and not told. A norm on the embeddings
before a pre-norm block (CLIP, Segformer, nanochat) has a reason, its output being the residual stream: info.

## Example
```python
import torch, normscope

norms = [torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8)]
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), *norms)
report = normscope.check(model, torch.randn(16, 3, 8, 8))
print(report)
```

## Fix
Remove the redundant norm; where it has been trained, multiply its gain into the other's and carry its bias over.

## References
- Normalization is idempotent: a set with mean 0 and variance 1 is left as it is, up to eps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from normscope.doctor.repeated import Redundancy, redundancy
from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, label, percent

if TYPE_CHECKING:
    from normscope.doctor.site import Call, Neighbour, Site
    from normscope.doctor.subject import Subject

SHORT = 0.01


@rule("NS108", "repeated-norm", kinds="G", needs=("data",), uses=("statistics",))
def check(subject: Subject) -> Iterator[Finding]:
    sites = {site.name: site for site in subject.known()}
    found: dict[tuple[str, str], list[Finding | None]] = {}
    for site in sites.values():
        for call in site.calls:
            first = _directly_before(call, sites)
            if first is not None:
                found.setdefault((first[0].name, site.name), []).append(_judged(subject, *first, site, call))
    # a pair is told where all of its calls say the same
    pairs = [calls for calls in found.values() if all(calls)]
    for severity in ("warning", "info"):
        yield from fold(calls[0] for calls in pairs if calls[0] and calls[0].severity == severity)


def _directly_before(call: Call, sites: dict[str, Site]) -> tuple[Site, Neighbour] | None:
    """The known norm whose output, through views alone, is the input of a call."""
    if len(call.fed_by) != 1:
        return None
    (neighbour,) = call.fed_by
    if neighbour.kind != "norm" or neighbour.through or neighbour.site not in sites:
        return None
    return sites[neighbour.site], neighbour


def _judged(subject: Subject, first: Site, between: Neighbour, second: Site, call: Call) -> Finding | None:
    if "frozen" in (first.mode_train, second.mode_train):
        return None  # a frozen norm is a gain and a bias
    before = next((c for c in first.calls if _same_sizes(c, call, between)), None)
    found = None if before is None else redundancy(first, before, second, call, between)
    if found is None or (found.which == "first" and between.consumers > 1):
        return None
    short = _short_of_unit(subject, first)
    if short is not None and short > SHORT:
        return None
    return _finding(first, second, found, short, between.consumers > 1)


def _same_sizes(before: Call, call: Call, between: Neighbour) -> bool:
    """Whether a call of the first norm can be the one whose output came here."""
    known = [(call.shape[i], place) for i, place in enumerate(between.places) if place is not None]
    return len(before.shape) > max((place for _, place in known), default=0) and all(
        before.shape[place] == size for size, place in known
    )


def _short_of_unit(subject: Subject, first: Site) -> float | None:
    """How far eps leaves the first norm's output short of unit size, at 95 % of its sets."""
    seen: list[Any] = [
        s for s in subject.measured.get("statistics", {}).get(first.name, ()) if s.set_size and s.live
    ]
    return max((1 - s.shrinkage[0] for s in seen), default=None)


def _finding(first: Site, second: Site, found: Redundancy, short: float | None, fork: bool) -> Finding:
    which, other = (second, first) if found.which == "second" else (first, second)
    if found.which == "second":
        why = (
            f"{label(first)}, which feeds it directly, has given its statistic sets mean 0 and size 1 already"
        )
        if not found.centered:
            why = f"{label(first)}, which feeds it directly, has given its statistic sets size 1 already"
    else:
        why = f"{label(second)}, which it feeds directly, takes its shift and scale away again"
    if found.while_uniform:
        why += ", as long as the gain and bias between them are the same for every feature"
    measured = "" if short is None else f"; on this batch eps leaves at most {percent(short)} to do"
    finding = Finding(
        code="NS108",
        site=which.name,
        severity="info" if found.while_uniform or fork else "warning",
        message=f"this norm is redundant: {why}{measured}.",
        evidence={
            "first": first.name,
            "second": second.name,
            "redundant": which.name,
            "patterns": [first.spec.stats, second.spec.stats] if first.spec and second.spec else [],
            "while_gain_is_uniform": found.while_uniform,
            "first_has_other_readers": fork,
        },
        fix=f"remove it; fold its gain and bias into those of {label(other)}",
    )
    return finding if short is None else replace(finding, evidence={**finding.evidence, "left_to_do": short})
