"""The commands: what they print, what they refuse, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from normscope.cli import settings
from normscope.cli.app import app
from normscope.errors import BadInput

MODELS = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
    def forward(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))

def trained():
    torch.manual_seed(0)
    model = Net()
    for _ in range(60):
        model(torch.randn(16, 3, 12, 12))
    return model.eval()

def with_data():
    torch.manual_seed(1)
    return trained(), torch.randn(16, 3, 12, 12)

class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such luck")

def raises():
    return Raises(), torch.zeros(2, 3)

def needs(width):
    return nn.Linear(width, 1)

def broken():
    raise KeyError("config")

class Leaves(nn.Module):
    def forward(self, x):
        sys.exit(0)

def leaves():
    return Leaves(), torch.zeros(8, 3)

def leaves_in_the_loss():
    model = nn.Sequential(nn.BatchNorm1d(3))
    return {"model": model, "inputs": torch.randn(8, 3), "loss_fn": lambda output: sys.exit(0)}

def leaves_at_once():
    sys.exit(0)

class Unusual(BaseException):
    pass

def unusual():
    raise Unusual("one\\n\\ntwo")

class Speechless(Exception):
    def __str__(self):
        raise ValueError("no words")

def speechless():
    raise Speechless

def talks():
    print("calling")
    return nn.Sequential(Talks(), nn.LayerNorm(3)), torch.randn(8, 3)

class Talks(nn.Module):
    def forward(self, x):
        print("model speaks")
        return x

class ByHand(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / x.std(0)

def a_dict():
    return {"model": nn.LayerNorm(3), "input": torch.randn(8, 3)}

def no_model():
    return {"model": "net"}

def __getattr__(name):
    if name == "mined":
        raise OSError("do not touch")
    raise AttributeError(name)

number = 3
"""


class Done:
    def __init__(self, *args: str) -> None:
        result = CliRunner().invoke(app, list(args))
        self.returncode, self.stdout, self.stderr = result.exit_code, result.stdout, result.stderr


