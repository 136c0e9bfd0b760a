"""Normalizations of whole ONNX graphs: what PyTorch's exporter writes is the layer that it was made of."""

import io
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.helper import (
    make_function,
    make_graph,
    make_model,
    make_node,
    make_opsetid,
    make_tensor_value_info,
)
from torch import nn

from normscope import families, reference, spec_of
from normscope.errors import BadTarget
from normscope.reading.graphs.graph import Graph, inlined
from normscope.reading.graphs.norms import node_norms
from normscope.spec import RunningState

SHAPE = (2, 8, 5, 6)


class ChannelsFirst(nn.Module):
    spec = families.channels_first_layer_norm(eps=1e-6)

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / torch.sqrt(var + 1e-6)
        return self.weight[:, None, None] * y + self.bias[:, None, None]


class Rms(nn.Module):
    """As transformers writes it: the root's reciprocal, the gain after the cast back."""

    spec = families.llama_rms_norm(eps=1e-5)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-5)).to(x.dtype)


class GainFirst(nn.Module):
    """As Python reads g * d / root + b."""

    spec = families.layer_norm(eps=1e-5)

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        d = x - x.mean(-1, keepdim=True)
        return self.weight * d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5) + self.bias


class RmsGainFirst(nn.Module):
    spec = families.rms_norm(eps=1e-5)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Unbiased(nn.Module):
    spec = families.layer_norm(eps=1e-6, weight=False, bias=False).replace(correction=1, eps_at="std")

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


class Unit(nn.Module):
    spec = families.l2_normalize().replace(stats="b c ... -> b ...")

    def forward(self, x):
        return nn.functional.normalize(x, dim=1)


def randomized(layer):
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2)
    return layer.eval()


LAYERS = {
    "layer": lambda: nn.LayerNorm(6, eps=1e-6),
    "layer2": lambda: nn.LayerNorm((5, 6)),
    "plain layer": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(4, 8, eps=1e-3),
    "plain group": lambda: nn.GroupNorm(2, 8, affine=False),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "batch": lambda: nn.BatchNorm2d(8, eps=1e-3),
    "channels first": ChannelsFirst,
    "rms": Rms,
    "gain first": GainFirst,
    "rms gain first": RmsGainFirst,
    "unbiased": Unbiased,
    "unit": Unit,
}


def exported(layer, x, opset=17, **settings):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that needs no further package is deprecated
        torch.onnx.export(layer, (x,), file, dynamo=False, opset_version=opset, **settings)
    return onnx.load_from_string(file.getvalue())


def norms(model, folder=None):
    return node_norms(Graph(inlined(model), folder=folder))


@pytest.mark.parametrize("opset", [11, 17, 18])
@pytest.mark.parametrize("name", LAYERS)
def test_what_was_exported_is_found_again(name, opset):
    torch.manual_seed(0)
    layer, x = randomized(LAYERS[name]()), torch.randn(SHAPE)
    (norm,) = norms(exported(layer, x, opset))
    wanted = getattr(layer, "spec", None) or spec_of(layer)
    held = {key: norm.array(key) for key in norm.parameters}
    found = norm.spec
    if (
        wanted.weight is None and "weight" in held
    ):  # the operator has no form without: ones and zeros are written
        assert (held["weight"] == 1).all()
        assert (held["bias"] == 0).all()
        found = found.replace(weight=None, bias=None)
    # ONNX updates by the biased variance; a graph of the eval mode does not say how it was trained
    same = found.replace(running=None).same_function(wanted.replace(running=None), shape=SHAPE)
    assert same, (same, norm.spec, wanted)
    state = RunningState(held["running_mean"], held["running_var"]) if "running_mean" in held else None
    y = reference.forward(
        x.numpy(), norm.spec, held.get("weight"), held.get("bias"), running=state, training=state is None
    )
    # outputs of a float32 layer below 16 of sums of at most 60 elements: a few ulp of 16
    np.testing.assert_allclose(y, layer(x).detach().numpy(), rtol=0, atol=16 * 2.0**-23 * 60**0.5)


def test_half_precision_root_in_float32():
    layer = Rms().half()
    (norm,) = norms(exported(layer, torch.randn(SHAPE).half()))
    assert (norm.spec.cast.compute, norm.spec.cast.weight) == ("float32", "after")
    assert norm.input == "onnx::Cast_0"  # not the cast copy of it


