"""``normscope identify`` and ``compare``: targets, layers made on the command line, verdicts as exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from normscope.cli import state_output
from normscope.cli.app import app
from normscope.errors import BadTarget
from normscope.targets import callables

OPTIONAL = """
import torch
from torch import nn

def named(x=None):
    raise AssertionError("it is not called to find out")

def fails(v=None):
    return v - v.mean()

def array(n=3):
    return torch.zeros(n) * n

def filled(v=torch.zeros(2, 8)):
    raise AssertionError("it is not called to find out")

def rest(*args):
    return args[0] - args[0].mean()

def makes():
    return nn.LayerNorm(8)

def makes_by_number(size=8, *, eps=1e-5):
    return nn.LayerNorm(size, eps)

def makes_unset(size=None):
    return nn.LayerNorm(size or 8)

def pair(size=8):
    return nn.LayerNorm(size), torch.zeros(2, size)

def broken():
    return 1 / 0

def broken_by_number(n=0):
    return 1 / n
"""
TARGETS = """
import numpy as np
import torch
from torch import nn

def textbook(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / (x.std(-1, ddof=1, keepdims=True) + 1e-6)

def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
    def forward(self, x):
        print("noise of the model")
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)

def written():
    return Written()

def with_input():
    return Written(), torch.zeros(3, 8)

number = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "layers.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "layers", raising=False)
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_identify_a_function_of_arrays(folder: Path) -> None:
    done = run("identify", "layers:textbook", "--input", "4x8", "--layout", "b c")
    assert done.exit_code == 0, done.output
    assert "... d -> ...; centered; std, unbiased; eps 1e-06 outside the root" in done.stdout


def test_what_needs_no_arguments_makes_something_or_is_the_function_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "optional.py").write_text(OPTIONAL)
    monkeypatch.chdir(tmp_path)
    for name in ("named", "fails", "array", "filled", "rest"):
        value, example = callables.load(f"optional:{name}")
        assert (value.__name__, example) == (name, None)
    for name in ("makes", "makes_by_number", "makes_unset"):
        assert isinstance(callables.load(f"optional:{name}")[0], torch.nn.LayerNorm)
    module, example = callables.load("optional:pair")
    assert (type(module), example.shape) == (torch.nn.LayerNorm, (2, 8))
    for name, said in (
        ("broken", "calling optional:broken raised ZeroDivisionError: division by zero"),
        (
            "broken_by_number",
            "calling optional:broken_by_number without arguments raised ZeroDivisionError: division by zero. Where it "
            "is itself the function to look at, take the default off 'n'",
        ),
    ):
        with pytest.raises(BadTarget) as error:
            callables.load(f"optional:{name}")
        assert str(error.value) == said


def test_identify_what_is_none(folder: Path) -> None:
    done = run("identify", "layers:softmax", "--input", "4x8")
    assert done.exit_code == 1, done.output
    assert "not a normalization of this family: " in done.stdout


