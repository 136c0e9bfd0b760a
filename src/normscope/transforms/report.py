"""What a transform did: each normalization, done or left and why, and how far outputs moved.

Plain data: a report holds no tensor and no part of the model.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

SHOWN = 4
"""sites of one kind that the text names before it counts"""


@dataclass(frozen=True)
class SiteChange:
    """One normalization module."""

    name: str
    """module path, "" for the model itself"""
    before: str
    """its type"""
    after: str = ""
    """its type now, "" where it was left"""
    reason: str = ""
    """why it was left, "" where it was done"""
    aliases: tuple[str, ...] = ()
    """other paths of the same module"""

    @property
    def done(self) -> bool:
        return bool(self.after)


@dataclass(frozen=True)
class Agreement:
    """Outputs before and after, on the sample. Each number is the largest difference in units of the largest output."""

    mode: str
    """``eval``, or ``train``: normalizing by the batch, dropout off"""
    dtype: str
    difference: float
    """after against before"""
    allowed: float
    error_before: float | None = None
    """against a copy of the model in float64; None where it cannot run in float64"""
    error_after: float | None = None

    @property
    def deviation(self) -> float:
        """What must not exceed ``allowed``."""
        return self.difference if self.error_after is None else self.error_after


@dataclass(frozen=True)
class TransformReport:
    """Result of a transform.

    >>> report = TransformReport("accelerate", (SiteChange("bn", "torch.nn.BatchNorm1d", "normscope.nn.BatchNorm1d"),))
    >>> print(report)
    accelerate: 1 of 1 normalizations done
      done  torch.nn.BatchNorm1d -> normscope.nn.BatchNorm1d: bn
      outputs were not compared: no sample was given
    """

    transform: str
    sites: tuple[SiteChange, ...]
    agreements: tuple[Agreement, ...] = ()
    notes: tuple[str, ...] = ("outputs were not compared: no sample was given",)
    dry_run: bool = False

    @property
    def done(self) -> tuple[SiteChange, ...]:
        return tuple(site for site in self.sites if site.done)

    @property
    def left(self) -> tuple[SiteChange, ...]:
        return tuple(site for site in self.sites if not site.done)

    def to_json(self) -> str:
        """Everything, as JSON; a number that is not finite is the string ``"NaN"`` or ``"Infinity"``."""
        document: dict[str, Any] = {
            "transform": self.transform,
            "dry_run": self.dry_run,
            "sites": [asdict(site) | {"done": site.done} for site in self.sites],
            "agreements": [
                {key: _finite(value) for key, value in asdict(one).items()} for one in self.agreements
            ],
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=2, allow_nan=False)

    def __str__(self) -> str:
        rehearsed = " (rehearsed, the model is as it was)" if self.dry_run else ""
        verb = "would be done" if self.dry_run else "done"
        lines = [f"{self.transform}: {len(self.done)} of {len(self.sites)} normalizations {verb}{rehearsed}"]
        groups: dict[tuple[str, str, str], list[str]] = {}
        for site in self.sites:
            paths = " = ".join(name or "the model itself" for name in (site.name, *site.aliases))
            groups.setdefault((site.before, site.after, site.reason), []).append(paths)
        for (before, after, _), names in groups.items():
            if after:
                lines.append(f"  done  {before} -> {after}: {_listed(names)}")
        for (before, after, reason), names in groups.items():
            if not after:
                lines.append(f"  left  {before}: {_listed(names)}: {reason}")
        for one in self.agreements:
            lines.append(f"  {one.mode:5} {one.dtype}: outputs moved by {one.difference:.1e} of the largest")
            if one.error_before is not None and one.error_after is not None:
                lines[-1] += f"; from float64 {one.error_before:.1e} before, {one.error_after:.1e} after"
            lines[-1] += f"; allowed {one.allowed:.1e}"
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _listed(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity"
    return value
