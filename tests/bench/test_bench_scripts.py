"""The scripts of ``benchmarks/``, on next to no time."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from normscope import bench
from normscope.bench import Report

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, *options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, "--seconds", "1e-6", *options])
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")


def test_call_overhead(tmp_path, capsys):
    run("call_overhead.py", "--json", str(tmp_path / "calls.json"))
    found = json.loads((tmp_path / "calls.json").read_text())
    assert len(found) == 2 * 2 * 3  # dtypes, functions, modes
    printed = capsys.readouterr().out
    for what, numbers in found.items():
        assert what in printed
        assert numbers["torch_us"] > 0
        assert numbers["ours_us"] > 0


def test_kernels(tmp_path, monkeypatch, capsys):
    few = bench.cases(["rms_norm"], ["float32"], ["1x768"])
    monkeypatch.setattr(bench, "cases", lambda: few)
    monkeypatch.setattr(bench, "models", list)
    monkeypatch.setattr("normscope.tune_allocator", lambda: "left alone by the test")
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    run("kernels.py", "--json", str(tmp_path / "kernels.json"), "--text", str(tmp_path / "kernels.txt"))
    report = Report.from_json((tmp_path / "kernels.json").read_text())
    assert [str(row) for row in report.rows] == ["rms_norm 1x768 contiguous float32"]
    assert set(report.rows[0].forward.seconds) == {"eager", "compiled", "ours", "copy"}
    assert report.machine.allocator == "left alone by the test"
    assert (tmp_path / "kernels.txt").read_text() == capsys.readouterr().out
