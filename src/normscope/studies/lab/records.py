"""Finished cells in a file, a line each: what was written stays, whatever happens next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from normscope.errors import BadInput
from normscope.studies.lab.study import Cell

Key = tuple[str, int]


def key(cell: Cell, seed: int) -> Key:
    return json.dumps(dict(cell), sort_keys=True), seed


class Records:
    """The file ``cells.jsonl`` of a run. A line is on the disk when `add` returns; a torn last line is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[Key, Mapping[str, Any]] = {}
        if path.exists():
            self._read()

    def add(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with self._path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        # As it is read back, so that an uninterrupted run has the values of a resumed one.
        self._keep(json.loads(line))

    def missing(self, cells: Iterable[Cell], seeds: Iterable[int]) -> list[tuple[Cell, int]]:
        seeds = list(seeds)
        return [(cell, seed) for cell in cells for seed in seeds if key(cell, seed) not in self.found]

    def seconds(self, cells: Iterable[Cell], seeds: Iterable[int]) -> float:
        """How long these cells took, one after the other."""
        seeds = list(seeds)
        keys = [key(cell, seed) for cell in cells for seed in seeds]
        return float(sum(self.found[k]["seconds"] for k in keys))

    def rows(self, cells: Iterable[Cell], seeds: Iterable[int]) -> list[dict[str, Any]]:
        """What these cells measured, in their order."""
        seeds = list(seeds)
        done = [
            (cell, self.found[k]) for cell in cells for seed in seeds if (k := key(cell, seed)) in self.found
        ]
        return [{**cell, "seed": record["seed"], **row} for cell, record in done for row in record["rows"]]

    def _read(self) -> None:
        whole, _, torn = self._path.read_bytes().rpartition(b"\n")
        if torn:
            with self._path.open("r+b") as file:
                file.truncate(len(whole) + 1 if whole else 0)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._keep(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise BadInput(
                    f"{self._path}, line {number} is no finished cell: the file was changed by something else. "
                    "Remove that line (its cell runs again) or choose another folder"
                ) from None

    def _keep(self, record: Mapping[str, Any]) -> None:
        self.found.setdefault(key(record["cell"], record["seed"]), record)
