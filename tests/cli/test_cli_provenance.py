"""A file that a transform has written says how it was made, and a check of the file shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import normscope
from normscope.cli.app import app
from normscope.targets.state_files import open_state
from normscope.targets.state_files.provenance import told
from normscope.transforms import recalibrate

MODELS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.LayerNorm(6))
"""
SAID = ("--source", "hospital B", "--selection", "the first of March")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "to_record.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    x = np.random.default_rng(0).normal(size=(10, 3, 6)).astype("float32")
    mask = np.arange(6) < np.arange(1, 11)[:, None]
    np.savez(tmp_path / "x.npz", x=np.where(mask[:, None], x, np.nan).astype("float32"), mask=mask)
    np.save(tmp_path / "x.npy", x)
    return tmp_path


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*words])
    return result.exit_code, result.stdout, result.stderr


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def test_recalibrate_under_the_mask_of_the_data(home: Path) -> None:
    code, _, err = run(
        "recalibrate", "to_record:net", "--data", "x.npz", "--batch-size", "4", "-o", "w.safetensors", *SAID
    )
    assert code == 0, err
    import to_record  # type: ignore[import-not-found]

    held = np.load(home / "x.npz")
    x, mask = torch.from_numpy(held["x"]), torch.from_numpy(held["mask"])
    model, report = recalibrate(to_record.net(), list(x.split(4)), mask=list(mask.split(4)))
    written = load_file(home / "w.safetensors")
    assert all(torch.equal(written[key], value) for key, value in model.state_dict().items())
    found = metadata(home / "w.safetensors")
    assert found["format"] == "pt", "which transformers asks for"
    record = json.loads(found["normscope"])
    assert record == {
        "command": "recalibrate", "version": normscope.__version__, "method": "exact", "source": "hospital B",
        "selection": "the first of March", "data": report.provenance["data"], "samples": 10, "batches": 3,
        "ranks": 1, "valid": "45 of 60",
    }  # fmt: skip
    code, out, _ = run("check", "w.safetensors")
    assert "the file says: made by normscope recalibrate (version" in out
    assert "source hospital B" in out


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (("freeze", "to_record:net"), ["torch.nn.BatchNorm1d, statistics frozen", ""]),
        (("convert", "to_record:net", "--to", "group", "--data", "x.npy"), ["torch.nn.GroupNorm", ""]),
    ],
    ids=["freeze", "convert"],
)
def test_the_others_say_what_became_of_each_norm(
    home: Path, words: tuple[str, ...], after: list[str]
) -> None:
    code, _, err = run(*words, "-o", "w.safetensors")
    assert code == 0, err
    record = json.loads(metadata(home / "w.safetensors")["normscope"])
    assert record["command"] == words[0]
    assert [(site["name"], site["after"]) for site in record["sites"]] == [
        ("1", after[0]), ("2", after[1]),
    ]  # fmt: skip
    assert [bool(site["reason"]) for site in record["sites"]] == [False, True]
    assert open_state(home / "w.safetensors").notes == [
        f"the file says: made by normscope {words[0]} (version {normscope.__version__}, 1 of 2 norms)"
    ]


@pytest.mark.parametrize(
    "value",
    [None, 3, [], {}, {"normscope": 3}, {"normscope": "{"}, {"normscope": "[" * 100_000}, {"normscope": "[]"},
     {"normscope": "{}"}, {"normscope": '{"command": 3}'}, {"other": "x"}],
)  # fmt: skip
def test_what_is_no_record_says_nothing(value: Any) -> None:
    assert told(value) == []


def test_anyone_may_have_written_a_record(tmp_path: Path) -> None:
    record = {
        "command": "fold\x1b[31m",
        "source": "a" * 200,
        "method": [[["x"]]],
        "sites": [{"after": 1}, 3, {}],
    }
    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors", {"normscope": json.dumps(record)})
    assert open_state(tmp_path / "w.safetensors").notes == [
        f"the file says: made by normscope fold?[31m (source {'a' * 80}..., 1 of 3 norms)"
    ]
