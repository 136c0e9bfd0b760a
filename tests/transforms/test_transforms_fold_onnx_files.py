"""What of an ONNX graph stays as it was in a fold, and how it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.helper import make_node
from onnx_nets import Net, layer, truth
from typer.testing import CliRunner

from normscope.cli.app import app
from normscope.errors import BadInput
from normscope.targets import onnx_saving
from normscope.targets.onnx_model import OnnxModel
from normscope.transforms import fold

pytest.importorskip("onnxruntime")


def net(**settings: Any) -> onnx.ModelProto:
    """A convolution, a batch norm, and beside them what a fold has nothing to do with."""
    made = Net()
    layer(made, "Conv", "x", "h", (3, 4), 1, "")
    made.norm("h", "n", 4)
    made.node("Relu", ["n"], "r")
    layer(made, "Conv", "r", "y", (4, 2), 1, "")
    model = made.model(
        {"x": ("n", 3, "height", 6)}, {"y": ("n", 2, None, None)}, doc_string="of the graph", **settings
    )
    model.producer_name, model.model_version, model.doc_string = "a test", 7, "of the model"
    model.metadata_props.add(key="license", value="none")
    model.graph.node[0].doc_string = "of the convolution"
    kind = onnx.TensorProto.FLOAT
    for name in ("h", "n", "r"):
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, ("n", 4, None, 5)))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "never_read"))
    if model.ir_version < 4:
        model.graph.input.append(onnx.helper.make_tensor_value_info("never_read", kind, (1,)))
    return model


@pytest.mark.parametrize("ir", [3, 8])
def test_everything_else_is_kept(ir: int) -> None:
    model = net(ir=ir, opset=12)
    folded, report = fold(OnnxModel(model))
    after = folded.graph.model
    onnx.checker.check_model(after, full_check=True)
    for field in (
        "ir_version",
        "producer_name",
        "model_version",
        "doc_string",
        "metadata_props",
        "opset_import",
    ):
        assert getattr(after, field) == getattr(model, field), field
    assert (after.graph.name, after.graph.doc_string) == ("net", "of the graph")
    assert list(after.graph.output) == list(model.graph.output)
    assert [node.name for node in after.graph.node] == ["h_node", "r_node", "y_node"]
    assert after.graph.node[0].doc_string == "of the convolution"
    assert [value.name for value in after.graph.value_info] == ["n", "r"]
    stored = ["h_weight", "y_weight", "never_read", "h_node_bias"]
    assert [tensor.name for tensor in after.graph.initializer] == stored
    assert [value.name for value in after.graph.input] == ["x", *(stored if ir < 4 else [])]
    assert report.notes[0] == (
        "compared on random input of the sizes that the graph declares (x 2x3x32x6, where sizes are left open as was "
        "seen to run); better on data"
    )
    assert report.notes[-1] == "nodes 4 -> 3, stored tensors 7 -> 4"


def test_a_constant_node_and_a_shared_bias() -> None:
    """A weight in a node becomes a stored tensor; a tensor that others read stays for them."""
    made = Net()
    layer(made, "Conv", "x", "h", (3, 4), 1, "vector")
    weight = made.stored.pop("h_weight")
    made.nodes.insert(0, make_node("Constant", [], ["h_weight"], value=numpy_helper.from_array(weight)))
    made.norm("h", "n", 4)
    made.stored["other"] = made.stored.pop("h_bias")
    made.nodes[1].input[2] = "other"
    made.node("Reshape", ["other", "sizes"], "wide")
    made.stored["sizes"] = np.array([1, 4, 1, 1])  # type: ignore[assignment]
    made.node("Add", ["n", "wide"], "y")
    model = made.model({"x": ("n", 3, 6, 6)}, {"y": [None] * 4})
    folded, report = fold(OnnxModel(model))
    assert len(report.done) == 1
    after = folded.graph.model
    assert [node.op_type for node in after.graph.node] == ["Conv", "Reshape", "Add"]
    assert {tensor.name for tensor in after.graph.initializer} == {
        "other",
        "sizes",
        "h_weight_folded",
        "other_folded",
    }
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)
    # 18 products in float32, values below 30
    np.testing.assert_allclose(truth(after, x), truth(model, x), atol=30 * 2.0**-23 * 18)


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A graph whose tensors lie in another file."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "net.onnx"
    onnx.save(net(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_weights_beside_the_graph(beside: Path, tmp_path: Path) -> None:
    folded, report = fold(beside)
    assert len(report.done) == 1
    folded.save(tmp_path / "out.onnx")
    (data,) = tmp_path.glob("out.onnx.*.data")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out.onnx", data.name]
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    written = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    places = {t.name: t.data_location == onnx.TensorProto.EXTERNAL for t in written.graph.initializer}
    assert places == {"h_weight": False, "y_weight": True, "never_read": True, "h_node_bias": False}
    x = np.random.default_rng(0).normal(size=(2, 3, 8, 6)).astype(np.float32)
    old, new = (truth(onnx.load(path), x) for path in (beside, tmp_path / "out.onnx"))
    np.testing.assert_allclose(new, old, atol=30 * 2.0**-23 * 24)
    again = OnnxModel(tmp_path / "out.onnx")
    again.save(tmp_path / "out.onnx")  # over the weights that it reads itself
    assert list(tmp_path.glob("out.onnx.*.data")) == [data]
    np.testing.assert_array_equal(truth(onnx.load(tmp_path / "out.onnx"), x), new)


def test_a_kill_between_two_files_left_the_old_graph_with_new_weights(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = fold(beside)
    out = tmp_path / "out.onnx"
    first.save(out)
    x = np.random.default_rng(0).normal(size=(2, 3, 8, 6)).astype(np.float32)
    (before,) = tmp_path.glob("out.onnx.*.data")
    old = truth(onnx.load(out), x)
    weights = beside.with_name("weights.bin")
    weights.write_bytes((2 * np.frombuffer(weights.read_bytes(), np.float32)).tobytes())  # another model
    second, _ = fold(beside)
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if Path(target) == out:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            second.save(out)
    np.testing.assert_array_equal(truth(onnx.load(out), x), old)
    (tmp_path / "out.onnx.data").write_text("not ours")
    second.save(out)
    (after,) = tmp_path.glob("out.onnx.*.data")
    assert after != before
    assert (tmp_path / "out.onnx.data").read_text() == "not ours"
    assert np.abs(truth(onnx.load(out), x) - old).max() > 0.1


def test_a_failure_leaves_what_was_there(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded, _ = fold(beside)
    for name in ("out.onnx", "out.onnx.data"):
        (tmp_path / name).write_text("before")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(onnx_saving, "_copy", full)
    with pytest.raises(OSError, match="No space left"):
        folded.save(tmp_path / "out.onnx")
    assert {p.name: p.read_text() for p in tmp_path.iterdir() if p.is_file()} == {
        "out.onnx": "before", "out.onnx.data": "before",
    }  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(onnx_saving, "LARGEST", 100)
    with pytest.raises(BadInput) as caught:
        folded.save(tmp_path / "other.onnx")
    assert str(caught.value) == (
        f"the graph and its new weights have {folded.graph.model.ByteSize()} bytes, more than one file can hold (100): "
        "save the original with its weights beside it (onnx.save(model, path, save_as_external_data=True))"
    )


def run(*words: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["fold", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command(tmp_path: Path) -> None:
    source, out = tmp_path / "net.onnx", tmp_path / "folded.onnx"
    onnx.save(net(), source)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, 3, 8, 6)).astype(np.float32))
    code, said, _ = run(source, "--dry-run", "--data", tmp_path / "x.npy")
    assert code == 0
    assert said.splitlines()[:2] == [
        "fold: 1 of 1 normalizations would be done (rehearsed, the model is as it was)",
        "  would be done  onnx.BatchNormalization -> part of Conv: n_node",
    ]
    assert "  n_node: into h_node, which feeds it" in said.splitlines()
    assert not out.exists()
    code, said, _ = run(source, "-o", out, "--data", tmp_path / "x.npy", "--json", tmp_path / "report.json")
    assert code == 0
    assert said.endswith(f"written: {out}\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folded.onnx", "net.onnx", "report.json", "x.npy"]
    assert json.loads((tmp_path / "report.json").read_text())["folds"][0]["into"] == ["h_node"]
    assert [node.op_type for node in onnx.load(out).graph.node] == ["Conv", "Relu", "Conv"]
    code, said, err = run(out, "-o", tmp_path / "again.onnx")
    assert (code, said.splitlines()[0]) == (1, "fold: no normalization was found")
    assert f"{tmp_path / 'again.onnx'} was not written: nothing was folded" in err
    assert not (tmp_path / "again.onnx").exists()


def test_the_command_refuses(tmp_path: Path) -> None:
    source = tmp_path / "net.onnx"
    onnx.save(net(), source)
    for words, said in (
        ((source,), "name a file to write with -o FILE.onnx, or rehearse with --dry-run"),
        ((source, "-o", "a.safetensors"), "-o a.safetensors: name a .onnx file, which is what is written"),
        (("demo", "-o", "a.onnx"), "-o a.onnx: name a .safetensors file, which is what is written"),
        ((source, "--dry-run", "--center"), "center=True: a graph folds into a new one, which has neither optimizer "
         "nor centering"),
    ):  # fmt: skip
        code, _, err = run(*words)
        assert (code, err) == (2, f"normscope: {said}\n")
