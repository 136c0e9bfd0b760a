"""The results of a run: the table, what was decided, and what it was measured with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.studies.lab.intervals import CONFIDENCE, RESAMPLES, Interval
from normscope.studies.lab.study import Scale, Study
from normscope.studies.lab.table import Table
from normscope.studies.lab.verdicts import Verdict

if TYPE_CHECKING:
    from normscope.render.charts import Figure


@dataclass(frozen=True)
class Results:
    """``str(results)`` tells the decisions."""

    study: Study
    table: Table
    decided: Mapping[str, Verdict]
    """key of a decision -> its verdict"""
    scale: Scale
    seeds: int
    fingerprint: Mapping[str, str]
    data: Mapping[str, str]
    """data set -> what was read"""
    redeclared: Sequence[str]
    """decisions whose words differ from those that were declared when the run began"""
    seconds: float
    """of all cells together"""

    def to_dict(self) -> dict[str, Any]:
        return {
            "study": declared(self.study),
            "scale": self.scale,
            "seeds": self.seeds,
            "fingerprint": self.fingerprint,
            "data": self.data,
            "intervals": f"percentile bootstrap over seeds, {CONFIDENCE:.0%}, {RESAMPLES} resamples, generator 0",
            "decisions": [
                {
                    "key": decision.key,
                    "statement": decision.statement,
                    "claims": decision.claims,
                    **asdict(self.decided[decision.key]),
                    "declared before the run": decision.key not in self.redeclared,
                }
                for decision in self.study.decisions
            ],
            "remarks": self.remarks(),
        }

    @cached_property
    def figures(self) -> list[Figure]:
        """Drawn when first asked for."""
        return [draw(self.table) for draw in self.study.figures]

    def remarks(self) -> list[str]:
        return list(self.study.remarks(self.table)) if self.study.remarks else []

    def __str__(self) -> str:
        lines = [f"{self.study.title} ({self.scale}, {self.seeds} seeds, {len(self.table.rows)} rows)"]
        for decision in self.study.decisions:
            found = self.decided[decision.key]
            numbers = "; ".join(f"{name} {value}" for name, value in told_numbers(found))
            lines += [f"  {found.verdict}: {decision.statement}", f"    {numbers}"]
        return "\n".join(lines)


def declared(study: Study) -> dict[str, Any]:
    """What a study says before it runs."""
    return {
        "name": study.name,
        "title": study.title,
        "question": study.question,
        "intervention": study.intervention,
        "held fixed": study.held_fixed,
        "measures": [asdict(measure) for measure in study.measures],
        "decisions": {decision.key: decision.statement for decision in study.decisions},
    }


def decide(
    study: Study,
    rows: Sequence[Mapping[str, Any]],
    *,
    scale: Scale,
    seeds: int,
    run: Mapping[str, Any],
    data: Mapping[str, str],
    seconds: float,
) -> Results:
    """Apply the declared rules to the rows. ``run`` is what was written down when the run began."""
    table = Table(rows)
    before = run["declared"]["decisions"]
    return Results(
        study=study,
        table=table,
        decided={decision.key: decision.decide(table) for decision in study.decisions},
        scale=scale,
        seeds=seeds,
        fingerprint=run["fingerprint"],
        data=data,
        redeclared=[d.key for d in study.decisions if before.get(d.key) != d.statement],
        seconds=seconds,
    )


def write(results: Results, out: Path, *, draw: bool) -> None:
    """``results.csv`` and ``results.json``; with ``draw`` also the figures and the page."""
    (out / "results.csv").write_text(results.table.csv(), encoding="utf-8")
    (out / "results.json").write_text(to_json(results), encoding="utf-8")
    if draw:
        from normscope.studies.lab.page import write_page

        write_page(results, out)


def to_json(results: Results) -> str:
    return json.dumps(_strict(results.to_dict()), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def told_numbers(verdict: Verdict) -> list[tuple[str, str]]:
    """The numbers of a verdict for people, without those that its rule says already."""
    found = verdict.numbers.items()
    return [(name, number(value)) for name, value in found if name.split(": ")[-1] not in ("bound", "of")]


def number(value: float | Interval) -> str:
    """For people: four digits.

    >>> number(0.123456), number(Interval(1.0, 0.5, 1.5, 3))
    ('0.1235', '1 [0.5, 1.5]')
    """
    return str(value) if isinstance(value, (Interval, int)) else f"{value:.4g}"


def _strict(value: Any) -> Any:
    """JSON has neither NaN nor infinity: they are None and text."""
    if isinstance(value, float) and not isfinite(value):
        return None if value != value else str(value)
    if isinstance(value, Mapping):
        return {key: _strict(inner) for key, inner in value.items()}
    return [_strict(inner) for inner in value] if isinstance(value, (list, tuple)) else value
