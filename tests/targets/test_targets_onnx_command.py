"""``normscope check`` and ``spec`` on .onnx files: output, notes and exit codes."""

import json

import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from typer.testing import CliRunner

from normscope.cli.app import app

pytest.importorskip("onnxruntime")


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def net(tmp_path):
    """Convolution and batch norm; the batch norm in training mode where it is asked for."""

    def made(training):
        generator = torch.Generator().manual_seed(0)
        stored = {
            "k": torch.randn(4, 3, 3, 3, generator=generator),
            "w": torch.rand(4, generator=generator) + 0.5,
            "b": torch.randn(4, generator=generator),
            "m": torch.randn(4, generator=generator) / 10,  # of deviations of 5: what normal numbers give
            "v": torch.rand(4, generator=generator) * 9 + 20,
        }
        outputs = ["y", "m2", "v2"] if training else ["y"]
        nodes = [
            make_node("Conv", ["x", "k"], ["h"], name="conv"),
            make_node("BatchNormalization", ["h", *"wbmv"], outputs, name="bn", training_mode=int(training)),
        ]
        value = lambda name: make_tensor_value_info(name, TensorProto.FLOAT, ["n", None, None, None])  # noqa: E731
        x = make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])
        parts = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in stored.items()]
        graph = make_graph(nodes, "g", [x], [value("y")], parts)
        path = tmp_path / "net.onnx"
        onnx.save(make_model(graph, opset_imports=[make_opsetid("", 15)], ir_version=8), path)
        return path

    return made


def test_spec_reads_without_a_run(net):
    done = run("spec", net(False), "--format", "json")
    assert done.exit_code == 0
    (site,) = json.loads(done.stdout)["sites"]
    assert (site["name"], site["kind"], site["type_name"], site["mode_eval"], site["calls"]) == (
        "bn", "node", "onnx.BatchNormalization", "frozen", 0,
    )  # fmt: skip


def test_check_runs_on_random_numbers_of_the_declared_sizes(net):
    done = run("check", net(False))
    assert done.exit_code == 0
    assert "NS804 foldable  bn (eval)" in done.stdout
    assert "random inputs say nothing about your data" in done.stdout
    assert "the graph runs on random input of the sizes it declares (x 2x3x8x8)" in done.stderr


def test_check_with_data(net, tmp_path):
    file = tmp_path / "batch.pt"
    torch.save({"x": torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))}, file)
    done = run("check", net(False), "--data", file, "--format", "json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["sites"][0]["shapes"] == [[16, 4, 6, 6]]
    assert {"NS401", "NS402", "NS403", "NS405"} <= set(report["passed"])
    assert "random input" not in done.stderr


def test_training_mode_fails_the_check(net):
    done = run("check", net(True))
    assert done.exit_code == 1
    assert "NS802 training-mode-export  bn (eval)" in done.stdout


def test_a_broken_file_is_one_message(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"# a readme")
    for command in ("check", "spec"):
        done = run(command, path)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "no ONNX file" in done.stderr


def test_squares_that_a_half_precision_graph_cannot_hold(tmp_path):
    """x^2 of 300 is beyond float16, and such a graph squares in float16."""
    size = ["n", 8]
    value = lambda name: make_tensor_value_info(name, TensorProto.FLOAT16, size)  # noqa: E731
    stored = [
        numpy_helper.from_array(torch.tensor(number, dtype=torch.float16).numpy(), name)
        for name, number in (("two", 2.0), ("eps", 1e-5))
    ]
    nodes = [
        make_node("Pow", ["x", "two"], ["s"]),
        make_node("ReduceMean", ["s"], ["v"], axes=[-1]),
        make_node("Add", ["v", "eps"], ["a"]),
        make_node("Sqrt", ["a"], ["r"], name="rms"),
        make_node("Div", ["x", "r"], ["y"]),
    ]
    graph = make_graph(nodes, "g", [value("x")], [value("y")], stored)
    path, data = tmp_path / "rms.onnx", tmp_path / "x.pt"
    onnx.save(make_model(graph, opset_imports=[make_opsetid("", 13)], ir_version=8), path)
    torch.save(300 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).half(), data)
    done = run("check", path, "--data", data, "--select", "NS4")
    assert done.exit_code == 1
    assert "NS404" in done.stdout


def test_a_name_that_is_no_text_is_escaped_by_every_command(net, tmp_path):
    path, folded = net(False), tmp_path / "folded.onnx"
    path.write_bytes(path.read_bytes().replace(b"\x1a\x02bn", b"\x1a\x02\xfen"))  # the field name of a node
    assert onnx.load(path).graph.node[1].name == b"\xfen"
    listed = run("spec", path, "--format", "json")
    assert [site["name"] for site in json.loads(listed.stdout)["sites"]] == [r"\xfen"]
    assert [site["name"] for site in json.loads(run("check", path, "--format", "json").stdout)["sites"]] == [
        r"\xfen"
    ]
    done = run("fold", path, "-o", folded)
    assert r"done  onnx.BatchNormalization -> part of Conv: \xfen" in done.stdout
    assert [node.op_type for node in onnx.load(folded).graph.node] == ["Conv"]
