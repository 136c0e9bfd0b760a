"""Two files, a file and a model, two graphs: their normalizations paired up, and every difference with its size."""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import normscope as ns
from normscope.errors import BadInput, BadTarget
from normscope.targets.norms.comparison import compare_norms
from normscope.targets.norms.differences import NormDifference
from normscope.targets.norms.lists import of_graph, of_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.bn(self.conv(x)).relu()
        return y


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5, momentum: float = 0.1, groups: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block())
        self.gn = nn.GroupNorm(groups, 8, eps=eps)
        self.ln = nn.LayerNorm(8)
        self.blocks[0].bn.momentum = momentum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.ln(self.gn(self.blocks(x)).mean((2, 3)))
        return y


@pytest.fixture(scope="module")
def net() -> Net:
    """With parameters and statistics that are all different."""
    torch.manual_seed(0)
    made = Net().eval()
    with torch.no_grad():
        for norm in (made.blocks[0].bn, made.gn, made.ln):
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.uniform_(-1.0, 1.0)
        made.blocks[0].bn.running_mean.uniform_(-1.0, 1.0)
        made.blocks[0].bn.running_var.uniform_(0.5, 2.0)
    return made


@pytest.fixture(scope="module")
def graph(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnx")
    path = tmp_path_factory.mktemp("graphs") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (torch.randn(2, 3, 8, 8),),
            str(path),
            dynamo=False,
            opset_version=17,
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )
    return path


def fields(c: ns.NormsComparison) -> list[tuple[str, str]]:
    return [(pair.name, d.field) for pair in c.pairs for d in pair.differences]


def test_one_model_in_every_kind_of_target_is_the_same(net: Net, graph: Path, tmp_path: Path) -> None:
    state = net.state_dict()
    torch.save({"epoch": 3, "state_dict": {f"module.{n}": t for n, t in state.items()}}, tmp_path / "a.ckpt")
    save_file(state, tmp_path / "b.safetensors")
    save_file({f"backbone.net.{n}": t for n, t in state.items()}, tmp_path / "c.safetensors")
    targets = [tmp_path / "a.ckpt", tmp_path / "b.safetensors", tmp_path / "c.safetensors", state, net, graph]
    for a in targets:
        for b in targets:
            c = compare_norms(a, b)
            assert c.same is True, str(c)
            assert [pair.name for pair in c.pairs] != []
            assert len(c.pairs) == 3
    c = compare_norms(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert c.prefixes == ("", "backbone.net.")
    assert c.notes == (f"paired without the prefix 'backbone.net.' of {tmp_path / 'c.safetensors'}",)


def test_every_difference_is_named_with_its_size(net: Net) -> None:
    other = copy.deepcopy(net)
    bn: Any = other.blocks[0].bn
    with torch.no_grad():
        bn.running_mean[2] += 3 * bn.running_var[2].sqrt()
        bn.running_var[5] *= 4
        other.ln.weight[1] += 0.25
    c = compare_norms(net, other)
    assert (c.same, bool(c)) == (False, False)
    assert fields(c) == [
        ("blocks.0.bn", "running_mean"),
        ("blocks.0.bn", "running_var"),
        ("ln", "weight"),
    ]
    mean, variance, weight = (d for pair in c.pairs for d in pair.differences)
    # float32 statistics: their differences are exact to some 1e-7
    assert mean.place == (2,)
    assert math.isclose(mean.deviations, 3.0, rel_tol=1e-5)
    assert variance.place == (5,)
    assert math.isclose(variance.deviations, 2.0, rel_tol=1e-5)
    assert weight.place == (1,)
    assert math.isclose(weight.size, 0.25, rel_tol=1e-5)
    largest = max(float(norm.weight.detach().max()) for norm in (net.ln, other.ln))
    assert math.isclose(weight.relative, 0.25 / largest, rel_tol=1e-5)


def test_conventions_of_two_models(net: Net, graph: Path) -> None:
    other = Net(eps=1e-3, momentum=0.01, groups=2).eval()
    other.load_state_dict(net.state_dict())
    c = compare_norms(net, other)
    assert [
        (name, d.field, d.a, d.b) for name, d in ((p.name, d) for p in c.pairs for d in p.differences)
    ] == [
        ("blocks.0.bn", "running.momentum", "0.1", "0.01"),
        ("gn", "eps", "1e-05", "0.001"),
        ("gn", "axes", "b (g c) ... -> b g, g=4", "b (g c) ... -> b g, g=2"),
    ]
    # a graph never updates its statistics: it has no momentum to differ
    assert fields(compare_norms(graph, other)) == [("gn", "eps"), ("gn", "axes")]


def test_a_graph_in_training_mode_beside_the_model_in_evaluation(net: Net, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(net).train(),
            (torch.randn(2, 3, 8, 8),),
            str(tmp_path / "train.onnx"),
            dynamo=False,
            opset_version=17,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
        )
    c = compare_norms(net, tmp_path / "train.onnx")
    assert ("blocks.0.bn", "mode in evaluation") in fields(c)


def test_norms_of_one_side_only(net: Net) -> None:
    state = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("ln.")}
    state["head_norm.weight"] = torch.ones(4)
    c = compare_norms(net, state)
    assert (c.same, c.only_a, c.only_b) == (False, ("ln",), ("head_norm",))
    assert "  1 only in Net: ln" in str(c).splitlines()


