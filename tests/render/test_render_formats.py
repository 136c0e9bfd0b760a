"""What renderers print is what the report holds, in formats that others can read."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from io import StringIO
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from normscope import families
from normscope.doctor.report import Finding, NotRun, Report, SiteRow
from normscope.doctor.rules import all_rules
from normscope.errors import BadInput, FindingsError
from normscope.render.github import to_github
from normscope.render.sites import print_sites
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


def test_the_hint_stands_under_what_was_not_run_and_only_where_something_can_be_passed() -> None:
    asked = replace(report(), not_run=(NotRun("NS502", "no optimizer was given: pass optimizer="),))
    assert "pass optimizer=\n        do this\nnote" in to_text(asked, hint="do this")
    assert "do this" not in to_text(report(), hint="do this")


def test_printing_draws_no_random_number() -> None:
    """Also not the first time, when rich is imported."""
    script = (
        "import random; before = random.getstate()\n"
        "from normscope.doctor.report import Report\n"
        "report = Report((), (), (), ())\n"
        "str(report); report._repr_html_(); import normscope.render.sites, rich.style\n"
        "assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def site(name: str, shape: tuple[int, ...] = (8, 3, 4, 4), mode_eval: str = "running") -> SiteRow:
    spec = families.batch_norm()
    return SiteRow(
        name, "module", "torch.nn.BatchNorm2d", spec, "", "batch", mode_eval, 1, (shape,), ("float32",)
    )


def printed(rows: list[SiteRow], width: int = 100, ran: bool = True) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    print_sites(rows, console, ran=ran)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_sites_of_one_specification_are_one_block() -> None:
    rows = [site("a"), site("b", (8, 6, 2, 2)), site(""), site("c", mode_eval="frozen")]
    assert printed(rows) == (
        "4 sites  torch.nn.BatchNorm2d\n"
        "    axes        b c ... -> c\n"
        "    divides by  sqrt(var + 1e-05)\n"
        "    affine      weight(c), bias(c)\n"
        "    arithmetic  float32\n"
        "    state       momentum 0.1, unbiased variance\n"
        "    train       batch\n"
        "    calls       1\n"
        "    sites       a, the model: eval running, shape 8x3x4x4\n"
        "                b: eval running, shape 8x6x2x2\n"
        "                c: eval frozen, shape 8x3x4x4\n"
    )
    assert len(printed(rows, 200).splitlines()) == 1 + len(rows)
    assert "not run" in printed(rows, 200, ran=False)
    many = printed([site(f"layer{i}.norm") for i in range(99)], 60)
    assert len(many.splitlines()) < 60
    assert max(map(len, many.splitlines())) <= 60
    assert all(f"layer{i}.norm" in many for i in range(99))


def test_a_model_that_is_itself_a_norm_has_a_name_everywhere(tmp_path: Path) -> None:
    finding = Finding("NS304", "", "Differs.", name="train-eval-gap")
    root = Report((finding,), (site(""),), ("NS101",), (), target="m:norm", versions={"torch": "2.6"})
    page = root._repr_html_()
    assert page.count("the model") == 2
    assert all_rules()["NS304"].summary in html.unescape(page)
    assert f"NS101: {all_rules()['NS101'].summary}" in html.unescape(page)
    assert "torch 2.6" in page
    assert "the model: Differs." in to_github(root)
    place = json.loads(root.to_sarif())["runs"][0]["results"][0]["locations"][0]["logicalLocations"][0]
    assert place["fullyQualifiedName"] == "m:norm"


@pytest.mark.parametrize("missing", ["altair", "vl_convert", "jinja2"])
def test_the_plain_page_is_whole_without_network_or_injection(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra the page has no pictures, and says what brings them."""
    monkeypatch.setitem(sys.modules, missing, None)
    report().to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert (
        f"This is the plain page. Pictures, filters and downloads need {missing}, which is not installed: "
        "pip install 'normscope[report]'"
    ) in html.unescape(page)
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
