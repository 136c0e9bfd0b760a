"""The sites of a report as a page shows them: a tile in the network, a line in the table, a portrait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normscope.render.grouping import counted, label
from normscope.render.page_findings import LISTED, SYMBOLS, WORDS, by_site
from normscope.render.sites import described

if TYPE_CHECKING:
    from normscope.doctor.report import Finding, Report, SiteRow

SHORT = 64
"""letters of a name on a tile"""


@dataclass(frozen=True)
class Cell:
    """A number of the table: as shown, and as sorted by."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class SiteView:
    number: int
    name: str
    short: str
    type_name: str
    axes: str
    modes: str
    state: str
    """error | warning | info | ok | unknown"""
    said: str
    """the same in words"""
    findings: tuple[tuple[str, str, str], ...]
    """code, name and message of each finding here, gravest first"""
    cells: Mapping[str, Cell]
    """see COLUMNS"""
    facts: tuple[tuple[str, str], ...]
    row: SiteRow
    measured: Mapping[str, Any]

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.state]

    @property
    def rank(self) -> float:
        """To sort by: the gravest state first, then the number of findings."""
        return ("error", "warning", "info", "unknown", "ok").index(self.state) - len(self.findings) / 1e3


COLUMNS = {
    "denominator": ("smallest denominator", "of the statistic sets on this batch, or stored"),
    "kappa": ("largest κ", "|mean| / standard deviation of a statistic set on this batch"),
    "error": ("largest error", "of the output against the float64 reference, in standard deviations"),
    "effective": ("independent values", "behind each batch mean"),
}
"""columns of numbers: heading and what it means"""


def site_views(report: Report) -> list[SiteView]:
    """The first ``LISTED``, in the order of the report."""
    findings = by_site(report)
    return [
        _view(i, row, findings.get(row.name, []), report.measurements.get(row.name, {}))
        for i, row in enumerate(report.sites[:LISTED], 1)
    ]


def _view(number: int, row: SiteRow, found: list[Finding], measured: Mapping[str, Any]) -> SiteView:
    state = found[0].severity if found else "ok" if row.spec is not None else "unknown"
    modes = row.mode_train if row.mode_train == row.mode_eval else f"{row.mode_train} → {row.mode_eval}"
    return SiteView(
        number=number,
        name=label(row.name),
        short=short(label(row.name)),
        type_name=row.type_name,
        axes=row.spec.stats if row.spec is not None else "not identified",
        modes=modes,
        state=state,
        said=_said(state, found),
        findings=tuple((f.code, f.name, f.severity) for f in found),
        cells=_cells(measured),
        facts=tuple(_facts(row).items()),
        row=row,
        measured=measured,
    )


def _said(state: str, found: list[Finding]) -> str:
    if state in ("ok", "unknown"):
        return WORDS[state]
    alike = sum(f.severity == state for f in found)
    return f"{alike} for information" if state == "info" else counted(alike, WORDS[state])


def short(name: str) -> str:
    """The end of a long name, cut where a part begins.

    >>> short("norm1"), short("model.decoder." + "block." * 12 + "norm")
    ('norm1', '…block.block.block.block.block.block.block.block.block.norm')
    """
    if len(name) <= SHORT:
        return name
    parts = name.split(".")
    while len(parts) > 1 and len(".".join(parts)) > SHORT - 1:
        parts.pop(0)
    return f"…{'.'.join(parts)[-SHORT + 1 :]}"


def _cells(measured: Mapping[str, Any]) -> dict[str, Cell]:
    live = [s for s in measured.get("statistics", ()) if s["mode"] in ("batch", "input")]
    found = {
        "denominator": min((d["smallest"] for d in measured.get("denominators", ())), default=None),
        "kappa": max((s["kappa"][1] for s in live if isinstance(s["kappa"][1], float)), default=None),
        "error": measured.get("conditioning", {}).get("error"),
        "effective": measured.get("effective_samples", {}).get("effective"),
    }
    return {key: _cell(found[key]) for key in COLUMNS}


def _cell(value: Any) -> Cell:
    if isinstance(value, (int, float)):
        return Cell(f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}", float(value))
    return Cell("–" if value is None else str(value))


def _facts(row: SiteRow) -> dict[str, str]:
    facts = {"type": row.type_name}
    if row.spec is not None:
        facts |= described(row)
    else:
        facts["not identified"] = row.reason
    facts["in training"], facts["in eval"] = row.mode_train, row.mode_eval
    facts["calls"] = str(row.calls)
    facts["input"] = ", ".join("×".join(map(str, shape)) for shape in row.shapes)
    facts["also called"] = ", ".join(row.aliases)
    facts["in deployment"] = "inside a fused kernel" if row.fused else ""
    facts["source"] = row.source
    return {key: value for key, value in facts.items() if value}
