"""What a check says: findings with evidence, what passed, and what could not run and why.

Plain data: a report holds no tensor and no part of the model, so it can be pickled, stored and compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import BadInput, FindingsError, printable

if TYPE_CHECKING:
    from normscope.spec import NormSpec
    from normscope.transforms.report import TransformReport

SEVERITIES = ("info", "warning", "error")
"""from the mildest to the gravest"""


def severity_rank(severity: str) -> int:
    """0 for info, 1 for warning, 2 for error.

    Raises:
        BadInput: for anything else.
    """
    if severity not in SEVERITIES:
        raise BadInput(f"a severity is one of {', '.join(SEVERITIES)}; got {severity!r}")
    return SEVERITIES.index(severity)


def plain(value: Any) -> Any:
    """Evidence as plain Python: NumPy scalars unwrapped, NaN and infinities as the strings JSON can carry."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


@dataclass(frozen=True)
class Finding:
    """One violated rule at one site, with numbers measured on the user's model and data."""

    code: str
    site: str
    message: str
    severity: str = "warning"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""
    mode: str = ""
    """the mode in which it shows (``train``, ``eval``), "" where it does not matter"""
    name: str = ""
    """the rule's name; filled in by the check"""
    also: tuple[Finding, ...] = ()
    """findings that follow from this one, such as the sites behind a stale layer"""

    def __post_init__(self) -> None:
        severity_rank(self.severity)
        object.__setattr__(self, "evidence", plain(self.evidence))

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "also"}
        out["evidence"] = dict(self.evidence)
        out["also"] = [finding.to_dict() for finding in self.also]
        return out


@dataclass(frozen=True)
class NotRun:
    """A rule that could not be decided (at one site, or at all), and why."""

    code: str
    reason: str
    site: str = ""


@dataclass(frozen=True)
class Suppressed:
    """A finding that the project knows of and accepts."""

    finding: Finding
    by: str
    """``"settings"`` or ``"baseline"``"""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"finding": self.finding.to_dict(), "by": self.by, "reason": self.reason}


@dataclass(frozen=True)
class SiteRow:
    """What a report keeps of a site."""

    name: str
    kind: str
    type_name: str
    spec: NormSpec | None
    reason: str
    mode_train: str
    mode_eval: str
    calls: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    fused: bool = False
    source: str = ""
    """``file.py:12``: the innermost class around it that is the user's own, "" where there is none"""
    unknown: tuple[str, ...] = ()
    """fields of ``spec`` that are not known, such as eps in a checkpoint: their values say nothing"""

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["spec"] = None if self.spec is None else self.spec.to_json()
        for name in ("shapes", "dtypes", "aliases", "unknown"):
            out[name] = plain(out[name])
        return out


@dataclass(frozen=True)
class Report:
    """The result of a check. ``str(report)`` is the text report.

    Attributes:
        findings: gravest first.
        sites: every normalization that was found.
        passed: codes of the rules that ran everywhere and found nothing.
        not_run: rules that could not be decided, with reasons.
        notes: what else a reader must know, such as parameters that could not be verified as untouched.
        measurements: site name -> what was measured there, plain data; see ``doctor/portraits.py``.
        suppressed: findings that settings or a baseline accept; none of the above counts them.
        source: ``file.py:12``, where the model itself is written, "" where that is not below the working directory.
    """

    findings: tuple[Finding, ...]
    sites: tuple[SiteRow, ...]
    passed: tuple[str, ...]
    not_run: tuple[NotRun, ...]
    notes: tuple[str, ...] = ()
    target: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    measurements: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    suppressed: tuple[Suppressed, ...] = ()
    source: str = ""

    def source_at(self, site: str) -> str:
        """``file.py:12``: the code around a site, or that of the model."""
        return next((row.source for row in self.sites if row.name == site and row.source), self.source)

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Findings of this severity or graver."""
        rank = severity_rank(severity)
        return tuple(f for f in self.findings if severity_rank(f.severity) >= rank)

    @property
    def ok(self) -> bool:
        """No warning and no error."""
        return not self.at_least("warning")

    def raise_for(self, severity: str = "warning") -> None:
        """Raise :class:`~normscope.errors.FindingsError` if there is a finding of this severity or graver."""
        found = self.at_least(severity)
        if found:
            said = [f"{len(found)} finding(s) at or above {severity}:"]
            for f in found:
                where = printable(f.site or "the model")
                said += f"{f.code} {f.name} ({f.severity}) at {where}: {f.message}".split("\n")
            raise FindingsError("\n".join(map(printable, said)))

    def apply(
        self,
        codes: str | Sequence[str],
        model: Any,
        sample: Any = None,
        *,
        optimizer: Any = None,
        unsafe: bool = False,
        inplace: bool = False,
    ) -> tuple[Any, TransformReport]:
        """Fix what is mechanical: ``(fixed model, what was done)``; see :func:`normscope.transforms.fixes.apply`.

        ``report.apply("NS501", model, inputs)`` compares outputs before and after on ``inputs``; what would change
        them is refused unless ``unsafe``.
        """
        from normscope.transforms.fixes import apply

        return apply(self, codes, model, sample, optimizer=optimizer, unsafe=unsafe, inplace=inplace)

    # The renderers stand a floor above; they are imported when asked for, so this file depends on none of them.
    def to_json(self) -> str:
        """The report as JSON; the schema ships as ``normscope/render/report-schema.json``."""
        from normscope.render.json import to_json

        return to_json(self)

    def to_sarif(self) -> str:
        """The report as SARIF 2.1.0."""
        from normscope.render.sarif import to_sarif

        return to_sarif(self)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one self-contained page to ``path``."""
        from normscope.render.html import to_html

        Path(path).write_text(to_html(self), encoding="utf-8")

    def __str__(self) -> str:
        from normscope.render.text import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        from normscope.render.html import fragment

        return fragment(self)
