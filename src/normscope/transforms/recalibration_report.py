"""What a recalibration did: the report of every transform, where the statistics come from and how far they went."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from normscope.errors import printable
from normscope.transforms.held_out import HeldOut
from normscope.transforms.report import TransformReport


@dataclass(frozen=True)
class Shift:
    """How far the statistics of one norm went, over its channels."""

    site: str
    mean: float
    """the largest, in standard deviations as they were stored"""
    variance_least: float
    """the smallest ratio of new to stored variance"""
    variance_most: float


@dataclass(frozen=True)
class RecalibrationReport(TransformReport):
    """Result of `recalibrate`: sites as in every report, where the statistics come from, how far they went."""

    provenance: dict[str, Any] = field(default_factory=dict)
    """what is kept on the model too, as ``model.normscope_recalibration``"""
    shifts: tuple[Shift, ...] = ()
    held_out: HeldOut | None = None

    @property
    def worse(self) -> bool | None:
        """Whether the metric fell on held-out inputs; None where none was given."""
        return None if self.held_out is None else self.held_out.worse

    def to_json(self) -> str:
        """Everything, as JSON."""
        more = {
            "provenance": self.provenance,
            "shifts": [asdict(shift) for shift in self.shifts],
            "held_out": None if self.held_out is None else asdict(self.held_out) | {"worse": self.worse},
        }
        return json.dumps(json.loads(super().to_json()) | more, indent=2)

    def __str__(self) -> str:
        known = self.provenance
        lines = [super().__str__()]
        lines.append(
            f"  {known['method']}: {known['samples']} samples in {known['batches']} batches"
            f"{'' if known['ranks'] == 1 else ' on {} ranks'.format(known['ranks'])}, "
            f"{'mask {} valid, '.format(known['valid']) if 'valid' in known else ''}no labels, "
            f"data {known['data'][:12]}, source {known['source'] or 'not declared'}, "
            f"selection {known['selection'] or 'not declared'}"
        )
        for shift in sorted(self.shifts, key=lambda s: -s.mean)[:3]:
            lines.append(
                f"  {shift.site or 'the model itself'}: means went by up to {shift.mean:.2g} standard deviations, "
                f"variances to {shift.variance_least:.2g} to {shift.variance_most:.2g} times"
            )
        held = (
            "whether it got worse was not looked at: pass held_out, and a metric"
            if self.held_out is None
            else ""
        )
        return "\n".join([lines[0], *map(printable, [*lines[1:], f"  {held or self.held_out}"])])
