"""The page that people look at: findings, the network, its sites and their pictures, in one file.

What a browser gets is plain HTML that reads without script. The script only filters, sorts and saves pictures; it is
let in by its hash, and nothing else may run or load (a content security policy).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from normscope.doctor.rules import all_rules
from normscope.doctor.suppress import told
from normscope.doctor.wording import encodable
from normscope.errors import visible
from normscope.render import page_findings, page_sites
from normscope.render.charts import PALETTE, Figure, network_figures, sensitivity_words, site_figures
from normscope.render.grouping import counted
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
        "style": Markup(_style()),
        "script": Markup(_text("page.js")),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {_allowed()}",
    }
    template = _environment().get_template("page.html")
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
    template = _environment().get_template("portrait.html")
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


def _visible(value: Any) -> Any:
    """Text with escapes for what is seen of no letter. Markup is made of such text, and of lines of the page's own."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return visible(value)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters |= {
        "breakable": _breakable,
        "picture": _picture,
        "csv_link": _csv_link,
        "file_name": _file_name,
        "marked": _marked,
    }
    return environment


@cache
def _text(name: str) -> str:
    return (files("normscope.render") / "templates" / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    """The page's style, with the colours of pictures turned into those for dark."""
    turned = "\n".join(
        f'  svg [{paint}="{light}"] {{ {paint}: {dark}; }}'
        for light, dark in PALETTE.values()
        for paint in ("fill", "stroke")
    )
    return f"{_text('page.css')}@media (prefers-color-scheme: dark) {{\n{turned}\n}}\n"


def _allowed() -> str:
    """The page's own script, and no other."""
    return f"'sha256-{b64encode(sha256(_text('page.js').encode()).digest()).decode()}'"


# Filters of the templates -------------------------------------------------------------------------------


def _picture(figure: Figure) -> Markup:
    """The drawing, made by this package from numbers and from words of its own."""
    return Markup(figure.svg)


def _breakable(name: str) -> Markup:
    """A dotted name that may wrap behind its dots."""
    return Markup(".<wbr>").join(visible(name).split("."))


def _csv_link(figure: Figure) -> str:
    return f"data:text/csv;charset=utf-8,{quote(encodable(figure.csv), safe=',./:;()|*')}"


def _file_name(text: str) -> str:
    """Letters, digits and dots that every file system takes.

    >>> _file_name("layer1.0/bn <x>")
    'layer1.0-bn-x'
    """
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:80] or "model"


def _marked(text: str) -> Markup:
    """Words of a rule's page: paragraphs, and what stands between backticks as code."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        parts = re.split(r"`+([^`]+)`+", visible(" ".join(paragraph.split())))
        pieces = [
            Markup("<code>{}</code>").format(part) if i % 2 else Markup.escape(part)
            for i, part in enumerate(parts)
        ]
        paragraphs.append(Markup("<p>{}</p>").format(Markup("").join(pieces)))
    return Markup("").join(paragraphs)
