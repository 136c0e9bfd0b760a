"""Graphs that others shipped, folded: the networks of the onnx package; RivaGAN's not, for their border."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.helper import make_tensor_value_info
from real_models import folder

import normscope as ns
from normscope.transforms import fold
from normscope.transforms.onnx_folding import layers

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.real
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
NETWORKS = {
    "resnet50": (53, 53, 0),
    "inception_v2": (69, 69, 69),
    "densenet121": (121, 59, 59),
    "shufflenet": (49, 49, 0),
}
"""batch norms, those behind a convolution, and scales written as Mul and Add behind those"""
LEFT = {"Concat": 58, "MaxPool": 1, "AveragePool": 3}
"""what makes the input of the other batch norms of DenseNet-121"""


def video(frames: int = 2) -> torch.Tensor:
    """(N, 3, 1, 64, 64) in [-1, 1], as the decoder takes it."""
    return torch.rand(frames, 3, 1, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_rivagan_s_batch_norms_stay_for_their_border() -> None:
    path = folder("imwatermark") / "rivagan_decoder.onnx"
    folded, report = fold(path, video())
    assert report.done == ()
    assert isinstance(folded, ns.OnnxModel)
    convs = [site.reason for site in report.left if "fills in zeros at the border" in site.reason]
    assert len(report.left) == 3
    assert len(convs) == 2
    assert "Tanh_4 (Tanh) makes its input" in convs[0]
    assert "where the norm's shift of up to 0.969 would be missing, and no bias makes up for that" in convs[0]
    assert "Softmax_10 (Softmax) reads its output" in report.left[1].reason


def test_a_fold_that_forgets_the_border_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no convolution padded: what the plan would have got wrong is measured and undone."""
    monkeypatch.setattr(layers, "_padded", lambda node: False)
    _, report = fold(folder("imwatermark") / "rivagan_decoder.onnx", video())
    assert report.done == ()
    undone = [
        site.reason for site in report.left if site.reason.startswith("undone, the function would change")
    ]
    assert len(undone) == 2
    # at the border 59 % and 2.8 % of the largest value, inside 5e-7
    off = [float(reason.split("would be ")[1].split()[0]) for reason in undone]
    assert [round(one, 2) for one in off] == [0.59, 0.03]


def random_weights(name: str) -> onnx.ModelProto:
    """A network of the onnx package, whose weights are one constant each, with random ones of usual sizes instead."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    random = np.random.default_rng(0)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    roles = {}
    for node in model.graph.node:
        kinds = {
            "Conv": ["weight", "bias"],
            "Gemm": ["weight", "bias"],
            "BatchNormalization": ["gain", "bias", "mean", "var"],
        }
        roles |= dict(zip(node.input[1:], kinds.get(node.op_type, []), strict=False))
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        (made,), size = node.output, shapes[node.input[0]].tolist()
        if roles.get(made) == "weight":
            values = random.normal(size=size) / np.sqrt(np.prod(size[1:]))
        elif roles.get(made) in ("gain", "var"):
            values = random.uniform(0.5, 1.5, size)
        else:
            values = random.normal(size=size) * 0.3
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), made))
        model.graph.input.append(make_tensor_value_info(made, onnx.TensorProto.FLOAT, size))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


@pytest.mark.parametrize("weights", ["constant", "random"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_onnx_package(name: str, weights: str, tmp_path: Path) -> None:
    norms, pairs, written = NETWORKS[name]
    path = LIGHT / f"light_{name}.onnx"
    folded, report = fold(ns.OnnxModel(path if weights == "constant" else random_weights(name)))
    done = Counter(site.before for site in report.done)
    assert done == Counter({"onnx.BatchNormalization": pairs, "onnx nodes (scale and shift)": written})
    assert (
        Counter(node.op_type for node in folded.graph.nodes)["BatchNormalization"]
        == norms - pairs
        == len(report.left)
    )
    if name == "densenet121":
        assert Counter(reason_of(site.reason) for site in report.left) == LEFT
    (agreement,) = report.agreements
    assert agreement.difference < 1e-6
    (sites,) = (note for note in report.notes if note.startswith("at the sites themselves"))
    # the constant weights of ResNet-50 add up 4608 equal numbers, whose roundings do too
    assert float(sites.split("at most ")[1].split()[0]) < (1e-5 if weights == "constant" else 5e-6)
    folded.save(tmp_path / "out.onnx")
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    if weights == "constant":
        shipped = onnx.TensorProto.FromString((LIGHT / f"light_{name}_output_0.pb").read_bytes())
        x = (np.arange(3 * 224**2) / (3 * 224**2)).reshape(1, 3, 224, 224).astype(np.float32)
        (y,) = ns.OnnxModel(tmp_path / "out.onnx").values({folded.input_names[0]: x}, ()).values()
        np.testing.assert_allclose(y.numpy(), numpy_helper.to_array(shipped), rtol=1e-3)


def reason_of(text: str) -> str:
    """The operator in front of a batch norm that is left."""
    return text.partition("(")[2].partition(")")[0]
