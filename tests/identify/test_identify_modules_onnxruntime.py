"""ONNX Runtime sessions of one node, identified through the session alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from normscope.errors import BadInput
from normscope.identify import identify
from normscope.spec import NormSpec, families

Shape = tuple[int, ...]


def session(
    op: str,
    shape: Shape,
    constants: dict[str, Any],
    opset: int = 18,
    kind: int = TensorProto.FLOAT,
    **attributes: Any,
) -> onnxruntime.InferenceSession:
    """A model of one node; its other inputs are initializers."""
    dtype = np.float64 if kind == TensorProto.DOUBLE else np.float32
    node = helper.make_node(op, ["x", *constants], ["y"], **attributes)
    stored = [numpy_helper.from_array(np.asarray(v, dtype=dtype), k) for k, v in constants.items()]
    ends = [helper.make_tensor_value_info(name, kind, shape) for name in "xy"]
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("op", "shape", "constants", "attributes", "expected"),
    [
        (
            "LayerNormalization",
            (4, 3, 6),
            {"w": numbers(6), "b": numbers(6, seed=1)},
            {"epsilon": 1e-5, "axis": -1},
            families.layer_norm(),
        ),
        (
            "LayerNormalization",
            (4, 3, 6),
            {"w": numbers(3, 6)},
            {"epsilon": 1e-3, "axis": 1},
            families.layer_norm("l d", eps=1e-3, bias=False),
        ),
        (
            "GroupNormalization",
            (4, 6, 3, 5),
            {"w": numbers(6), "b": numbers(6, seed=1)},
            {"epsilon": 1e-5, "num_groups": 2, "opset": 21},
            families.group_norm(2),
        ),
        (
            "InstanceNormalization",
            (4, 6, 3, 5),
            {"w": numbers(6), "b": numbers(6, seed=1)},
            {"epsilon": 1e-5},
            families.instance_norm(weight=True, bias=True),
        ),
        (
            "RMSNormalization",
            (4, 3, 6),
            {"w": numbers(6)},
            {"epsilon": 1e-5, "axis": -1, "opset": 23},
            families.rms_norm(eps=1e-5),
        ),
    ],
    ids=["layer norm", "layer norm over two", "group norm", "instance norm", "rms norm"],
)
def test_one_node(
    op: str, shape: Shape, constants: dict[str, Any], attributes: dict[str, Any], expected: NormSpec
) -> None:
    found = identify(session(op, shape, constants, **attributes), np.zeros(shape, np.float32))
    assert found.spec is not None, str(found)
    # eps is stored in float32, so 1e-5 is 9.99999974738e-06; read from float32 outputs it is known to about 1e-5
    spec = found.spec if found.spec.eps != 9.99999974738e-06 else found.spec.replace(eps=1e-5)
    assert spec.same_function(expected, shape=shape), f"{found}\n{spec.same_function(expected, shape=shape)}"
    # float32 arithmetic: 2**-24 a rounding, times the conditioning of inputs far from zero
    assert found.max_error is not None
    assert found.max_error < 1e-5
    np.testing.assert_allclose(np.ravel(found.weight), np.ravel(constants["w"]), rtol=1e-5)


def test_batch_normalization_is_a_fixed_map() -> None:
    stored = {"w": numbers(6), "b": numbers(6, seed=1), "m": numbers(6, seed=2), "v": numbers(6, seed=3)}
    found = identify(session("BatchNormalization", (4, 6, 3, 5), stored), np.zeros((4, 6, 3, 5), np.float32))
    assert found.spec is None
    assert found.fixed is not None, str(found)
    assert found.fixed.axes == "c"
    slope = stored["w"] / np.sqrt(stored["v"] + 1e-5)
    np.testing.assert_allclose(found.fixed.a, slope, rtol=1e-5)
    np.testing.assert_allclose(found.fixed.b, stored["b"] - stored["m"] * slope, rtol=1e-4, atol=1e-5)


def test_lp_normalization() -> None:
    found = identify(
        session("LpNormalization", (4, 6), {}, axis=-1, p=2, opset=22), np.zeros((4, 6), np.float32)
    )
    assert found.spec is not None, str(found)
    assert (found.spec.center, found.spec.scale) == (False, "l2")


def test_a_softmax_node_is_no_normalization() -> None:
    found = identify(session("Softmax", (4, 6), {}), np.zeros((4, 6), np.float32))
    assert found.spec is None
    assert found.reason


def test_sessions_of_several_inputs_are_refused() -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, 6)) for name in ("x", "z", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "z"], ["y"])], "two", ends[:2], ends[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    two = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(BadInput) as caught:
        identify(two, np.zeros((4, 6), np.float32))
    assert str(caught.value) == (
        "a session to identify has one input; this one has 2: x, z. Pass a function that fixes the others: "
        "lambda x: session.run(None, {...: x, ...})[0]"
    )
