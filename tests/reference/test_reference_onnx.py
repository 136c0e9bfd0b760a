"""The ONNX operators' own node cases: 53, of which 50 are specifications and 3 (p = 1) follow by an identity."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest

from normscope import reference
from normscope.reference import RunningState
from normscope.spec import NormSpec, Running, families

onnx = pytest.importorskip("onnx")
MODULES = (
    "batch_normalization",
    "instance_normalization",
    "layernormalization",
    "groupnormalization",
    "rmsnormalization",
    "lpnormalization",
    "meanvariancenormalization",
)
# The expected outputs are float32, computed in float32 over at most 120 elements summed in pairs: 7 roundings in
# each of mean and variance, and half a dozen elementwise ones, of numbers no larger than the largest output.
ULPS = 24 * 2.0**-24


def load() -> list[Any]:
    node = importlib.import_module("onnx.backend.test.case.node")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0/0 inside a case's own recipe
        for name in MODULES:
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    return [
        case
        for case in node._NodeTestCases
        if case.model.graph.node[0].op_type in OPERATORS and "_expanded" not in case.name
    ]


OPERATORS = {
    "BatchNormalization": 4,
    "InstanceNormalization": 2,
    "LayerNormalization": 19,
    "GroupNormalization": 2,
    "RMSNormalization": 19,
    "LpNormalization": 6,
    "MeanVarianceNormalization": 1,
}
CASES = load()


def attributes(case: Any) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in case.model.graph.node[0].attribute}


def trailing(first: int, ndim: int) -> str:
    return " ".join(f"a{i}" for i in range(first % ndim, ndim))


def check(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=ULPS * max(1.0, float(np.abs(expected).max())))


def test_every_case_is_there() -> None:
    assert Counter(case.model.graph.node[0].op_type for case in CASES) == OPERATORS
    assert len(CASES) == 53


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node_case(case: Any) -> None:
    operator, a = case.model.graph.node[0].op_type, attributes(case)
    inputs, outputs = case.data_sets[0]
    x, eps = inputs[0], a.get("epsilon", 1e-5)
    globals()[f"run_{operator}"](x, inputs[1:], outputs, eps, a)


def run_BatchNormalization(x: Any, rest: Any, outputs: Any, eps: float, a: dict[str, Any]) -> None:
    scale, bias, mean, var = rest
    keep = a.get("momentum", 0.9)  # the share that stays
    spec = families.batch_norm(eps=eps).replace(running=Running(momentum=1 - keep, correction=0))
    state, training = RunningState(mean, var), a.get("training_mode", 0) == 1
    check(reference.forward(x, spec, scale, bias, running=state, training=training), outputs[0])
    if training:
        after = reference.update_running(state, x, spec)
        check(after.mean, outputs[1])
        check(after.var, outputs[2])
    else:
        assert len(outputs) == 1


def run_InstanceNormalization(x: Any, rest: Any, outputs: Any, eps: float, a: dict[str, Any]) -> None:
    check(reference.forward(x, families.instance_norm(eps=eps, weight=True, bias=True), *rest), outputs[0])


def run_GroupNormalization(x: Any, rest: Any, outputs: Any, eps: float, a: dict[str, Any]) -> None:
    check(reference.forward(x, families.group_norm(a["num_groups"], eps=eps), *rest), outputs[0])


def run_LayerNormalization(x: Any, rest: Any, outputs: Any, eps: float, a: dict[str, Any]) -> None:
    spec = families.layer_norm(trailing(a.get("axis", -1), x.ndim), eps=eps)
    check(reference.forward(x, spec, *rest), outputs[0])
    mean, variance, _ = reference.statistics(x, spec)
    check(mean, outputs[1].reshape(mean.shape))
    check(1 / np.sqrt(variance + eps), outputs[2].reshape(mean.shape))


def run_RMSNormalization(x: Any, rest: Any, outputs: Any, eps: float, a: dict[str, Any]) -> None:
    check(
        reference.forward(x, families.rms_norm(trailing(a.get("axis", -1), x.ndim), eps=eps), *rest),
        outputs[0],
    )


def run_LpNormalization(x: Any, rest: Any, outputs: Any, eps: float, a: dict[str, Any]) -> None:
    axis = a.get("axis", -1) % x.ndim
    left = [f"a{i}" for i in range(x.ndim)]
    # A set of norm 0 gives 0, hence not eps 0; the smallest positive eps that float64 can divide by changes no other.
    spec = NormSpec(
        f"{' '.join(left)} -> {' '.join(left[:axis] + left[axis + 1 :])}",
        center=False,
        scale="l2",
        eps=float(np.finfo(np.float64).tiny),
        eps_at="max",
    )
    if a.get("p", 2) == 2:
        y = reference.forward(x, spec)
    else:
        # A p-norm is outside of the family. With r = sqrt(|x|): x / sum|x| = sign(x) (r / |r|_2)^2.
        y = np.sign(x) * reference.forward(np.sqrt(np.abs(x)), spec) ** 2
    check(y, outputs[0])


def run_MeanVarianceNormalization(x: Any, rest: Any, outputs: Any, eps: float, a: dict[str, Any]) -> None:
    check(reference.forward(x, NormSpec("b c h w -> c", eps=1e-9, eps_at="std")), outputs[0])
