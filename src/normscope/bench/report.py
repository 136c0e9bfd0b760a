"""What a run measured, the ratios that follow from it, and its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from normscope.bench.machine import Machine
from normscope.bench.timing import COPY, Timing

SCHEMA = 1
Pass = Literal["forward", "with_backward"]
PASSES: tuple[Pass, Pass] = ("forward", "with_backward")


@dataclass(frozen=True)
class Row:
    """One operation on one input. ``saved`` are bytes kept for backward, ``sets`` statistic sets."""

    op: str
    shape: tuple[int, ...]
    group: str
    layout: str
    dtype: str
    sets: int
    input_bytes: int
    passes: tuple[int, int]
    forward: Timing
    with_backward: Timing
    saved: dict[str, int]
    difference: float | None
    failures: dict[str, str]

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    def __str__(self) -> str:
        return f"{self.op} {self.size} {self.layout} {self.dtype}"

    def timing(self, which: Pass) -> Timing:
        return self.forward if which == "forward" else self.with_backward

    def against(self, other: str, which: Pass) -> float | None:
        """How many times faster than ``other`` ours is."""
        return ratio(self.timing(which), other, "ours")

    def of_copy_limit(self, which: Pass, who: str = "ours") -> float | None:
        """The time in which a copy would move as many bytes, divided by the time taken; a copy is two passes."""
        found = ratio(self.timing(which), COPY, who)
        return None if found is None else found * self.passes[PASSES.index(which)] / 2


@dataclass(frozen=True)
class ModelRow:
    """One model before and after ``accelerate``; ``swapped`` counts norms, ``note`` says why nothing was timed."""

    name: str
    swapped: int = 0
    timing: Timing | None = None
    difference: float | None = None
    note: str = ""

    @property
    def faster(self) -> float | None:
        return None if self.timing is None else ratio(self.timing, "before", "after")


@dataclass(frozen=True)
class Report:
    """``notes`` hold what should be known beside the numbers, such as why nothing was compiled."""

    machine: Machine
    rows: tuple[Row, ...] = ()
    models: tuple[ModelRow, ...] = ()
    notes: tuple[str, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Geometric means of the ratios, each operation and layout counted once, and the worst ratio."""
        means: dict[str, Any] = {}
        for dtype in dict.fromkeys(row.dtype for row in self.rows):
            rows = [row for row in self.rows if row.dtype == dtype]
            groups = {
                group: [r for r in rows if r.group == group] for group in dict.fromkeys(r.group for r in rows)
            }
            groups["all"] = rows
            means[dtype] = {
                group: {
                    f"{which}_against_{other}": mean_over_ops(chosen, other, which)
                    for which in PASSES
                    for other in ("eager", "compiled")
                }
                for group, chosen in groups.items()
            }
        return {"geometric_means": means, "worst": self.worst()}

    def worst(self) -> dict[str, Any] | None:
        """Where ours is slowest against eager."""
        found = [(value, row, which) for value, row, which in self._against_eager()]
        if not found:
            return None
        value, row, which = min(found, key=lambda entry: entry[0])
        return {"against_eager": value, "where": str(row), "pass": which}

    def _against_eager(self) -> Iterator[tuple[float, Row, Pass]]:
        for row in self.rows:
            for which in PASSES:
                if (value := row.against("eager", which)) is not None:
                    yield value, row, which

    def to_json(self) -> str:
        """Schema 1, as the documentation describes it."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "machine": asdict(self.machine),
                "notes": list(self.notes),
                "rows": [_row(row) for row in self.rows],
                "models": [{**asdict(row), "faster": row.faster} for row in self.models],
                "summary": self.summary(),
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that wrote this; what follows from the measurements is computed again."""
        found = json.loads(text)
        if found.get("schema") != SCHEMA:
            raise ValueError(f"a report of schema {SCHEMA} was expected, got schema {found.get('schema')!r}")
        return cls(
            Machine(**found["machine"]),
            tuple(_read_row(row) for row in found["rows"]),
            tuple(_read_model(row) for row in found["models"]),
            tuple(found["notes"]),
        )


def ratio(timing: Timing, slower: str, faster: str) -> float | None:
    """The time of one contender divided by another's; None where one was not timed."""
    times = timing.seconds
    return times[slower] / times[faster] if slower in times and faster in times else None


def geometric_mean(values: Iterable[float]) -> float | None:
    """
    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def mean_over_ops(rows: Iterable[Row], other: str, which: Pass) -> float | None:
    """The mean over sizes of each operation and layout first: one with many sizes weighs no more."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if (value := row.against(other, which)) is not None:
            found.setdefault((row.op, row.layout), []).append(value)
    means = [geometric_mean(values) for values in found.values()]
    return geometric_mean(value for value in means if value is not None)


def _row(row: Row) -> dict[str, Any]:
    found = asdict(row)
    for which in PASSES:
        found[which]["against"] = {other: row.against(other, which) for other in ("eager", "compiled")}
        found[which]["of_copy_limit"] = {
            who: row.of_copy_limit(which, who) for who in row.timing(which).seconds if who != COPY
        }
    return found


def _read_timing(found: dict[str, Any]) -> Timing:
    return Timing(found["seconds"], found["rounds"], found["kept"])


def _read_row(found: dict[str, Any]) -> Row:
    measured: dict[str, Any] = {which: _read_timing(found[which]) for which in PASSES}
    lists: dict[str, Any] = {name: tuple(found[name]) for name in ("shape", "passes")}
    return Row(**(found | measured | lists))


def _read_model(found: dict[str, Any]) -> ModelRow:
    timing = None if found["timing"] is None else _read_timing(found["timing"])
    return ModelRow(found["name"], found["swapped"], timing, found["difference"], found["note"])
