"""The report as a plain page: no script, no picture, nothing but the standard library. Notebooks show it."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from normscope.doctor.rules import all_rules
from normscope.errors import visible
from normscope.render.grouping import Group, counted, grouped, label, listed, shown
from normscope.render.text import summary

if TYPE_CHECKING:
    from normscope.doctor.report import Report

STYLE = """
:root { color-scheme: light dark; --line: #8884; --error: #c0262d; --warning: #8a6100; --info: #0b6b8a; }
@media (prefers-color-scheme: dark) { :root { --error: #ff8085; --warning: #e6b84d; --info: #6cc7e6; } }
.normscope { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
.normscope article { border-left: 4px solid; padding: .2rem 1rem; margin: 1rem 0; }
.normscope article.error { border-color: var(--error); } .normscope .error b { color: var(--error); }
.normscope article.warning { border-color: var(--warning); } .normscope .warning b { color: var(--warning); }
.normscope article.info { border-color: var(--info); } .normscope .info b { color: var(--info); }
.normscope h3 { margin: 0; font-size: 1rem; overflow-wrap: anywhere; } .normscope p { margin: .3rem 0; }
.normscope .rule, .normscope .versions { font-size: .85em; opacity: .75; }
.normscope dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: .3rem 0; font-size: .9em; }
.normscope dd { margin: 0; overflow-wrap: anywhere; }
.normscope .scroll { overflow-x: auto; } .normscope table { border-collapse: collapse; font-size: .85em; }
.normscope td, .normscope th { border-bottom: 1px solid var(--line); padding: .2rem .6rem; text-align: left; }
"""


def document(report: Report, line: str = "") -> str:
    """A whole document; ``line`` stands above the report."""
    title = escape(f"Normscope: {report.target or 'model'}")
    said = f'<p class="normscope">{escape(line)}</p>' if line else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title></head><body>{said}{fragment(report)}</body></html>\n"
    )


def fragment(report: Report) -> str:
    """The report as a piece of a page, as notebooks show it."""
    findings = "".join(_article(group) for group in grouped(report.findings))
    not_run = "".join(
        f"<li>{escape(n.code)}{escape(f' at {n.site}') if n.site else ''}: {escape(n.reason)}</li>"
        for n in report.not_run
    )
    passed = "".join(f"<li>{escape(code)}: {escape(_summary(code))}</li>" for code in report.passed)
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    sites = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                label(row.name),
                row.type_name,
                str(row.spec) if row.spec is not None else row.reason,
                row.mode_train,
                row.mode_eval,
                str(row.calls),
            )
        )
        + "</tr>"
        for row in report.sites
    )
    return (
        f'<div class="normscope"><style>{STYLE}</style><h1>{escape(report.target or "model")}</h1>'
        f"<p>{escape(counted(len(report.sites), 'normalization'))}; {escape(summary(report))}.</p>"
        f"<section aria-label='Findings'>{findings}</section>"
        f"<h2>Passed</h2><ul>{passed or '<li>none</li>'}</ul>"
        f"<h2>Not run</h2><ul>{not_run or '<li>none</li>'}</ul>"
        + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
        + "<h2>Sites</h2><div class='scroll'><table><thead><tr><th>site</th><th>type</th><th>specification</th>"
        f"<th>in train</th><th>in eval</th><th>calls</th></tr></thead><tbody>{sites}</tbody></table></div>"
        f"<p class='versions'>{escape(', '.join(f'{k} {v}' for k, v in report.versions.items()))}</p></div>"
    )


def escape(text: str) -> str:
    """Text for HTML; what would turn the direction of the page or steer a terminal is shown as an escape."""
    return html.escape(visible(text))


def _summary(code: str) -> str:
    """What the rule fires on; "" for a code that is no rule's."""
    rule = all_rules().get(code)
    return rule.summary if rule is not None else ""


def _article(group: Group) -> str:
    f = group.first
    evidence = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(shown(value))}</dd>"
        for key, value in f.evidence.items()
    )
    more = f"<p>Also at {escape(listed(group.like, 50))}.</p>" if group.like else ""
    follows = f"<p>Folded under this: {escape(listed(group.follows, 50))}.</p>" if group.follows else ""
    fix = f"<p>Fix: {escape(f.fix)}</p>" if f.fix else ""
    return (
        f'<article class="{f.severity}">'
        f"<h3><b>{f.severity}</b> {escape(f.code)} {escape(f.name)}: "
        f"{escape(label(f.site))}</h3><p class='rule'>{escape(_summary(f.code))}</p>"
        f"<p>{escape(f.message)}</p><dl>{evidence}</dl>"
        f"{more}{follows}{fix}</article>"
    )