def run(*args: str, cwd: Path | None = None) -> Done:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(cwd or Path(__file__).parent)
        try:
            return Done(*args)
        finally:
            sys.modules.pop("models", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user")
    (path / "models.py").write_text(MODELS)
    torch.manual_seed(2)
    np.save(path / "batch.npy", torch.randn(16, 3, 12, 12).numpy())
    np.save(path / "shifted.npy", (torch.randn(16, 3, 12, 12) * 3 + 5).numpy())
    np.save(path / "nan.npy", np.full((8, 3, 12, 12), np.nan, dtype=np.float32))
    np.save(path / "empty.npy", np.zeros((0, 3, 12, 12), dtype=np.float32))
    np.save(path / "flat.npy", np.zeros((8, 5), dtype=np.float32))
    np.save(path / "ints.npy", np.zeros((8, 3, 12, 12), dtype=np.int64))
    return path


def test_the_demo_has_findings_and_the_healthy_one_has_none() -> None:
    done = run("check", "demo", "--format", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    schema = json.loads((files("normscope.render") / "report-schema.json").read_text())
    jsonschema.validate(document, schema)
    grave = {f["code"] for f in document["findings"] if f["severity"] != "info"}
    assert {"NS103", "NS302", "NS304", "NS308"} <= grave, grave
    assert not any("internal error" in entry["reason"] for entry in document["not_run"])
    healthy = run("check", "demo:healthy")
    assert healthy.returncode == 0, healthy.stdout


def test_data_decides(folder: Path) -> None:
    good = run("check", "models:trained", "--data", "batch.npy", cwd=folder)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = run("check", "models:trained", "--data", "shifted.npy", cwd=folder)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert "NS304" in bad.stdout
    quiet = run("check", "models:trained", "--data", "shifted.npy", "--ignore", "NS3,NS4", cwd=folder)
    assert quiet.returncode == 0, quiet.stdout
    random = run("check", "models:trained", "--input", "8x3x12x12", cwd=folder)
    assert random.returncode == 0, random.stdout
    assert "random inputs say nothing about your data" in " ".join(random.stdout.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing.here:model"], "cannot import 'nothing.here': there is no module 'nothing'"),
        (["models"], "cannot read the target 'models': write package.module:attribute"),
        (
            ["models.py:trained"],
            "'models.py:trained' looks like a path; write it as an import: models:trained",
        ),
        (["models:absent"], "'models' has no attribute 'absent'; it has:"),
        (
            ["models:leaves"],
            "the model raised on these inputs (inputs: (8, 3) float32) in eval mode SystemExit: 0",
        ),
        (["models:leaves_in_the_loss"], "loss_fn(output) raised SystemExit: 0"),
        (["models:leaves_at_once"], "calling models:leaves_at_once raised SystemExit: 0"),
        (["models:unusual"], "calling models:unusual raised Unusual: one\n    two\n"),
        (
            ["models:speechless"],
            "calling models:speechless raised Speechless (its message cannot be shown: ValueError in __str__)",
        ),
        (["models:mined"], "looking up 'mined' in 'models' raised OSError: do not touch"),
        (
            ["models:a_dict"],
            "models:a_dict returned a dict with input; known: model, inputs, targets, mask, loss_fn, optimizer",
        ),
        (
            ["models:no_model"],
            "models:no_model returned a dict whose model is a str; expected a torch.nn.Module",
        ),
        (["models:number"], "models:number is a int; expected a torch.nn.Module"),
        (["models:needs"], "models:needs needs the arguments width; wrap it in a function"),
        (["models:broken"], "calling models:broken raised KeyError: 'config'"),
        (
            ["models:raises"],
            "the model raised on these inputs (inputs: (2, 3) float32) in eval mode RuntimeError: no such luck.",
        ),
        (
            ["models:trained", "--data", "flat.npy"],
            "the model raised on these inputs (inputs: (8, 5) float32)",
        ),
        (
            ["models:trained", "--data", "ints.npy"],
            "the model raised on these inputs (inputs: (8, 3, 12, 12) int64)",
        ),
        (["models:trained", "--data", "nan.npy"], "inputs holds 3456 NaN of 3456 values"),
        (["models:trained", "--data", "empty.npy"], "an empty batch: inputs has shape (0, 3, 12, 12)"),
        (["models:trained", "--data", "absent.npy"], "there is no file absent.npy"),
        (
            ["models:trained", "--data", "batch.npy", "--input", "8x3"],
            "--data and --input exclude each other",
        ),
        (["models:trained", "--select", "NS9"], "select names 'NS9', which begins no rule's code"),
        (["models:trained", "--fail-on", "fatal"], "a severity is one of info, warning, error; got 'fatal'"),
        (["models:trained", "--format", "xml"], "--format is one of text, json, sarif, github; got 'xml'"),
        (["models:trained", "--select", ","], "--select names no rule; write codes or their beginnings"),
        (["models:trained", "--html", "no/such/folder/x.html"], "does not exist; make it first"),
        (["models:trained", "--html", ""], "--html . is a folder; name a file to write, such as report.html"),
        (
            ["models:trained", "--html", "."],
            "--html . is a folder; name a file to write, such as report.html",
        ),
        (["models:trained", "--html", "/dev/full"], "--html /dev/full is no ordinary file; name a file"),
        (
            ["models:trained", "--html", "n" * 300],
            f"--html {'n' * 300} cannot be written (File name too long); name a file to write",
        ),
        (["demo:unknown"], "there is no demo 'unknown'; there are faulty, healthy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_message_and_exit_2(args: list[str], words: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = run("check", *args, cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    assert [p for p in sorted(folder.rglob("*")) if "__pycache__" not in str(p)] == [
        p for p in before if "__pycache__" not in str(p)
    ]


def test_traceback_on_request(folder: Path) -> None:
    done = run("check", "models:raises", "--traceback", cwd=folder)
    assert "Traceback" in done.stderr
    assert "no such luck" in done.stderr


def test_settings_are_read_and_the_command_line_wins(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "shifted.npy").write_bytes((folder / "shifted.npy").read_bytes())
    (tmp_path / "pyproject.toml").write_text('[tool.normscope]\nignore = ["NS3", "NS4"]\n')
    args = ("check", "models:trained", "--data", "shifted.npy")
    assert run(*args, cwd=tmp_path).returncode == 0
    assert run(*args, "--ignore", "NS501", cwd=tmp_path).returncode == 1
    (tmp_path / "pyproject.toml").write_text("[tool.normscope]\nignored = 3\n")
    wrong = run(*args, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "[tool.normscope] has no setting 'ignored'; known: select, ignore, fail-on" in wrong.stderr


def test_sizes_are_at_least_one(folder: Path) -> None:
    for size in ("-5", "0", "many"):
        done = run("check", "models:trained", "--dataset-size", size, cwd=folder)
        assert done.returncode == 2
        assert "--dataset-size" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tool = 3", "[tool] must be a table, got 3"),
        ("[tool]\nnormscope = 3", "[tool.normscope] must be a table, got 3"),
        ("[tool.normscope]\ndataset-size = -3", "dataset-size is a number of samples, at least 1; got -3"),
        ("[tool.normscope]\ndataset-size = true", "dataset-size must be a int, got True"),
        ('[tool.normscope]\nfail-on = "fatal"', "fail-on is one of info, warning, error; got 'fatal'"),
        (
            '[tool.normscope]\nfrozen-policy = "all"',
            "frozen-policy is one of statistics, affine, both; got 'all'",
        ),
        ("[tool.normscope]\nselect = [3]", "select must be a list of strings, got [3]"),
        ('[tool.normscope]\nignore = ["ns9"]', "ignore names 'NS9', which begins no rule's code; known: NS1"),
        ("[tool.normscope", "is not valid TOML: "),
    ],
)
def test_wrong_settings_are_named_with_their_file(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        settings.load(tmp_path)
    assert str(caught.value).startswith(str(file))
    assert words in str(caught.value)


def test_codes_are_read_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.normscope]\nselect = ["ns3", " NS101"]')
    assert settings.load(tmp_path).select == ("NS3", "NS101")


@pytest.mark.parametrize("form", ["json", "sarif", "github", "text"])
def test_what_the_model_prints_is_not_in_the_report(form: str, folder: Path) -> None:
    done = run("check", "models:talks", "--format", form, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("calling\nmodel speaks\n")
    assert "model speaks" not in done.stdout
    if form in ("json", "sarif"):
        json.loads(done.stdout)


def test_how_to_give_what_rules_need_is_said_once(folder: Path) -> None:
    def text(*args: str) -> str:
        return " ".join(run("check", *args, cwd=folder).stdout.split())

    assert (
        text("models:with_data").count("is given by --data FILE, with the keys inputs, targets and mask") == 1
    )
    assert "--data FILE" not in text("models:with_data", "--select", "NS101")


def test_weights_say_what_was_done_to_them(folder: Path, tmp_path: Path) -> None:
    state = {f"module.{key}": value for key, value in torch.nn.LayerNorm(3).state_dict().items()}
    torch.save({f"1.{k}".replace("1.module", "module.1"): v for k, v in state.items()}, tmp_path / "w.pt")
    done = run("check", "models:talks", "--weights", str(tmp_path / "w.pt"), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"normscope: note: {tmp_path / 'w.pt'}: took the prefix 'module.' off every key\n" in done.stderr


def test_a_fault_is_told_from_a_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a command is exit 2: neither 0, nor the 1 that means findings."""
    for error in (SystemExit(0), ZeroDivisionError("by zero"), GeneratorExit()):

        def broken(*_: object, _error: BaseException = error, **__: object) -> None:
            raise _error

        monkeypatch.setattr("normscope.doctor.check.check", broken)
        done = run("check", "models:with_data", cwd=folder)
        assert done.returncode == 2
        assert done.stderr.startswith(f"normscope: stopped by {type(error).__name__}")
        assert f"raised in {__file__}, line " in done.stderr


def test_spec_table(folder: Path) -> None:
    done = run("spec", "models:with_data", cwd=folder)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "norm torch.nn.BatchNorm2d",
        "b c ... -> c",
        "sqrt(var + 1e-05)",
        "momentum 0.1, unbiased variance",
        "calls 1",
    ):
        assert part in text, part
    rows = json.loads(run("spec", "models:with_data", "--format", "json", cwd=folder).stdout)["sites"]
    assert rows[0]["mode_train"] == "batch"
    assert rows[0]["mode_eval"] == "running"


def test_spec_without_data_says_what_it_cannot_see(folder: Path) -> None:
    assert "calls       not run" in run("spec", "models:trained", cwd=folder).stdout
    assert run("spec", "models:ByHand", cwd=folder).stdout == (
        "no normalization found\n"
        "norms written as functions or by hand show only in a run: pass --data FILE or --input SHAPE\n"
    )
    assert "run: pass" not in run("spec", "models:Talks", "--input", "8x3", cwd=folder).stdout


def test_rule_pages() -> None:
    listing = run("rule").stdout
    assert "NS304" in listing
    page = run("rule", "ns304").stdout
    assert "train-eval-gap" in page
    assert "What it does" in page
    missing = run("rule", "NS999")
    assert missing.returncode == 2
    assert "there is no rule 'NS999'; known: NS101" in missing.stderr


def test_version_and_usage() -> None:
    assert run("--version").stdout.startswith("normscope 0.")
    assert run("check").returncode == 2
    assert run("chekc", "demo").returncode == 2
    module = subprocess.run([sys.executable, "-m", "normscope", "--version"], capture_output=True, text=True)
    assert module.stdout.startswith("normscope 0.")


def test_html_is_written_only_where_named(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run("check", "models:trained", "--data", "batch.npy", "--html", str(page), cwd=folder)
    assert ">Sites</h2>" in page.read_text()
    assert list(tmp_path.iterdir()) == [page]
