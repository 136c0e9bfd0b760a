"""The results of a study as a table: rows chosen by columns, means over seeds, differences paired by seed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from normscope.errors import BadInput
from normscope.studies.lab.intervals import Interval, interval


@dataclass(frozen=True)
class Table:
    """Rows in the order of the grid, then of the seeds. A column that a row has not is None there.

    >>> table = Table([
    ...     {"norm": n, "seed": s, "error": e}
    ...     for n, errors in {"batch": (1.0, 2.0), "layer": (2.0, 4.0)}.items() for s, e in enumerate(errors)
    ... ])
    >>> table.interval("error", norm="batch").mean, table.difference("error", {"norm": "layer"}, {"norm": "batch"}).mean
    (1.5, 1.5)
    """

    rows: Sequence[Mapping[str, Any]]

    @cached_property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

    def where(self, **fixed: Any) -> Table:
        """The rows that have these values; none where no row has. Raises BadInput for a column that is in no row.

        A column with a name that Python does not take goes in as ``where(**{"batch size": 2})``.
        """
        self._known(fixed)
        return Table([row for row in self.rows if all(row.get(k) == v for k, v in fixed.items())])

    def values(self, measure: str) -> list[Any]:
        """What was measured, row by row, where it was."""
        self._known([measure])
        return [row[measure] for row in self.rows if row.get(measure) is not None]

    def distinct(self, column: str) -> list[Any]:
        """The values of a column, in order of appearance."""
        return list(dict.fromkeys(self.values(column)))

    def groups(self, *columns: str) -> Iterator[tuple[dict[str, Any], Table]]:
        """The rows apart, by the values of these columns."""
        self._known(columns)
        for key in dict.fromkeys(tuple(row.get(c) for c in columns) for row in self.rows):
            fixed = dict(zip(columns, key, strict=True))
            yield fixed, self.where(**fixed)

    def by_seed(self, measure: str, **fixed: Any) -> dict[int, float]:
        """seed -> mean of what was measured with it."""
        found: dict[int, list[float]] = {}
        self._known([measure])
        for row in self.where(**fixed).rows:
            if row.get(measure) is not None:
                found.setdefault(row["seed"], []).append(row[measure])
        return {seed: sum(values) / len(values) for seed, values in found.items()}

    def interval(self, measure: str, **fixed: Any) -> Interval:
        """The mean over seeds and its interval; a seed with several rows counts once, with their mean."""
        return interval(list(self.by_seed(measure, **fixed).values()))

    def difference(self, measure: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Interval:
        """``one`` less ``other``, paired by seed: the mean over the seeds that both have, and its interval."""
        a, b = self.by_seed(measure, **one), self.by_seed(measure, **other)
        return interval([a[seed] - b[seed] for seed in a if seed in b])

    def csv(self) -> str:
        """As text; floats in full, so that they are read back to the bit."""
        out = io.StringIO()
        writer = csv.DictWriter(out, fieldnames=self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()

    def _known(self, columns: Any) -> None:
        for column in columns:
            if self.rows and column not in self.columns:
                raise BadInput(
                    f"there is no column {column!r} in the results; there are {', '.join(self.columns)}"
                )
