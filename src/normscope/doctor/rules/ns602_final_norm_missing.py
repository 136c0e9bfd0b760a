"""final-norm-missing: a pre-norm stack whose residual stream reaches the head without a norm.

## What it does
A pre-norm block computes `x + f(norm(x))`: the sum goes around the norm. The rule follows the sums of a forward and
looks for the last: the one that no normalization depends on. It fires where at least two such blocks stand in a row,
the sum of one going into the norm of the next, and

- the stream goes into a linear layer (directly, or through pooling, views and activations): a warning;
- it is returned, or goes into a convolution or something else: info, since a head elsewhere may hold the norm, and
  networks that restore images end like this on purpose.

The size of the stream at the first and the last norm is given where it was measured: what the missing norm would take
away.

A second shape is info: a norm on the sum itself (post-norm) whose output goes both into the next pre-norm and around
it, so that the stream is normalized twice at every block (Conformer does so on purpose). Norms at both ends of a
branch, `x + norm(f(norm(x)))`, leave the stream alone and are silent.

## Why it matters
Each block adds to the stream and nothing ever scales it down, so it grows with depth, and differently for each input.
The head then sees features on a scale that depth and training decide; logits are too large, and gradients of the head
dwarf the others. Checkpoints whose final norm was lost on the way load and run.

## Known problems
An encoder whose output is normalized somewhere in a decoder is not told apart from one that is normalized itself: any
norm behind the last sum makes the rule silent. Sums that are not written as an addition (gates, concatenation) end
the stack.

## Example
```python
import torch, normscope

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(self.norm(x))

model = torch.nn.Sequential(Block(), Block(), Block(), torch.nn.Linear(16, 4))
report = normscope.check(model, torch.randn(8, 16))
print(report)
```

## Fix
One norm of the same kind between the last sum and the head. A trained model needs the one it was trained with, or
some finetuning.

## References
- Xiong et al. 2020, On Layer Normalization in the Transformer Architecture: the pre-norm transformer has a final
  layer norm.
- Gulati et al. 2020, Conformer, section 2: a layer norm after the residual sums of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, label, number, plural

if TYPE_CHECKING:
    from normscope.doctor.site import Call, Join, Site
    from normscope.doctor.subject import Subject

    Branch = tuple[Call, Site, Join]


@rule("NS602", "final-norm-missing", kinds="G", needs=("data",), uses=("statistics",))
def check(subject: Subject) -> Iterator[Finding]:
    found = (
        (call, site, call.join) for site in subject.sites for call in site.calls if call.join is not None
    )
    branches: list[Branch] = sorted(found, key=lambda branch: branch[0].order)
    # by the place of the sum: two branches may end in one; a sum that nothing reads reaches no head
    ends = {b[2].path: b for b in branches if b[2].ends and not b[2].normalized_later}
    stacks = (list(_stack(branch, branches)) for branch in ends.values())
    yield from fold(_missing(subject, stack) for stack in stacks if len(stack) > 1)
    again = _again(branches)
    if len(again) > 1:
        yield from fold(again)


def _stack(last: Branch, branches: list[Branch]) -> Iterator[Branch]:
    """The branches in a row that end with this one, the last first: the sum of each goes into the norm of the next."""
    yield last
    before = {n.site: branch for branch in branches for n in branch[2].feeds if n.kind == "norm"}
    while (branch := before.get(last[1].name)) is not None and branch[0].order < last[0].order:
        yield branch
        last = branch


def _missing(subject: Subject, stack: list[Branch]) -> Finding:
    call, site, join = stack[0]
    into_linear = "linear" in join.ends
    reader = next((n.path for n in join.feeds if n.kind == "linear"), "")
    if into_linear:
        where = f"goes into a linear layer{f' ({reader})' if reader else ''}"
    else:
        where = "is returned" if join.ends == ("output",) else f"goes into {' and '.join(join.ends)}"
    finding = Finding(
        code="NS602",
        site=site.name,
        severity="warning" if into_linear else "info",
        message=f"this norm begins the last of {plural(len(stack), 'pre-norm branch')} in a row; the sum that ends it "
        f"(in {join.path or 'the model'}) {where} without a norm.",
        evidence={"branches": len(stack), "reached": list(join.ends), "sum_in": join.path},
        fix="put a norm of the same kind between the last residual sum and the head",
    )
    first = stack[-1]
    start, end = _size(subject, first[1], first[0]), _size(subject, site, call)
    if start is None or end is None:
        return finding
    return replace(
        finding,
        message=f"{finding.message} At {label(first[1])} the stream has size {number(start)}, here {number(end)}.",
        evidence={**finding.evidence, "size_at_first": start, "size_at_last": end},
    )


def _size(subject: Subject, site: Site, call: Call) -> float | None:
    """The median over its statistic sets of the standard deviation (root mean square) of what a call receives."""
    seen = subject.measured.get("statistics", {}).get(site.name, ())
    if call.index >= len(seen) or seen[call.index].set_size == 0 or not seen[call.index].live:
        return None
    return float(seen[call.index].variance[1] ** 0.5)


def _again(branches: list[Branch]) -> list[Finding]:
    """Pre-norms whose input is a norm of the sum that ended the block before."""
    on_sums = {n.site for *_, join in branches if join.readers == 1 for n in join.feeds if n.kind == "norm"}
    found: dict[str, Finding] = {}
    for call, site, _ in branches:
        before = call.fed_by[0] if len(call.fed_by) == 1 else None
        if before is not None and before.kind == "norm" and not before.through and before.site in on_sums:
            found[site.name] = Finding(
                code="NS602",
                site=site.name,
                severity="info",
                message=f"the stream is normalized twice around the sum: by {before.site}, which takes the sum, and "
                "again at the beginning of this branch.",
                evidence={"norm_of_the_sum": before.site},
                fix="none where this is meant (Conformer); else keep one of the two",
            )
    return list(found.values())
