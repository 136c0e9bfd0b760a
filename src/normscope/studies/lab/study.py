"""What a study declares before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from normscope.errors import BadInput, MissingExtra

if TYPE_CHECKING:
    from normscope.render.charts import Figure
    from normscope.studies.lab.table import Table
    from normscope.studies.lab.verdicts import Verdict

Scale = Literal["full", "quick", "smoke"]
SCALES: tuple[Scale, ...] = get_args(Scale)
Value: TypeAlias = str | int | float | bool | None
RUNNING, DRAWING = ("joblib", "scipy"), ("altair", "vl_convert", "jinja2")
PACKAGES = {"vl_convert": "vl-convert-python"}
Cell: TypeAlias = Mapping[str, Value]
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """One column of the results: its name, unit, and which way is better (``"higher"``, ``"lower"``, or neither)."""

    name: str
    unit: str = ""
    better: Literal["higher", "lower", ""] = ""
    meaning: str = ""


@dataclass(frozen=True)
class Decision:
    """A statement, and the rule that decides it from the table.

    ``decide`` builds its verdict with `above`, `below`, `within`, `at_most` and `all_of`, so that the word always
    follows from numbers. ``claims`` are the numbers of the entries in ``docs/claims.md`` that the statement speaks to.
    """

    key: str
    statement: str
    decide: Callable[[Table], Verdict]
    claims: tuple[int, ...] = ()


@dataclass(frozen=True)
class Study:
    """One experiment, declared before it runs.

    ``cells(scale)`` lists the cells of the grid, each a dict of plain values; ``measure(cell, seed, scale)`` runs one
    of them for one seed and returns a row, or several, as dicts of plain values. What varies with the scale and is not
    varied by the study (steps, samples) is looked up by ``scale`` inside ``measure``. It must be deterministic given
    its arguments; torch has one thread, and the random state around it is put back behind it.
    """

    name: str
    title: str
    question: str
    intervention: str
    """the single property that differs between the cells compared"""
    held_fixed: str
    method: str
    measures: tuple[Measure, ...]
    cells: Callable[[Scale], Iterable[Cell]]
    measure: Callable[[Cell, int, Scale], Row | Iterable[Row]]
    decisions: tuple[Decision, ...]
    limits: str
    """what it cannot say"""
    figures: tuple[Callable[[Table], Figure], ...] = ()
    data: tuple[str, ...] = ()
    """data sets that it loads, of `normscope.studies.lab.data`; found before the run, and part of its fingerprint"""
    seeds: Mapping[str, int] = field(default_factory=lambda: {"full": 10, "quick": 3, "smoke": 2})
    remarks: Callable[[Table], Iterable[str]] | None = None
    """sentences on the results with their numbers, beside the decisions"""
    contrary: str = ""
    """what is known not to help or not to reproduce, beside the decisions that do not hold"""
    change: str = ""
    """what a reader would change first, and where"""
    sources: tuple[str, ...] = ()
    requires: tuple[tuple[str, str], ...] = ()
    """packages beside those of the extra ``studies``, each with the extra that brings it"""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise BadInput(f"a study's name is of lower-case letters, digits and '-', got {self.name!r}")
        for what, found in (
            ("decision", [d.key for d in self.decisions]),
            ("measure", [m.name for m in self.measures]),
        ):
            if len(set(found)) < len(found):
                raise BadInput(f"study {self.name}: every {what} needs a name of its own, got {found}")

    @property
    def claims(self) -> tuple[int, ...]:
        return tuple(sorted({number for decision in self.decisions for number in decision.claims}))

    def grid(self, scale: Scale) -> list[dict[str, Value]]:
        """The cells of a scale, in order. Raises BadInput where one is there twice, or holds what is no plain value."""
        if scale not in SCALES:
            raise BadInput(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
        found = [dict(cell) for cell in self.cells(scale)]
        for cell in found:
            if found.count(cell) > 1:
                raise BadInput(f"study {self.name}, scale {scale}: the cell {told_cell(cell)} is there twice")
            for key, value in cell.items():
                if not isinstance(value, (str, int, float, bool, type(None))):
                    raise BadInput(
                        f"study {self.name}: cell values are text, numbers or None; {key} is {value!r}"
                    )
        return found

    def require(self, *, draw: bool) -> None:
        """Raise MissingExtra where a package that it needs is not installed: before it runs, not behind it."""
        for package in (*RUNNING, *(DRAWING if draw else ())):
            if find_spec(package) is None:
                raise MissingExtra(PACKAGES.get(package, package), "studies", "a study")
        for package, extra in self.requires:
            if find_spec(package) is None:
                raise MissingExtra(package, extra, f"the study {self.name}")


def told_cell(cell: Cell) -> str:
    """A cell for people.

    >>> told_cell({"norm": "batch", "batch size": 2})
    'norm=batch, batch size=2'
    """
    return ", ".join(f"{key}={value}" for key, value in cell.items()) or "the only one"
