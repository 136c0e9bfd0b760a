"""unsafe-to-transform: a batch norm beside a linear map that a fold would not leave the function of.

## What it does
By stored statistics a batch norm is y = a x + b per channel, and tools fold it into the convolution or linear layer
before it, or the one after it. Looks at every norm that has such a neighbour, with only views between, and says at
each what would make the fold wrong:

- the norm runs several times in a forward (it is shared), or is registered under several names;
- the layer's output has other readers (also: the model returns it), or its weight is used several times;
- the norm can only go into the layer after it, and that one pads with zeros: inside the image the shift b is right,
  at the border it would be added to zeros that the network never had;
- the weight is computed in the forward (parametrization, weight norm, weight standardization), or the operation is a
  function call without a layer of its own, or a layer of a subclass whose forward takes no bias;
- forward hooks, or a forward that was replaced, on one of the two;
- somebody sees what lies between the two although no operation shows it: NumPy, a view that is written to, a tensor
  that is kept after the forward, a hook of a module around them;
- the norm takes batch statistics in eval mode although it keeps running ones.

## Why it matters
A fold of such a norm changes the output, often only at the borders of an image or for some inputs, and the tool says
nothing. Quantization and export to other runtimes fold by default.

## Known problems
What no norm stands directly beside is not judged: after an activation or a sum nothing can be folded, and every tool
sees that. A fold for some of several calls by hand can be right.

## Example
```python
import torch, normscope

norm, conv = torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 8, 3, padding=1)
torch.nn.init.normal_(norm.bias)
# the norm's shift does not reach the padding
report = normscope.check(torch.nn.Sequential(norm, conv), torch.randn(4, 3, 8, 8))
print(report)
```

## Fix
Leave these norms as they are, or take away what stands in the way first: give each call its own norm, compute the
parametrized weight once, pad explicitly with the value that the norm makes of zero.

## References
- Jacob et al. 2018, Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
  section 3.2: folding.
- `torch.nn.utils.fusion` and `torch.ao.quantization.fuse_modules`.
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


@rule("NS801", "unsafe-to-transform", kinds="G", stateful=True, needs=("data", "foldable"))
def check(subject: Subject) -> Iterator[Finding]:
    found: list[Candidate] = subject.measured["foldable"]
    yield from fold(_finding(candidate) for candidate in found if candidate.obstacles)


def _finding(candidate: Candidate) -> Finding:
    layer = f"{candidate.into or 'the model'} ({candidate.op})"
    beside = f"{layer}, which {'feeds it' if candidate.where == 'before' else 'it feeds'}"
    return Finding(
        code="NS801",
        site=candidate.site,
        severity="info",
        message=f"folding this norm into {beside}, would change the function: {'; '.join(candidate.obstacles)}.",
        evidence={
            "into": candidate.into,
            "where": candidate.where,
            "obstacles": list(candidate.obstacles),
            "largest_shift": candidate.shift,
            "channels": candidate.channels,
        },
        fix="leave it as it is, or take away what stands in the way first",
        mode="eval",
    )
