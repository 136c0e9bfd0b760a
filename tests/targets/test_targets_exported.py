"""Programs of torch.export as targets: only where they are trusted."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from normscope import spec_of
from normscope.cli.app import app
from normscope.errors import BadTarget
from normscope.targets import resolve


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(2), nn.LayerNorm(16)
    ).eval()
    batch = {0: torch.export.Dim("n")}
    program = torch.export.export(net, (torch.randn(4, 3, 6, 6),), dynamic_shapes=(batch,))
    path = tmp_path / "net.pt2"
    torch.export.save(program, path)
    return net, path


def test_not_loaded_unless_trusted(saved):
    _, path = saved
    with pytest.raises(BadTarget) as caught:
        resolve(str(path))
    assert str(caught.value) == (
        f"{path} is a program: what it names is called when it runs, any function that torch can reach, and its "
        "expressions are evaluated when it is loaded. If it comes from you, say so with --trust"
    )
    done = run("check", path)
    assert (done.exit_code, done.stdout) == (2, "")


def test_its_normalizations_are_the_network_s(saved):
    net, path = saved
    done = run("spec", path, "--trust", "--format", "json")
    assert done.exit_code == 0
    sites = json.loads(done.stdout)["sites"]
    assert [(site["name"], site["kind"], site["mode_eval"]) for site in sites] == [
        ("1", "hidden", "frozen"),
        ("3", "hidden", "input"),
    ]
    assert [site["spec"]["eps"] for site in sites] == [spec_of(net[1]).eps, spec_of(net[3]).eps]


def test_check_with_data(saved, tmp_path):
    _, path = saved
    data = tmp_path / "x.pt"
    torch.save(torch.randn(16, 3, 6, 6), data)
    done = run("check", path, "--trust", "--data", data, "--format", "json", "--select", "NS4")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert {"NS402", "NS403", "NS405"} <= set(report["passed"])
    assert [site["shapes"] for site in report["sites"]] == [[[16, 4, 4, 4]], [[16, 4, 16]]]


def test_a_missing_or_broken_file(tmp_path):
    path = tmp_path / "net.pt2"
    with pytest.raises(BadTarget) as caught:
        resolve(str(path), trust=True)
    assert str(caught.value) == f"there is no file {path}"
    path.write_bytes(b"# a readme")
    with pytest.raises(BadTarget) as caught:
        resolve(str(path), trust=True)
    assert str(caught.value).startswith(f"loading {path} raised ")
