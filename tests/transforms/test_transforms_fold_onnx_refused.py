"""What of an ONNX graph does not fold, with the reason; and what is refused as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from onnx_nets import Net, layer, truth

from normscope.doctor.refusals import Refused
from normscope.errors import BadInput, MissingExtra
from normscope.targets.onnx_model import OnnxModel
from normscope.transforms import fold
from normscope.transforms.agreement import Deviation
from normscope.transforms.onnx_folding import checking

pytest.importorskip("onnxruntime")
IMAGES = ("n", 3, 6, 6)
NO_LAYER = "reads its output, which is no linear layer or convolution"
FORWARD = "; not forwards: the graph returns its output"


def conv_norm(net: Net) -> None:
    layer(net, "Conv", "x", "h", (3, 4), 1, "vector")
    net.norm("h", "y", 4)


def activation(net: Net) -> None:
    layer(net, "Conv", "x", "h", (3, 4), 1, "")
    net.node("Tanh", ["h"], "t")
    net.norm("t", "n", 4)
    layer(net, "Conv", "n", "y", (4, 2), 1, "", pads=[1, 1, 1, 1])


def two_readers(net: Net) -> None:
    layer(net, "Conv", "x", "h", (3, 4), 1, "")
    net.norm("h", "n", 4)
    net.node("Add", ["h", "n"], "y")


def at_the_input(net: Net) -> None:
    net.norm("x", "y", 3)


def transposed(net: Net) -> None:
    net.norm("x", "n", 3)
    layer(net, "ConvTranspose", "n", "y", (3, 2), 1, "")


def shared(net: Net) -> None:
    layer(net, "Conv", "x", "h", (3, 3), 1, "", pads=[1, 1, 1, 0])
    net.norm("h", "n", 3)
    net.node("Relu", ["n"], "r")
    net.node("Conv", ["r", "h_weight"], "y")


def training(net: Net) -> None:
    layer(net, "Conv", "x", "h", (3, 4), 1, "")
    net.norm("h", "y", 4, training_mode=1)
    net.nodes[-1].output.extend(["y_mean_now", "y_var_now"])


def computed_weight(net: Net) -> None:
    net.store("w", 4, 3, 3, 3)
    net.node("Softmax", ["w"], "weight")
    net.node("Conv", ["x", "weight"], "h")
    net.norm("h", "y", 4)


def quantized_weight(net: Net) -> None:
    net.store("w", 4, 3, 3, 3)
    net.stored["w"] = (net.stored["w"] * 20).astype(np.int8)  # type: ignore[assignment]
    net.stored["step"] = np.asarray(0.05, np.float32)
    net.node("DequantizeLinear", ["w", "step"], "weight")
    net.node("Conv", ["x", "weight"], "h")
    net.norm("h", "y", 4)


def quantized_value(net: Net) -> None:
    layer(net, "Conv", "x", "h", (3, 4), 1, "")
    net.stored["step"] = np.asarray(0.05, np.float32)
    net.node("QuantizeLinear", ["h", "step"], "q")
    net.node("DequantizeLinear", ["q", "step"], "d")
    net.norm("d", "y", 4)


def negative_variance(net: Net) -> None:
    conv_norm(net)
    net.stored["y_var"][2] = -1
    for part in ("gain", "bias", "mean"):
        net.stored[f"y_{part}"][2] = 2


def layer_norm(net: Net) -> None:
    layer(net, "Conv", "x", "h", (3, 4), 1, "")
    net.node("LayerNormalization", ["h", net.store("gain", 5)], "y")


def tokens(net: Net) -> None:
    """Statistics over what is not the feature axis of the product."""
    layer(net, "MatMul", "x", "h", (6, 5), 1, "vector")
    net.norm("h", "y", 3)


def half_range(net: Net) -> None:
    conv_norm(net)
    net.stored["y_gain"][1] = 6e4
    net.stored["y_var"][1] = 1e-5


BORDER = (
    "fills in zeros {}, where the norm's shift of up to 1.23 would be missing, and no bias makes up for that"
)
CASES: dict[Callable[[Net], None], str] = {
    activation: "not backwards: t_node (Tanh) makes its input, which is no linear layer or convolution; not forwards: "
    f"y_node (Conv) {BORDER.format('at the border')}",
    transposed: "not backwards: its input is an input of the graph, and no layer makes it; not forwards: y_node "
    f"(ConvTranspose) {BORDER.format('between the elements and at the border')}",
    two_readers: "not backwards: the output of h_node (Conv) has 2 readers (n_node (BatchNormalization), y_node "
    f"(Add)), and the others want it as it is; not forwards: y_node (Add) {NO_LAYER}",
    at_the_input: f"not backwards: its input is an input of the graph, and no layer makes it{FORWARD}",
    shared: "not backwards: the weight of h_node (Conv) is used 2 times in the graph; not forwards: "
    f"r_node (Relu) {NO_LAYER}",
    training: "is in training mode: it normalizes by the batch, and has no fixed scale",
    computed_weight: "not backwards: the weight of h_node (Conv) is computed in the graph, not stored as a dense tensor"
    f"{FORWARD}",
    quantized_weight: "not backwards: the weight of h_node (Conv) is quantized: fold the graph before it is quantized"
    f"{FORWARD}",
    quantized_value: "not backwards: d_node (DequantizeLinear) makes its input: the graph is quantized there, fold it "
    f"before that{FORWARD}",
    negative_variance: "its scale or shift is not finite in 1 of 4 channels, the first of them 2 (gain 2, bias 2, mean "
    "2, variance -1)",
    layer_norm: "takes its statistics from its input, so it cannot go; its gain and bias stay with it in a graph",
    tokens: f"not backwards: its channels are not the features that h_product_node makes{FORWARD}",
}  # fmt: skip


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_left_with_the_reason(build: Callable[[Net], None]) -> None:
    net = Net(3)
    build(net)
    for name in net.stored:  # so that the largest shift is a round number
        if name == "n_mean":
            net.stored[name][:] = 0
            net.stored["n_bias"][:] = np.linspace(1.23, 1, len(net.stored[name]))
    model = OnnxModel(net.model({"x": IMAGES}, {"y": [None] * 4}))
    folded, report = fold(model)
    assert folded is model
    assert [site.reason for site in report.left] == [CASES[build]]
    assert (report.done, report.agreements, report.folds) == ((), (), ())


def test_a_weight_that_its_type_cannot_hold() -> None:
    net = Net(3, "float16")
    half_range(net)
    _, report = fold(OnnxModel(net.model({"x": IMAGES}, {"y": [None] * 4})))
    assert [site.reason for site in report.left] == ["a weight of h_node would not be finite in float16"]


def test_a_shared_weight_gets_a_copy_where_that_is_asked_for() -> None:
    net = Net(3)
    shared(net)
    proto = net.model({"x": IMAGES}, {"y": [None] * 4})
    folded, report = fold(OnnxModel(proto), clone_shared=True)
    assert len(report.done) == 1
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in folded.graph.model.graph.initializer}
    assert set(stored) == {"h_weight", "h_weight_folded", "h_node_bias"}
    assert np.array_equal(stored["h_weight"], net.stored["h_weight"])
    x = net.random.normal(size=(2, 3, 6, 6)).astype(np.float32)
    # 2 convolutions of 18 products in float32, values below 100
    np.testing.assert_allclose(truth(folded.graph.model, x), truth(proto, x), atol=100 * 2.0**-23 * 18)


def test_defaults_that_a_caller_may_replace() -> None:
    for name, what in (("h_weight", "the weight of h_node (Conv)"), ("y_gain", "its gain")):
        net = Net()
        conv_norm(net)
        model = net.model({"x": IMAGES, name: net.stored[name].shape}, {"y": [None] * 4})
        _, report = fold(OnnxModel(model))
        reason = f"{what} comes from {name}, an input of the graph with a default, which a caller may replace"
        assert [
            site.reason.split("; not forwards")[0].removeprefix("not backwards: ") for site in report.left
        ] == [reason]


def test_bodies_of_nodes() -> None:
    """Norms inside are left; a body that reads a layer's output keeps it."""
    net = Net()
    layer(net, "Gemm", "x", "h", (3, 4), 1, "vector")
    net.norm("h", "n", 4)
    inner = Net(1)
    inner.norm("h", "deep", 4)
    bodies = []
    for branch in ("then", "else"):
        out = make_tensor_value_info(f"{branch}_out", TensorProto.FLOAT, ["n", 4])
        nodes = [onnx.NodeProto.FromString(inner.nodes[0].SerializeToString())]
        nodes[0].name, nodes[0].output[0] = f"{branch}_norm", f"{branch}_out"
        bodies.append(make_graph(nodes, branch, [], [out]))
    net.stored |= inner.stored
    net.stored["c"] = np.asarray(True)  # type: ignore[assignment]
    net.nodes.append(make_node("If", ["c"], ["i"], name="if", then_branch=bodies[0], else_branch=bodies[1]))
    net.node("Add", ["n", "i"], "y")
    _, report = fold(OnnxModel(net.model({"x": ("n", 3)}, {"y": ("n", 4)})))
    assert {site.name: site.reason for site in report.left} == {
        "n_node": "not backwards: the output of h_node (Gemm) has 2 readers (n_node (BatchNormalization), if (If)), "
        f"and the others want it as it is; not forwards: y_node (Add) {NO_LAYER}",
        "then_norm": "stands in the body of an If, Loop or Scan node, and only the main graph is folded",
        "else_norm": "stands in the body of an If, Loop or Scan node, and only the main graph is folded",
    }  # fmt: skip


