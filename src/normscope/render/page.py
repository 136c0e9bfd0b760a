"""The page that people look at: findings, the network, its sites and their pictures, in one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from normscope.doctor.rules import all_rules
from normscope.doctor.suppress import told
from normscope.render import page_findings, page_sites
from normscope.render.charts import PALETTE, network_figures, sensitivity_words, site_figures
from normscope.render.grouping import counted
from normscope.render.shell import environment, head
from normscope.render.text import reasons, summary

if TYPE_CHECKING:
    from normscope.doctor.report import Report

MOST_DRAWN = 14
"""sites that get pictures; each takes about a second and a twentieth of the page"""
OPEN = 3
"""sites whose pictures are in sight at once; the others unfold"""
BYTES = 1_900_000
"""of the whole page, about"""


def document(report: Report) -> str:
    """The whole page."""
    sites = page_sites.site_views(report)
    frame: dict[str, Any] = {
        "title": report.target or "model",
        "lead": _lead(report),
        "sites": sites,
        "count": len(report.sites),
        "columns": page_sites.COLUMNS,
        "symbols": page_findings.SYMBOLS,
        "entries": page_findings.entries(report),
        "totals": _totals(report),
        "rules": sorted({(finding.code, finding.name) for finding in report.findings}),
        "passed": [(code, rule.summary if (rule := all_rules().get(code)) else "") for code in report.passed],
        "not_run": list(reasons(report).items()),
        "known": list(told(report.suppressed)),
        "notes": report.notes,
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "network": network_figures(report.sites[: page_findings.LISTED], report.measurements),
        **head(PALETTE.values()),
    }
    template = environment().get_template("page.html")
    frame |= {"portraits": [], "drawn": set()}
    room = BYTES - len(template.render(frame).encode())
    portraits = list(_portraits(sites, room))
    drawn = {portrait["site"].number for portrait in portraits}
    frame |= {
        "portraits": sorted(portraits, key=lambda portrait: portrait["site"].number),
        "drawn": drawn,
    }
    return template.render(frame)


def _lead(report: Report) -> str:
    unknown = sum(row.spec is None for row in report.sites)
    said = counted(len(report.sites), "normalization") + (f", {unknown} not identified" if unknown else "")
    return f"{said}; {summary(report)}" if report.suppressed or not report.findings else said


def _totals(report: Report) -> list[tuple[str, int, str]]:
    """Severity, count and word of what is told first."""
    found = [
        (severity, sum(f.severity == severity for f in report.findings), severity)
        for severity in ("error", "warning")
    ]
    found = [(severity, count, word if count == 1 else f"{word}s") for severity, count, word in found]
    found.append(("info", sum(f.severity == "info" for f in report.findings), "for information"))
    found.append(("ok", len(report.passed), "rule passed" if len(report.passed) == 1 else "rules passed"))
    return found


def _portraits(sites: list[page_sites.SiteView], room: int) -> Iterator[dict[str, Any]]:
    """Sites with their pictures, as many as there is room for."""
    template = environment().get_template("portrait.html")
    for count, site in enumerate(_most_telling(sites)):
        if count == MOST_DRAWN:
            return
        portrait = {
            "site": site,
            "figures": site_figures(site.row, site.measured),
            "words": sensitivity_words(site.measured["sensitivity"])
            if "sensitivity" in site.measured
            else "",
            "open": count == 0 or (count < OPEN and site.state in ("error", "warning")),
        }
        room -= len(template.render(portrait=portrait, symbols=page_findings.SYMBOLS).encode())
        if room < 0:
            return
        yield portrait


def _most_telling(sites: list[page_sites.SiteView]) -> list[page_sites.SiteView]:
    """Sites with errors and warnings first; the others so that any beginning of them is spread over the network."""
    grave = [s for state in ("error", "warning") for s in sites if s.state == state]
    rest = [s for s in sites if s.state not in ("error", "warning")]
    room = max(1, MOST_DRAWN - len(grave))
    step = max(1, -(-len(rest) // room))
    return grave + [site for start in range(step) for site in rest[start::step]]
