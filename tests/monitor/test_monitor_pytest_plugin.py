"""The pytest plugin in test runs of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from normscope.errors import BadInput
from normscope.pytest_plugin import assert_clean

pytest_plugins = ("pytester",)

TESTS = """
import pytest, torch
import normscope
from normscope.pytest_plugin import assert_clean

def test_clean(normscope_check):
    report = normscope_check(torch.nn.LayerNorm(8), torch.randn(8, 8))
    assert isinstance(report, normscope.Report)
    assert_clean(report)

def test_found(normscope_check):
    norm = torch.nn.BatchNorm1d(8)
    norm.running_var.fill_(-1.0)
    assert_clean(normscope_check(norm, select=["NS301"]))

def test_milder(normscope_check):
    report = normscope_check(torch.nn.BatchNorm1d(8), select=["NS302"])  # fresh: info
    assert_clean(report)
    with pytest.raises(pytest.fail.Exception):
        assert_clean(report, "info")
"""


@pytest.fixture
def loaded() -> list[str]:
    """Arguments that load the plugin where the installed package does not do so by itself."""
    installed = any(e.value == "normscope.pytest_plugin" for e in entry_points(group="pytest11"))
    return [] if installed else ["-p", "normscope.pytest_plugin"]


def test_fixture_and_assertion(pytester: pytest.Pytester, loaded: list[str]) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess(*loaded)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "1 finding(s) at or above warning",
            "error * NS301 invalid-running-variance*",
            "*running_var is negative in 8 of 8 channels (lowest -1)*",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_plugin.py:*")


def test_settings_of_the_project_hold(pytester: pytest.Pytester, loaded: list[str]) -> None:
    pytester.makepyprojecttoml(
        """
        [tool.normscope]
        ignore = ["NS302"]
        dataset-size = 129
        baseline = "known.json"
        [[tool.normscope.ignore-site]]
        site = "0"
        codes = ["NS301"]
        reason = "known"
        """
    )
    pytester.makepyfile(
        """
        import pytest, torch
        import normscope
        from normscope.doctor.baseline import Baseline

        def broken():
            norm = torch.nn.BatchNorm1d(8)
            norm.running_var.fill_(-1.0)
            return torch.nn.Sequential(norm, torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))

        def codes(report):
            return {finding.code for finding in report.findings}

        def test_baseline_is_read(normscope_check):
            with pytest.raises(normscope.errors.BadInput, match="known.json does not exist"):
                normscope_check(broken())
            accepted = Baseline.of(normscope.check(broken(), torch.randn(64, 8), select=["NS501"])).to_json()
            with open("known.json", "w") as file:
                file.write(accepted)

        def test_settings(normscope_check):
            report = normscope_check(broken(), torch.randn(64, 8))
            assert codes(report) & {"NS301", "NS302", "NS501"} == set()
            assert {s.finding.code for s in report.suppressed} >= {"NS301", "NS501"}
            assert "NS204" in codes(report)  # 129 samples leave one

        def test_arguments_win(normscope_check):
            report = normscope_check(broken(), torch.randn(64, 8), ignore=["NS7"], dataset_size=128)
            assert "NS302" in codes(report)
            assert "NS204" not in codes(report)
        """
    )
    pytester.runpytest_subprocess(*loaded, "-p", "no:randomly").assert_outcomes(passed=3)


def test_it_is_registered() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\nnormscope = "normscope.pytest_plugin"\n' in text


def test_loading_it_is_light() -> None:
    script = (
        "import sys, normscope.pytest_plugin\n"
        "print([m for m in ('torch', 'numpy', 'normscope.doctor') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_such_severity() -> None:
    import torch

    import normscope

    with pytest.raises(BadInput) as error:
        assert_clean(normscope.check(torch.nn.Linear(2, 2)), "fatal")
    assert str(error.value) == "a severity is one of info, warning, error; got 'fatal'"
