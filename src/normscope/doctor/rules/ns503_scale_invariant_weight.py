"""scale-invariant-weight: weight decay acts on weights whose scale the network does not see.

## What it does
Measures, for each convolution and linear layer that feeds a norm, whether the network changes when its weight is
scaled: by Euler's relation the gradient must stand at a right angle to such a weight (each set of features that
shares statistics by itself), and doubling all such weights at once must leave the output as it was. Where the
optimizer given decays them, one finding tells the effective learning rate of each, the norm of its gradient and
what the decay does. Without an optimizer there is nothing to tell.

## Why it matters
Weight decay is meant to limit what a layer can express. Before a norm it limits nothing: only the direction of the
weight counts. A gradient at a right angle makes the weight longer, decay makes it shorter, and a step of SGD with
learning rate r turns it by r |g| / |w|, where |g| is itself proportional to 1 / |w|. So the effective learning rate
is r / |w|^2, and decay is a schedule for it: without decay it falls over training, with decay it settles where
both balance, after about 1 / (2 r decay) steps. Changing the decay there changes the learning rate; so does loading
weights of another length, or scaling an initialization.

## Known problems
Not a fault: most recipes with batch norm do this, and were tuned with it. A weight so small that eps is felt is not
invariant and not listed. Adaptive optimizers move each number by about the learning rate whatever the gradient, so
for them the rate is r sqrt(n) / |w|. Where the decay is part of an adaptive gradient (Adam), how fast it shortens a
weight cannot be told from the settings. Biases and gains of the norms themselves are NS502's.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=5e-4)
report = normscope.check(model, torch.randn(8, 3, 8, 8), optimizer=optimizer)
print(report)
```

## Fix
Nothing, as long as the recipe works. To control the rate by itself, set the decay of these weights to 0 and give
their learning rate a schedule, or keep their norms fixed (normalize them after each step).

## References
- van Laarhoven 2017, L2 Regularization versus Batch and Weight Normalization, sections 2 and 3.
- Zhang, Wang, Xu and Grosse 2019, Three Mechanisms of Weight Decay Regularization, section 4.1.
- Wan et al. 2021, Spherical Motion Dynamics, section 3: the balance and its time scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import fold, number

if TYPE_CHECKING:
    from normscope.doctor.probes.scale_symmetry import Symmetry
    from normscope.doctor.subject import Subject


@rule("NS503", "scale-invariant-weight", kinds="D", needs=("scale_symmetry",))
def check(subject: Subject) -> Iterator[Finding]:
    optimizer = subject.optimizer
    assert optimizer is not None  # or the probe did not run
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    kinds = {cls.__name__ for cls in type(optimizer).__mro__}
    found = []
    for name, parameter in subject.model.named_parameters():
        symmetry = subject.measured["scale_symmetry"].get(name)
        group = groups.get(id(parameter), {})
        if symmetry is not None and symmetry.invariant and (group.get("weight_decay") or 0) > 0:
            found.append(_finding(name, symmetry, group, kinds))
    found.sort(key=lambda finding: -finding.evidence["effective_learning_rate"])
    yield from fold(found)


def _finding(name: str, weight: Symmetry, group: dict[str, Any], kinds: set[str]) -> Finding:
    rate, decay = float(group.get("lr", 0.0)), float(group["weight_decay"])
    gradient = "SGD" in kinds
    effective = rate / weight.norm**2 if gradient else rate * math.sqrt(weight.numbers) / weight.norm
    # coupled decay passes through the adaptive step, whose size is not that of the gradient
    direct = gradient or "AdamW" in kinds or bool(group.get("decoupled_weight_decay"))
    pull = rate * decay
    steps = math.log(2) / -math.log1p(-pull) if direct and 0 < pull < 1 else None
    shrinks = (
        f"it halves |w| in {round(steps)} steps if gradients do not lengthen it" if steps else "it shortens w"
    )
    formula = "lr / |w|^2" if gradient else "lr sqrt(n) / |w|"
    return Finding(
        code="NS503",
        site=weight.site,
        severity="info",
        message=f"the network does not see the scale of {name} (doubling all such weights moves the output by "
        f"{number(weight.change or 0.0)}), so weight decay {number(decay)} limits nothing there: {shrinks}, and so "
        f"raises the effective learning rate {formula}, now {number(effective)}.",
        evidence={
            "weight": name,
            "norm": weight.norm,
            "gradient_norm": weight.gradient,
            "largest_cosine": weight.cosine,
            "learning_rate": rate,
            "weight_decay": decay,
            "effective_learning_rate": effective,
            "half_life_in_steps": None if steps is None else round(steps),
        },
        fix="nothing, as long as the recipe works: change decay and learning rate of these weights together",
        mode="train",
    )
