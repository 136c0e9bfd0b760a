"""Folded ONNX graphs compute what the originals compute, at every border."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_nets import Net, layer, truth

from normscope.targets.onnx_model import OnnxModel
from normscope.transforms import fold
from normscope.transforms.onnx_folding.carry_out import fold_into
from normscope.transforms.onnx_folding.plan import Stays, Step, plan

pytest.importorskip("onnxruntime")
SIZE = (2, 5, 4)
"""of a batch of images: samples, height, width"""


@st.composite
def nets(draw: st.DrawFn, dtypes: list[str]) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Norms before and behind a layer of any kind, in any shape that its operator allows."""
    net = Net(draw(st.integers(0, 2**16)), draw(st.sampled_from(dtypes)))
    op = draw(st.sampled_from(["Conv", "ConvTranspose", "Gemm", "MatMul"]))
    image = op in ("Conv", "ConvTranspose")
    groups = draw(st.sampled_from([1, 2, 3])) if image else 1
    sizes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    attributes: dict[str, Any] = {}
    if image:
        attributes["strides"] = [draw(st.sampled_from([1, 2])), 1]
        attributes["pads"] = draw(st.sampled_from([[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 2, 0]]))
        if op == "Conv" and draw(st.booleans()):
            attributes["auto_pad"] = draw(st.sampled_from(["SAME_UPPER", "VALID"]))
            del attributes["pads"]
    elif op == "Gemm":
        attributes = {"transB": draw(st.booleans()), "alpha": draw(st.sampled_from([1.0, 0.5])), "beta": 2.0}
    bias = draw(st.sampled_from(["", "vector", "row", "number", "column"]))
    facts = {
        "op": op,
        "before": draw(st.booleans()),
        "behind": draw(st.integers(0, 2)),
        "shifted": draw(st.booleans()),
    }
    inputs = sizes[0] * groups
    value = "x"
    if facts["before"]:
        value = net.norm(value, "n0", inputs)
        if not facts["shifted"]:
            net.stored["n0_bias"] = np.zeros(inputs, net.dtype)
            net.stored["n0_mean"] = np.zeros(inputs, net.dtype)
    if draw(st.booleans()):
        value = net.node("Identity", [value], "same")
    _, outputs = layer(net, op, value, "h", sizes, groups, bias, **attributes)
    value = "h"
    for i in range(facts["behind"]):
        if draw(st.booleans()):
            value = net.node("Identity", [value], f"same{i}")
        if draw(st.booleans()):
            shape = (outputs, 1, 1) if image else (outputs,)
            value = net.node("Mul", [value, net.store(f"factor{i}", *shape)], f"scaled{i}")
            value = net.node("Sub", [value, net.store(f"less{i}", *shape)], f"moved{i}")
        value = net.norm(value, f"n{i + 1}", outputs)
    if draw(st.booleans()) or value == "h":
        value = net.node("Relu", [value], "last")
    shape = (SIZE[0], inputs, *SIZE[1:]) if image else (SIZE[0], inputs)
    facts["x"] = net.random.normal(size=shape).astype(net.dtype)
    facts["pads"] = (
        op == "ConvTranspose" or attributes.get("auto_pad") == "SAME_UPPER" or any(attributes.get("pads", []))
    )
    return net.model({"x": shape}, {value: [None] * len(shape)}), facts


@settings(max_examples=60, deadline=None)
@given(nets(["float64"]))
def test_in_float64_nothing_moves(found: tuple[onnx.ModelProto, dict[str, Any]]) -> None:
    """The reference implementation of the operators, so that the algebra shows and no rounding hides a border."""
    model, facts = found
    graph = OnnxModel(model).graph
    planned = plan(graph, clone_shared=False, refused={})
    steps = [one for one in planned if isinstance(one, Step)]
    left = {one.site: one.obstacle.reason for one in planned if isinstance(one, Stays)}
    # everything behind folds; before, where no zeros take the place of the shift
    assert left.keys() == (
        {"n0_node"} if facts["before"] and facts["pads"] and facts["shifted"] else set()
    ), left
    after = fold_into(graph, steps)
    onnx.checker.check_model(after, full_check=True)
    assert sum(node.op_type == "BatchNormalization" for node in after.graph.node) == len(left)
    assert [v.name for v in after.graph.output] == [v.name for v in model.graph.output]
    old, new = (truth(one, facts["x"]) for one in (model, after))
    # sums of up to 54 products, each scaled by up to 1 / sqrt(0.2) and rounded a few times
    np.testing.assert_allclose(new, old, rtol=0, atol=1e-13 * max(1.0, float(np.abs(old).max())))


