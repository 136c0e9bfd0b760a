"""tracking-flag-flipped: track_running_stats does not fit the buffers.

## What it does
`track_running_stats` is read at construction, to make buffers or not, and again in every forward. Changed in
between, the two disagree:

| flag now | buffers | batch norm in train | batch norm in eval | instance norm in eval |
|---|---|---|---|---|
| False | exist | by the batch, buffers stand still | by the old buffers | by the input, buffers move |
| True | none | by the batch | by the batch | raises an error |

## Why it matters
Setting the flag to False is a common recipe for "use batch statistics at test time". For batch norm it does
the opposite: eval keeps the old buffers, and training stops refreshing them, so the two drift apart with
every step.

## Known problems
With statistics frozen for good, on purpose, the flag does stop the updates; but train and eval still
normalize differently. Putting the norm in eval mode is the clear way.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
model[1].track_running_stats = False  # too late: the buffers exist
report = normscope.check(model)
print(report)
```

## Fix
For batch statistics in eval too, construct the norm with `track_running_stats=False`, or set `running_mean`
and `running_var` to None. To stop updates, put the norm in eval mode. Else set the flag back to True.

## References
- The documentation of `torch.nn.BatchNorm2d` on `track_running_stats`, and the source of its `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

READS = {"batch": "the batch", "input": "the input", "running": "the stored statistics"}


@rule("NS307", "tracking-flag-flipped", kinds="S")
def check(subject: Subject) -> Iterator[Finding]:
    off, on = [], []
    for site in subject.sites:
        flag = getattr(site.module, "track_running_stats", None)
        if site.mode_train == "frozen":
            continue
        if flag is False and site.has_running_state:
            off.append(_buffers_left(site))
        elif flag is True and site.spec is not None and not site.has_running_state:
            on.append(_buffers_missing(site))
    yield from fold(off)
    yield from fold(on)


def _buffers_left(site: Site) -> Finding:
    after = "stand still" if site.mode_eval == "running" else "move in eval too, unread"
    return Finding(
        code="NS307",
        site=site.name,
        severity="warning",
        message="track_running_stats is False, but the buffers exist: train normalizes by "
        f"{READS[site.mode_train]}, eval by {READS[site.mode_eval]}, and the buffers {after}.",
        evidence={"track_running_stats": False, "mode_train": site.mode_train, "mode_eval": site.mode_eval},
        fix="set running_mean and running_var to None for batch statistics everywhere, else set the flag back to True",
    )


def _buffers_missing(site: Site) -> Finding:
    return Finding(
        code="NS307",
        site=site.name,
        severity="warning",
        message="track_running_stats is True, but there are no buffers: nothing is tracked, and in eval a batch norm "
        "still normalizes by the batch while an instance norm raises an error.",
        evidence={"track_running_stats": True, "mode_train": site.mode_train, "mode_eval": site.mode_eval},
        fix="construct the norm with track_running_stats=True, which makes the buffers, or set the flag to False",
        mode="eval",
    )
