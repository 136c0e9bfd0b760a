"""The calibration runs, writes its page, and finds no alarm in the few runs of its quick form."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("skimage")
pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    found = importlib.util.spec_from_file_location("false_alarms", ROOT / "scripts" / "false_alarms.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["false_alarms"] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    yield module
    del sys.modules["false_alarms"]


def test_quick_form(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["false_alarms.py", "--quick", "--out", str(out)])
    script.main()
    rows = re.findall(r"^\| (NS\d{3}) \S+ \| (\d+) \| (\d+) \|", out.read_text(encoding="utf-8"), flags=re.M)
    assert [code for code, _, _ in rows] == list(script.CODES)
    assert all(int(runs) > 0 for _, runs, _ in rows)
    # forty steps are a short training: one alarm would be no surprise, many would be a broken threshold
    # (NS311 is right there: after forty updates the statistics still hold some of their initial values)
    assert sum(int(alarms) for code, _, alarms in rows if code != "NS311") <= 1


@pytest.mark.parametrize(("alarms", "runs", "bound"), [(0, 200, 0.01487), (1, 20, 0.2161), (3, 3, 1.0)])
def test_bound_is_that_of_the_tables(script: ModuleType, alarms: int, runs: int, bound: float) -> None:
    assert script.upper_bound(alarms, runs) == pytest.approx(bound, rel=1e-3)
