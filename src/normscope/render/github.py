"""Findings as GitHub workflow commands, which show as annotations of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normscope.errors import printable
from normscope.render.grouping import grouped, listed

if TYPE_CHECKING:
    from normscope.doctor.report import Report

LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def to_github(report: Report) -> str:
    """One line a rule and severity, at the code of its first site: GitHub shows only the first ten of a step."""
    lines = []
    for group in grouped(report.findings):
        f = group.first
        sites = listed([f.site, *group.like])
        text = f"{sites}: {f.message}" + (f" Fix: {f.fix}" if f.fix else "")
        file, _, line = report.source_at(f.site).rpartition(":")
        where = {"file": file, "line": line} if file else {}
        options = ",".join(
            f"{key}={_escaped(value, True)}"
            for key, value in {**where, "title": f"{f.code} {f.name}"}.items()
        )
        lines.append(f"::{LEVELS[f.severity]} {options}::{_escaped(text)}")
    return "".join(line + "\n" for line in lines)


def _escaped(text: str, in_property: bool = False) -> str:
    text = printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text
