"""Laws: a layer is its own specification, and one convention that is changed is named, by that name alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normscope as ns
from normscope import NormSpec, families

LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "BatchNorm1d": lambda m: m.BatchNorm1d(6),
    "BatchNorm2d": lambda m: m.BatchNorm2d(6, momentum=None),
    "BatchNorm2d without state": lambda m: m.BatchNorm2d(6, track_running_stats=False),
    "InstanceNorm2d": lambda m: m.InstanceNorm2d(6, affine=True),
    "InstanceNorm1d with state": lambda m: m.InstanceNorm1d(6, track_running_stats=True),
    "LayerNorm": lambda m: m.LayerNorm(6),
    "LayerNorm over two axes": lambda m: m.LayerNorm((3, 6), eps=1e-8),
    "GroupNorm": lambda m: m.GroupNorm(3, 6),
    "RMSNorm": lambda m: m.RMSNorm(6),
}


def trained(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, *((0.5, 1.5) if "var" in name else (-1.5, 1.5)))
    return module


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_specification(name: str) -> None:
    module = trained(LAYERS[name](nn))
    c = ns.compare(module, ns.spec_of(module))
    assert (c.same, c.differences, c.counterexample) == (True, (), None), str(c)


@pytest.mark.parametrize("name", LAYERS)
def test_our_layer_is_pytorchs(name: str) -> None:
    a, b = trained(LAYERS[name](nn)), trained(LAYERS[name](ns.nn))
    assert ns.compare(a, b).same is True


BASES = {
    "layer": families.layer_norm(),
    "batch": families.batch_norm(),
    "group": families.group_norm(2),
}
CHANGES: dict[str, dict[str, Any]] = {
    "eps": {"eps": 3e-5},
    "eps_at": {"eps_at": "std"},
    "correction": {"correction": 1},
    "center": {"center": False},
    "weight": {"weight": None},
    "bias": {"bias": None},
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("field", CHANGES)
def test_one_changed_field_is_named_alone(base: str, field: str) -> None:
    spec = BASES[base]
    c = ns.compare(spec, spec.replace(**CHANGES[field]))
    assert c.same is False
    assert [d.field for d in c.differences] == [field]
    assert c.differences[0].size > 0
    assert c.counterexample is not None


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"correction": 1}, "train"),  # stored statistics carry the correction of their own
        ({"eps": 3e-5}, "both"),
        ({"center": False}, "both"),
    ],
)
def test_train_and_eval_are_told_apart(changes: dict[str, Any], mode: str) -> None:
    spec: NormSpec = BASES["batch"]
    c = ns.compare(spec, spec.replace(**changes))
    assert c.differences[0].mode == mode
    assert c.modes["eval"] is (mode == "train")
