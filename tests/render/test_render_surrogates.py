"""A module's name may hold half a surrogate pair, which UTF-8 has not: it is written as an escape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import normscope
from normscope.doctor.explain import Explanation
from normscope.doctor.report import Report
from normscope.render.github import to_github
from normscope.render.plain import document

HALF = "half\udc80"
ESCAPED = "half\\udc80"


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    model = nn.Sequential()
    model.add_module(HALF, nn.Conv2d(3, 3, 1))
    model.add_module(f"bn{HALF}", nn.BatchNorm2d(3, eps=0.0))
    return normscope.explain(model, torch.randn(8, 3, 4, 4), target=HALF)


@pytest.fixture(scope="module")
def report(explanation: Explanation) -> Report:
    """With such a name wherever a report has room for one."""
    found = explanation.report
    assert found.findings
    return replace(
        found,
        findings=tuple(
            replace(f, message=f.message + HALF, fix=HALF, evidence={HALF: HALF}) for f in found.findings
        ),
        not_run=tuple(replace(entry, reason=HALF, site=HALF) for entry in found.not_run),
        notes=(HALF,),
        source=f"{HALF}.py:3",
    )


def test_half_a_surrogate_in_a_name_raised_in_the_page(report: Report, tmp_path: Path) -> None:
    report.to_html(tmp_path / "page.html")
    assert ESCAPED in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_half_a_surrogate_in_a_name_could_not_be_printed(report: Report, explanation: Explanation) -> None:
    for text in (str(report), report._repr_html_(), document(report), to_github(report), str(explanation)):
        assert ESCAPED.encode() in text.encode("utf-8")
        assert HALF not in text


def test_json_keeps_the_name_by_an_escape_of_its_own(report: Report, explanation: Explanation) -> None:
    plain, sarif, steps = (
        json.loads(text.encode("utf-8"))
        for text in (report.to_json(), report.to_sarif(), explanation.to_json())
    )
    assert (plain["target"], steps["target"]) == (HALF, HALF)
    assert HALF in sarif["runs"][0]["results"][0]["properties"]["site"]