def test_a_fold_that_does_not_hold_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    layer(net, "Conv", "x", "h", (3, 4), 1, "vector")
    net.norm("h", "n", 4)
    net.node("Relu", ["n"], "r")
    layer(net, "Conv", "r", "g", (4, 2), 1, "")
    net.norm("g", "y", 2)
    plain = checking.fold_into

    def wrong(graph: Any, steps: Any) -> Any:
        made = plain(graph, steps)
        bias = next((t for t in made.graph.initializer if t.name == "h_bias"), None)
        if len(steps) > 1 and bias is not None:
            bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(0.01), "h_bias"))
        return made

    monkeypatch.setattr(checking, "fold_into", wrong)
    folded, report = fold(OnnxModel(net.model({"x": IMAGES}, {"y": [None] * 4})))
    assert [site.name for site in report.done] == ["y_node"]
    (left,) = report.left
    assert left.name == "n_node"
    assert left.reason.startswith("undone, the function would change: its output would be ")
    assert left.reason.endswith(" of the largest away, and float32 allows 1.0e-05")
    assert [node.op_type for node in folded.graph.nodes] == ["Conv", "BatchNormalization", "Relu", "Conv"]


@pytest.mark.parametrize(("mean", "told"), [(1e4, False), (1e6, True)])
def test_roundings_that_the_original_amplifies_are_allowed(mean: float, told: bool) -> None:
    """A sum of 1e4 and 1 in front of a batch norm that takes the 1e4 away: float32 leaves 1e-3 of it."""
    net = Net()
    conv_norm(net)
    net.stored["h_bias"][:] = net.stored["y_mean"][:] = mean
    folded, report = fold(OnnxModel(net.model({"x": IMAGES}, {"y": [None] * 4})))
    assert len(report.done) == 1
    assert 1e-5 < report.agreements[0].allowed < 1e-5 * mean
    doubts = ["cannot tell from the outputs", "cannot tell at y_node"] if told else []
    assert [note.split(":")[0] for note in report.notes if note.startswith("cannot tell")] == doubts
    assert folded.graph.nodes[0].op_type == "Conv"


