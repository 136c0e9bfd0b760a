"""Every rule's page is whole, and the example on it makes the rule fire."""

from __future__ import annotations

import re

import pytest

import normscope
from normscope.doctor.report import Report
from normscope.doctor.rules import KINDS, SECTIONS, all_rules

RULES = all_rules()


@pytest.mark.parametrize("code", RULES)
def test_page_is_whole(code: str) -> None:
    rule = RULES[code]
    assert rule.page.startswith(f"{rule.name}: "), "the first line is the name, a colon and a sentence"
    assert set(rule.kinds) <= set(KINDS)
    assert rule.kinds
    positions = [rule.page.index(f"## {section}") for section in SECTIONS]
    assert positions == sorted(positions)
    for start, end in zip(positions, [*positions[1:], len(rule.page)], strict=True):
        assert len(rule.page[start:end].splitlines()) > 1, "no section is empty"


@pytest.mark.parametrize("code", RULES)
def test_example_fires(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Report] = []
    real = normscope.check

    def recorded(*args: object, **kwargs: object) -> Report:
        reports.append(real(*args, **kwargs))  # type: ignore[arg-type]
        return reports[-1]

    monkeypatch.setattr(normscope, "check", recorded)
    report_of = normscope.Monitor.report

    def told(monitor: normscope.Monitor) -> Report:
        reports.append(report_of(monitor))
        return reports[-1]

    monkeypatch.setattr(normscope.Monitor, "report", told)
    blocks = re.findall(r"^```python\n(.*?)^```", RULES[code].page, flags=re.M | re.S)
    assert blocks, "the page has an example"
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, code, "exec"), names)
    wide = [line for block in blocks for line in block.splitlines() if len(line) > 88]
    assert not wide, "examples are copied from `normscope rule`"
    assert reports, "the example calls normscope.check, or the report() of a monitor"
    assert code in {f.code for report in reports for f in report.findings}
