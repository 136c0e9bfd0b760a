"""``normscope freeze``, ``recalibrate`` and ``convert``: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from normscope.cli import state_output
from normscope.cli.app import app
from normscope.transforms import convert, recalibrate

MODELS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    for _ in range(3):
        model(torch.randn(16, 3, 3, 3))
    return model

def plain():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(1)), torch.randn(2, 3, 3, 3)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "to_freeze.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    x = np.random.default_rng(0).normal(size=(40, 3, 3, 3)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    import to_freeze  # type: ignore[import-not-found]

    labels = to_freeze.net().eval()(torch.from_numpy(x)).argmax(1).numpy()
    np.savez(tmp_path / "labelled.npz", x=x, y=labels)
    np.save(tmp_path / "far.npy", 20 + 9 * x)
    return tmp_path


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*words])
    return result.exit_code, result.stdout, result.stderr


def net() -> torch.nn.Module:
    import to_freeze

    model: torch.nn.Module = to_freeze.net()
    return model


def test_freeze(home: Path) -> None:
    words = (
        "--policy",
        "both",
        "--select",
        "1",
        "--data",
        "x.npy",
        "--json",
        "r.json",
        "-o",
        "w.safetensors",
    )
    code, out, err = run("freeze", "to_freeze:net", *words)
    assert code == 0, err
    assert out.startswith(
        "freeze: 1 of 1 normalizations done\n"
        "  done  torch.nn.BatchNorm2d -> torch.nn.BatchNorm2d, statistics and gain and bias frozen: 1\n"
    )
    assert out.endswith(
        "written: w.safetensors\nin your code, after the weights are loaded: "
        "normscope.transforms.freeze(model, 'both', select=['1'], inplace=True)\n"
    )
    wanted = net().state_dict()
    written = load_file(home / "w.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[key], value) for key, value in wanted.items())
    assert json.loads((home / "r.json").read_text())["agreements"][0]["difference"] == 0.0


def test_freeze_of_nothing(home: Path) -> None:
    code, out, _ = run("freeze", "to_freeze:plain", "-o", "w.safetensors")
    assert code == 1
    assert "left  torch.nn.LayerNorm: 1: stores no statistics" in out
    assert not (home / "w.safetensors").exists()


def test_convert(home: Path) -> None:
    code, out, err = run("convert", "to_freeze:net", "--to", "group", "--groups", "2", "-o", "w.safetensors")
    assert code == 0, err
    assert out.startswith("convert: THE FUNCTION CHANGES: validate the model again")
    assert "statistics: was b c ... -> c; now b (g c) ... -> b g" in out
    converted, _ = convert(net(), "group", groups=2)
    converted.load_state_dict(load_file(home / "w.safetensors"))
    code, out, _ = run("convert", "to_freeze:net", "--to", "batch", "--dry-run")
    assert code == 1
    assert "is a BatchNorm2d already" in out


SAID = ("--source", "a generator", "--selection", "all of it")


def test_recalibrate(home: Path) -> None:
    words = ("--data", "far.npy", "-o", "w.safetensors", "--json", "r.json", "--batch-size", "16", *SAID)
    code, out, err = run("recalibrate", "to_freeze:net", *words)
    assert code == 0, err
    assert "exact: 40 samples in 3 batches, no labels" in out
    assert "source a generator, selection all of it" in out
    assert out.endswith("written: w.safetensors\n")
    model, report = recalibrate(net(), list(torch.from_numpy(np.load(home / "far.npy")).split(16)))
    written = load_file(home / "w.safetensors")
    assert all(torch.equal(written[key], value) for key, value in model.state_dict().items())
    provenance = json.loads((home / "r.json").read_text())["provenance"]
    assert (provenance["source"], provenance["selection"]) == ("a generator", "all of it")
    assert provenance["data"] == report.provenance["data"]


def test_worse_is_exit_1(home: Path) -> None:
    words = ("--data", "far.npy", "--dry-run", "--held-out", "labelled.npz", *SAID)
    code, out, err = run("recalibrate", "to_freeze:net", *words)
    assert code == 1, err
    assert "metric 1 -> " in out
    assert "WORSE; keep the statistics that were there" in out
    assert not list(home.glob("*.safetensors"))
    code, out, _ = run(
        "recalibrate", "to_freeze:net", "--data", "far.npy", "--dry-run", "--held-out", "x.npy", *SAID
    )
    assert code == 0
    assert "whether that is better or worse only a metric can tell" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--data", "x.npy", "-o", "w.safetensors", "--source", "a"), "Missing option '--selection'"),
        (("--data", "x.npy", "-o", "w.safetensors", "--selection", "a"), "Missing option '--source'"),
        (
            ("--data", "x.npy", "-o", "w.safetensors", "--source", " ", "--selection", "a"),
            "normscope: --source is empty: say it in a few words, it is kept with the result",
        ),
        (
            ("--data", "x.npy", *SAID),
            "normscope: name a file to write with -o FILE.safetensors, or rehearse with --dry-run",
        ),
        (
            ("--data", "x.npy", "--dry-run", "--method", "mean", *SAID),
            "normscope: method is one of 'exact', 'ema', 'layerwise'; got 'mean'",
        ),
    ],
)
def test_refused(home: Path, words: tuple[str, ...], text: str) -> None:
    code, _, err = run("recalibrate", "to_freeze:net", *words)
    assert code == 2
    assert text in " ".join(err.split()).replace(" │ ", " ")


@pytest.mark.parametrize(
    "words",
    [
        ("fold", "--data", "x.npy"),
        ("freeze",),
        ("convert", "--to", "group", "--groups", "2"),
        ("recalibrate", "--data", "x.npy", *SAID),
    ],
)
def test_a_report_said_done_of_weights_that_a_full_disk_did_not_take(
    home: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_output, "write", full)
    command, *options = words
    code, _, err = run(command, "to_freeze:net", *options, "-o", "w.safetensors", "--json", "r.json")
    assert (code, err.splitlines()[-1]) == (2, "normscope: [Errno 28] No space left on device")
    assert not (home / "r.json").exists()
