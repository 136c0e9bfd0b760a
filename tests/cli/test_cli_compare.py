"""``normscope compare`` on files: what it takes, what it prints, its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

from normscope.cli.app import app

MODELS = """
import torch
def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_to_compare.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "models_to_compare", raising=False)
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    torch.save(net.state_dict(), "a.pt")
    with torch.no_grad():
        net[1].weight[2] = 1.5
    torch.save({f"module.{name}": tensor for name, tensor in net.state_dict().items()}, "b.pt")
    torch.save({"fc.weight": torch.ones(4, 4)}, "none.pt")
    program = torch.export.export(net.eval(), (torch.randn(3, 4),))
    torch.export.save(program, "b.pt2")
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["compare", *args])


def test_exit_codes_and_text(folder: Path) -> None:
    same = run("a.pt", "models_to_compare:net")
    assert (same.exit_code, same.stdout) == (
        0,
        "a.pt and models_to_compare:net: the same normalizations\n  2 normalizations in both, 0 of them different\n",
    )
    other = run("a.pt", "b.pt")
    assert (other.exit_code, other.stdout) == (
        1,
        "a.pt and b.pt: not the same\n  2 normalizations in both, 1 of them different\n"
        "  - weight of 1 normalization at 1: 1 against 1.5 at [2], off by up to 0.5 (33.3 % of the largest)\n",
    )
    neither = run("none.pt", "none.pt")
    assert (neither.exit_code, neither.stdout) == (2, "none.pt and none.pt: no normalization in either\n")


def test_json(folder: Path) -> None:
    done = run("a.pt", "b.pt", "--format", "json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["same"], document["targets"]) == (1, False, ["a.pt", "b.pt"])
    (pair,) = (pair for pair in document["pairs"] if pair["differences"])
    (difference,) = pair["differences"]
    assert pair["name"] == "1"
    assert (difference["field"], difference["size"], difference["place"]) == ("weight", 0.5, [2])
    assert difference["deviations"] is None


def test_a_program_needs_trust(folder: Path) -> None:
    refused = run("b.pt2", "b.pt")
    assert refused.exit_code == 2
    assert "say so with --trust" in " ".join(refused.stderr.split())
    done = run("b.pt2", "b.pt", "--trust")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("a.pt", "b.pt", "--layout", "b c"), "--layout says nothing here: what files hold is compared, and nothing "
         "is run"),
        (("torch.nn:LayerNorm(4)", "torch.nn:LayerNorm(4)", "--trust"), "--trust says nothing here: neither target is "
         "a .pt2 program"),
        (("a.pt", "missing.pt"), "there is no file missing.pt"),
        (("a.pt", "models_to_compare:nothing"), "'models_to_compare' has no attribute 'nothing'"),
        (("a.pt", "b.pt", "--format", "xml"), "--format is text or json; got 'xml'"),
    ],
)  # fmt: skip
def test_commands_that_are_wrong(folder: Path, args: tuple[str, ...], said: str) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
