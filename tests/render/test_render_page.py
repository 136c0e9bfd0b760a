"""The page in a browser: it draws, loads nothing, filters, saves, and can be read by anyone.

Needs Debian's Chromium, driven by Playwright, which brings no browser of its own here; NORMSCOPE_REQUIRE_BROWSER makes
a missing one a failure. With NORMSCOPE_AXE, the path of axe-core's ``axe.min.js``, its rules are applied too.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import normscope
from normscope.doctor.report import Report
from normscope.render import page
from normscope.render.html import to_html

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
pytest.importorskip("jinja2")

EVIL = '"><img src=x onerror=alert(1)><script>alert(2)</script>'
"""a module's name"""
FIGURES = {
    "axes",
    "denominators",
    "channel-means",
    "channel-variances",
    "conditioning",
    "companions",
    "spectrum",
    "effective-samples",
}


def checked() -> Report:
    """A small network with faults, and a module whose name is an attack."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 6, 3))
    model.add_module(EVIL, nn.BatchNorm2d(6))
    model.add_module("groups", nn.GroupNorm(2, 6))
    model.add_module("layer", nn.LayerNorm([8, 8]))
    x = torch.randn(12, 3, 10, 10)
    for _ in range(20):  # running statistics
        model(x)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    return normscope.check(
        model.eval(),
        x * 3 + 1,
        optimizer=optimizer,
        target="<b>model</b> & 'friends'",
        select=["NS2", "NS3", "NS4", "NS5"],
    )


@pytest.fixture(scope="module")
def report() -> Report:
    return checked()


@pytest.fixture(scope="module")
def address(report: Report, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.to_html(path)
    assert path.stat().st_size < 2_000_000
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        if os.environ.get("NORMSCOPE_REQUIRE_BROWSER"):
            pytest.fail("chromium is not installed: apt-get install chromium")
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=chromium)
        yield found
        found.close()


class Opened:
    """A page in a context of its own, with all that it said, asked for and tried."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def shown(self) -> list[str]:
        """Rule codes of the findings in sight."""
        return [
            e.get_attribute("data-rule") for e in self.page.query_selector_all(".finding") if e.is_visible()
        ]

    def unfold(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Opened]:
    found = Opened(browser, address)
    yield found
    found.context.close()


def test_it_draws_loads_nothing_and_says_nothing(opened: Opened, address: str) -> None:
    opened.unfold()
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("data:")] == [address]
    for figure in opened.page.query_selector_all("figure"):
        key = figure.get_attribute("class")
        box = figure.query_selector("svg").bounding_box()
        assert box["width"] > 100, key
        assert box["height"] > 60, key
        marks = figure.evaluate(
            "f => [...f.querySelectorAll('svg path, svg rect, svg line')]"
            ".filter(m => m.getBBox().width + m.getBBox().height > 0).length"
        )
        assert marks > 5, key
    keys = {
        name.split()[-1]
        for name in opened.page.eval_on_selector_all("figure", "all => all.map(f => f.className)")
    }
    assert keys >= FIGURES


def test_a_name_that_is_markup_is_only_a_name(opened: Opened, report: Report) -> None:
    opened.unfold()
    assert opened.page.title() == "Normscope: <b>model</b> & 'friends'"
    assert opened.page.inner_text("h1") == "<b>model</b> & 'friends'"
    assert opened.page.inner_text("#row-1 th") == EVIL
    assert opened.page.query_selector("img") is None
    assert opened.page.evaluate("document.scripts.length") == 1
    assert opened.said == []


def test_nothing_else_may_run(opened: Opened) -> None:
    """The policy of the page stops a script that is not the page's own, were one to get in."""
    opened.page.evaluate(
        "() => { const script = document.createElement('script'); script.textContent = 'window.got = 1';"
        " document.body.append(script); }"
    )
    assert opened.page.evaluate("window.got") is None
    assert any("Content Security Policy" in line for line in opened.said)


def test_filters(opened: Opened, report: Report) -> None:
    codes = opened.shown()
    entries = len(codes)
    assert entries >= 4
    assert opened.page.inner_text("#status") == f"{entries} of {entries} entries"
    opened.page.uncheck("input[value=info]")
    grave = [f.code for f in report.findings if f.severity != "info"]
    assert set(opened.shown()) == set(grave)
    opened.page.check("input[value=info]")
    opened.page.select_option("select[name=rule]", "NS502")
    assert opened.shown() == ["NS502"]
    opened.page.select_option("select[name=rule]", "")
    opened.page.fill("input[name=site]", "GROUPS")
    at_groups = {f.code for f in _flat(report) if f.site == "groups"}
    assert at_groups <= set(opened.shown()) < set(codes)
    assert [
        row.get_attribute("data-name")
        for row in opened.page.query_selector_all("tbody tr")
        if row.is_visible()
    ] == ["groups"]
    assert opened.page.inner_text("#status").endswith("1 of 3 sites")
    opened.page.fill("input[name=site]", "nowhere")
    assert opened.shown() == []
    opened.page.fill("input[name=site]", "")
    assert opened.shown() == codes


