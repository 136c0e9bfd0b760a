"""A run that is killed, resumed, spread or changed: the same table, or a refusal that says why."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normscope.errors import BadInput, MissingExtra, ModelError
from normscope.studies import Decision, Measure, Study, above, run
from normscope.studies.lab.records import Records
from normscope.studies.lab.runner import CELLS, RUN

SCRIPT = """
import os, sys, time
from pathlib import Path

import torch

from normscope.studies import Decision, Measure, Study, above, run

LOG = Path(__file__).with_name("measured.txt")


def cells(scale):
    return [{"width": w} for w in range(8)]


def measure(cell, seed, scale):
    with LOG.open("a") as log:
        print(os.getpid(), file=log)
    time.sleep(0.2)
    noise = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    return [{"part": p, "value": noise.mul(cell["width"] + 0.1).cumsum(0)[p].item()} for p in (3, 99)]


STUDY = Study(
    name="killed",
    title="Killed",
    question="Which?",
    intervention="the width",
    held_fixed="the rest",
    method="Noise.",
    measures=(Measure("value"),),
    cells=cells,
    measure=measure,
    decisions=(Decision("any", "It is above 0.", lambda table: above(table.interval("value"))),),
    limits="A toy.",
)

if __name__ == "__main__":
    run(STUDY, out=sys.argv[1], seeds=1, workers=2, draw=False)
