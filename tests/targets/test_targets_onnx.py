"""ONNX graphs as models: what is found, what is measured in a run, and that a run of pieces is a run of the whole."""

import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from torch import nn

import normscope as ns
from normscope.errors import BadInput, BadTarget, MissingExtra
from normscope.reading import UnknownNormalization
from normscope.targets import onnx_run, resolve
from normscope.targets.onnx_model import OnnxModel

pytest.importorskip("onnxruntime")
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def exported(model, x, opset=17, **settings):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that needs no further package is deprecated
        torch.onnx.export(model, (x,), file, dynamo=False, opset_version=opset, **settings)
    return onnx.load_from_string(file.getvalue())


def network(**conv):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, **conv), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(),
        nn.Linear(8 * 36, 6), nn.LayerNorm(6),
    )  # fmt: skip
    with torch.no_grad():
        net(2 * torch.randn(64, 3, 10, 10) + 1)
    return net.eval()


def images(n=16):
    return 2 * torch.randn(n, 3, 10, 10, generator=torch.Generator().manual_seed(1)) + 1


def open_batch(net):
    axes = {"x": {0: "n"}, "y": {0: "n"}}
    # optimizations of the exporter would fold the batch norm
    return exported(
        net, images(2), input_names=["x"], output_names=["y"], dynamic_axes=axes,
        training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
    )  # fmt: skip


def codes(report):
    return {finding.code for finding in report.findings}


@pytest.mark.parametrize(
    ("name", "norms", "folded"),
    [("resnet50", 53, 53), ("inception_v2", 69, 69), ("densenet121", 121, 59), ("shufflenet", 49, 49)],
)
def test_the_graphs_of_the_onnx_package(name, norms, folded):
    path = LIGHT / f"light_{name}.onnx"
    model = OnnxModel(path)
    assert len(model._modules) == norms
    assert all(child.spec.stats == "b c ... -> c" and len(child.held) == 4 for child in model.children())
    layers = [n for child in model.children() for n in child.fed_by if n.kind == "conv" and not n.through]
    assert len(layers) == folded
    assert all((n.feature_axis, n.rewritable, n.consumers) == (1, True, 1) for n in layers)


def test_a_graph_is_judged_as_the_model_that_it_was():
    net, x = network(), images()
    model = OnnxModel(open_batch(net))
    found, wanted = ns.check(model, x), ns.check(net, x)
    assert [row.spec.stats for row in found.sites] == [row.spec.stats for row in wanted.sites]
    assert {row.kind for row in found.sites} == {"node"}
    # of those that look at inputs and stored tensors alone; biases and gradients belong to modules
    both = {"NS101", "NS102", "NS401", "NS402", "NS403", "NS404", "NS405", "NS406", "NS804"}
    assert both <= set(found.passed) | codes(found) | {n.code for n in found.not_run}
    assert codes(found) & both == codes(wanted) & both == {"NS804"}
    (fold,) = (f for f in found.findings if f.code == "NS804")
    assert (fold.evidence["into"], fold.fix) == (
        "/0/Conv", "none needed; ONNX Runtime does it for itself when it loads the graph",
    )  # fmt: skip


def test_what_is_wrong_with_the_data_shows():
    net = network()
    x = images()
    x[:, :] = x.mean((2, 3), keepdim=True)  # constant images
    model = OnnxModel(exported(nn.Sequential(nn.InstanceNorm2d(3, affine=True)), x))
    report = ns.check(model, x)
    assert "NS402" in codes(report)
    assert codes(ns.check(model, images())) == set()
    far = images() + 1e5
    assert "NS403" in codes(ns.check(OnnxModel(open_batch(nn.Sequential(nn.GroupNorm(1, 3), net))), far))


def test_stored_statistics_of_other_data_show_in_a_graph():
    net, x = network(), images(128)
    net[1].momentum = 1.0  # the statistics of the last batch
    with torch.no_grad():
        net.train()(x[:64])
    model = OnnxModel(open_batch(net.eval()))
    assert "NS304" in ns.check(model, x[64:], select=["NS304"]).passed
    (finding,) = ns.check(model, 255 * x[64:], select=["NS304"]).findings
    (module,) = ns.check(net, 255 * x[64:], select=["NS304"]).findings
    assert (finding.site, finding.severity) == ("/1/BatchNormalization", "error")
    # float32 convolutions of two libraries
    assert finding.evidence == pytest.approx(module.evidence, rel=1e-3)
    assert finding.fix == f"{module.fix} in the model that the graph was exported from"
    # random numbers of the declared sizes are no data
    assert "NS304" not in ns.check(model, select=["NS304"]).passed


