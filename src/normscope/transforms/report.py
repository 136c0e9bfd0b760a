"""What a transform did: each normalization, done or left and why, and how far outputs moved.

Plain data: a report holds no tensor and no part of the model.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from normscope.errors import printable

SHOWN = 4
"""sites of one kind that the text names before it counts; a rehearsal, which is a plan, names them all"""
UNSAMPLED = (
    "outputs were not compared: no sample was given",
    "calls of functions and hand-written norms were not looked for: they show only where a sample is given",
)


@dataclass(frozen=True)
class SiteChange:
    """One normalization: a module, or (always left) a call or arithmetic in a forward."""

    name: str
    """module path, "" for the model itself; ``path:F.layer_norm`` for what is no module"""
    before: str
    """its type, or the function"""
    after: str = ""
    """its type now, "" where it was left"""
    reason: str = ""
    """why it was left, "" where it was done"""
    aliases: tuple[str, ...] = ()
    """other paths of the same module"""
    already: bool = False
    """it was left because it is normscope's"""

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
      calls of functions and hand-written norms were not looked for: they show only where a sample is given
    """

    transform: str
    sites: tuple[SiteChange, ...]
    agreements: tuple[Agreement, ...] = ()
    notes: tuple[str, ...] = UNSAMPLED
    dry_run: bool = False
    nothing: str = "no normalization was found"
    """what is said where there are no sites"""

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
        would = "would be " if self.dry_run else ""
        lines = [f"{self.transform}: {self._summary(would)}{rehearsed}"]
        groups: dict[tuple[str, str, str], list[str]] = {}
        for site in self.sites:
            paths = " = ".join(name or "the model itself" for name in (site.name, *site.aliases))
            groups.setdefault((site.before, site.after, site.reason), []).append(paths)
        for (before, after, _), names in groups.items():
            if after:
                lines.append(f"  {would}done  {before} -> {after}: {self._listed(names)}")
        for (before, after, reason), names in groups.items():
            if not after:
                lines.append(f"  {would}left  {before}: {self._listed(names)}: {reason}")
        for one in self.agreements:
            lines.append(f"  {one.mode:5} {one.dtype}: outputs moved by {one.difference:.1e} of the largest")
            if one.error_before is not None and one.error_after is not None:
                lines[-1] += f"; from float64 {one.error_before:.1e} before, {one.error_after:.1e} after"
            lines[-1] += f"; allowed {one.allowed:.1e}"
        return "\n".join(map(printable, [*lines, *(f"  {note}" for note in self.notes)]))

    def _summary(self, would: str) -> str:
        ours = sum(site.already for site in self.sites)
        others = len(self.sites) - ours
        if not self.sites:
            return self.nothing
        if not others:
            listed = "the one normalization is" if ours == 1 else f"all {ours} normalizations are"
            return f"nothing to do, {listed} normscope's already"
        more = f", {ours} more {'is' if ours == 1 else 'are'} normscope's already" if ours else ""
        return f"{len(self.done)} of {others} normalizations {would}done{more}"

    def _listed(self, names: list[str]) -> str:
        rest = 0 if self.dry_run else max(0, len(names) - SHOWN)
        return ", ".join(names[: len(names) - rest]) + (f" and {rest} more" if rest else "")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity"
    return value
