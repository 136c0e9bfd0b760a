"""Every example runs by itself in a few seconds and prints the numbers that it asserts."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
LONGER = {"monitor_fashion_mnist"}
"""trains: tests/monitor/test_monitor_example.py runs it"""
TOPICS = {
    "axes_and_special_cases",
    "companions",
    "fault_found_by_check",
    "jacobian",
    "rms_half_precision",
    "running_state",
}
LIMIT = 5.0
"""seconds of processor time"""


def test_every_topic_has_its_script():
    assert {path.stem for path in EXAMPLES} >= TOPICS


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem not in LONGER], ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    before = os.times()
    started = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(re.findall(r"\d", done.stdout)) > 5, "an example prints its numbers"
    assert list(tmp_path.iterdir()) == []
    assert spent < LIMIT, f"{spent:.1f} s of processor time, {time.monotonic() - started:.1f} s of wall time"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_what_it_shows(path):
    text = path.read_text()
    assert text.startswith('"""')
    assert "assert " in text
    assert "print(" in text