def test_a_padded_convolution_behind_an_activation_cannot_take_the_norm():
    class Watermark(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = (
                nn.Conv2d(3, 8, 3),
                nn.BatchNorm2d(8),
                nn.Conv2d(8, 3, 3, padding=1),
            )
            nn.init.uniform_(self.norm.running_mean)

        def forward(self, x):
            return self.last(self.norm(torch.tanh(self.conv(x))))

    report = ns.check(OnnxModel(open_batch(Watermark().eval())), images())
    (finding,) = (f for f in report.findings if f.code == "NS801")
    assert (finding.evidence["into"], finding.evidence["where"]) == ("/last/Conv", "after")
    assert "NS804" not in codes(report)


def test_outputs_and_sites_are_those_of_the_network():
    net, x = network(), images()
    model = OnnxModel(open_batch(net))
    seen = {}
    for name, child in model.named_children():
        child.register_forward_hook(lambda _, given, made, name=name: seen.update({name: given}))
    y = model(x)
    # two float32 runs of sums of up to 288 products, outputs below 8
    torch.testing.assert_close(y, net(x), rtol=0, atol=8 * 2.0**-23 * 288**0.5 * 4)
    layers = {"/1/BatchNormalization": 1, "/4/InstanceNormalization": 4, "/7/LayerNormalization": 7}
    assert set(seen) == set(layers)
    for name, index in layers.items():
        given, made = seen[name]
        torch.testing.assert_close(given, net[:index](x), rtol=0, atol=1e-4)
        torch.testing.assert_close(made, net[: index + 1](x), rtol=0, atol=1e-4)


def test_a_run_in_pieces_is_the_run(monkeypatch):
    model, x = OnnxModel(open_batch(network())), images()
    whole = model(x)
    runs = []
    plain = onnx_run._session
    monkeypatch.setattr(onnx_run, "_session", lambda *args: runs.append(args[1]) or plain(*args))
    monkeypatch.setattr(onnx_run, "BUDGET", 1)
    assert torch.equal(OnnxModel(open_batch(network()))(x), whole)
    assert [len(names) for names in runs] == [2, 2, 2]


def trained_export():
    net = network().train()
    return exported(net, images(4), training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)


def test_a_graph_in_training_mode():
    report = ns.check(OnnxModel(trained_export()))
    (finding,) = report.findings
    assert (finding.code, finding.site, finding.evidence["mode_in_eval"]) == (
        "NS802", "/1/BatchNormalization", "batch",
    )  # fmt: skip


def test_what_is_said_of_a_node_of_a_graph():
    """It is no module: nothing is said of train() and eval(), nor of calling it."""
    model = OnnxModel(trained_export())
    found = {f.code: f for f in ns.check(model, images(4), select=["NS802", "NS202"]).findings}
    told, beside = found["NS802"], found["NS202"]
    assert told.message.startswith(
        "this batch norm (onnx.BatchNormalization, a node of a graph) is written down in training mode: whoever runs "
        "the graph, it normalizes by the batch; other samples of the batch change its output by "
    )
    assert told.fix == (
        "call model.eval() before tracing, scripting or exporting, and export again; or set training_mode of this node "
        "to 0, which leaves it one output"
    )
    assert beside.fix == "export the graph again from the model in eval mode, with running statistics"
    with pytest.raises(UnknownNormalization) as error:
        ns.verify.run_layer(model)
    assert str(error.value) == (
        "no norm of normscope.targets.onnx_model.OnnxModel can be verified: /1/BatchNormalization "
        "(onnx.BatchNormalization), /4/InstanceNormalization (onnx nodes (group norm)), /7/LayerNormalization "
        "(onnx.LayerNormalization): not verifiable: because it is a node of a graph that another runtime runs, and no "
        "module to call on inputs of its own. normscope check measures it on the inputs of its graph"
    )


def test_silent_on_instance_norms_and_eval_exports():
    for model in (network(), nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.InstanceNorm2d(3))):
        report = ns.check(OnnxModel(exported(model.eval(), images(4))), select=["NS802"])
        assert (codes(report), "NS802" in report.passed) == (set(), True)


def test_a_check_leaves_the_graph_as_it_was():
    model, x = OnnxModel(open_batch(network())), images()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = model(x)
    ns.check(model, x)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model(x), first)
    assert not model.training


def test_stored_statistics_are_checked():
    net = network()
    net[1].running_var[3] = -1.0
    assert "NS301" in codes(ns.check(OnnxModel(open_batch(net))))


def test_inputs_that_do_not_fit():
    model = OnnxModel(open_batch(network()))
    with pytest.raises(BadInput) as caught:
        ns.check(model, {"z": images()})
    assert str(caught.value) == "the graph takes x; it got 0 by position and z by name"
    with pytest.raises(BadInput) as caught:
        ns.check(model, images().double())
    assert str(caught.value).startswith(
        "the graph takes x: float ['n', 3, 10, 10]; it got x: float64 [16, 3, 10, 10], and ONNX Runtime raised "
    )
    with pytest.raises(BadInput) as caught:
        model(images().bfloat16())
    assert str(caught.value) == "ONNX Runtime takes tensors of a type that NumPy has; got torch.bfloat16"