def _flat(report: Report) -> list[Any]:
    return [f for finding in report.findings for f in (finding, *finding.also)]


def test_saved_numbers_are_the_measured_ones(opened: Opened, report: Report, tmp_path: Path) -> None:
    opened.unfold()
    measured = report.measurements[EVIL]
    with opened.page.expect_download() as download:
        opened.page.click("#site-1 .denominators a[download]")
    rows = saved_csv(download.value, tmp_path)
    assert sum(int(row["sets"]) for row in rows) == sum(h["sets"] for h in measured["denominators"])
    with opened.page.expect_download() as download:
        opened.page.click("#site-1 .companions a[download]")
    rows = saved_csv(download.value, tmp_path)
    flat = [rate for line in measured["sensitivity"]["matrix"] for rate in line]
    assert [float(row["rate"]) for row in rows] == flat
    assert (
        download.value.suggested_filename
        == "normscope-img-src-x-onerror-alert-1-script-alert-2-script-companions.csv"
    )


def saved_csv(download: Any, folder: Path) -> list[dict[str, str]]:
    path = folder / "saved.csv"
    download.save_as(path)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_saved_picture_stands_by_itself(opened: Opened, tmp_path: Path) -> None:
    opened.unfold()
    for figure in ("#site-1 .channel-means", "#network .network-errors"):
        with opened.page.expect_download() as download:
            opened.page.click(f"{figure} button[data-save]")
        path = tmp_path / "saved.svg"
        download.value.save_as(path)
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert float(root.get("width", "0")) > 200
        text = path.read_text(encoding="utf-8")
        assert "var(" not in text
        assert "script" not in text
        assert download.value.suggested_filename.endswith(".svg")


def test_the_table_sorts(opened: Opened) -> None:
    def column(number: int) -> list[str]:
        return [e.inner_text() for e in opened.page.query_selector_all(f"tbody tr > :nth-child({number})")]

    assert column(1) == ["1", "2", "3"]
    heading = opened.page.locator("thead th").nth(9)
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column(10)[0] != "–"  # what was not measured stays below
    assert column(10)[-1] == "–"
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(10)[-1] == "–"
    opened.page.locator("thead th").nth(1).locator("button").click()
    assert column(2) == sorted(column(2), key=str.lower)
    assert heading.get_attribute("aria-sort") is None


def test_the_keyboard_reaches_everything(opened: Opened) -> None:
    press = opened.page.keyboard.press

    def focused() -> str:
        return opened.page.evaluate("document.activeElement.outerHTML")

    press("Tab")
    assert 'class="skip"' in focused()
    assert (
        opened.page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    )  # seen once it has focus
    seen = []
    for _ in range(400):
        press("Tab")
        if focused().startswith("<body"):
            break
        seen.append(focused()[:80])
        style = opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none", focused()[:200]
    for what in (
        "#network",
        'value="error"',
        "<select",
        'type="search"',
        "<summary",
        'class="tile',
        "<button",
        "download=",
    ):
        assert any(what in element for element in seen), what
    opened.page.locator("details.portrait summary").last.focus()
    before = opened.page.evaluate("document.activeElement.parentElement.open")
    press("Enter")
    assert opened.page.evaluate("document.activeElement.parentElement.open") is not before


def test_a_tile_unfolds_the_pictures_of_its_site(opened: Opened) -> None:
    opened.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = false; })")
    opened.page.click('a.tile[href="#site-2"]')
    opened.page.wait_for_function("document.getElementById('site-2').open")


