"""Every study, at its smallest: it runs, decides, draws, tells, and goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normscope import studies
from normscope.studies.lab.book import write_docs
from normscope.studies.lab.runner import CELLS


@pytest.mark.parametrize("name", studies.names())
def test_a_study_runs(name: str, tmp_path: Path) -> None:
    study, out = studies.find(name), tmp_path / "out"
    assert study.name == name
    for package, _ in study.requires:
        pytest.importorskip(package)
    results = studies.run(study, out=out, scale="smoke", backend="sequential")
    table = results.table
    assert len(table.rows) >= len(study.grid("smoke")) * study.seeds["smoke"]
    assert {measure.name for measure in study.measures} <= set(table.columns)
    for decision in study.decisions:
        verdict = results.decided[decision.key]
        assert verdict.numbers, decision.key
        assert all(1 <= number <= 47 for number in decision.claims), decision.key
    told = json.loads((out / "results.json").read_text())
    assert [d["verdict"] for d in told["decisions"]] == [
        results.decided[d.key].verdict for d in study.decisions
    ]

    page = (out / "index.html").read_text()
    for words in (study.question, study.limits, study.intervention, study.held_fixed):
        assert words.split("'")[0] in page
    assert "Where it did not help or did not reproduce" in page
    assert "src=" not in page, "the page loads something"
    figures = {path.stem for path in (out / "figures").glob("*.svg")}
    assert len(figures) == len(study.figures) > 0
    assert figures == {path.stem for path in (out / "figures").glob("*.png")}
    assert figures == {path.stem for path in (out / "figures").glob("*.csv")}
    book = write_docs(results, tmp_path / "docs").read_text()
    assert all(f"{name}/{key}.svg" in book for key in figures)

    # Without its second half, torn inside a line, it goes on to the same table.
    lines = (out / CELLS).read_bytes()
    (out / CELLS).write_bytes(lines[: len(lines) // 2])
    again = studies.run(study, out=out, scale="smoke", backend="sequential", draw=False)
    assert again.table.csv() == table.csv()
    for scale in ("full", "quick"):
        assert len(study.grid(scale)) >= 1
