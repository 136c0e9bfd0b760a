"""ONNX files from anywhere: broken, cut, or asking for other people's files."""

import os
import re

import numpy as np
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import set_external_data
from onnx.helper import make_function, make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

from normscope.errors import BadTarget, NormscopeError
from normscope.targets.onnx_model import OnnxModel

GAIN = np.arange(8, dtype=np.float32) + 1


def model_with(gain=None, large=None):
    stored = [numpy_helper.from_array(GAIN, "w") if gain is None else gain]
    nodes = [make_node("LayerNormalization", ["x", "w"], ["y"], name="norm")]
    if large is not None:
        stored.append(large)
        nodes.append(make_node("MatMul", ["y", large.name], ["z"], name="dense"))
    value = lambda name: make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8])  # noqa: E731
    graph = make_graph(nodes, "g", [value("x")], [value("y")], stored)
    return make_model(graph, opset_imports=[make_opsetid("", 17)], ir_version=9)


def outside(location, dims=(8,), name="w", **keys):
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, raw_data=b"x")
    set_external_data(tensor, location, **keys)
    tensor.ClearField("raw_data")
    return tensor


def saved(tmp_path, model):
    folder = tmp_path / "models"
    folder.mkdir(exist_ok=True)
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def refusal(path):
    with pytest.raises(BadTarget) as caught:
        OnnxModel(path)
    return str(caught.value)


def test_weights_in_a_file_beside(tmp_path):
    path = saved(tmp_path, model_with(outside("w.bin", offset=4)))
    (path.parent / "w.bin").write_bytes(b"skip" + GAIN.tobytes())
    assert (OnnxModel(path).norm.weight.numpy() == GAIN).all()


def test_a_run_finds_weights_in_a_file_beside(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)  # which is not the folder of the graph
    path = saved(tmp_path, model_with(outside("w.bin", offset=4)))
    (path.parent / "w.bin").write_bytes(b"skip" + GAIN.tobytes())
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    wanted = torch.nn.functional.layer_norm(x, (8,), torch.from_numpy(GAIN))
    # float32, outputs below 32, sums of 8: a few ulp
    torch.testing.assert_close(OnnxModel("models/net.onnx")(x), wanted, rtol=0, atol=32 * 2.0**-23 * 4)


def test_weights_of_no_norm_are_not_read(tmp_path):
    path = saved(tmp_path, model_with(large=outside("huge.bin", (8, 2**28), "big")))
    with (path.parent / "huge.bin").open("wb") as file:
        file.truncate(8 * 2**28 * 4)  # 8 GiB of holes
    assert (OnnxModel(path).norm.weight.numpy() == GAIN).all()


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "a/../../secret.bin", "link.bin", ""])
def test_other_peoples_files_are_not_read(tmp_path, location):
    (tmp_path / "secret.bin").write_bytes(GAIN.tobytes())
    path = saved(tmp_path, model_with(outside(location)))
    os.symlink(tmp_path / "secret.bin", path.parent / "link.bin")
    assert refusal(path) == (
        f"{path}: the tensor w asks for the file {location!r}, which is not inside {path.parent}: weights are read "
        "only from the folder of the graph"
    )


def test_files_that_do_not_hold_what_is_said(tmp_path):
    path = saved(tmp_path, model_with(outside("w.bin")))
    beside = path.parent / "w.bin"
    assert (
        refusal(path)
        == f"{path}: the tensor w lies in {beside}, which is not there: keep it beside the graph"
    )
    beside.write_bytes(b"short")
    assert refusal(path) == (
        f"{path}: the tensor w says it lies at offset 0 of w.bin with no bytes, but that file has 5"
    )
    beside.write_bytes(GAIN.tobytes() * 2)
    path = saved(tmp_path, model_with(outside("w.bin", length=60)))
    assert refusal(path) == f"{path}: the tensor w says 60 bytes in w.bin, but its shape needs 32"
    path = saved(tmp_path, model_with(outside("w.bin", offset=-8)))
    assert "says it lies at offset -8 of w.bin" in refusal(path)


def test_a_model_in_memory_has_no_folder():
    with pytest.raises(BadTarget) as caught:
        OnnxModel(model_with(outside("w.bin")))
    assert str(caught.value) == (
        "the model: the tensor w lies in the file 'w.bin': give the path of the graph's file"
    )


def test_no_model_at_all(tmp_path):
    path = tmp_path / "x.onnx"
    assert refusal(path) == f"there is no file {path}"
    path.write_bytes(b"")
    assert refusal(path) == f"{path} is no ONNX model: it has no graph with an operator set"
    path.write_bytes(b"# a readme")
    assert refusal(path).startswith(f"{path} is broken or no ONNX file: DecodeError: ")


