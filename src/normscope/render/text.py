"""The text report: readable in a narrow terminal and without colour."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from normscope.doctor.suppress import told
from normscope.errors import printable
from normscope.render.grouping import Group, counted, grouped, label, listed, shown
from normscope.render.randomness import kept_random_state

with kept_random_state():
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

if TYPE_CHECKING:
    from normscope.doctor.report import Report

STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def to_text(report: Report, width: int = 100, *, hint: str = "") -> str:
    """The report as plain text; ``hint`` as for :func:`print_report`."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    print_report(report, console, hint=hint)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()  # a command may have come to a line's beginning
    return "\n".join(printable(line.rstrip()) for line in lines) + "\n"


@kept_random_state()
def print_report(report: Report, console: Console, *, hint: str = "") -> None:
    """Print the report; ``hint`` says how to give what rules that were not run ask for.

    All text goes through ``Text``: a module path may hold what looks like markup.
    """
    known = [row for row in report.sites if row.spec is not None]
    unknown = len(report.sites) - len(known)
    head = Text(printable(f"{report.target or 'model'}: "), style="bold")
    head.append(counted(len(report.sites), "normalization"))
    if unknown:
        head.append(f" ({unknown} not identified)")
    console.print(head)
    for group in grouped(report.findings):
        console.print()
        _print_group(group, console)
    console.print()
    _label(console, "passed", f"{counted(len(report.passed), 'rule')}: {' '.join(report.passed) or 'none'}")
    for reason, codes in reasons(report).items():
        _label(console, "not run", f"{codes}: {reason}")
    if hint and any("pass " in entry.reason for entry in report.not_run):
        _label(console, "", hint)
    for line in told(report.suppressed):
        _label(console, "known", line)
    for note in report.notes:
        _label(console, "note", note)
    console.print(Text(summary(report), style="bold"))


def summary(report: Report) -> str:
    """``2 errors, 1 warning, 3 for information``; counts every site, folded ones apart."""
    counts = [
        counted(number, severity)
        for severity in ("error", "warning")
        if (number := sum(f.severity == severity for f in report.findings))
    ]
    infos = sum(f.severity == "info" for f in report.findings)
    if infos:
        counts.append(f"{infos} for information")
    accepted = len(report.suppressed)
    if not counts and not report.passed and not accepted:
        return "nothing could be checked"
    said = ", ".join(counts) if counts else "nothing new found" if accepted else "nothing found"
    return f"{said}; {accepted} accepted" if accepted else said


def _print_group(group: Group, console: Console) -> None:
    first = group.first
    head = Text(f"{first.severity:<8}", style=STYLES[first.severity])
    head.append(f"{first.code} {first.name}", style="bold")
    head.append(printable(f"  {label(first.site)}") + (f" ({first.mode})" if first.mode else ""))
    console.print(head)
    _indented(console, first.message)
    if first.evidence:
        evidence = " · ".join(
            f"{key.replace('_', ' ')} {shown(value)}" for key, value in first.evidence.items()
        )
        _indented(console, evidence, style="dim")
    if group.like:
        _indented(console, f"Also at {counted(len(group.like), 'more site')}: {listed(group.like)}.")
    if group.follows:
        _indented(console, f"Folded under this: {listed(group.follows)}.")
    if first.fix:
        _indented(console, f"Fix: {first.fix}")


def _indented(console: Console, text: str, style: str = "") -> None:
    console.print(Padding(Text(printable(text), style=style), (0, 0, 0, 8)))


def _label(console: Console, word: str, text: str) -> None:
    """A label and a hanging paragraph beside it."""
    grid = Table.grid(padding=(0, 0))
    grid.add_column(width=8, no_wrap=True)
    grid.add_column()
    grid.add_row(Text(word, style="dim"), Text(printable(text)))
    console.print(grid)


def reasons(report: Report) -> dict[str, str]:
    """reason -> the rules (and sites) it holds for."""
    where: dict[str, dict[str, list[str]]] = {}
    for entry in report.not_run:
        where.setdefault(entry.reason, {}).setdefault(entry.code, []).append(entry.site)
    return {
        reason: ", ".join(
            code + (f" at {listed([s for s in sites if s], 3)}" if any(sites) else "")
            for code, sites in codes.items()
        )
        for reason, codes in where.items()
    }