def test_identify_a_module_as_json_apart_from_what_it_prints(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "normscope",
        "identify",
        "layers:with_input",
        "--format",
        "json",
        "--mode",
        "eval",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["target"] == "layers:with_input"
    assert (found["spec"]["center"], found["spec"]["scale"], found["mode"]) == (False, "rms", "input")
    assert "noise of the model" in done.stderr


def test_compare_says_by_its_exit_code(folder: Path) -> None:
    same = run("compare", "torch.nn:RMSNorm(8, eps=1e-6)", "normscope:families.rms_norm(eps=1e-6)")
    assert same.exit_code == 0, same.output
    assert same.stdout.startswith("RMSNorm and spec (... d -> ...): the same function\n")
    other = run("compare", "torch.nn:LayerNorm(8)", "torch.nn:LayerNorm(8, eps=1e-3)", "--format", "json")
    assert other.exit_code == 1, other.output
    document = json.loads(other.stdout)
    assert document["targets"] == ["torch.nn:LayerNorm(8)", "torch.nn:LayerNorm(8, eps=1e-3)"]
    assert [d["field"] for d in document["differences"]] == ["eps"]


def test_compare_what_is_written_by_hand(folder: Path) -> None:
    done = run("compare", "layers:written", "torch.nn:RMSNorm(8, eps=1e-6)", "--input", "4x8")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "layers:number",
            "layers:number is a int; expected a layer, a function of one array, or a NormSpec",
        ),
        (
            "layers:Written",
            "layers:Written is a class; write its arguments behind it, layers:Written(...), or point at an object of "
            "it",
        ),
        (
            "os:system('true')",
            "os:system is no layer class of PyTorch or Keras and no named specification of normscope.families, so it "
            "is not called. Write a function without arguments that returns the layer, and point at that",
        ),
        (
            "torch.nn:LayerNorm(open('x'))",
            "the arguments cannot be read as literals (malformed node or string on line 1: <ast.Call object at 0x>); "
            "write it as torch.nn:LayerNorm(768, eps=1e-6), with plain literals; got \"torch.nn:LayerNorm(open('x'))\"",
        ),
        (
            "torch.nn:LayerNorm(*(3, 4))",
            "the arguments cannot be read as literals (malformed node or string on line 1: <ast.Starred object at "
            "0x>); write it as torch.nn:LayerNorm(768, eps=1e-6), with plain literals; got "
            "'torch.nn:LayerNorm(*(3, 4))'",
        ),
        (
            "torch.nn:LayerNorm(**{'normalized_shape': 3})",
            "the arguments cannot be read as literals (** is no literal); write it as torch.nn:LayerNorm(768, "
            "eps=1e-6), with plain literals; got \"torch.nn:LayerNorm(**{'normalized_shape': 3})\"",
        ),
        (
            "torch.nn:(lambda: 3)()",
            "a layer is named by its class; write it as torch.nn:LayerNorm(768, eps=1e-6), with plain literals; got "
            "'torch.nn:(lambda: 3)()'",
        ),
        (
            "torch.nn:LayerNorm()",
            "making torch.nn:LayerNorm() raised TypeError: LayerNorm.__init__() missing 1 required positional "
            "argument: 'normalized_shape'",
        ),
    ],
)
def test_targets_that_are_none(folder: Path, target: str, said: str) -> None:
    with pytest.raises(BadTarget) as caught:
        callables.load(target)
    assert re.sub(r"0x\w+", "0x", str(caught.value)) == said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("identify", "layers:textbook"), "layers:textbook is identified by probing it: pass the shape of an input, "
         "--input 8x16x32"),
        (("identify", "layers:written", "--mode", "test"), "--mode is train or eval; got 'test'"),
        (("identify", "layers:written", "--format", "xml"), "--format is text or json; got 'xml'"),
        (("compare", "layers:textbook", "torch.nn:LayerNorm(8)"), "the first cannot be read without running it"),
    ],
)  # fmt: skip
def test_commands_that_are_wrong(folder: Path, args: tuple[str, ...], said: str) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_layer_is_made_by_check_and_spec_too(folder: Path) -> None:
    for command in ("check", "spec"):
        done = run(command, "torch.nn:LayerNorm(8, eps=1e-3)", "--input", "4x8")
        assert done.exit_code == 0, done.output
    done = run("spec", "os:system('true')")
    assert done.exit_code == 2
    assert "os:system is no layer class of PyTorch or Keras" in done.stderr
    done = run("check", "normscope:families.rms_norm()")
    assert "is a NormSpec; expected a torch.nn.Module" in done.stderr


def test_a_dot_for_the_colon_is_told(folder: Path) -> None:
    done = run("identify", "torch.nn.LayerNorm(64)", "--input", "4x64")
    assert done.exit_code == 2
    assert "write package.module:attribute, with a colon before the class" in " ".join(done.stderr.split())


def test_compare_without_an_input_advises_the_option(folder: Path) -> None:
    done = run("compare", "layers:written", "torch.nn:LayerNorm(8)")
    assert done.exit_code == 2
    assert " ".join(done.stderr.split()).endswith(
        "the first cannot be read without running it: pass the shape of an input of both, --input 8x16x32"
    )


def test_the_nearest_names_come_first(folder: Path) -> None:
    with pytest.raises(BadTarget) as caught:
        callables.load("torch.nn:LayerNrm(8)")
    assert "'torch.nn' has no attribute 'LayerNrm'; it has: LayerNorm, " in str(caught.value)
    assert str(caught.value).endswith(", ...")


def test_identify_is_short_unless_the_evidence_is_asked_for(folder: Path) -> None:
    short = run("identify", "layers:textbook", "--input", "4x8")
    long = run("identify", "layers:textbook", "--input", "4x8", "--evidence")
    assert "  because: " not in short.stdout
    assert "largest error on fresh inputs" in short.stdout
    kept = [line for line in long.stdout.splitlines() if not line.startswith("  because: ")]
    assert kept == short.stdout.splitlines()
    assert len(kept) < len(long.stdout.splitlines())


def test_explain_refuses_what_it_would_not_heed() -> None:
    for option in ("--select", "--ignore"):
        done = run("check", "demo", "--explain", option, "NS3")
        assert done.exit_code == 2
        assert "leave --select, --ignore" in " ".join(done.stderr.split())


def test_a_file_that_is_written_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        state_output.write(torch.nn.LayerNorm(4), tmp_path / "fixed.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "fixed.safetensors").stat().st_mode & 0o777 == 0o640
