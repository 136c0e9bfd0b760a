"""wrong-axis: statistics run over an axis that the producer says is not the feature axis.

## What it does
Follows each norm's input back to the convolution, linear layer or embedding that made it, through views, transposes
and elementwise operations, and asks on which axis its features lie. The norm's own feature axis is the one its gain
lives on (or, without a gain, the axes it names beside the samples). Where every producer that could be followed puts
its features on another axis, the rule fires. Three shapes of it are common:

- a layer norm over tokens: the input is (B, D, L), the norm takes the last axis;
- `BatchNorm1d` on (N, L, C), which reads axis 1 as channels;
- `InstanceNorm1d` on (N, C), which PyTorch reads as one unbatched sample (C, L): the batch becomes the channels.

Sizes decide the severity. Where the two axes have the same size nothing could have complained, and it is an error;
where they differ the module was built for the other axis, perhaps on purpose, and it is a warning.

## Why it matters
The shapes fit, so nothing fails. A layer norm over tokens mixes positions (in a language model also the future) and
gives each position, not each feature, a gain. A batch norm over tokens has one statistic per position and breaks at
another length.

## Known problems
Norms over tokens or frequencies on purpose are flagged: ignore the rule there. An input that comes from an operation
the check cannot follow (attention, custom kernels, a reshape that mixes axes) is not judged.

## Example
```python
import torch, normscope

class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Conv1d(3, 16, 3, padding=1)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        # (B, 3, 16) -> (B, 16 features, 16 positions): the norm takes positions
        return self.norm(self.embed(x))

report = normscope.check(Tokens(), torch.randn(8, 3, 16))
print(report)
```

## Fix
Transpose before and after the norm, or use one whose channels lie where the features are (`BatchNorm1d` wants
(N, C, L); channels-first layer norm keeps (B, C, ...)).

## References
- The documentation of `torch.nn.BatchNorm1d`, `torch.nn.InstanceNorm1d` and `torch.nn.LayerNorm`, on shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.report import Finding
from normscope.doctor.rules import rule
from normscope.doctor.wording import listed

if TYPE_CHECKING:
    from normscope.doctor.site import Call, Neighbour, Site
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

PRODUCERS = ("conv", "linear", "embedding", "pool")


@rule("NS103", "wrong-axis", kinds="D", needs=("data",))
def check(subject: Subject) -> Iterator[Finding]:
    for site in subject.known():
        found = next((f for call in site.calls if (f := _judged(subject, site, call))), None)
        if found is not None:
            yield found


def _judged(subject: Subject, site: Site, call: Call) -> Finding | None:
    spec = call.spec or site.spec
    if spec is None or (spec.scale != "std" and spec.weight is None):
        return None  # a bare RMS or L2 norm has no feature axis of its own: attention normalizes over tokens on purpose
    makers = [n for n in call.fed_by if n.kind in PRODUCERS and n.feature_axis is not None]
    own = _own_axes(spec, call.shape)
    if own is None or not makers or any(n.feature_axis in own for n in makers):
        return _unbatched(subject, site, call, spec)
    return _unbatched(subject, site, call, spec) or _elsewhere(site, call, spec, own, makers)


def _own_axes(spec: NormSpec, shape: tuple[int, ...]) -> set[int] | None:
    """Input axes that hold the features as the norm sees them; None where it names none."""
    bound = spec.bind(shape)
    if spec.weight:
        names = set(spec.weight.replace("(", " ").replace(")", " ").split())
    else:
        names = {axis.name for axis in bound.axes if axis.dim != bound.sample_dim}
        names -= {name for name in names if name.startswith("...") or name == "t"}
    axes = {
        axis.dim
        for axis in bound.axes
        if axis.dim != bound.sample_dim  # gains that come with the input stand on samples, too
        and (axis.name in names or ("..." in names and axis.name.startswith("...")))
    }
    return axes or None


def _elsewhere(site: Site, call: Call, spec: NormSpec, own: set[int], makers: list[Neighbour]) -> Finding:
    maker = makers[0]
    features = maker.feature_axis
    assert features is not None
    theirs, ours = call.shape[features], [call.shape[axis] for axis in sorted(own)]
    silent = theirs in ours
    axis = ", ".join(str(a) for a in sorted(own))
    return Finding(
        code="NS103",
        site=site.name,
        severity="error" if silent else "warning",
        message=f"{maker.op} ({maker.path or 'the model'}) puts its {theirs} features on axis {features} of the input "
        f"{call.shape}, but this norm takes axis {axis} (size {listed([str(n) for n in ours])}) for the features"
        f"{': the sizes are equal, so nothing complained.' if silent else '.'}",
        evidence={
            "shape": list(call.shape),
            "feature_axis": features,
            "norm_axis": sorted(own),
            "feature_size": theirs,
            "norm_size": ours,
            "producer": maker.path,
            "pattern": spec.stats,
        },
        fix=f"move axis {features} to axis {axis} before the norm and back after it",
    )


def _unbatched(subject: Subject, site: Site, call: Call, spec: NormSpec) -> Finding | None:
    """An instance norm that takes the samples of a (N, C) input for the channels of one unbatched sample."""
    pattern = spec.pattern
    if (
        len(call.shape) != 2
        or spec.sample_group is not None
        or len(pattern.left) != 2
        or pattern.kept != ("c",)
    ):
        return None
    samples, features = call.shape
    declared = getattr(site.module, "num_features", None)
    fed = any(n.kind in PRODUCERS and n.feature_axis == 1 for n in call.fed_by)
    mistaken = fed or (declared == features and declared != samples)
    if samples != subject.batch_size or not mistaken:
        return None
    return Finding(
        code="NS103",
        site=site.name,
        severity="error",
        message=f"an input of shape {call.shape} is read as one sample with {samples} channels: each of the {samples} "
        f"samples is normalized over its {features} features, with no gain or bias of its own.",
        evidence={"shape": list(call.shape), "feature_axis": 1, "norm_axis": [0], "pattern": spec.stats},
        fix="use LayerNorm for vectors, or give the input a length axis: x.unsqueeze(-1) needs more than one position",
    )
