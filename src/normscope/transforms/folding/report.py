"""What a fold did: the report of every transform, and which layer took over what, by how much its scale spreads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import log2
from typing import TYPE_CHECKING, Protocol

from normscope.doctor.wording import listed, number, plural
from normscope.errors import printable
from normscope.transforms.report import TransformReport

if TYPE_CHECKING:
    from torch import Tensor

    from normscope.doctor.folding.linear_map import LinearMap

WIDE = 10.0
"""growth from which the report warns: more than three of the eight bits of per-tensor quantization are lost"""


@dataclass(frozen=True)
class Folded:
    """One norm and the layers that took it over."""

    site: str
    into: tuple[str, ...]
    where: str
    """``before``: the layer that feeds the norm; ``after``: those that read it"""
    growth: float
    """the largest |scale| of a channel over the layer's median |scale|"""
    channel: int
    """where it is the largest"""
    zero_variance: int
    """channels whose stored variance is 0: they carry nothing, and their scale is the largest that eps allows"""
    centering: str = ""
    """the layer that took over the centering"""


@dataclass(frozen=True)
class FoldReport(TransformReport):
    """A `TransformReport` with what a fold adds."""

    folds: tuple[Folded, ...] = ()
    removed_keys: tuple[str, ...] = ()
    """state-dict keys that are gone"""
    added_keys: tuple[str, ...] = ()
    """state-dict keys of biases that had to be made"""

    def to_json(self) -> str:
        """Everything, as JSON; a number that is not finite is the string ``"NaN"`` or ``"Infinity"``."""
        document = json.loads(super().to_json())
        document["folds"] = [asdict(one) for one in self.folds]
        document |= {"removed_keys": list(self.removed_keys), "added_keys": list(self.added_keys)}
        return json.dumps(document, indent=2, allow_nan=False)

    def __str__(self) -> str:
        lines = [super().__str__()]
        if self.dry_run:
            lines += [f"  {_told(one)}" for one in self.folds]
        if self.removed_keys:
            would = "would be " if self.dry_run else ""
            lines.append(
                f"  state dict: {plural(len(self.removed_keys), 'key')} {would}gone ({listed(self.removed_keys)})"
                + (f", {len(self.added_keys)} new ({listed(self.added_keys)})" if self.added_keys else "")
            )
        return "\n".join(
            [lines[0], *map(printable, [*lines[1:], *(f"  {note}" for note in _spread(self.folds))])]
        )


class FoldedStep(Protocol):
    """A step of a plan, for a module or a graph."""

    @property
    def site(self) -> str: ...
    @property
    def maps(self) -> tuple[LinearMap, ...]: ...
    @property
    def where(self) -> str: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def zero_variance(self) -> int: ...
    @property
    def centered(self) -> LinearMap | None: ...


def folded(step: FoldedStep) -> Folded:
    """Scale growth of one step."""
    sizes = step.scale.abs()
    some = sizes[sizes > 0]
    median = float(some.median()) if some.numel() else 1.0
    return Folded(
        site=step.site,
        into=tuple(one.path for one in step.maps),
        where=step.where,
        growth=float(sizes.max()) / median if sizes.numel() else 1.0,
        channel=int(sizes.argmax()) if sizes.numel() else 0,
        zero_variance=step.zero_variance,
        centering=step.centered.path if step.centered else "",
    )


def _told(one: Folded) -> str:
    where = "which feeds it" if one.where == "before" else "which reads it"
    parts = [f"into {listed(one.into, 8)}, {where}" if one.into else ""]
    parts.append(f"its centering into {one.centering}, which feeds it" if one.centering else "")
    return f"{one.site}: {'; '.join(filter(None, parts))}"


def _spread(folds: tuple[Folded, ...]) -> list[str]:
    wide = sorted((one for one in folds if one.growth > WIDE), key=lambda one: -one.growth)
    if not wide:
        return []
    worst = wide[0]
    dead = sum(one.zero_variance for one in folds)
    cause = (
        f"; {plural(dead, 'channel')} of stored variance 0 take the largest scale that eps allows"
        if dead
        else ""
    )
    return [
        f"scales within {plural(len(wide), 'layer')} spread by more than {WIDE:.0f} times the median, the most by "
        f"{number(worst.growth)} (channel {worst.channel} of {worst.site}){cause}. Quantized per tensor, such a "
        f"weight loses up to {log2(worst.growth):.1f} bits in its other channels: quantize per channel, or prune "
        "the dead channels first"
    ]
