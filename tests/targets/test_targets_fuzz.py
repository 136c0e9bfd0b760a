"""Hostile and damaged checkpoints: a small form of ``benchmarks/fuzz_checkpoints.py``."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from normscope.errors import BadTarget
from normscope.targets.state_files import open_state

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the script needs pipes and resource limits")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    found = importlib.util.spec_from_file_location(
        "fuzz_checkpoints", ROOT / "benchmarks" / "fuzz_checkpoints.py"
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["fuzz_checkpoints"] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    yield module
    del sys.modules["fuzz_checkpoints"]


def tried(script: ModuleType, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's, on names that stand twice as they should
        tally = script.run(count)
    assert tally.failures == []
    assert tally.inputs >= count
    assert tally.reports > count // 50, (
        "hardly any file was read: the changes are too coarse to reach the depths"
    )
    assert len(tally.messages) > 10, "the files fail for hardly any reason"


def test_each_ends_in_a_report_or_one_error(script: ModuleType) -> None:
    tried(script, 200)


@pytest.mark.slow
def test_many_end_in_a_report_or_one_error(script: ModuleType) -> None:
    tried(script, 3000)


def test_the_script_would_notice(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error of another kind, and an endless message, are failures."""
    tally = script.Tally()
    (tmp_path / "a.pt").write_bytes(b"")
    for error in (ValueError("inside"), BadTarget("x" * 5000)):

        def fails(_: Path, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(script, "check_state", fails)
        tally.tried(tmp_path / "a.pt")
    assert [failure.split(":")[0] for failure in tally.failures] == [
        "ValueError",
        "a message of 5000 characters",
    ]


def test_found_by_it_an_archive_without_records(tmp_path: Path) -> None:
    """zipfile opens an end of archive alone; there is no last record then."""
    (tmp_path / "a.pt").write_bytes(b"PK\x05\x06" + b"\0" * 18)
    with pytest.raises(BadTarget, match=r"its archive holds no data\.pkl"):
        open_state(tmp_path / "a.pt")
