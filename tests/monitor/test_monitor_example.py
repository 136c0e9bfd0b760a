"""The training of the example: three faults found, the sound run silent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "monitor_fashion_mnist.py"
FASHION = Path("/usr/share/datasets/fashion-mnist")


def run(folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert list(folder.iterdir()) == []
    return done.stdout


def test_small_form(tmp_path: Path) -> None:
    """Whatever data is there; the example asserts what must be found."""
    said = run(tmp_path, "--steps", "24")
    assert said.startswith("Fashion-MNIST: 20000 images\n" if FASHION.is_dir() else "no Fashion-MNIST in ")
    assert "  findings: 0\n" in said


@pytest.mark.slow
@pytest.mark.skipif(not FASHION.is_dir(), reason="apt-get install dataset-fashion-mnist")
def test_long_form(tmp_path: Path) -> None:
    said = run(tmp_path, "--steps", "400")
    assert said.startswith("Fashion-MNIST: 20000 images\n")


@pytest.mark.slow
def test_digits(tmp_path: Path) -> None:
    said = run(tmp_path, "--steps", "24", "--data", str(tmp_path / "none"))
    assert said.startswith(
        f"no Fashion-MNIST in {tmp_path / 'none'} (apt-get install dataset-fashion-mnist): 1797"
    )
