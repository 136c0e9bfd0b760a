"""Names come from files: nothing in them may steer a terminal, end a line, or speak to a CI service."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from typer.testing import CliRunner

import normscope
from normscope.cli.app import app
from normscope.doctor.report import Finding, Report
from normscope.errors import CONTROL, FindingsError, printable
from normscope.identify.result import Evidence
from normscope.monitor.callback import MonitorCallback
from normscope.render.plain import document
from normscope.render.text import to_text
from normscope.transforms.report import SiteChange, TransformReport
from normscope.verify.evidence import Evidence as Checked

EVIL = "\x1b[31mbn\n::error::owned \u202e"
SHOWN = r"\x1b[31mbn\n::error::owned \u202e"
KEYS = ("weight", "bias", "running_mean", "running_var")


def harmless(text: str) -> bool:
    """No control character but line ends, and no line that is a workflow command of the file's."""
    return not CONTROL.search(text.replace("\n", " ")) and not re.search(r"^\s*::error::", text, re.MULTILINE)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("evil")
    state = {f"{EVIL}.{key}": torch.full((4,), float("nan")) for key in KEYS}
    torch.save(state, folder / "evil.pt")
    torch.save({prefix + key: torch.ones(4) for key in state for prefix in ("", "x")}, folder / "other.pt")
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 4, 3]) for name in ("x", "y")]
    norm = helper.make_node("BatchNormalization", ["x", *KEYS], ["y"], name=EVIL)
    stored = [numpy_helper.from_array(-torch.ones(4).numpy(), key) for key in KEYS]
    graph = helper.make_graph([norm], "g", value[:1], value[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "evil.onnx").write_bytes(model.SerializeToString())
    (folder / f"{SHOWN}.pt").write_text("broken")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["evil.pt", "evil.onnx"])
@pytest.mark.parametrize(
    "command", [["check"], ["check", "--format", "github"], ["spec"], ["compare", "other.pt"]]
)
def test_names_of_files_are_escaped(files: dict[str, Path], name: str, command: list[str]) -> None:
    word, *options = (str(files.get(part, part)) for part in command)
    found = CliRunner().invoke(app, [word, str(files[name]), *options])
    assert r"\x1b[31mbn\n" in found.output or "%0A" in found.output
    assert harmless(found.output), found.output


def test_names_in_errors_are_escaped(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["check", f"{tmp_path}/{EVIL}.pt"])
    assert found.exit_code == 2
    assert harmless(found.output), found.output
    traced = CliRunner().invoke(app, ["check", f"{tmp_path}/{EVIL}.pt", "--traceback"])
    assert harmless(traced.output), traced.output


def test_no_line_of_a_wrapped_report_is_a_command() -> None:
    name = f"{'x' * 100}::error::owned and {'y' * 94} ::error::owned"  # cut at 100 columns, or wrapped there
    text = to_text(Report((), (), (), (), target=name))
    assert "x3a:error::owned" in text
    assert harmless(text)


def test_reports_of_transforms_are_escaped() -> None:
    report = TransformReport("fold", (SiteChange(EVIL, "a", reason=EVIL),), notes=(EVIL,))
    lines = str(report).split("\n")
    assert len(lines) == 3
    assert lines[1] == f"  left  a: {SHOWN}: {SHOWN}"
    assert harmless(str(report))
    model = torch.nn.Sequential()
    model.add_module(EVIL, torch.nn.BatchNorm1d(3))
    model.add_module("last", torch.nn.Linear(3, 2))
    model.eval()
    x = torch.randn(4, 3)
    for transform, arguments in (
        (normscope.transforms.fold, (x,)),
        (normscope.transforms.freeze, ()),
        (normscope.transforms.recalibrate, (x,)),
        (normscope.transforms.convert, ("layer",)),
    ):
        assert harmless(str(transform(model, *arguments, dry_run=True)[1]))
    assert harmless(str(normscope.check(model, x)))


def test_answers_of_identify_compare_and_verify_are_escaped() -> None:
    evil = type(EVIL, (torch.nn.LayerNorm,), {})(4)
    x = torch.randn(3, 4)
    comparison = normscope.compare(evil, torch.nn.LayerNorm(4, eps=1e-3), x)
    assert str(comparison).startswith(f"{SHOWN} and LayerNorm: not the same function")
    apart = normscope.compare(evil, torch.nn.BatchNorm2d(4))  # no input has axes for both
    found = normscope.identify(evil, x)
    said = Evidence(EVIL, EVIL)
    checked = Checked(EVIL, EVIL, EVIL, EVIL, 0.0, 1.0, 2.0, EVIL)
    for answer in (
        comparison,
        *comparison.differences,
        comparison.counterexample,
        apart,
        found,
        said,
        checked,
    ):
        assert harmless(str(answer)), str(answer)
    assert str(said) == f"{SHOWN} (from {SHOWN})"


def test_findings_raised_and_warned_of_are_escaped() -> None:
    finding = Finding("NS101", EVIL, EVIL, "error")
    with pytest.raises(FindingsError) as raised:
        Report((finding,), (), (), ()).raise_for()
    assert harmless(str(raised.value))
    callback = MonitorCallback()
    with pytest.warns(UserWarning, match="NS101") as warned:
        callback._found(finding)
    assert all(harmless(str(one.message)) for one in warned)


def test_pages_are_escaped(tmp_path: Path) -> None:
    """What turns the direction of text, or steers the terminal of one who prints the file."""
    model = torch.nn.Sequential()
    for name in (EVIL, f"{EVIL}2"):
        model.add_module(name, torch.nn.BatchNorm1d(3, eps=0.0))
    report = normscope.check(model, torch.randn(16, 3), target=EVIL)
    assert report.findings
    finding = replace(report.findings[0], message=EVIL, fix=EVIL, evidence={EVIL: EVIL})
    report = replace(report, findings=(finding,), notes=(EVIL,), source=f"{EVIL}:3")
    report.to_html(tmp_path / "page.html")
    for page in (
        (tmp_path / "page.html").read_text(encoding="utf-8"),
        document(report),
        report._repr_html_(),
    ):
        assert SHOWN in page
        assert not CONTROL.search(page.replace("\n", " "))
        assert "bn\n" not in page


def test_what_is_no_command_stays() -> None:
    for text in ("aten::native_layer_norm", "naïve ß 正規化", "several\n    lines of a message", "# a ## b"):
        assert printable(text) == text
    assert printable("##[add-mask]x ##vso[task]") == r"\x23#[add-mask]x \x23#vso[task]"
