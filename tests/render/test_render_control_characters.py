"""Names come from files: nothing in them may steer a terminal, end a line, or speak to a CI service."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from typer.testing import CliRunner

import normscope
from normscope.cli.app import app
from normscope.doctor.report import Report
from normscope.errors import CONTROL, printable
from normscope.render.text import to_text
from normscope.transforms.report import SiteChange, TransformReport

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


def test_what_is_no_command_stays() -> None:
    for text in ("aten::native_layer_norm", "naïve ß 正規化", "several\n    lines of a message", "# a ## b"):
        assert printable(text) == text
    assert printable("##[add-mask]x ##vso[task]") == r"\x23#[add-mask]x \x23#vso[task]"
