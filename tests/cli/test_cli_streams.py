"""Standard output and error in a process of its own: every encoding, every reader, other people's prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-c", "from normscope.cli import main; main()")
LOUD = """
import atexit, os
import torch

atexit.register(print, "at exit")

class Loud(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(3)

    def forward(self, x):
        print("python")
        os.write(1, b"descriptor\\n")
        os.system("echo child")
        return self.norm(x)

def loud():
    return Loud(), torch.randn(8, 3)
"""


def run(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([*COMMAND, *args], capture_output=True, cwd=cwd, env=environment)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which ``normscope`` is the command."""
    script = f"normscope() {{ '{COMMAND[0]}' -c '{COMMAND[2]}' \"$@\"; }}\n{line}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True)


def test_the_report_is_alone_in_standard_output(tmp_path: Path) -> None:
    (tmp_path / "noise.py").write_text(LOUD)
    done = run("check", "noise:loud", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"] == "noise:loud"
    assert {b"python", b"descriptor", b"child", b"at exit"} <= set(done.stderr.splitlines())


@pytest.mark.parametrize(
    "env",
    [
        {"LANG": "C", "PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "C"],
)
def test_any_encoding_can_be_printed_to(env: dict[str, str]) -> None:
    done = run("check", "demo", **env)
    assert done.returncode == 1
    assert done.stderr == b""
    assert done.stdout.isascii()
    assert rb" \xb7 " in done.stdout  # the dot between two numbers


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("normscope check demo:healthy >&-", 0),
        ("normscope check demo --format json >&- <&- 2>&-", 1),
        ("set -o pipefail; normscope check demo --format json | true", 1),
        ("set -o pipefail; normscope rule | true", 0),
        ("normscope check absent:model 2>&-", 2),
        ("normscope check absent:model 2>/dev/full", 2),
    ],
)
def test_a_reader_that_is_gone_changes_nothing(line: str, code: int) -> None:
    done = shell(line)
    assert done.returncode == code
    assert done.stderr == done.stdout == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["check demo", "rule"])
def test_a_report_that_cannot_be_written_is_no_verdict(command: str) -> None:
    done = shell(f"normscope {command} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "normscope: [Errno 28] No space left on device: 'standard output'\n"