def test_random_input_of_declared_sizes(tmp_path):
    path = tmp_path / "net.onnx"
    onnx.save(open_batch(network()), path)
    loaded = resolve(str(path))
    assert loaded.inputs is None
    loaded.fill_in()
    assert loaded.synthetic
    assert loaded.inputs["x"].shape == (2, 3, 10, 10)
    assert loaded.notes == [
        "the graph runs on random input of the sizes it declares (x 2x3x10x10); pass --data FILE for more"
    ]


def test_sizes_left_open_are_not_guessed(tmp_path):
    path = tmp_path / "net.onnx"
    axes = {"x": {0: "n", 2: "h", 3: "w"}}
    onnx.save(exported(nn.GroupNorm(1, 3), images(), input_names=["x"], dynamic_axes=axes), path)
    loaded = resolve(str(path))
    loaded.fill_in()
    assert (loaded.inputs, loaded.synthetic) == (None, False)
    assert loaded.notes == [
        "the graph leaves sizes of its inputs open (x), so it was read and not run: pass --data FILE"
    ]


def test_weights_beside_a_graph_are_refused(tmp_path):
    path = tmp_path / "net.onnx"
    onnx.save(open_batch(network()), path)
    with pytest.raises(BadTarget) as caught:
        resolve(str(path), weights=Path("w.pt"))
    assert str(caught.value) == f"{path} holds its own weights: leave --weights w.pt out"


def test_without_the_packages(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtra) as caught:
        OnnxModel(open_batch(network()))(images())
    assert str(caught.value) == (
        "running an ONNX graph needs onnxruntime, which is not installed: pip install 'normscope[onnx]'"
    )
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingExtra) as caught:
        OnnxModel("x.onnx")
    assert str(caught.value) == (
        "reading an ONNX graph needs onnx, which is not installed: pip install 'normscope[onnx]'"
    )


def test_neighbours_through_views_and_activations():
    value = lambda name, shape: make_tensor_value_info(name, TensorProto.FLOAT, shape)  # noqa: E731
    stored = {"w": np.ones((4, 6), np.float32), "b": np.ones(6, np.float32), "e": np.ones((9, 4), np.float32)}
    nodes = [
        make_node("Gather", ["e", "ids"], ["h"], name="embed"),
        make_node("MatMul", ["h", "w"], ["p"], name="dense"),
        make_node("Add", ["b", "p"], ["q"], name="bias"),
        make_node("Relu", ["q"], ["r"], name="relu"),
        make_node("LayerNormalization", ["r", "b"], ["n1"], name="first"),
        make_node("LayerNormalization", ["n1", "b"], ["n2"], name="second"),
        make_node("Add", ["n2", "r"], ["y"], name="sum"),
    ]
    ids = make_tensor_value_info("ids", TensorProto.INT64, (2, 5))
    graph = make_graph(
        nodes, "g", [ids], [value("y", (2, 5, 6))], [numpy_helper.from_array(a, n) for n, a in stored.items()]
    )
    model = OnnxModel(make_model(graph, opset_imports=[make_opsetid("", 17)], ir_version=9))
    first, second = model.children()
    (layer,), (after,) = first.fed_by, first.feeds
    assert (layer.kind, layer.path, layer.through, layer.feature_axis) == ("linear", "dense", ("relu",), 2)
    assert (after.kind, after.site) == ("norm", "second")
    assert [(n.kind, n.site) for n in second.fed_by] == [("norm", "first")]
    assert [(n.kind, n.path) for n in second.feeds] == [("add", "sum")]


def test_what_stands_in_a_body_is_read_and_not_looked_at():
    value = lambda name, shape, kind=TensorProto.FLOAT: make_tensor_value_info(name, kind, shape)  # noqa: E731

    def branch(name):
        node = make_node("LayerNormalization", ["h", "w"], [f"{name}_y"], name=name)
        return make_graph([node], name, [], [value(f"{name}_y", ["n", 6])])

    nodes = [
        make_node("LayerNormalization", ["x", "w"], ["h"], name="first"),
        make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("b")),
    ]
    inputs = [value("x", ["n", 6]), value("c", [], TensorProto.BOOL)]
    stored = [numpy_helper.from_array(np.ones(6, np.float32), "w")]
    graph = make_graph(nodes, "g", inputs, [value("y", ["n", 6])], stored)
    model = OnnxModel(make_model(graph, opset_imports=[make_opsetid("", 17)], ir_version=9))
    report = ns.check(model, {"x": torch.randn(16, 6), "c": torch.tensor(True)})
    assert {row.name: row.calls for row in report.sites} == {"first": 1, "a": 0, "b": 0}
    assert {row.spec.weight for row in report.sites} == {"d"}
