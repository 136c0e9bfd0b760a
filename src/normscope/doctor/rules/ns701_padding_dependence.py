"""padding-dependence: padded positions change the output of valid ones.

## What it does
With a mask (True at valid positions), the batch runs in eval mode again with other content at the padded positions,
and with a quarter more of them. Outputs at valid positions must stay the same: equal content aside, a difference
above 1e-5 of their size counts. Names the first site whose valid outputs change for unchanged valid inputs, with the
size of both changes, or the model where its output changes and no site is responsible: a convolution across the border
or an attention without a mask does that.

In training, a norm that stores statistics normalizes by those of the batch. A warning where padding moves them: the
means by more than a quarter of a standard deviation, or the variances by more than a factor of 1.5, against those of
the valid positions.

The severity follows what reaches the model's output at valid positions: an error from a quarter of its size on, a
warning from 3 %, else info. Where the output cannot be matched to positions, what the site shows decides.

## Why it matters
Predictions then depend on how long the longest sequence of the batch is. A batch norm that counts padding in training
stores statistics of a mixture, whose share of padding is another in evaluation, or none.

## Known problems
Only positions that a site still shows as (B, L) are followed; after a stride or a pooling over time nothing can be
told valid from padded, except in the pooled output. Padded inputs are refilled with values from valid positions;
a model that always sees zeros there may be less sensitive than the first number says.

## Example
```python
import torch, normscope

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Conv1d(6, 6, 1)
        self.norm = torch.nn.GroupNorm(2, 6)

    def forward(self, x):
        return self.norm(self.mix(x))

inputs = torch.randn(4, 6, 10)
mask = torch.arange(10) < torch.tensor([[10], [8], [6], [5]])
report = normscope.check(Encoder(), inputs, mask=mask)
print(report)
```

## Fix
Normalize over features only (layer norm over the last axis), or count valid positions only: batch, group, layer and
instance norms of `normscope.nn` take `mask=` or `lengths=`.

## References
- Ba et al. 2016, Layer Normalization, section 3.1: statistics of each time step alone.
- Shen et al. 2020, PowerNorm, section 3: batch statistics of padded text.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.significance import LOG_VAR, SHIFT
from normscope.doctor.wording import fold, number, percent

if TYPE_CHECKING:
    from normscope.doctor.probes.padding import Padding
    from normscope.doctor.subject import Subject


MATTERS, LARGE = 0.03, 0.25
"""of the size of the valid outputs"""


@rule("NS701", "padding-dependence", kinds="D", needs=("padding",))
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    measured: Padding = subject.measured["padding"]
    for run in ("padded", "other_length"):
        if subject.runs.get(run):
            yield NotRun("NS701", subject.runs[run])
    guilty = {
        name: min(found.order for found in (measured.content.get(name), measured.length.get(name)) if found)
        for run in (measured.content, measured.length)
        for name, mixing in run.items()
        if mixing.responsible
    }
    first = min(guilty, key=guilty.__getitem__) if guilty else ""
    here = [run[first].relative for run in (measured.content, measured.length) if first and first in run]
    output = [size for size in (measured.output_content, measured.output_length) if size is not None]
    if not math.isfinite(sum(here) + sum(output)):
        yield NotRun(
            "NS701", "valid outputs hold NaN or infinities, so their change has no size (see NS406)", first
        )
    elif guilty:
        yield _at_site(first, measured, _severity(output or here))
    elif any(output):
        yield Finding(
            code="NS701",
            site="",
            severity=_severity(output),
            message="padded positions change the model's output at valid ones, by "
            f"{_sizes(measured.output_content, measured.output_length)}; no normalization that was found does it.",
            mode="eval",
            evidence=_evidence(measured),
            fix="pass the mask to attention and pooling; set padded positions to zero before convolutions over time",
        )
    yield from _in_training(measured, guilty)


def _in_training(measured: Padding, guilty: Container[str]) -> Iterator[Finding]:
    """Guilty sites normalize by the batch in evaluation, too."""
    found = [
        Finding(
            code="NS701",
            site=name,
            message="in training its batch statistics count padded positions: against those of the valid ones the "
            f"means lie {number(counted.shift)} standard deviations off, and the variances are "
            f"{number(math.exp(counted.log_var))} times as large "
            f"({percent(measured.masked / measured.positions)} of the positions are padded).",
            evidence={
                "shift_in_standard_deviations": counted.shift,
                "variance_factor": math.exp(counted.log_var),
                "masked_positions": measured.masked,
                "positions": measured.positions,
            },
            fix="count valid positions only: batch norms of normscope.nn take mask= and lengths=",
            mode="train",
        )
        for name, counted in measured.training.items()
        if name not in guilty and (counted.shift > SHIFT or abs(counted.log_var) > LOG_VAR)
    ]
    yield from fold(found)


def _severity(changes: list[float]) -> str:
    return "error" if max(changes) >= LARGE else "warning" if max(changes) >= MATTERS else "info"


def _at_site(name: str, measured: Padding, severity: str) -> Finding:
    content, length = measured.content.get(name), measured.length.get(name)
    sizes = _sizes(content.relative if content else None, length.relative if length else None)
    output = [size for size in (measured.output_content, measured.output_length) if size is not None]
    reaches = (
        f", and the model's valid outputs by up to {number(max(output))} of their size" if output else ""
    )
    return Finding(
        code="NS701",
        site=name,
        severity=severity,
        message=f"padded positions change the normalized values of valid ones, by {sizes}{reaches} "
        f"({percent(measured.masked / measured.positions)} of the positions are padded).",
        mode="eval",
        evidence={
            "relative_change_other_content": content.relative if content else None,
            "relative_change_more_padding": length.relative if length else None,
            **_evidence(measured),
        },
        fix="normalize over features only, or count valid positions only: layers of normscope.nn take mask= and "
        "lengths=",
    )


def _sizes(content: float | None, length: float | None) -> str:
    parts = [(content, "with other content there"), (length, "with more padding")]
    return " and ".join(f"{number(size)} of their size {when}" for size, when in parts if size is not None)


def _evidence(measured: Padding) -> dict[str, float | int | None]:
    return {
        "output_change_other_content": measured.output_content,
        "output_change_more_padding": measured.output_length,
        "masked_positions": measured.masked,
        "positions": measured.positions,
    }
