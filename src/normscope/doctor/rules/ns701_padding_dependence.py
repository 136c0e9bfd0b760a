"""padding-dependence: padded positions change the output of valid ones.

## What it does
With a mask (True at valid positions), the batch runs in eval mode again with other content at the padded positions,
and with a quarter more of them. Outputs at valid positions must stay the same: equal content aside, a difference
above 1e-5 of their size counts. Names the first site whose valid outputs change for unchanged valid inputs, with the
size of both changes. Where no site is responsible but the model's output changes, it is info: a convolution across
the border or an attention without a mask does that.

## Why it matters
Predictions then depend on how long the longest sequence of the batch is. A norm over time or over the batch that
counts padding has wrong statistics in training, too.

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
Normalize over features only (layer norm over the last axis), or use statistics that count valid positions only.

## References
- Ba et al. 2016, Layer Normalization, section 3.1: statistics of each time step alone.
- Shen et al. 2020, PowerNorm, section 3: batch statistics of padded text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import number, percent

if TYPE_CHECKING:
    from normscope.doctor.probes.padding import Padding
    from normscope.doctor.subject import Subject


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
    if guilty:
        yield _at_site(min(guilty, key=guilty.__getitem__), measured)
    elif measured.output_content or measured.output_length:
        yield Finding(
            code="NS701",
            site="",
            severity="info",
            message="padded positions change the model's output at valid ones, by "
            f"{_sizes(measured.output_content, measured.output_length)}; no normalization that was found does it.",
            mode="eval",
            evidence=_evidence(measured),
            fix="pass the mask to attention and pooling; set padded positions to zero before convolutions over time",
        )


def _at_site(name: str, measured: Padding) -> Finding:
    content, length = measured.content.get(name), measured.length.get(name)
    sizes = _sizes(content.relative if content else None, length.relative if length else None)
    return Finding(
        code="NS701",
        site=name,
        severity="warning",
        message=f"padded positions change the normalized values of valid ones, by {sizes} "
        f"({percent(measured.masked / measured.positions)} of the positions are padded).",
        mode="eval",
        evidence={
            "relative_change_other_content": content.relative if content else None,
            "relative_change_more_padding": length.relative if length else None,
            **_evidence(measured),
        },
        fix="normalize over features only, or count valid positions only (a masked norm)",
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