@settings(max_examples=25, deadline=None)
@given(nets(["float32", "float16"]))
def test_in_onnx_runtime_they_agree(found: tuple[onnx.ModelProto, dict[str, Any]]) -> None:
    model, facts = found
    original = model.SerializeToString()
    folded, report = fold(OnnxModel(model), torch.from_numpy(facts["x"]))
    assert model.SerializeToString() == original
    assert not any("undone" in site.reason for site in report.left)
    left = facts["before"] and facts["pads"] and facts["shifted"]
    assert [site.name for site in report.left] == (["n0_node"] if left else [])
    if report.done:
        onnx.checker.check_model(folded.graph.model, full_check=True)
        (agreement,) = report.agreements
        assert agreement.difference <= agreement.allowed
    if left:
        assert "fills in zeros" in report.left[0].reason


def same(net: Net, shape: tuple[int, ...], output: str) -> tuple[list[str], list[str]]:
    """Operators that are left, and sites that stay, of a graph whose fold moves nothing."""
    model = net.model({"x": shape}, {output: [None] * len(shape)})
    graph = OnnxModel(model).graph
    planned = plan(graph, clone_shared=False, refused={})
    after = fold_into(graph, [one for one in planned if isinstance(one, Step)])
    onnx.checker.check_model(after, full_check=True)
    x = net.random.normal(size=shape)
    # sums of up to 27 products
    np.testing.assert_allclose(truth(after, x), truth(model, x), rtol=0, atol=1e-12)
    left = [one.site for one in planned if isinstance(one, Stays)]
    return [node.op_type for node in after.graph.node], left


def test_tokens_that_are_turned_for_the_norm() -> None:
    """A batch norm of tokens: (N, L, C) becomes (N, C, L) and back."""
    net = Net(0, "float64")
    layer(net, "MatMul", "x", "h", (3, 4), 1, "")
    net.node("Transpose", ["h"], "turned", perm=[0, 2, 1])
    net.node("Add", ["turned", net.store("added", 4, 1)], "more")
    net.norm("more", "n", 4)
    net.node("Transpose", ["n"], "back", perm=[0, 2, 1])
    net.node("Tanh", ["back"], "t")
    net.node("Transpose", ["t"], "again", perm=[0, 2, 1])
    net.norm("again", "m", 4)
    net.node("Transpose", ["m"], "b", perm=[0, 2, 1])
    layer(net, "MatMul", "b", "y", (4, 2), 1, "row")
    operators, left = same(net, (2, 5, 3), "y")
    assert left == []
    assert operators == [
        "MatMul", "Add", "Transpose", "Transpose", "Tanh", "Transpose", "Transpose", "MatMul", "Add",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["reflect", "edge", "constant"])
def test_a_border_of_values_of_the_image_keeps_the_shift(mode: str) -> None:
    net = Net(0, "float64")
    net.norm("x", "n", 3)
    net.stored["sdap"] = np.array([1, 1, 0, 0, 2, 1, 0, 0])
    net.stored |= {name: np.array([at]) for name, at in (("start", -1), ("end", -(2**63)), ("axis", 0))}
    # turned round in the graph, as exporters do
    net.node("Slice", ["sdap", "start", "end", "axis", "start"], "pads")
    net.node("Pad", ["n", "pads"], "p", mode=mode)
    layer(net, "Conv", "p", "y", (3, 2), 1, "")
    operators, left = same(net, (2, 3, 5, 4), "y")
    assert operators[-2:] == ["Pad", "Conv"]
    assert left == (["n_node"] if mode == "constant" else [])


def test_a_batch_norm_written_as_four_nodes() -> None:
    net = Net(0, "float64")
    layer(net, "ConvTranspose", "x", "h", (2, 2), 3, "vector")
    value = "h"
    for i, op in enumerate(("Sub", "Div", "Mul", "Add")):
        value = net.node(op, [value, net.store(f"c{i}", 6, 1, 1, low=0.5)], f"v{i}")
    net.node("Mul", [value, value], "y")
    assert same(net, (2, 6, 4, 4), "y") == (["ConvTranspose", "Mul"], [])


def test_one_norm_and_several_layers_that_read_it() -> None:
    net = Net(0, "float64")
    net.norm("x", "n", 3)
    layer(net, "Gemm", "n", "a", (3, 4), 1, "", transB=True, alpha=0.5)
    net.node("Dropout", ["n"], "d")
    layer(net, "MatMul", "d", "b", (3, 4), 1, "vector")
    net.node("Sub", ["a", "b"], "y")
    assert same(net, (2, 3), "y") == (["Gemm", "Dropout", "MatMul", "Add", "Sub"], [])


def test_growth_and_dead_channels_are_told() -> None:
    net = Net()
    layer(net, "Conv", "x", "h", (3, 4), 1, "")
    net.norm("h", "y", 4)
    net.stored |= {"y_gain": np.ones(4, np.float32), "y_var": np.array([1, 1, 0, 1], np.float32)}
    _, report = fold(OnnxModel(net.model({"x": (1, 3, 6, 6)}, {"y": [None] * 4})))
    (one,) = report.folds
    assert (one.site, one.into, one.where, one.channel, one.zero_variance) == (
        "y_node",
        ("h_node",),
        "before",
        2,
        1,
    )
    assert one.growth == pytest.approx((1e-5) ** -0.5, rel=1e-4)
