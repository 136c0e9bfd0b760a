"""``normscope fold``: what it writes fits a model folded in the same way; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from normscope.cli.app import app
from normscope.transforms import fold

MODELS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    for _ in range(3):
        model(torch.randn(4, 3, 3, 3))
    return model

def last():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)), torch.randn(2, 3, 5, 5)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "to_fold.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["fold", *words])
    return result.exit_code, result.stdout, result.stderr


def test_what_is_written_fits_a_folded_model(home: Path) -> None:
    np.save(home / "x.npy", np.random.default_rng(0).normal(size=(2, 3, 3, 3)).astype("float32"))
    code, out, _ = run("to_fold:net", "-o", "folded.safetensors", "--data", "x.npy", "--json", "report.json")
    assert code == 0, out
    assert out.startswith("fold: 1 of 1 normalizations done\n")
    assert out.endswith("written: folded.safetensors\n")
    assert sorted(p.name for p in home.iterdir() if p.suffix in (".safetensors", ".part")) == [
        "folded.safetensors"
    ]
    assert json.loads((home / "report.json").read_text())["folds"][0]["into"] == ["0"]
    import to_fold  # type: ignore[import-not-found]

    x = torch.from_numpy(np.load(home / "x.npy"))
    model = to_fold.net().eval()
    empty, _ = fold(model, x)
    for parameter in empty.parameters():
        torch.nn.init.zeros_(parameter)
    empty.load_state_dict(load_file(home / "folded.safetensors"))
    with torch.no_grad():
        assert torch.allclose(empty(x), model(x), atol=1e-6)


def test_a_rehearsal_writes_nothing(home: Path) -> None:
    before = sorted(home.iterdir())
    code, out, err = run("to_fold:net", "--dry-run", "--input", "2x3x3x3")
    assert code == 0
    assert out.splitlines()[0] == (
        "fold: 1 of 1 normalizations would be done (rehearsed, the model is as it was)"
    )
    assert "  1: into 0, which feeds it" in out.splitlines()
    assert "checked on random numbers: give real inputs with --data where you have them" in err
    assert [p for p in sorted(home.iterdir()) if p.name != "__pycache__"] == before


def test_nothing_to_fold_is_told_by_the_exit_code(home: Path) -> None:
    code, out, err = run("to_fold:last", "-o", "folded.safetensors")
    assert code == 1
    assert (
        "not backwards: relu stands between 0 (conv2d) and it; not forwards: the model returns its output"
        in out
    )
    assert "folded.safetensors was not written: nothing was folded" in err
    assert not (home / "folded.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("to_fold:net",), "name a file to write with -o FILE.safetensors, or rehearse with --dry-run"),
        (("to_fold:net", "-o", "a.pt"), "-o a.pt: name a .safetensors file, which is what is written"),
        (
            ("to_fold:net", "-o", "a.safetensors"),
            "fold needs inputs, which show what feeds what: --data FILE, or --input SHAPE for random numbers",
        ),
    ],
)
def test_refused(home: Path, words: tuple[str, ...], said: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert err == f"normscope: {said}\n"


def test_a_folder_that_does_not_exist(home: Path) -> None:
    code, _, err = run("to_fold:net", "-o", "no/a.safetensors")
    assert code == 2
    assert err == (
        f"normscope: -o no/a.safetensors: the folder {home / 'no'} does not exist; name a file to write in a folder "
        "that exists\n"
    )
