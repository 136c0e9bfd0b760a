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
