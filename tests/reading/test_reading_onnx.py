"""ONNX nodes: the node cases of the onnx package itself, and what their attributes say."""

import importlib

import numpy as np
import onnx
import pytest
from onnx.helper import make_node

from normscope import reference
from normscope.reading import UnknownNormalization, read, spec_of
from normscope.reading.onnx_nodes import shortest_float32
from normscope.spec import Cast, RunningState

FILES = (
    "batch_normalization",
    "groupnormalization",
    "instance_normalization",
    "layernormalization",
    "lpnormalization",
    "meanvariancenormalization",
    "rmsnormalization",
)


def node_cases():
    """Cases of one node each: importing their modules registers them."""
    home = importlib.import_module("onnx.backend.test.case.node")
    with np.errstate(invalid="ignore"):
        for name in FILES:
            importlib.import_module(f"{home.__name__}.{name}")
    cases = {}
    for case in home._NodeTestCases:
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type.endswith("Normalization") and "_l1" not in case.name:
            cases[case.name] = case
    return cases


CASES = node_cases()


def test_the_onnx_package_still_has_its_cases():
    assert len(CASES) >= 45


@pytest.mark.parametrize("name", CASES)
def test_node_case_computes_what_is_read(name):
    case = CASES[name]
    inputs, outputs = case.data_sets[0]
    reading = read(case.model.graph.node[0], input_ndim=np.ndim(inputs[0]))
    weight, bias = (inputs[i] if len(inputs) > i else None for i in (1, 2))
    running = RunningState(inputs[3], inputs[4]) if len(inputs) > 4 else None
    y = reference.forward(
        inputs[0], reading.spec, weight, bias, running=running, training=reading.mode_now != "running"
    )
    # float32 outputs below 8 of sums of at most 120 elements: a few ulp of 8, sqrt(120) of rounding in the sums
    tolerance = 8 * 2.0**-23 * 120**0.5
    np.testing.assert_allclose(y, outputs[0], rtol=0, atol=tolerance)
    if reading.updates:
        moved = reference.update_running(running, inputs[0], reading.spec)
        np.testing.assert_allclose(moved.mean, outputs[1], rtol=0, atol=tolerance)
        np.testing.assert_allclose(moved.var, outputs[2], rtol=0, atol=tolerance)


def test_numbers_are_the_ones_that_were_written():
    spec = spec_of(make_node("BatchNormalization", list("xsbmv"), ["y"], epsilon=1e-3, momentum=0.99))
    assert (spec.eps, spec.running.momentum, spec.running.correction) == (0.001, 0.01, 0)
    assert shortest_float32(np.float32(0.1).item()) == 0.1
    assert shortest_float32(0.5) == 0.5
    third = np.float32(1 / 3).item()
    assert np.float32(shortest_float32(third)) == np.float32(third)


def test_batch_norm_mode_is_written_in_the_node():
    infer = read(make_node("BatchNormalization", list("xsbmv"), ["y"]))
    train = read(make_node("BatchNormalization", list("xsbmv"), ["y", "m", "v"], training_mode=1))
    old_train = read(make_node("BatchNormalization", list("xsbmv"), ["y", "m", "v", "sm", "sv"]))
    assert (infer.mode_now, infer.updates) == ("running", ())
    assert (train.mode_now, train.updates) == ("batch", ("train", "eval"))
    assert old_train.mode_now == "batch"


def test_optional_bias_and_stash_type():
    assert spec_of(make_node("LayerNormalization", ["x", "s"], ["y"])).bias is None
    assert spec_of(make_node("LayerNormalization", ["x", "s", ""], ["y"])).bias is None
    spec = spec_of(make_node("LayerNormalization", ["x", "s", "b"], ["y"], stash_type=16))
    assert (spec.bias, spec.cast) == ("d", Cast("bfloat16", "after"))


@pytest.mark.parametrize(
    ("node", "ndim", "text"),
    [
        (
            make_node("LayerNormalization", ["x", "s"], ["y"], axis=1, name="ln"),
            None,
            "onnx.LayerNormalization 'ln' counts its axes from the front: pass input_ndim, the number of axes of its "
            "input.",
        ),
        (
            make_node("LayerNormalization", ["x", "s"], ["y"], axis=3),
            3,
            "onnx.LayerNormalization names an axis that an input of 3 axes does not have.",
        ),
        (
            make_node("LpNormalization", ["x"], ["y"], p=1),
            None,
            "onnx.LpNormalization has p=1: only p=2 divides by a root of squares and is in the family.",
        ),
        (
            make_node("MeanVarianceNormalization", ["x"], ["y"], axes=[0, -1]),
            None,
            "onnx.MeanVarianceNormalization counts its axes from the front: pass input_ndim, the number of axes of its "
            "input.",
        ),
        (
            make_node("BatchNormalization", list("xsbmv"), ["y"], spatial=0),
            None,
            "onnx.BatchNormalization has spatial=0, statistics per position, which operator sets from 9 on do not have."
            " Convert the model.",
        ),
        (
            make_node("GroupNormalization", ["x", "s", "b"], ["y"]),
            None,
            "onnx.GroupNormalization has no num_groups, which the operator requires. Export the model again.",
        ),
        (
            make_node("RMSNormalization", ["x", "s"], ["y"], stash_type=6),
            None,
            "onnx.RMSNormalization has stash_type=6, which is no floating-point type.",
        ),
        (
            make_node("LRN", ["x"], ["y"], size=3),
            None,
            "onnx.LRN divides by a sum over a window of neighbouring channels and is outside the family.",
        ),
        (
            make_node("Conv", ["x", "w"], ["y"]),
            None,
            "onnx.Conv of domain ai.onnx is none of the operators BatchNormalization, InstanceNormalization, "
            "LayerNormalization, RMSNormalization, GroupNormalization, LpNormalization, MeanVarianceNormalization.",
        ),
    ],
    ids=lambda v: v.op_type if isinstance(v, onnx.NodeProto) else "",
)
def test_what_cannot_be_read_says_why(node, ndim, text):
    with pytest.raises(UnknownNormalization) as error:
        spec_of(node, input_ndim=ndim)
    assert str(error.value) == text
