"""``normscope study``: the list, a run, and a run that is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from normscope import studies
from normscope.cli.app import app
from normscope.studies.lab.records import Records


def study(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["study", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_list_names_every_study() -> None:
    code, out, _ = study("list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == studies.names()


def test_a_run_writes_below_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = study("geometry", "--smoke", "--backend", "sequential", "--seeds", "2")
    assert code == 0
    assert "holds: Centering removes the all-ones direction and no other" in out
    assert out.splitlines()[-1].startswith("written: normscope-study-geometry/index.html")
    assert [path.name for path in tmp_path.iterdir()] == ["normscope-study-geometry"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "there is no study named 'nosuch'; there are "),
        (["geometry", "--quick", "--smoke"], "--quick and --smoke are two scales: give one of them"),
        (
            ["geometry", "--smoke", "--backend", "dask"],
            "the backend dask needs the address of a running cluster",
        ),
    ],
)
def test_what_cannot_run_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    code, _, err = study(*arguments, "--out", str(tmp_path / "out"))
    assert code == 2
    assert err.startswith(f"normscope: {message}")


def test_stopped_by_hand_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["geometry", "--smoke", "--backend", "sequential", "--out", str(tmp_path)]
    kept, add = [], Records.add

    def stopping(self: Records, record: dict[str, object]) -> None:
        add(self, record)
        kept.append(record)
        if len(kept) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Records, "add", stopping)
        code, _, err = study(*arguments)
    assert code == 130
    assert err == f"normscope: interrupted; finished cells are in {tmp_path}, and the same command goes on\n"
    assert len(Records(tmp_path / "cells.jsonl").found) == 3
    assert study(*arguments)[0] == 0
