"""A study's results in sections, for the page and for the book alike."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from normscope.render.charts import Figure
from normscope.studies.lab.results import Results, told_numbers
from normscope.studies.lab.study import Decision
from normscope.studies.lab.verdicts import Verdict

STATES = {"holds": "ok", "does not hold": "error", "undecided": "unknown"}
SYMBOLS = {"holds": "✓", "does not hold": "✗", "undecided": "?"}
ROWS = 60
"""of a figure's numbers that a page shows; all are in its CSV"""


@dataclass(frozen=True)
class Told:
    """One decision with what was found."""

    decision: Decision
    verdict: Verdict
    late: bool
    """its words are not those declared when the run began"""

    @property
    def state(self) -> str:
        return STATES[self.verdict.verdict]

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.verdict.verdict]

    @property
    def numbers(self) -> list[tuple[str, str]]:
        return told_numbers(self.verdict)


@dataclass(frozen=True)
class Drawn:
    """A figure, and the beginning of its numbers as a table."""

    figure: Figure
    head: list[str]
    rows: list[list[str]]
    more: int


def sections(results: Results) -> dict[str, Any]:
    """What templates show."""
    study = results.study
    told = [Told(d, results.decided[d.key], d.key in results.redeclared) for d in study.decisions]
    counts = [
        (word, sum(t.verdict.verdict == word for t in told), STATES[word], SYMBOLS[word]) for word in STATES
    ]
    return {
        "study": study,
        "told": told,
        "counts": counts,
        "contrary": [t for t in told if t.verdict.verdict != "holds"],
        "figures": [drawn(figure) for figure in results.figures],
        "remarks": results.remarks(),
        "scale": results.scale,
        "how_many": how_many(results),
        "intervals": caution(results.seeds),
        "data": list(results.data.values()),
        "versions": ", ".join(
            f"{k} {v}" for k, v in results.fingerprint.items() if k not in ("study", "scale")
        ),
        "file": study.name.replace("-", "_") + ".py",
    }


def how_many(results: Results) -> str:
    cells = len(results.study.grid(results.scale))
    seeds = f"{results.seeds} seed{'s' * (results.seeds != 1)}"
    return f"{cells} cells, {seeds} each, {len(results.table.rows)} rows; {results.seconds:.0f} s of computing in all"


def caution(seeds: int) -> str:
    """What intervals over so many seeds are worth."""
    if seeds == 1:
        return "One seed gives no interval, and so no verdict that needs one."
    return (
        f"Intervals are 95 % percentile bootstrap over {seeds} seeds. They cannot reach beyond the smallest and the "
        f"largest of the {seeds}, which hold the true median between them in {1 - 0.5 ** (seeds - 1):.1%} of cases."
    )


def drawn(figure: Figure) -> Drawn:
    head, *rows = list(csv.reader(io.StringIO(figure.csv)))
    shown = [[_short(value) for value in row] for row in rows[:ROWS]]
    return Drawn(figure, head, shown, len(rows) - len(shown))


def _short(text: str) -> str:
    try:
        return text if text.lstrip("-").isdigit() else f"{float(text):.4g}"
    except ValueError:
        return text
