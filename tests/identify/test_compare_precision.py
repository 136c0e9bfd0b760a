"""Sides that compute in float32 beside exact ones: decided as far as float32 tells, and no further."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns

DECIDED = (
    "decided to the precision of float32, in which one of them computes: values that differ by less than 4e-06 of "
    "their size are not told apart"
)
CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.LayerNorm(16), (4, 6, 16)),
    (lambda: nn.GroupNorm(2, 8), (4, 8, 5, 5)),
    (lambda: nn.RMSNorm(16), (4, 6, 16)),  # its eps is that of the dtype
    (lambda: nn.RMSNorm(16, eps=1e-6), (4, 6, 16)),
    (lambda: nn.BatchNorm2d(8), (4, 8, 5, 5)),
]


def trained(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    module, generator = make().eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                low = -1.0 if name in ("bias", "running_mean") else 0.5
                tensor.copy_(low + 1.3 * torch.rand(tensor.shape, generator=generator))
    return module


def single(module: nn.Module, out: Any = np.float32) -> Callable[[Any], Any]:
    """The module in float32, as a function of arrays."""

    def function(x: Any) -> Any:
        with torch.no_grad():
            return module(torch.from_numpy(np.asarray(x, np.float32))).numpy().astype(out)

    return function


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_trained_values_read_off_in_float32_do_not_leave_a_comparison_undecided(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module = trained(make)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    inside = single(module, np.float64)  # takes and returns float64, computes in float32
    for c in (ns.compare(single(module), module, x), ns.compare(module, inside, shape)):
        assert (c.same, c.differences, c.counterexample) == (True, (), None), str(c)
        assert c.notes[-1] == DECIDED


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_values_that_float32_tells_apart_are_told_apart(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module = trained(make)
    other: Any = copy.deepcopy(module)
    with torch.no_grad():
        other.weight[3] *= 1 + 1e-4
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert ns.compare(single(other), module, x).same is False


def test_a_difference_too_small_beside_the_largest_output_is_undecided_and_says_why() -> None:
    module: Any = trained(lambda: nn.LayerNorm(16))
    with torch.no_grad():
        module.weight[3] = module.bias[3] = 1e-7
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight[3] = 2e-7
    c = ns.compare(single(other), module, np.zeros((4, 6, 16), np.float32))
    assert c.same is None
    assert c.notes[-1] == (
        "undecided: weight values differ by more than rounding, by less than shows beside the largest output, and no "
        "input that was tried shows it"
    )


def test_float64_is_still_told_apart_far_below_float32() -> None:
    module: Any = trained(lambda: nn.LayerNorm(8)).double()
    other: Any = copy.deepcopy(module)
    with torch.no_grad():
        other.weight[3] *= 1 + 1e-9

    def double(x: Any) -> Any:
        with torch.no_grad():
            return other(torch.from_numpy(x)).numpy()

    c = ns.compare(double, module, (4, 8))
    assert c.same is False
    assert "weight values" in {d.field for d in c.differences}
    assert DECIDED not in c.notes


def test_a_session_of_onnx_runtime_with_trained_weights_is_the_module_it_came_from() -> None:
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    module: Any = trained(lambda: nn.LayerNorm(16))
    stored = [onnx.numpy_helper.from_array(p.detach().numpy(), name) for name, p in module.named_parameters()]
    node = onnx.helper.make_node(
        "LayerNormalization", ["x", "weight", "bias"], ["y"], epsilon=module.eps, axis=-1
    )
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (4, 16)) for name in "xy"]
    graph = onnx.helper.make_graph([node], "one", ends[:1], ends[1:], stored)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    c = ns.compare(session, module, torch.randn(4, 16))
    assert c.same is True, str(c)
    assert c.notes[-1] == DECIDED