def gemm(opset: int = 17, **model: Any) -> onnx.ModelProto:
    net = Net()
    layer(net, "Gemm", "x", "h", (3, 4), 1, "vector")
    net.norm("h", "y", 4)
    made = net.model({"x": ("n", 3)}, {"y": ("n", 4)}, opset=opset)
    return onnx.ModelProto.FromString(made.SerializeToString())


def test_refused_as_a_whole() -> None:
    with pytest.raises(Refused) as caught:
        fold(OnnxModel(gemm(opset=6)))
    assert str(caught.value) == (
        "the graph is of operator set 6, in which a batch norm and sizes that broadcast are written in another way: "
        "convert it first (onnx.version_converter.convert_version(model, 7) or later)"
    )
    trained = gemm()
    trained.training_info.add()
    with pytest.raises(Refused) as caught:
        fold(OnnxModel(trained))
    assert str(caught.value) == (
        "the graph carries a training, which needs its weights as they are: drop training_info first"
    )
    with pytest.raises(BadInput) as given:
        fold(OnnxModel(gemm()), inplace=True, center=True)
    assert str(given.value) == (
        "inplace=True, center=True: a graph folds into a new one, which has neither optimizer nor centering"
    )


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(BadInput) as caught:
        fold(OnnxModel(gemm()), torch.zeros(2, 5))
    assert "ONNX Runtime raised" in str(caught.value)
    net = Net()
    net.store("w", 6, 4)
    net.node("Reshape", ["x", "shape"], "flat")
    net.stored["shape"] = np.array([7, 6])  # type: ignore[assignment]
    net.node("MatMul", ["flat", "w"], "h")
    net.norm("h", "y", 4)
    with pytest.raises(BadInput) as caught:
        fold(OnnxModel(net.model({"x": ("n", "k")}, {"y": (7, 4)})))
    said = "a fold is compared in a run, and no sample was given. The graph fails on random input: BadInput: the graph"
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith(". Give a sample, on the command line with --data FILE")


def test_without_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtra) as caught:
        fold(OnnxModel(gemm()))
    assert str(caught.value) == (
        "running an ONNX graph needs onnxruntime, which is not installed: pip install 'normscope[onnx]'"
    )


def test_outputs_that_deviate_where_no_place_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "ALLOWED", {torch.float32: -1.0})
    monkeypatch.setattr(checking, "ROUNDINGS", 0.0)
    monkeypatch.setattr(checking, "_witnesses", lambda steps: {})
    with pytest.raises(Deviation) as caught:
        fold(OnnxModel(gemm()))
    assert "although every folded place agrees. Nothing was written" in str(caught.value)


def test_functions_are_written_out() -> None:
    from onnx import FunctionProto

    model = gemm()
    body = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    names = [t.name for t in model.graph.initializer]
    function = FunctionProto(
        name="block",
        domain="own",
        input=["x", *names],
        output=["y"],
        node=body,
        opset_import=[make_opsetid("", 17)],
    )
    call = make_node("block", ["x", *names], ["y"], domain="own")
    graph = make_graph([call], "net", model.graph.input, model.graph.output, model.graph.initializer)
    whole = make_model(
        graph,
        functions=[function],
        opset_imports=[make_opsetid("", 17), make_opsetid("own", 1)],
        ir_version=9,
    )
    folded, report = fold(OnnxModel(whole))
    assert [node.op_type for node in folded.graph.nodes] == ["Gemm"]
    assert "local functions were written out in place of their calls" in report.notes
