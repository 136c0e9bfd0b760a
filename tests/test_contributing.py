"""The rule that CONTRIBUTING shows works as it stands."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import normscope
from normscope.doctor import rules

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_rule_of_the_guide_fires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"PAGE_AND_RULE = '''\n(.*?)'''", TEXT, re.S)
    assert found is not None
    path = tmp_path / "ns199_large_eps.py"
    path.write_text(found[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ns199_large_eps", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ns199_large_eps", module)
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    spec.loader.exec_module(module)
    monkeypatch.setattr("normscope.doctor.check.all_rules", lambda: dict(rules._RULES))
    report = normscope.check(torch.nn.LayerNorm(8, eps=0.5))
    assert [(f.code, f.name, f.evidence) for f in report.findings if f.code == "NS199"] == [
        ("NS199", "large-eps", {"eps": 0.5})
    ]