def test_a_tensor_whose_bytes_do_not_fit_its_shape(tmp_path):
    tensor = numpy_helper.from_array(GAIN, "w")
    tensor.dims[0] = 2**40
    message = refusal(saved(tmp_path, model_with(tensor)))
    assert ": the tensor w is broken: ValueError: " in message


def test_values_in_a_circle(tmp_path):
    nodes = [
        make_node("Cast", ["b"], ["a"], to=1, name="first"),
        make_node("Cast", ["a"], ["b"], to=1),
        make_node("LayerNormalization", ["a", "a"], ["y"], name="norm"),
    ]
    value = make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])
    graph = make_graph(nodes, "g", [], [value])
    path = saved(tmp_path, make_model(graph, opset_imports=[make_opsetid("", 17)], ir_version=9))
    assert refusal(path) == f"{path}: the node 'first' of this graph waits for itself, so it cannot be run"


def test_nodes_in_any_order(tmp_path):
    model = model_with()
    model.graph.node.insert(0, make_node("Relu", ["y"], ["z"]))
    assert OnnxModel(saved(tmp_path, model)).norm.spec.weight == "d"


@pytest.mark.parametrize("rounds", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_files_with_wrong_bytes_end_in_one_clear_error(tmp_path, rounds):
    rng = np.random.default_rng(0)
    whole = bytearray(
        model_with(large=numpy_helper.from_array(np.ones((8, 4), np.float32), "big")).SerializeToString()
    )
    path, refused = tmp_path / "x.onnx", 0
    for _ in range(rounds):
        broken = bytearray(whole)
        for _ in range(rng.integers(1, 6)):
            broken[rng.integers(len(broken))] = rng.integers(256)
        if rng.random() < 0.3:
            del broken[rng.integers(len(broken)) :]
        path.write_bytes(broken)
        try:
            OnnxModel(path)
        except NormscopeError:
            refused += 1
    assert rounds // 10 < refused < rounds  # some of the bytes do not matter


def calling_twice(depth, body=()):
    """Local functions, each of which calls the next one twice, the last one in the body of an If."""
    opsets = [make_opsetid("", 17), make_opsetid("d", 1)]
    call = lambda i, x, y: make_node(f"F{i}", [x], [y], domain="d")  # noqa: E731
    functions = [
        make_function("d", f"F{i}", ["a"], ["r"], [call(i + 1, "a", "t"), call(i + 1, "t", "r")], opsets)
        for i in range(depth)
    ]
    branch = make_graph(
        [call(depth + 1, "a", "s")], "b", [], [make_tensor_value_info("s", TensorProto.FLOAT, None)]
    )
    condition = make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True)))
    functions += [
        make_function("d", f"F{depth}", ["a"], ["r"],
                      [condition, make_node("If", ["c"], ["r"], then_branch=branch, else_branch=branch)], opsets),
        make_function("d", f"F{depth + 1}", ["a"], ["r"], [*body, make_node("Relu", ["a"], ["r"])], opsets),
    ]  # fmt: skip
    value = lambda name: make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8])  # noqa: E731
    nodes = [make_node("LayerNormalization", ["x", "w"], ["h"]), call(0, "h", "y")]
    graph = make_graph(nodes, "g", [value("x")], [value("y")], [numpy_helper.from_array(GAIN, "w")])
    return make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)


def test_functions_that_are_endless_when_written_out_are_refused_before(tmp_path):
    path = saved(tmp_path, calling_twice(40))
    assert path.stat().st_size < 4096
    nodes = 4 * 2**40 + 1  # each of the 2**40 calls: a constant, an If and one Relu in each branch; the norm
    size = int(re.search(r"(\d+) bytes", refusal(path))[1])  # of the encoding, which versions may change
    assert refusal(path) == (
        f"{path}: with its functions written out in place of their calls this graph has {nodes} nodes and {size} "
        "bytes; it is read up to 200000 nodes and 2147483647 bytes. Functions that call each other again and again "
        "grow so: it is broken or made to be so, or is to be exported without functions"
    )


def test_functions_that_are_too_many_bytes_when_written_out_are_refused_before(tmp_path):
    table = make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.zeros(2**14, np.float32)))
    told = refusal(saved(tmp_path, calling_twice(15, [table])))  # 2**16 copies of 64 KiB
    assert "graph has 196609 nodes and 43" in told


def test_functions_that_call_each_other_twice_are_read(tmp_path):
    model = OnnxModel(saved(tmp_path, calling_twice(6)))
    assert len(model.graph.nodes) == 1 + 2 * 2**6
    assert [child.spec.eps for child in model.children()] == [pytest.approx(1e-5)]
