"""counter-inconsistent: num_batches_tracked is missing, or at odds with the statistics or the momentum policy.

## What it does
Compares the counter of updates with the statistics it counts. It matters only where the norm averages
cumulatively (`momentum=None`), since there the next update has the weight 1 / (counter + 1):

| counter | momentum a number | momentum None |
|---|---|---|
| 0 beside trained statistics | info: only the history is lost | warning: the first batch overwrites everything |
| missing | silent | warning: PyTorch then updates with weight 0, that is never |
| negative | warning | warning |
| of a floating type | info | warning: it stops at 2048 in float16, 256 in bfloat16 |

## Why it matters
`1 / (0 + 1)` is 1: one batch replaces statistics of a million images. Rules that reason from the counter (is
it warm, was it ever updated) are blind where it lies.

## Known problems
Checkpoints ported from TensorFlow and old PyTorch checkpoints have a counter of 0 as a matter of course. With
a momentum that is a number this does no harm. Instance norms have a counter that PyTorch never touches: silent. In a
norm that is identified a counter may have another name: none is missed there.

## Example
```python
import torch, normscope

norm = torch.nn.BatchNorm2d(4, momentum=None)
norm.load_state_dict(
    {
        **norm.state_dict(),
        "running_mean": torch.randn(4),
        "running_var": torch.rand(4) + 0.5,
    }
)
# the counter is still 0
report = normscope.check(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), norm))
print(report)
```

## Fix
Before training on with `momentum=None`, set `num_batches_tracked` to the number of batches that the
statistics stand for, or give momentum a number. Keep the counter an integer: convert models with
`.to(dtype)`, which leaves integers alone.

## References
- The documentation of `torch.nn.BatchNorm2d`: `momentum=None` means a cumulative moving average (simple
  average).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.history import counter_is_idle, momentum_of, statistics_at_start, updates
from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

LAST_COUNT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}
"""where counter + 1 rounds back to the counter"""


@rule("NS303", "counter-inconsistent", kinds="C", stateful=True)
def check(subject: Subject) -> Iterator[Finding]:
    diagnoses: dict[str, list[Finding]] = {}
    for site in subject.sites:
        if site.has_running_state and site.mode_train != "frozen" and not counter_is_idle(site):
            for diagnosis, finding in _diagnose(site):
                diagnoses.setdefault(diagnosis, []).append(finding)
    for findings in diagnoses.values():
        yield from fold(findings)


def _diagnose(site: Site) -> Iterator[tuple[str, Finding]]:
    running = site.spec.running if site.spec is not None else None
    # Without a counter PyTorch's cumulative average never moves, and its spec says momentum 0: ask the module. One that
    # was identified moved in front of our eyes: where it keeps its count, and what momentum means there, is its own.
    told = site.identified is None
    cumulative = (running is not None and running.average == "cumulative") or (
        told and site.module is not None and getattr(site.module, "momentum", 0.0) is None
    )
    momentum = momentum_of(site)
    count = updates(site)
    dtype = site.dtype("num_batches_tracked")

    def finding(severity: str, message: str, fix: str) -> Finding:
        evidence = {"updates": count, "momentum": momentum, "cumulative": cumulative, "dtype": dtype}
        return Finding("NS303", site.name, message, severity, evidence, fix, mode="train")

    if count is None:
        if cumulative and told:
            yield (
                "missing",
                finding(
                    "warning",
                    "num_batches_tracked is missing and momentum is None: the statistics can never move, since PyTorch "
                    "takes the weight of an update from the counter.",
                    "restore the counter, or give momentum a number",
                ),
            )
        return
    if count < 0:
        yield (
            "negative",
            finding("warning", f"num_batches_tracked is {count}.", "set it to the number of batches"),
        )
    if count == 0 and not statistics_at_start(site):
        if cumulative:
            yield (
                "zero",
                finding(
                    "warning",
                    "num_batches_tracked is 0 beside trained statistics and momentum is None: the next batch in train "
                    "mode has the weight 1 and overwrites them all.",
                    "set num_batches_tracked to the number of batches behind the statistics, or give momentum a number",
                ),
            )
        else:
            move = "" if momentum is None else f" (momentum is {number(momentum)}; the counter is not used)"
            yield (
                "zero",
                finding(
                    "info",
                    f"num_batches_tracked is 0 beside trained statistics{move}: a ported checkpoint; how many batches "
                    "stand behind them is not known.",
                    "nothing, unless momentum becomes None",
                ),
            )
    if dtype in LAST_COUNT:
        yield (
            "floating",
            finding(
                "warning" if cumulative else "info",
                f"num_batches_tracked is {dtype} and stops counting at {LAST_COUNT[dtype]}.",
                "keep the counter an integer (torch.long)",
            ),
        )
