"""The ONNX operators' own node cases through `normalize`: 50 of 53; the other three have p = 1."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from normscope import normalize
from normscope.spec import NormSpec, Running, RunningState, families

onnx = pytest.importorskip("onnx")
MODULES = {
    "BatchNormalization": "batch_normalization",
    "InstanceNormalization": "instance_normalization",
    "LayerNormalization": "layernormalization",
    "GroupNormalization": "groupnormalization",
    "RMSNormalization": "rmsnormalization",
    "LpNormalization": "lpnormalization",
    "MeanVarianceNormalization": "meanvariancenormalization",
}
# Both sides compute in float32 over at most 120 elements, the expected ones with sums in float32 (7 roundings each of
# mean and variance) and half a dozen elementwise ones, of numbers no larger than the largest output.
ULPS = 24 * 2.0**-24


def attributes(case: Any) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in case.model.graph.node[0].attribute}


def load() -> list[Any]:
    node = importlib.import_module("onnx.backend.test.case.node")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0/0 inside a case's own recipe
        for name in MODULES.values():
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    return [
        case
        for case in node._NodeTestCases
        if case.model.graph.node[0].op_type in MODULES
        and "_expanded" not in case.name
        and attributes(case).get("p", 2) == 2
    ]


CASES = load()


def spec_of(operator: str, ndim: int, a: dict[str, Any]) -> NormSpec:
    eps, axis = a.get("epsilon", 1e-5), a.get("axis", -1) % ndim
    last = " ".join(f"a{i}" for i in range(axis, ndim))
    every = [f"a{i}" for i in range(ndim)]
    return {
        "BatchNormalization": lambda: families.batch_norm(eps=eps).replace(
            running=Running(momentum=1 - a.get("momentum", 0.9), correction=0)
        ),
        "InstanceNormalization": lambda: families.instance_norm(eps=eps, weight=True, bias=True),
        "GroupNormalization": lambda: families.group_norm(a["num_groups"], eps=eps),
        "LayerNormalization": lambda: families.layer_norm(last, eps=eps),
        "RMSNormalization": lambda: families.rms_norm(last, eps=eps),
        "LpNormalization": lambda: NormSpec(
            f"{' '.join(every)} -> {' '.join(every[:axis] + every[axis + 1 :])}",
            center=False,
            scale="l2",
            eps=float(np.finfo(np.float32).tiny),  # a set of norm 0 gives 0
            eps_at="max",
        ),
        "MeanVarianceNormalization": lambda: NormSpec("b c h w -> c", eps=1e-9, eps_at="std"),
    }[operator]()


def check(found: torch.Tensor, expected: Any) -> None:
    assert tuple(found.shape) == expected.shape
    np.testing.assert_allclose(
        found.numpy(), expected, rtol=0, atol=ULPS * max(1.0, float(np.abs(expected).max()))
    )


def test_every_case_is_there() -> None:
    assert len(CASES) == 50


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node_case(case: Any) -> None:
    operator, a = case.model.graph.node[0].op_type, attributes(case)
    inputs, outputs = case.data_sets[0]
    x, *rest = (torch.tensor(array) for array in inputs)
    spec = spec_of(operator, x.ndim, a)
    if operator != "BatchNormalization":
        check(normalize(x, spec, *rest), outputs[0])
        return
    scale, bias, mean, var = rest
    state, training = RunningState(mean, var), a.get("training_mode", 0) == 1
    check(normalize(x, spec, scale, bias, running=state, training=training), outputs[0])
    assert len(outputs) == (3 if training else 1)
    if training:
        check(state.mean, outputs[1])
        check(state.var, outputs[2])