def test_a_size_left_open_still_tells_the_axes():
    layer = randomized(nn.LayerNorm(6))
    x = torch.randn(SHAPE)
    model = exported(layer, x, 11, input_names=["x"], dynamic_axes={"x": {0: "n", 2: "h"}})
    (norm,) = norms(model)
    assert norm.spec.same_function(spec_of(layer), shape=SHAPE)


def graph_of(nodes, inputs, outputs, stored=(), opset=17, functions=()):
    graph = make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(a, n) for n, a in stored])
    opsets = [make_opsetid("", opset), *(make_opsetid(f.domain, 1) for f in functions)]
    return make_model(graph, opset_imports=opsets, ir_version=9, functions=list(functions))


def value(name, shape=SHAPE, kind=TensorProto.FLOAT):
    return make_tensor_value_info(name, kind, shape)


ONES = np.full(8, 2, np.float32)
BATCH = ["x", "w", "b", "m", "v"]


@pytest.mark.parametrize("form", ["initializer", "constant node", "identity", "expanded"])
def test_parameters_wherever_they_are_stored(form):
    names, nodes, stored = BATCH, [], []
    for name in BATCH[1:]:
        if form == "initializer":
            stored.append((name, ONES))
        elif form == "constant node":
            nodes.append(make_node("Constant", [], [name], value=numpy_helper.from_array(ONES)))
        elif form == "identity":
            stored.append((f"{name}0", ONES))
            nodes += [
                make_node("Identity", [f"{name}0"], [f"{name}1"]),
                make_node("Identity", [f"{name}1"], [name]),
            ]
        else:
            stored.append((f"{name}0", np.array([8], np.int64)))
            two = numpy_helper.from_array(np.array([2], np.float32))
            nodes.append(make_node("ConstantOfShape", [f"{name}0"], [name], value=two))
    nodes.append(make_node("BatchNormalization", names, ["y"], name="bn"))
    (norm,) = norms(graph_of(nodes, [value("x")], [value("y")], stored))
    assert set(norm.parameters) == {"weight", "bias", "running_mean", "running_var"}
    assert all((norm.array(name) == ONES).all() for name in norm.parameters)


def test_parameters_that_the_graph_computes_are_no_parameters():
    nodes = [make_node("LayerNormalization", ["x", "w"], ["y"], name="adaptive")]
    (norm,) = norms(graph_of(nodes, [value("x"), value("w", (6,))], [value("y")]))
    assert norm.spec.source == "input"
    assert norm.parameters == {}


def test_statistics_that_the_graph_computes_are_not_stored_ones():
    nodes = [make_node("BatchNormalization", BATCH, ["y"], name="bn")]
    inputs = [value("x"), value("m", (8,)), value("v", (8,))]
    (norm,) = norms(graph_of(nodes, inputs, [value("y")], [("w", ONES), ("b", ONES)]))
    assert norm.spec is None
    assert norm.reason == "its mean and variance are computed in the graph, not stored"


def test_training_mode_is_batch_mode():
    nodes = [make_node("BatchNormalization", BATCH, ["y", "m2", "v2"], name="bn", training_mode=1)]
    (norm,) = norms(graph_of(nodes, [value("x")], [value("y")], [(n, ONES) for n in BATCH[1:]]))
    assert norm.mode == "batch"


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_without_positions_is_no_instance_norm(affine):
    torch.manual_seed(0)
    layer, x = randomized(nn.GroupNorm(2, 8, affine=affine)), torch.randn(4, 8)
    (norm,) = norms(exported(layer, x))
    assert (norm.spec.stats, dict(norm.spec.sizes)) == ("b (g c) ... -> b g", {"g": 2})
    held = {key: norm.array(key) for key in norm.parameters}
    y = reference.forward(x.numpy(), norm.spec, held.get("weight"), held.get("bias"))
    # as above, of sums of 4 elements
    np.testing.assert_allclose(y, layer(x).detach().numpy(), rtol=0, atol=16 * 2.0**-23 * 2)


def test_group_norm_before_operator_set_21_scales_groups():
    nodes = [make_node("GroupNormalization", ["x", "w", "b"], ["y"], num_groups=2)]
    two = np.array([1, 3], np.float32)
    (norm,) = norms(graph_of(nodes, [value("x")], [value("y")], [("w", two), ("b", two)], opset=18))
    assert (norm.spec.weight, norm.spec.bias) == ("g", "g")
    x = np.random.default_rng(0).normal(size=SHAPE)
    y = reference.forward(x, norm.spec, two, two)
    plain = reference.forward(x, norm.spec.replace(weight=None, bias=None))
    np.testing.assert_allclose(y, plain * two.repeat(4)[:, None, None] + two.repeat(4)[:, None, None])


