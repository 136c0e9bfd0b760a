"""decayed-norm-parameters: the optimizer applies weight decay to gains and biases of norms.

## What it does
Matches the optimizer's parameter groups with the gains and biases of the norms, by identity, and lists those
in a group with a weight decay above 0. Frozen parameters are left out, since optimizers skip what has no
gradient.

## Why it matters
Decay pulls a gain towards 0 (towards a gain of 1 where the stored weight is the distance from 1) and a bias
towards 0. That limits no capacity: before a norm the scale of weights does not matter, and after it the gain
is the scale. Many training recipes therefore spare gains and biases, and their published hyperparameters
assume it.

## Known problems
An opinion about recipes, not a fault: info. Some recipes decay everything and were tuned that way.

## Example
```python
import torch, normscope

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
report = normscope.check(model, torch.randn(8, 8), optimizer=optimizer)
print(report)
```

## Fix
Two groups: parameters with one axis (gains and biases) at `weight_decay=0`, the others at yours.

## References
- He et al. 2019, Bag of Tricks for Image Classification, section 3.1: no bias decay.
- van Laarhoven 2017, L2 Regularization versus Batch and Weight Normalization.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from normscope.doctor.report import Finding, NotRun
from normscope.doctor.rules import rule
from normscope.doctor.wording import clean_path, fold, number

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


@rule("NS502", "decayed-norm-parameters", kinds="S")
def check(subject: Subject) -> Iterator[Finding | NotRun]:
    if subject.optimizer is None:
        yield NotRun("NS502", "no optimizer was given: pass optimizer=")
        return
    groups = {
        id(parameter): group
        for group in subject.optimizer.param_groups
        for parameter in group["params"]
        if (group.get("weight_decay") or 0) > 0 and parameter.requires_grad
    }
    paths = {id(p): clean_path(name) for name, p in subject.model.named_parameters()}
    found = []
    for site in subject.sites:
        decayed: dict[str, Any] = {
            name: groups[id(site.tensors[name])]
            for name in ("weight", "bias")
            if name in site.tensors and id(site.tensors[name]) in groups
        }
        if decayed:
            held = [paths[id(site.tensors[name])] for name in decayed if id(site.tensors[name]) in paths]
            found.append(_finding(site, decayed, held))
    yield from fold(found)


def _finding(site: Site, decayed: dict[str, Any], paths: list[str]) -> Finding:
    words = {"weight": "gain", "bias": "bias"}
    names = " and ".join(words[name] for name in decayed)
    group = next(iter(decayed.values()))
    decay, rate = float(group["weight_decay"]), float(group.get("lr", 0.0))
    centre = site.spec.weight_offset if site.spec is not None else 0.0
    pull = f"; the gain is pulled towards {number(centre)}" if "weight" in decayed else ""
    return Finding(
        code="NS502",
        site=site.name,
        severity="info",
        message=f"weight decay {number(decay)} acts on the {names} of this norm{pull}.",
        evidence={
            "weight_decay": decay,
            "learning_rate": rate,
            "parameters": list(decayed),
            "paths": paths,
            "numbers": sum(site.tensors[name].numel() for name in decayed),
        },
        fix="put gains and biases into a parameter group with weight_decay=0: "
        'report.apply("NS502", model, optimizer=optimizer)',
        mode="train",
    )
