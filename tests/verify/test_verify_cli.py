"""The command: exit codes, files only where the user names them, one message for a wrong target."""

import json

import pytest
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