def test_bodies_of_if_are_looked_into():
    def branch(name):
        node = make_node("LayerNormalization", ["x", "w"], [f"{name}_y"], name=name)
        return make_graph([node], name, [], [value(f"{name}_y")])

    nodes = [make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("b"))]
    inputs = [value("x"), value("c", (), TensorProto.BOOL)]
    found = norms(graph_of(nodes, inputs, [value("y")], [("w", np.ones(6, np.float32))]))
    assert sorted((norm.name, norm.reachable, norm.spec.weight) for norm in found) == [
        ("a", False, "d"),
        ("b", False, "d"),
    ]


def test_local_functions_are_looked_into():
    body = [make_node("LayerNormalization", ["x", "w"], ["y"], name="inner")]
    function = make_function("own", "Block", ["x", "w"], ["y"], body, [make_opsetid("", 17)])
    nodes = [
        make_node("Block", ["x", "w"], ["z"], domain="own"),
        make_node("Block", ["z", "w"], ["y"], domain="own"),
    ]
    stored = [("w", np.ones(6, np.float32))]
    found = norms(graph_of(nodes, [value("x")], [value("y")], stored, functions=[function]))
    assert len(found) == 2
    assert len({norm.name for norm in found}) == 2


def test_functions_that_call_themselves_are_refused():
    body = [make_node("Block", ["x"], ["y"], domain="own")]
    function = make_function("own", "Block", ["x"], ["y"], body, [make_opsetid("own", 1)])
    nodes = [make_node("Block", ["x"], ["y"], domain="own")]
    with pytest.raises(BadTarget) as caught:
        norms(graph_of(nodes, [value("x")], [value("y")], functions=[function]))
    assert str(caught.value) == "the functions Block of this graph call themselves, so it cannot be run"


class Attention(nn.Module):
    """Roots and quotients that are no norm."""

    def forward(self, x):
        scores = x @ x.transpose(-1, -2) / torch.sqrt(torch.tensor(6.0))
        spread = torch.sqrt(x.pow(2).mean(-1, keepdim=True))
        return torch.softmax(scores, -1) @ x + spread


class Position(nn.Module):
    """What is added behind a norm without bias is no bias of it where it lives on other axes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6, elementwise_affine=False)
        self.position = nn.Parameter(torch.randn(1, 1, 5, 6))

    def forward(self, x):
        return self.norm(x) + self.position


class OtherAxes(nn.Module):
    """The mean over one axis, the variance over another."""

    def forward(self, x):
        centered = x - x.mean(1, keepdim=True)
        return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)


def test_what_looks_like_a_norm_and_is_none():
    x = torch.randn(SHAPE)
    assert norms(exported(Attention(), x)) == []
    assert [norm.spec.scale for norm in norms(exported(OtherAxes(), x))] == [
        "rms"
    ]  # of what is centered elsewhere
    (norm,) = norms(exported(Position(), x, 11))
    assert (norm.spec.bias, norm.parameters) == (None, {})


def test_an_operator_outside_of_the_family_says_so():
    nodes = [make_node("LRN", ["x"], ["y"], size=5, name="lrn")]
    (norm,) = norms(graph_of(nodes, [value("x")], [value("y")]))
    assert norm.spec is None
    assert norm.reason == (
        "onnx.LRN 'lrn' divides by a sum over a window of neighbouring channels and is outside the family."
    )


def test_one_name_for_each():
    nodes = [make_node("MeanVarianceNormalization", [a], [b], name="same") for a, b in ("xz", "zy")]
    assert [norm.name for norm in norms(graph_of(nodes, [value("x")], [value("y")]))] == ["same", "same#2"]


def test_a_constant_that_would_fill_the_memory_is_not_computed():
    stored = [("n", np.array([2**40], np.int64))]
    nodes = [make_node("ConstantOfShape", ["n"], ["w"]), make_node("LayerNormalization", ["x", "w"], ["y"])]
    (norm,) = norms(graph_of(nodes, [value("x")], [value("y")], stored))
    assert norm.parameters == {}