CONTRAST = """() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parsed = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parsed(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll("body *")) {
    if (!e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const style = getComputedStyle(e);
    const inside = e.closest("svg");
    const paint = parsed(inside ? style.fill : style.color);
    const below = inside ? parsed(getComputedStyle(inside.querySelector("rect")).fill) : ground(e);
    const [a, b] = [light(paint), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push([e.textContent.slice(0, 40), e.className, ratio]);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_width_and_scheme(browser: Any, address: str, width: int, scheme: str) -> None:
    opened = Opened(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.unfold()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width  # nothing to push sideways
    for picture in opened.page.query_selector_all(".picture svg"):
        box = picture.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    dark = opened.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
    assert dark is (scheme == "dark")
    assert opened.page.evaluate(CONTRAST) == []  # WCAG 2.2, 1.4.3: 4.5 to 1
    opened.context.close()


def test_without_script_it_is_a_plain_page(
    browser: Any, address: str, report: Report, tmp_path: Path
) -> None:
    opened = Opened(browser, address, java_script_enabled=False)
    page_ = opened.page
    assert len(opened.shown()) == page_.locator(".finding").count() > 0
    assert not page_.is_visible("#filter")
    assert page_.locator("button:visible").count() == 0
    with page_.expect_download() as download:
        page_.click("#network .network-errors a[download]")
    rows = saved_csv(download.value, tmp_path)
    assert {row["site"] for row in rows} == {row.name for row in report.sites}
    opened.context.close()


def test_motion_is_left_out_where_asked(browser: Any, address: str) -> None:
    for wish, behaviour in (("reduce", "auto"), ("no-preference", "smooth")):
        opened = Opened(browser, address, reduced_motion=wish)
        assert opened.page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == behaviour
        opened.context.close()


def test_a_screen_reader_is_told_the_same(opened: Opened) -> None:
    opened.unfold()
    assert [e.evaluate("e => e.tagName") for e in opened.page.query_selector_all("body > *:not(script)")] == [
        "A",
        "HEADER",
        "MAIN",
        "FOOTER",
    ]
    levels = opened.page.eval_on_selector_all("h1, h2, h3", "all => all.map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    for picture in opened.page.query_selector_all("[role=img]"):
        title, caption = (
            opened.page.inner_text(f"#{picture.get_attribute(name)}")
            for name in ("aria-labelledby", "aria-describedby")
        )
        assert len(title) > 3
        assert len(caption) > 40
    assert opened.page.query_selector("table caption") is not None
    ids = opened.page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    # a state is never told by colour alone
    assert all(
        e.inner_text().strip() for e in opened.page.query_selector_all(".tile .said, td.state, .badge")
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, address: str, scheme: str) -> None:
    path = os.environ.get("NORMSCOPE_AXE")
    if not path:
        pytest.skip("NORMSCOPE_AXE names no axe.min.js; .ci/run fetches one")
    opened = Opened(browser, address, color_scheme=scheme, bypass_csp=True)
    opened.unfold()
    opened.page.add_script_tag(path=path)
    found = opened.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in found["violations"]] == []
    opened.context.close()


def test_a_large_model_stays_small_and_says_what_is_left_out(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuple(replace(report.sites[1], name=f"block{i}.norm") for i in range(300))
    measured = {row.name: report.measurements["groups"] for row in many}
    large = replace(report, sites=many, measurements=measured, findings=())
    monkeypatch.setattr(page, "MOST_DRAWN", 3)
    text = to_html(large)
    assert len(text.encode()) < 2_000_000
    assert "Pictures are drawn of 3 of 300 sites" in text
    assert {n for n in range(1, 301) if f'id="site-{n}"' in text} == {1, 101, 201}  # spread over the network
    monkeypatch.setattr(page, "BYTES", 1)
    assert "Pictures are drawn of 0 of 300 sites" in to_html(large)


def test_a_giant_model_is_listed_in_part(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    many = tuple(
        replace(report.sites[1], name=f"encoder.layers.{i}.attention.output.LayerNorm") for i in range(5000)
    )
    follow = tuple(replace(report.findings[0], site=row.name, also=()) for row in many)
    giant = replace(report, sites=many, measurements={}, findings=(replace(report.findings[0], also=follow),))
    monkeypatch.setattr(page, "MOST_DRAWN", 1)
    text = to_html(giant)
    assert len(text.encode()) < 2_000_000
    assert "These are the first 1000 of 5000 sites" in text
    assert text.count('<tr id="row-') == 1000
    assert "And 4940 more." in text


def test_a_report_without_measurements_has_a_page(report: Report, browser: Any, tmp_path: Path) -> None:
    for name, bare in {
        "bare": replace(report, measurements={}),
        "empty": Report((), (), (), ()),
        "json": replace(report, measurements=json.loads(report.to_json())["measurements"]),
    }.items():
        path = tmp_path / f"{name}.html"
        bare.to_html(path)
        opened = Opened(browser, path.as_uri())
        assert opened.said == []
        opened.context.close()
    assert (tmp_path / "json.html").read_text() == to_html(report)


def test_one_report_gives_one_page(report: Report) -> None:
    assert to_html(report) == to_html(report)