def test_statistics_that_were_left_behind(net: Net) -> None:
    c = compare_norms(net, dict(net.named_parameters()))
    assert fields(c) == [("blocks.0.bn", "running_mean"), ("blocks.0.bn", "running_var")]
    assert {d.b for pair in c.pairs for d in pair.differences} == {"none"}


def test_nan_is_a_difference_beside_a_number_and_none_beside_itself(net: Net) -> None:
    broken = copy.deepcopy(net)
    with torch.no_grad():
        broken.blocks[0].bn.running_var[3] = math.nan
    assert compare_norms(broken, copy.deepcopy(broken)).same is True
    (d,) = (d for pair in compare_norms(net, broken).pairs for d in pair.differences)
    assert (d.field, d.size, d.place) == ("running_var", math.inf, (3,))
    assert str(d).endswith(" against nan at [3]")
    json.dumps(compare_norms(net, broken).to_json(), allow_nan=False)


def test_a_copy_in_another_dtype_is_the_same_up_to_its_rounding(net: Net) -> None:
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in net.state_dict().items()}
    assert compare_norms(net, half).same is True
    half["ln.weight"][0] *= 1 + 2**-5  # four last places
    assert fields(compare_norms(net, half)) == [("ln", "weight")]
    near = copy.deepcopy(net)
    with torch.no_grad():
        near.ln.weight[0] = torch.nextafter(near.ln.weight[0], torch.tensor(9.0))
    assert fields(compare_norms(net, near)) == [("ln", "weight")], "of one dtype equal means equal"


def test_a_gain_of_one_is_none_and_an_offset_is_part_of_it() -> None:
    assert compare_norms(
        {"norm.weight": torch.ones(4)}, {"norm.weight": torch.ones(4), "norm.bias": torch.zeros(4)}
    )
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(4)
    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(4)
    one, two = nn.ModuleDict({"norm": gemma}), nn.ModuleDict({"norm": llama})
    assert compare_norms(one, two).same is True, "0 stored for 1 + w, 1 stored for w"
    with torch.no_grad():
        llama.weight[2] = 0.0
    assert fields(compare_norms(one, two)) == [("norm", "weight_offset"), ("norm", "weight")]
    assert compare_norms(one, one.state_dict()).same is True


def test_a_class_that_no_reader_knows_is_a_norm_by_its_tensors() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    model = nn.ModuleDict({"final_norm": Own(), "plain": nn.LayerNorm(4, elementwise_affine=False)})
    c = compare_norms(model, model.state_dict())
    assert (c.same, [pair.name for pair in c.pairs]) == (True, ["final_norm"])
    assert c.notes == (
        "left out of ModuleDict, since without tensors they stand in no file of weights: plain",
    )
    assert len(of_model(model).norms) == 2


def test_names_that_have_nothing_in_common_are_paired_in_order() -> None:
    one = {"a.norm1.weight": torch.ones(4), "a.norm2.weight": torch.ones(8)}
    two = {"x.first_norm.weight": torch.ones(4), "y.last_norm.weight": torch.ones(8)}
    c = compare_norms(one, two)
    assert (c.same, c.notes) == (True, ("no name is in both: paired in the order in which they come",))


def test_prefixes_that_most_names_have() -> None:
    layers = {f"layers.{i}.norm.weight": torch.full((4,), float(i)) for i in range(6)}
    wrapped = {f"model.{name}": tensor for name, tensor in layers.items()}
    c = compare_norms(
        {**wrapped, "head_norm.weight": torch.ones(4)}, {**layers, "head_norm.weight": torch.ones(4)}
    )
    assert (c.same, c.prefixes, len(c.pairs)) == (True, ("model.", ""), 7)


