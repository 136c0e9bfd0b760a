"""Batch norms written as multiplication and addition by stored statistics, and what only looks like one."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

from normscope import reference
from normscope.reading.graphs.graph import Graph
from normscope.reading.graphs.norms import node_norms
from normscope.spec import RunningState

EPS = 1e-3
C = 6
N = make_node


def held(**more):
    random = np.random.default_rng(0)
    found = {name: random.uniform(0.5, 2, C).astype(np.float32) for name in ("gamma", "beta", "mean", "var")}
    found["minus_half"] = np.array(-0.5, np.float32)
    return found | {"eps": np.array(EPS, np.float32), "one": np.array(1, np.float32)} | more


def graph(nodes, values, shape):
    tensors = [numpy_helper.from_array(value, name) for name, value in values.items()]
    ends = [make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    made = make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    return make_model(made, opset_imports=[make_opsetid("", 13)], ir_version=8)


ROOT = [N("Add", ["var", "eps"], ["v"]), N("Sqrt", ["v"], ["root"], name="bn/Rsqrt")]
INVERSE = [*ROOT, N("Reciprocal", ["root"], ["inv"]), N("Mul", ["inv", "gamma"], ["a"])]
FORMS = {
    # TensorFlow: x * inv + (offset - mean * inv)
    "merged": [*INVERSE, N("Mul", ["mean", "a"], ["m"]), N("Sub", ["beta", "m"], ["b"]), N("Mul", ["x", "a"], ["z"]),
               N("Add", ["z", "b"], ["y"])],
    "merged, no gain": [*ROOT, N("Div", ["one", "root"], ["a"]), N("Mul", ["a", "mean"], ["m"]),
                        N("Sub", ["beta", "m"], ["b"]), N("Mul", ["a", "x"], ["z"]), N("Add", ["b", "z"], ["y"])],
    "power": [ROOT[0], N("Pow", ["v", "minus_half"], ["inv"], name="bn/Rsqrt"), *INVERSE[3:],
              N("Mul", ["mean", "a"], ["m"]), N("Sub", ["beta", "m"], ["b"]), N("Mul", ["x", "a"], ["z"]),
              N("Add", ["z", "b"], ["y"])],
    "gain over root": [*ROOT, N("Div", ["gamma", "root"], ["a"]), N("Mul", ["mean", "a"], ["m"]),
                       N("Mul", ["x", "a"], ["z"]), N("Sub", ["z", "m"], ["w"]), N("Add", ["w", "beta"], ["y"])],
    "no offset": [*INVERSE, N("Mul", ["mean", "a"], ["m"]), N("Mul", ["x", "a"], ["z"]), N("Sub", ["z", "m"], ["y"])],
    "in steps": [*ROOT, N("Sub", ["x", "mean"], ["c"]), N("Div", ["c", "root"], ["h"]), N("Mul", ["h", "gamma"], ["z"]),
                 N("Add", ["z", "beta"], ["y"])],
    "in steps, one factor": [*INVERSE, N("Sub", ["x", "mean"], ["c"]), N("Mul", ["c", "a"], ["z"]),
                             N("Add", ["z", "beta"], ["y"])],
}  # fmt: skip
ABSENT = {"merged, no gain": ("weight",), "no offset": ("bias",)}


def ran(model, x):
    return onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0]


@pytest.mark.parametrize("shape", [(4, 3, 3, C), (5, C)], ids=["channels last", "features"])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_batch_norm_that_it_computes(form, shape):
    model = graph(FORMS[form], held(), shape)
    (norm,) = node_norms(Graph(model))
    assert (norm.name, norm.type_name, norm.mode) == ("bn/Rsqrt", "onnx nodes (batch norm)", "running")
    assert norm.spec.eps == EPS
    assert {"weight", "bias"} - set(norm.parameters) == set(ABSENT.get(form, ()))
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    state = RunningState(norm.array("running_mean"), norm.array("running_var"))
    given = {name: norm.array(name) for name in ("weight", "bias") if name in norm.parameters}
    wanted = reference.forward(x, norm.spec, **given, running=state, training=False)
    assert (norm.input, norm.output) == ("x", "y")
    # five roundings of float32, of numbers below 16
    np.testing.assert_allclose(ran(model, x), wanted, rtol=0, atol=5 * 16 * 2.0**-24)


def test_channels_first_through_a_reshape():
    last = FORMS["merged"][-2:]
    shaped = [N("Reshape", [name, "sizes"], [f"{name}4"]) for name in ("a", "b")]
    nodes = [*FORMS["merged"][:-2], *shaped, N("Mul", ["x", "a4"], ["z"]), N("Add", ["z", "b4"], ["y"])]
    assert len(last) == 2
    (norm,) = node_norms(Graph(graph(nodes, held(sizes=np.array([1, C, 1, 1])), (4, C, 3, 3))))
    assert norm.spec.stats == "b c ... -> c"
    assert norm.array("running_var").shape == (C,)


INNOCENT = {
    "a scale and a shift": [N("Mul", ["x", "gamma"], ["z"]), N("Add", ["z", "beta"], ["y"])],
    "multiplied out": [*INVERSE, N("Mul", ["x", "a"], ["z"]), N("Add", ["z", "beta"], ["y"])],
    "another mean factor": [*INVERSE, N("Mul", ["mean", "inv"], ["m"]), N("Sub", ["beta", "m"], ["b"]),
                            N("Mul", ["x", "a"], ["z"]), N("Add", ["z", "b"], ["y"])],
    "a root of a constant": [N("Sqrt", ["var"], ["root"]), N("Sub", ["x", "mean"], ["c"]),
                             N("Div", ["c", "root"], ["y"])],
    "the product is read twice": [*FORMS["merged"][:-1], N("Add", ["z", "b"], ["w"]), N("Add", ["w", "z"], ["y"])],
    "one number": [N("Add", ["one", "eps"], ["v"]), N("Sqrt", ["v"], ["root"]), N("Sub", ["x", "one"], ["c"]),
                   N("Div", ["c", "root"], ["y"])],
}  # fmt: skip


@pytest.mark.parametrize("name", INNOCENT)
def test_a_scale_and_a_shift_is_no_norm(name):
    assert node_norms(Graph(graph(INNOCENT[name], held(), (4, 3, 3, C)))) == []
