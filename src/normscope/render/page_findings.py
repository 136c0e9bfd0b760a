"""The findings of a report as a page shows them: one entry a rule and severity, with all its sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscope.doctor.report import severity_rank
from normscope.doctor.rules import all_rules
from normscope.render.grouping import Group, grouped, label, shown

if TYPE_CHECKING:
    from normscope.doctor.report import Finding, Report

SYMBOLS = {"error": "✖", "warning": "▲", "info": "●", "ok": "✓", "unknown": "?"}
"""beside every colour, so that none has to be told from another"""
WORDS = {
    "error": "error",
    "warning": "warning",
    "info": "information",
    "ok": "nothing found",
    "unknown": "not identified",
}
LISTED = 1000
"""sites that have a place on the page"""
NAMED = 60
"""sites named in an entry"""


@dataclass(frozen=True)
class Place:
    name: str
    number: int
    """of the site on the page, from 1; 0 where it has no place there"""


@dataclass(frozen=True)
class Entry:
    severity: str
    code: str
    name: str
    summary: str
    why: str
    site: Place
    mode: str
    message: str
    fix: str
    source: str
    evidence: tuple[tuple[str, str], ...]
    like: tuple[Place, ...]
    follows: tuple[Place, ...]
    more: int
    """sites beyond those named"""
    numbers: tuple[int, ...]
    """of every site of the entry"""

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.severity]


def entries(report: Report) -> list[Entry]:
    """Gravest first."""
    number = {row.name: i for i, row in enumerate(report.sites[:LISTED], 1)}

    def place(site: str) -> Place:
        return Place(label(site), number.get(site, 0))

    return [_entry(report, group, place) for group in grouped(report.findings)]


def _entry(report: Report, group: Group, place: Callable[[str], Place]) -> Entry:
    f = group.first
    rule = all_rules().get(f.code)
    like, follows = ([place(site) for site in sites] for sites in (group.like, group.follows))
    every = [place(f.site), *like, *follows]
    return Entry(
        severity=f.severity,
        code=f.code,
        name=f.name,
        summary=rule.summary if rule else "",
        why=section(rule.page, "Why it matters") if rule else "",
        site=place(f.site),
        mode=f.mode,
        message=f.message,
        fix=f.fix,
        source=report.source_at(f.site),
        evidence=tuple((key.replace("_", " "), shown(value)) for key, value in f.evidence.items()),
        like=tuple(like[:NAMED]),
        follows=tuple(follows[:NAMED]),
        more=max(0, len(like) - NAMED) + max(0, len(follows) - NAMED),
        numbers=tuple(sorted({p.number for p in every if p.number})),
    )


def section(page: str, title: str) -> str:
    """The text of one section of a rule's page.

    >>> section("name: what.\\n\\n## Why it matters\\nBecause.\\n\\n## Fix\\nDo it.", "Why it matters")
    'Because.'
    """
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0].strip()


def by_site(report: Report) -> dict[str, list[Finding]]:
    """Site name -> its findings, those folded under others included, gravest first."""
    found: dict[str, list[Finding]] = {}
    for finding in _flat(report.findings):
        found.setdefault(finding.site, []).append(finding)
    return {site: sorted(some, key=lambda f: -severity_rank(f.severity)) for site, some in found.items()}


def _flat(findings: tuple[Finding, ...]) -> list[Finding]:
    return [f for finding in findings for f in (finding, *_flat(finding.also))]
