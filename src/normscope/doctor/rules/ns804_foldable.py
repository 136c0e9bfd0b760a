"""foldable: norms that could be folded away at inference.

## What it does
Counts the batch norms that are exactly y = a x + b per channel in eval mode (stored statistics) and stand directly
beside a convolution or linear layer that could take a and b over without changing the function, and says into which.
One finding for all of them. Norms where something stands in the way are NS801's.

## Why it matters
Nothing is wrong. Folded, the model does the same with fewer operations and less memory traffic: at inference a batch
norm is bound by memory and can cost as much as a small convolution.

## Known problems
Only for inference: a folded norm cannot be trained on, and its statistics are gone. Rounding differs in the last
bits; where channels are dead (NS314) the folded weights spread over a wide range, which hurts quantization per
tensor.

## Example
```python
import torch, normscope

conv, norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
model = torch.nn.Sequential(conv, norm, torch.nn.ReLU())
report = normscope.check(model, torch.randn(4, 3, 8, 8))
print(report)
```

## Fix
None needed. For deployment: W' = a W and b' = a b + shift per output channel, as `normscope.transforms.fold` does and
checks.

## References
- Jacob et al. 2018, Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
  section 3.2: folding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold

if TYPE_CHECKING:
    from normscope.doctor.probes.foldable import Candidate
    from normscope.doctor.subject import Subject


@rule("NS804", "foldable", kinds="G", stateful=True, needs=("data", "foldable"))
def check(subject: Subject) -> Iterator[Finding]:
    found: list[Candidate] = subject.measured["foldable"]
    nodes = {site.name for site in subject.sites if site.kind == "node"}
    yield from fold(
        _finding(candidate, candidate.site in nodes) for candidate in found if not candidate.obstacles
    )


def _finding(candidate: Candidate, in_graph: bool) -> Finding:
    layer = f"{candidate.into or 'the model'} ({candidate.op})"
    beside = f"{layer}, which {'feeds it' if candidate.where == 'before' else 'it feeds'}"
    return Finding(
        code="NS804",
        site=candidate.site,
        severity="info",
        message=f"at inference this norm could be folded into {beside}.",
        evidence={"into": candidate.into, "where": candidate.where, "channels": candidate.channels},
        fix="none needed; ONNX Runtime does it for itself when it loads the graph"
        if in_graph
        else "none needed; for deployment normscope.transforms.fold does it",
        mode="eval",
    )