"""


def values(cell: Any, seed: int, scale: str) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    return {"value": float(torch.randn(1000, generator=generator).add(cell["shift"]).pow(3).mean())}


def shifts(scale: str) -> list[dict[str, float]]:
    return [{"shift": 0.1 * k} for k in range(3)]


def study(measure: Any = values, **changes: Any) -> Study:
    told: dict[str, Any] = {
        "name": "toy",
        "title": "Toy",
        "question": "Which?",
        "intervention": "the shift",
        "held_fixed": "the rest",
        "method": "Noise.",
        "measures": (Measure("value"),),
        "cells": shifts,
        "measure": measure,
        "decisions": (Decision("above", "It is above 0.", lambda table: above(table.interval("value"))),),
        "limits": "A toy.",
    }
    return Study(**{**told, **changes})


def table(out: Path, **arguments: Any) -> str:
    arguments = {"seeds": 2, "backend": "sequential", "draw": False, **arguments}
    return run(arguments.pop("study", study()), out=out, **arguments).table.csv()


def test_killed_and_resumed_is_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed_study.py").write_text(SCRIPT)
    out, log = tmp_path / "out", tmp_path / "measured.txt"
    process = subprocess.Popen([sys.executable, "killed_study.py", str(out)], cwd=tmp_path)
    while not (out / CELLS).exists() or (out / CELLS).read_bytes().count(b"\n") < 2:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = (out / CELLS).read_bytes().count(b"\n")
    assert 2 <= done < 8
    monkeypatch.syspath_prepend(tmp_path)
    import killed_study

    resumed = table(out, study=killed_study.STUDY, seeds=1)
    here = log.read_text().splitlines().count(str(os.getpid()))
    assert here == 8 - done  # each missing cell, and no other
    assert resumed == table(tmp_path / "whole", study=killed_study.STUDY, seeds=1)
    assert len(resumed.splitlines()) == 1 + 16


def test_two_workers_of_a_cluster_give_the_table_of_one_process(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster:
        spread = table(tmp_path / "dask", backend="dask", scheduler=cluster.scheduler_address)
    assert spread == table(tmp_path / "one")


def test_more_seeds_add_to_what_is_there(tmp_path: Path) -> None:
    seen: list[str] = []
    two = table(tmp_path, seeds=2)
    three = table(tmp_path, seeds=3, progress=seen.append)
    assert [word for word in seen if word != "found"] == [f"shift={0.1 * k}, seed 2" for k in range(3)]
    assert three == table(tmp_path / "at once", seeds=3)
    assert table(tmp_path, seeds=2) == two


def test_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    table(tmp_path)
    before = (tmp_path / CELLS).read_bytes()
    with pytest.raises(BadInput) as refused:
        table(tmp_path, scale="quick")
    assert str(refused.value) == (
        f"{tmp_path} holds a run that differs in scale (full there, quick now). Results of both would not be one "
        "experiment: choose another folder, or remove this one to start afresh"
    )
    told = json.loads((tmp_path / RUN).read_text())
    told["fingerprint"]["torch"] = "1.0"
    (tmp_path / RUN).write_text(json.dumps(told))
    with pytest.raises(BadInput, match=re.escape(f"differs in torch (1.0 there, {torch.__version__} now)")):
        table(tmp_path)
    assert (tmp_path / CELLS).read_bytes() == before


def test_a_torn_line_is_dropped_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    whole = table(tmp_path)
    path = tmp_path / CELLS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:-1])  # all of it but its end
    assert len(Records(path).found) == 2
    assert table(tmp_path) == whole
    path.write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(BadInput) as refused:
        table(tmp_path)
    assert str(refused.value) == (
        f"{path}, line 2 is no finished cell: the file was changed by something else. Remove that line (its cell runs "
        "again) or choose another folder"
    )


def test_rules_that_change_behind_a_run_are_told(tmp_path: Path) -> None:
    table(tmp_path)
    changed = study(decisions=(Decision("above", "Another.", lambda t: above(t.interval("value"), 9)),))
    results = run(changed, out=tmp_path, seeds=2, backend="sequential", draw=False)
    assert results.redeclared == ["above"]
    assert results.decided["above"].verdict == "does not hold"
    (told,) = json.loads((tmp_path / "results.json").read_text())["decisions"]
    assert told["declared before the run"] is False


def greedy(cell: Any, seed: int, scale: str) -> dict[str, Any]:
    """Takes the process for its own."""
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    if cell["shift"] == 0.2:
        raise RuntimeError("out of luck")
    return {"value": np.float32(random.random()), "drawn": torch.rand(())}


def test_the_process_stays_as_it_was_and_finished_cells_stay(tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        arrays = np.random.get_state()  # noqa: NPY002
        return (
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            [part.tolist() if isinstance(part, np.ndarray) else part for part in arrays],
            random.getstate(),
        )

    before = state()
    with pytest.raises(ModelError) as raised:
        table(tmp_path, study=study(greedy), seeds=1)
    assert str(raised.value) == "study toy, cell shift=0.2, seed 0: RuntimeError: out of luck"
    assert state() == before
    assert len(Records(tmp_path / CELLS).found) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "threads"}, "backend must be one of loky, sequential, dask, ray, got 'threads'"),
        ({"scale": "tiny"}, "scale must be one of full, quick, smoke, got 'tiny'"),
        ({"seeds": 0}, "seeds must be 1 or more, got 0"),
        ({"workers": 0}, "workers must be 1 or more, got 0"),
        (
            {"backend": "dask"},
            "the backend dask needs the address of a running cluster: pass scheduler (--scheduler)",
        ),
        (
            {"scheduler": "tcp://here"},
            "scheduler is the address of a cluster, and the backend sequential has none: pass backend",
        ),
        (
            {"study": study(cells=lambda scale: [{"a": 1}, {"a": 1}])},
            "study toy, scale full: the cell a=1 is there twice",
        ),
    ],
)
def test_what_cannot_run_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        table(tmp_path / "out", **arguments)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("joblib", "a study needs joblib, which is not installed: pip install 'normscope[studies]'"),
        (
            "vl_convert",
            "a study needs vl-convert-python, which is not installed: pip install 'normscope[studies]'",
        ),
        (
            "spikingjelly",
            "the study toy needs spikingjelly, which is not installed: pip install 'normscope[spiking]'",
        ),
    ],
)
def test_what_is_missing_is_told_before_it_runs(
    missing: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "normscope.studies.lab.study.find_spec", lambda name: None if name == missing else name
    )
    with pytest.raises(MissingExtra) as refused:
        table(tmp_path / "out", study=study(requires=(("spikingjelly", "spiking"),)), draw=True)
    assert str(refused.value) == message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"seed": 1}, "ValueError: a row holds what was measured; 'seed' is there already, from the cell"),
        ({"value": [1]}, "TypeError: a row holds text, numbers and None; value is a list"),
    ],
)
def test_rows_that_no_table_takes_are_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    def bad(cell: Any, seed: int, scale: str) -> Iterator[dict[str, Any]]:
        yield row

    with pytest.raises(ModelError) as refused:
        table(tmp_path, study=study(bad))
    assert str(refused.value) == f"study toy, cell shift=0.0, seed 0: {message}"
