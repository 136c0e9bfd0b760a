"""The command: exit codes, files only where the user names them, one message for a wrong target."""

import json

import pytest
import torch
from typer.testing import CliRunner

from normscope import verify
from normscope.cli.app import app
from normscope.verify import Evidence, VerifyReport

runner = CliRunner()


def test_own_layers_pass_and_are_written_where_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["verify", "--json", "record.json"])
    assert result.exit_code == 0, result.output
    assert "-0.9950371902" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    assert json.loads((tmp_path / "record.json").read_text())["target"] == "torch.nn on this machine"


def test_a_layer_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine_verified.py").write_text("from torch import nn\nnorm = nn.GroupNorm(2, 6)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = runner.invoke(app, ["verify", "mine_verified:norm", "--json", "one.json"])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "one.json").read_text())["target"] == "mine_verified:norm"


def test_failure_is_exit_code_1(monkeypatch):
    failed = Evidence("t", "c", "x", "spec", 0.1, 1.0, 0.0, "because")
    monkeypatch.setattr(verify, "run", lambda: VerifyReport((failed,), "here", {}))
    result = runner.invoke(app, ["verify"])
    assert result.exit_code == 1
    assert "1 of 1 FAILED" in result.output


def test_a_layer_of_nan_is_exit_code_2_and_beside_others_named(tmp_path, monkeypatch):
    (tmp_path / "spoilt.py").write_text(
        "import torch\nfrom torch import nn\ntorch.set_grad_enabled(False)\nnorm = nn.LayerNorm(3)\n"
        "norm.weight[0] = torch.nan\nmodel = nn.Sequential(nn.LayerNorm(3), norm)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        alone = runner.invoke(app, ["verify", "spoilt:norm"])
        beside = runner.invoke(app, ["verify", "spoilt:model"])
    finally:
        torch.set_grad_enabled(True)
    assert alone.exit_code == 2
    assert "LayerNorm is not verifiable: because its weight holds NaN or infinity" in alone.output
    assert beside.exit_code == 0, beside.output
    assert "1 norm passed; 1 norm not verified: 1" in beside.output


DECLARED = """
import torch
from torch import nn
from normscope import NormSpec

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

SPEC = dict(stats="... d -> ...", weight="d", center=False, scale="rms")
def right(): return Norm(), NormSpec(**SPEC, eps=1e-6)
def with_shape(): return Norm(), NormSpec(**SPEC, eps=1e-6), (2, 7, 64)
wrong = (Norm(), NormSpec(**SPEC, eps=1e-5))
no_shape = (Norm(), NormSpec(**SPEC), "wide")
def model(): return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), Norm()), torch.randn(4, 64)
"""


@pytest.fixture
def declared(tmp_path, monkeypatch):
    (tmp_path / "declared_norms.py").write_text(DECLARED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, *more: runner.invoke(app, ["verify", f"declared_norms:{name}", *more])


def test_a_layer_with_its_declared_specification(declared):
    result = declared("right")
    assert result.exit_code == 0, result.output
    assert "declared_norms.Norm, declared: ... d -> ...; not centered; rms; eps 1e-06" in result.output
    assert result.output.splitlines()[-1].startswith("all ")
    assert "shape (2, 7, 64)" in declared("with_shape").output


def test_a_wrong_declaration_is_exit_code_1_and_says_what_would_pass(declared):
    result = declared("wrong")
    assert result.exit_code == 1
    assert "it would pass with = eps=1e-06" in result.output


def test_a_shape_that_is_none_is_exit_code_2(declared):
    result = declared("no_shape")
    assert result.exit_code == 2
    assert "is a tuple of positive integers; got 'wide'" in result.output + result.stderr


def test_norms_of_a_model_that_were_not_verified_are_in_the_text_and_the_json(declared):
    result = declared("model", "--json", "model.json")
    assert result.exit_code == 0, result.output
    assert "checks of 1 norm passed; 1 norm not verified: 2" in result.output
    with open("model.json") as file:
        (missed,) = json.load(file)["not_verified"]
    assert missed == {
        "site": "2",
        "type_name": "declared_norms.Norm",
        "why": "written by hand; verify it alone, as (layer, NormSpec)",
    }


def test_long_writes_the_arrays_out(declared):
    short, long = declared("right").output, declared("right", "--long").output
    assert max(map(len, short.splitlines())) <= 100
    assert long.count("measured") > 10
    assert "measured" not in short


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torch.nn:Linear"], "normscope: torch.nn:Linear needs the arguments in_features, out_features"),
        (["torch.nn:Identity"], "normscope: torch.nn.Identity is not a normalization that can be read."),
        (["demo", "--figures", "x"], "normscope: --figures draws torch.nn's own layers: leave out TARGET"),
    ],
)
def test_wrong_command_is_exit_code_2_and_one_message(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["verify", *arguments])
    assert result.exit_code == 2
    assert message in result.output + result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []
