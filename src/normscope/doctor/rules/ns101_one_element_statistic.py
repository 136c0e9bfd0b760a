"""one-element-statistic: a statistic set has one element, so the output is the bias.

## What it does
Counts the elements of every statistic set on your batch. A set of one element has no spread: subtracting its mean
leaves 0, and the output is the bias whatever the input was. Without centering (RMS norm, filter response norm) a set
of one element keeps its sign and loses its size. Both are measured in the eval run.

A batch norm that would meet one element per channel in training (one sample, a 1 by 1 map) is told only if the model
was handed over in training mode: PyTorch then raises. In eval it normalizes by stored statistics, which is fine.

## Why it matters
Everything the layer receives is lost and nothing fails: shapes fit, the loss falls a little through later biases. The
common ways there: group norm with as many groups as channels behind a global pooling, a layer norm over an axis of
size 1, instance norm at the bottom of a U-Net whose input is smaller than planned.

## Known problems
Set sizes depend on the input's size: check with the smallest inputs you deploy on.

## Example
```python
import torch, normscope

pooled = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.AdaptiveAvgPool2d(1))
# one channel at one place per group
model = torch.nn.Sequential(pooled, torch.nn.GroupNorm(16, 16))
report = normscope.check(model, torch.randn(8, 3, 8, 8))
print(report)
```

## Fix
Normalize over more than one element: fewer groups, normalization before the pooling, or a layer norm over channels.
For a batch norm behind a global pooling, train with at least 2 samples a batch (`drop_last=True`).

## References
- The variance of one number is 0: `y = w (x - x) / sqrt(0 + eps) + b = b`.
- Wu and He 2018, Group Normalization, section 3: groups = channels is instance norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import plural

if TYPE_CHECKING:
    from normscope.doctor.probes.statistics import SetStatistics
    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject


@rule("NS101", "one-element-statistic", kinds="DS", uses=("statistics",))
def check(subject: Subject) -> Iterator[Finding]:
    for site in subject.known():
        alone = [s for s in subject.measured.get("statistics", {}).get(site.name, ()) if s.set_size == 1]
        if alone:
            yield _measured(site, alone[0])
        elif not site.calls and getattr(site.module, "normalized_shape", None) in ((1,), (1, 1), (1, 1, 1)):
            yield _constructed(site)
        elif site.mode_now == "batch" and (shape := _training_shape(site)):
            yield _training(site, shape)


def _measured(site: Site, seen: SetStatistics) -> Finding:
    assert site.spec is not None
    centered = site.spec.center
    what = "the output is the bias, whatever the input" if centered else "only the sign of the input is left"
    return Finding(
        code="NS101",
        site=site.name,
        severity="error" if centered else "warning",
        message=f"each of its {plural(seen.sets, 'statistic set')} has one element on an input of shape "
        f"{seen.shape}: {what}.",
        evidence={"set_size": 1, "sets": seen.sets, "shape": list(seen.shape), "pattern": site.spec.stats},
        fix="normalize over more than one element: fewer groups, another axis, or before the pooling",
        mode="eval" if seen.run == "eval" else "train",
    )


def _constructed(site: Site) -> Finding:
    """A layer whose own sizes leave one element, whatever it is fed."""
    assert site.spec is not None
    shape = list(site.module.normalized_shape)  # type: ignore[union-attr, arg-type]
    return Finding(
        code="NS101",
        site=site.name,
        severity="error" if site.spec.center else "warning",
        message=f"it normalizes over axes of size 1 (normalized_shape {shape}): nothing of its input is left"
        f"{'' if site.spec.center else ' but the sign'}.",
        evidence={"set_size": 1, "normalized_shape": shape, "pattern": site.spec.stats},
        fix="normalize over more than one element: another axis, or before the reduction to one feature",
    )


def _training_shape(site: Site) -> tuple[int, ...] | None:
    """The shape of a call whose batch statistics would have one element; None where there is none."""
    for call in site.calls:
        spec = call.spec or site.spec
        if (
            spec is not None
            and call.mode in ("running", "frozen", "batch")
            and spec.bind(call.shape).set_size == 1
        ):
            return call.shape
    return None


def _training(site: Site, shape: tuple[int, ...]) -> Finding:
    return Finding(
        code="NS101",
        site=site.name,
        severity="warning",
        message=f"in training, as the model is now, this batch gives one element per channel (input {shape}): "
        "PyTorch raises an error here.",
        evidence={"set_size": 1, "shape": list(shape), "batch_size": shape[0]},
        fix="train with at least 2 samples a batch (drop_last=True), or call model.eval() before single samples",
        mode="train",
    )
