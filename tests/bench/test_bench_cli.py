"""The command: a quick run, its JSON, and clear words for wrong options."""

import json

import pytest
import torch
from typer.testing import CliRunner

import normscope
from normscope.bench import Report
from normscope.bench.table import WIDTH
from normscope.cli.app import app

runner = CliRunner()
QUICK = [
    "bench",
    "--quick",
    "--seconds",
    "1e-6",
    "--no-tune-allocator",
    "--op",
    "rms-norm",
    "--dtype",
    "float32",
]


def test_quick_run(tmp_path):
    result = runner.invoke(app, [*QUICK, "--json", str(tmp_path / "numbers.json")])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= max(WIDTH, len(str(tmp_path)) + 30)
    assert "64x768 float32" in result.stdout
    assert "note: torch.compile was left out" in result.stdout
    report = Report.from_json((tmp_path / "numbers.json").read_text())
    assert [row.size for row in report.rows] == ["1x768", "64x768"]
    assert report.machine.torch == torch.__version__
    assert report.machine.allocator == "as it is"


def test_json_to_standard_output_is_nothing_but_json():
    result = runner.invoke(app, [*QUICK, "--size", "1x768", "--json", "-"])
    assert result.exit_code == 0, result.output
    assert [row["shape"] for row in json.loads(result.stdout)["rows"]] == [[1, 768]]


def test_threads_are_set_and_reported():
    before = torch.get_num_threads()
    try:
        result = runner.invoke(app, [*QUICK, "--size", "1x768", "--threads", "1", "--json", "-"])
    finally:
        torch.set_num_threads(before)
    assert json.loads(result.stdout)["machine"]["threads"] == 1


def test_the_allocator_is_tuned_unless_it_is_not_to_be(monkeypatch):
    monkeypatch.setattr(normscope, "tune_allocator", lambda: "tuned for the test", raising=False)
    options = [option for option in QUICK if option != "--no-tune-allocator"]
    result = runner.invoke(app, [*options, "--size", "1x768", "--json", "-"])
    assert json.loads(result.stdout)["machine"]["allocator"] == "tuned for the test"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "0"], "--threads must be 1 or more, got 0"),
        (["--seconds", "-1"], "--seconds must be more than 0, got -1"),
        (["--seconds", "inf"], "--seconds must be more than 0, got inf"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json: there is no directory nowhere"),
        (
            ["--dtype", "int8"],
            "there is no dtype 'int8' to measure; known: float32, bfloat16, float16, float64",
        ),
    ],
)
def test_wrong_options(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert result.stderr == f"normscope: {message}\n"