class Hand(nn.Module):
    """An RMS norm that multiplies by 1 + its weight."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.gain_name = name
        setattr(self, name, nn.Parameter(torch.linspace(-0.5, 0.5, 6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain: torch.Tensor = 1 + getattr(self, self.gain_name)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


@pytest.mark.parametrize(("path", "name"), [("rms", "g"), ("pre", "factors")])
def test_a_gain_that_only_the_graph_tells(path: str, name: str, tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("lin", nn.Linear(6, 6))
    net.add_module(path, Hand(name))
    file = tmp_path / "hand.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.randn(2, 6),), file, dynamo=False, opset_version=17)
    state = net.state_dict()
    found = ns.compare_norms(state, str(file))
    assert (found.same, [pair.a for pair in found.pairs]) == (True, [path])
    assert found.notes == (
        f"the graph multiplies by 1 + the weight of the file at {path}; that the model does so is not in a "
        "file of weights",
    )
    state[f"{path}.{name}"] = state[f"{path}.{name}"] + 0.25
    assert fields(ns.compare_norms(state, str(file))) == [(path, "weight")]


def test_a_graph_names_its_nodes_by_the_modules_they_came_from(graph: Path) -> None:
    assert {norm.name for norm in of_graph(graph).norms} == {"blocks.0.bn", "gn", "ln"}


@pytest.mark.parametrize("target", [[nn.LayerNorm(4)], 3, None])
def test_what_is_no_target(target: Any) -> None:
    with pytest.raises(BadInput) as caught:
        compare_norms({"norm.weight": torch.ones(4)}, target)
    assert str(caught.value) == (
        "compare_norms takes models, state dicts and the paths of files; the second is a "
        f"{type(target).__name__}. Of a single layer or a function, use normscope.compare"
    )


def test_compare_says_what_compares_files() -> None:
    for target in ("a.pt", Path("a.pt"), {"weight": torch.ones(4)}):
        with pytest.raises(BadInput, match=r"of files and state dicts, normscope\.compare_norms\(a, b\)"):
            ns.compare(target, nn.LayerNorm(4))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    good = tmp_path / "good.pt"
    torch.save({"norm.weight": torch.ones(4)}, good)
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "short.safetensors").write_bytes(b"\x08\0\0")
    (tmp_path / "folder").mkdir()
    for name in ("empty.pt", "short.safetensors", "folder", "missing.ckpt", "missing.onnx", "odd.txt"):
        for pair in ((good, tmp_path / name), (tmp_path / name, good)):
            with pytest.raises(BadTarget):
                compare_norms(*pair)


def test_shapes_that_differ_and_files_without_norms() -> None:
    (d,) = (
        d
        for pair in compare_norms(
            {"norm.weight": torch.ones(4)}, {"norm.weight": torch.full((5,), 2.0)}
        ).pairs
        for d in pair.differences
    )
    assert str(d) == "weight: shape (4,) against shape (5,)"
    none = compare_norms({"fc.weight": torch.ones(4, 4)}, {"fc.weight": torch.ones(4, 4)})
    assert (none.same, str(none)) == (None, "a state dict and a state dict: no normalization in either")


def test_a_model_is_left_as_it_was(net: Net) -> None:
    model = copy.deepcopy(net).train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    compare_norms(model, net)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(np.array_equal(before[n], t) for n, t in model.state_dict().items())


def test_a_layer_norm_by_name_with_running_statistics() -> None:
    """Its specification is not known; its tensors are compared."""
    one = {"ln.running_mean": torch.zeros(4), "ln.running_var": torch.ones(4)}
    two = {**one, "ln.running_mean": torch.full((4,), 0.5)}
    assert fields(compare_norms(one, two)) == [("ln", "running_mean")]
    assert ns.check_state(one).sites[0].reason == (
        "a layer norm by its name, with running statistics, which layer norms do not keep"
    )


def test_sparse_tensors_are_refused_by_name() -> None:
    state = {f"norm.{name}": tensor.to_sparse() for name, tensor in nn.LayerNorm(4).state_dict().items()}
    with pytest.raises(BadInput) as caught:
        compare_norms(state, nn.Sequential(nn.LayerNorm(4)))
    assert str(caught.value) == (
        "tensors are compared number by number; weight of norm in a state dict is sparse (torch.sparse_coo). Pass "
        "tensor.to_dense()"
    )


def test_names_in_a_difference_are_printed_escaped() -> None:
    assert str(NormDifference("bn\x1b[31m", "1", "2")) == r"bn\x1b[31m: 1 against 2"
