"""What renderers print is what the report holds, in formats that others can read."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from normscope import families
from normscope.doctor.report import Finding, NotRun, Report, SiteRow
from normscope.errors import BadInput, FindingsError
from normscope.render.github import to_github
from normscope.render.text import to_text

NASTY = "block[0].norm <script>alert('&')</script> 100%: [bold]x[/bold]"


def report() -> Report:
    """One report with everything in it, and names that look like markup."""
    follow = Finding("NS304", "layer2.bn", "follows", name="train-eval-gap")
    return Report(
        findings=(
            Finding(
                "NS304",
                NASTY,
                "Batch statistics differ.\nSecond line, 50% off.",
                "error",
                {"effect": 1.25, "share": 0.5, "worst": float("inf"), "sets": [1, 2]},
                "Feed it as in training.",
                name="train-eval-gap",
                also=(follow,),
            ),
            Finding("NS303", "a", "Counter 0.", "info", {"counter": 0}, name="counter-inconsistent"),
            Finding("NS303", "b", "Counter 0.", "info", {"counter": 0}, name="counter-inconsistent"),
        ),
        sites=(
            SiteRow(
                "a",
                "module",
                "torch.nn.BatchNorm2d",
                families.batch_norm(),
                "",
                "batch",
                "running",
                1,
                ((8, 3, 4, 4),),
                ("float32",),
            ),
            SiteRow(
                "b:x",
                "inlined",
                "x / x.std()",
                None,
                "hand-written",
                "input",
                "input",
                1,
                ((2, 3),),
                ("float32",),
            ),
        ),
        passed=("NS101", "NS102"),
        not_run=(NotRun("NS701", "needs a mask"), NotRun("NS304", "cannot tell", "a")),
        notes=("something else",),
        target="pkg.mod:model",
        versions={"normscope": "0.1.0"},
    )


def test_json_follows_its_schema_and_holds_everything() -> None:
    schema = json.loads((files("normscope.render") / "report-schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(report().to_json())
    jsonschema.validate(document, schema)
    assert [f["code"] for f in document["findings"]] == ["NS304", "NS303", "NS303"]
    assert document["findings"][0]["site"] == NASTY
    assert document["findings"][0]["evidence"]["worst"] == "Infinity"
    assert document["findings"][0]["also"][0]["site"] == "layer2.bn"
    assert document["ok"] is False


def test_sarif_is_valid() -> None:
    path = os.environ.get("NORMSCOPE_SARIF_SCHEMA")
    if not path:
        pytest.skip("NORMSCOPE_SARIF_SCHEMA names no schema file; .ci/run fetches one")
    schema = json.loads(Path(path).read_text(encoding="utf-8"))
    document = json.loads(report().to_sarif())
    jsonschema.Draft7Validator(schema).validate(document)


def test_sarif_says_each_finding_with_its_rule() -> None:
    run = json.loads(report().to_sarif())["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert [r["level"] for r in run["results"]] == ["error", "warning", "note", "note"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert (
        run["results"][0]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"]
        == f"pkg.mod:model:{NASTY}"
    )


def test_github_is_one_line_a_group_and_escaped() -> None:
    lines = to_github(report()).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("::error title=NS304 train-eval-gap::block[0].norm")
    assert "%0ASecond line, 50%25 off." in lines[0]
    assert lines[1].startswith("::notice title=NS303 counter-inconsistent::a, b: Counter 0.")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_fits_the_terminal_and_says_all(width: int) -> None:
    text = to_text(report(), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for part in (
        "NS304",
        "[bold]x[/bold]",
        "effect 1.25",
        "layer2.bn",
        "Also at 1 more site: b.",
        "needs a mask",
    ):
        assert part in flat, part
    assert text.rstrip().endswith("1 error, 2 for information")
    assert "\x1b" not in text


def test_html_is_one_whole_page_without_network_or_injection(tmp_path: Path) -> None:
    report().to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    opened: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            opened.append(tag)
            assert not any(name in ("src", "href") for name, _ in attrs)

        def handle_endtag(self, tag: str) -> None:
            while opened and opened[-1] == "meta":
                opened.pop()
            assert opened.pop() == tag

    Parser().feed(page)
    assert [tag for tag in opened if tag != "meta"] == []
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert report()._repr_html_() in page


def test_raise_for_names_what_it_found() -> None:
    with pytest.raises(FindingsError) as caught:
        report().raise_for("error")
    assert str(caught.value) == (
        f"1 finding(s) at or above error:\nNS304 train-eval-gap (error) at {NASTY}: "
        "Batch statistics differ.\nSecond line, 50% off."
    )
    with pytest.raises(BadInput, match="a severity is one of info, warning, error; got 'fatal'"):
        report().raise_for("fatal")
    Report((), (), (), ()).raise_for("info")
    assert Report((), (), (), ()).ok
