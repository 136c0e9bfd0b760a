"""The report as tables, at most 110 columns wide."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normscope.bench.report import PASSES, ModelRow, Pass, Report, Row
from normscope.bench.timing import ROUNDS

WIDTH = 110
UNITS = ((1e-3, "ms", 1e3), (0.0, "us", 1e6))
FEW = ROUNDS
"""rounds kept: below, a number is marked"""
WORDS: dict[Pass, str] = {"forward": "forward", "with_backward": "+ backward"}


def to_text(report: Report, width: int = WIDTH) -> str:
    """The report as plain text."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    print_report(report, console)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def print_report(report: Report, console: Console) -> None:
    _print_head(report, console)
    for op in dict.fromkeys(row.op for row in report.rows):
        _print(console, op, _rows([row for row in report.rows if row.op == op]))
    if report.rows:
        _print_summary(report, console)
    if any(row.timing for row in report.models):
        _print(console, "whole models, before and after accelerate", _models(report.models))
    for row in report.models:
        if row.note:
            console.print(Text(f"{row.name}: {row.note}"))
    for note in report.notes:
        console.print(Text(f"note: {note}"))


def _print_head(report: Report, console: Console) -> None:
    found = report.machine
    console.print(Text(f"{found.cpu}, {found.cores} cores, {found.system}", style="bold"))
    console.print(
        Text(
            f"last-level cache {_bytes(found.last_level_cache)}, memory {_bytes(found.memory)}, "
            f"threads {found.threads}"
        )
    )
    console.print(Text(f"torch {found.torch}, normscope {found.normscope}, Python {found.python}"))
    console.print(Text(f"allocator: {found.allocator}"))
    for line in found.kernels.splitlines():
        console.print(Text(line))


def _rows(rows: Iterable[Row]) -> Table:
    table = _table("input", "pass")
    for head in ("eager", "compiled", "ours", "/eager", "/compiled", "of copy", "kept", "saved"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        for which in PASSES:
            timing = row.timing(which)
            first = which == PASSES[0]
            table.add_row(
                Text(
                    f"{row.size} {row.dtype}" if first else "  channels-last" * (row.layout != "contiguous")
                ),
                WORDS[which],
                *(_time(timing.seconds.get(who)) for who in ("eager", "compiled", "ours")),
                _times(row.against("eager", which)),
                _times(row.against("compiled", which)),
                _share(row.of_copy_limit(which)),
                _kept(timing.kept, timing.rounds),
                "" if first else _saved(row),
            )
    return table


def _print_summary(report: Report, console: Console) -> None:
    summary = report.summary()
    heads = list(dict.fromkeys(group for found in summary["geometric_means"].values() for group in found))
    table = _table("dtype", "pass", "ratio")
    for head in heads:
        table.add_column(head, justify="right")
    for dtype, groups in summary["geometric_means"].items():
        for which in PASSES:
            for other in ("eager", "compiled"):
                values = [groups.get(head, {}).get(f"{which}_against_{other}") for head in heads]
                if any(value is not None for value in values):
                    table.add_row(dtype, WORDS[which], f"/{other}", *map(_times, values))
    if table.row_count:
        _print(console, "geometric means, each operation and layout counted once", table)
    worst: dict[str, Any] | None = summary["worst"]
    if worst is not None:
        where = f"{worst['where']}, {worst['pass'].replace('_', ' ')}"
        console.print(Text(f"worst against eager: {_times(worst['against_eager'])} on {where}"))


def _models(rows: Iterable[ModelRow]) -> Table:
    table = _table("model")
    for head in ("norms swapped", "before", "after", "faster", "difference", "kept"):
        table.add_column(head, justify="right")
    for row in rows:
        if row.timing is not None:
            table.add_row(
                Text(row.name),
                str(row.swapped),
                *(_time(row.timing.seconds.get(who)) for who in ("before", "after")),
                _times(row.faster),
                "" if row.difference is None else f"{row.difference:.1e}",
                _kept(row.timing.kept, row.timing.rounds),
            )
    return table


def _print(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _time(seconds: float | None) -> str:
    """
    >>> _time(0.00245), _time(3.1e-6), _time(1.5), _time(None)
    ('2.45 ms', '3.10 us', '1500 ms', '-')
    """
    if seconds is None:
        return "-"
    unit, factor = next((unit, factor) for least, unit, factor in UNITS if seconds >= least)
    value = seconds * factor
    return f"{value:#.3g} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _kept(kept: int, rounds: int) -> str:
    return f"{kept}/{rounds}{' !' if kept < FEW else ''}"


def _saved(row: Row) -> str:
    """Kept for backward in inputs: eager, then ours."""
    return " / ".join(
        f"{row.saved[who] / row.input_bytes:.2f}" for who in ("eager", "ours") if who in row.saved
    )


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
