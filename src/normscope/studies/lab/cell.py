"""One cell, measured for one seed: in any process, one at a time, leaving the process as it was."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normscope.errors import ModelError, told
from normscope.studies.lab import data
from normscope.studies.lab.study import Cell, Row, Scale, told_cell

_ONE_AT_A_TIME = threading.Lock()
"""a cluster's worker may have several threads, and random state and thread count belong to the process"""


def run_cell(
    name: str,
    measure: Callable[[Cell, int, Scale], Row | Iterable[Row]],
    cell: Cell,
    seed: int,
    scale: Scale,
    sources: Mapping[str, str],
    folder: Path | None,
) -> dict[str, Any]:
    """The record of a finished cell: its rows as plain values, and how long it took.

    ``sources`` are the data as the run began with them; a worker that finds others refuses.

    Raises ModelError, naming the cell, where ``measure`` raises.
    """
    with _ONE_AT_A_TIME, _alone(), data.folder(folder):
        data.same(sources)
        begin = time.perf_counter()
        try:
            found = measure(cell, seed, scale)
            rows = [_plain(row, cell) for row in ([found] if isinstance(found, Mapping) else found)]
        except Exception as error:
            raise ModelError(f"study {name}, cell {told_cell(cell)}, seed {seed}: {told(error)}") from error
        return {"cell": dict(cell), "seed": seed, "rows": rows, "seconds": time.perf_counter() - begin}


@contextmanager
def _alone() -> Iterator[None]:
    """One thread, float32, gradients on, and the random states of Python, NumPy and torch put back.

    What a measurement draws without a generator comes from seed 0, so that it is the same everywhere.
    """
    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    own, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_num_threads(1)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            torch.manual_seed(0)
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(gradients)
            random.setstate(own)
            np.random.set_state(arrays)  # noqa: NPY002


def _plain(row: Row, cell: Cell) -> dict[str, Any]:
    """Values that JSON has: numbers of NumPy and torch become Python's."""
    plain: dict[str, Any] = {}
    for key, value in row.items():
        if key in cell or key == "seed":
            raise ValueError(f"a row holds what was measured; {key!r} is there already, from the cell")
        found = value.item() if isinstance(value, (np.generic, torch.Tensor, np.ndarray)) else value
        if not isinstance(found, (str, int, float, bool, type(None))):
            raise TypeError(f"a row holds text, numbers and None; {key} is a {type(found).__name__}")
        plain[key] = found
    return plain
