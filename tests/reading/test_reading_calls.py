"""Functional calls and operators: what is read from a call computes what the call computes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from normscope import reference
from normscope.reading import read_call
from normscope.spec import RunningState

torch.set_num_threads(1)
TOLERANCE = 300 * 2.0**-52 * 300**0.5 * 2  # as for the modules: sums of at most 300 float64 terms


def rand(*shape, seed=0):
    return 0.5 + torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = 2 + 3 * torch.randn((4, 6, 5, 3), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
W, B, M, V = (rand(6, seed=s) for s in range(4))
AFFINE = {"weight": W, "bias": B}
aten = torch.ops.aten
CALLS = [
    (F.batch_norm, (X, None, None), {"training": True, "eps": 0.1}, "F.batch_norm", "batch"),
    (F.batch_norm, (X, M, V, W), {"training": True, "momentum": 0.3}, "F.batch_norm", "batch"),
    (F.batch_norm, (X, M, V), AFFINE, "F.batch_norm", "running"),
    (torch.batch_norm, (X, W, B, M, V, False, 0.1, 1e-3, False), {}, "torch.batch_norm", "running"),
    (torch.native_batch_norm, (X, W, B, None, None, True, 0.1, 1e-3), {}, "torch.native_batch_norm", "batch"),
    (
        aten.native_batch_norm.default,
        (X, W, B, M, V, False, 0.1, 1e-3),
        {},
        "aten.native_batch_norm",
        "running",
    ),
    (
        aten._native_batch_norm_legit.no_stats,
        (X, W, B, True, 0.1, 1e-3),
        {},
        "aten._native_batch_norm_legit",
        "batch",
    ),
    (
        aten._native_batch_norm_legit_no_training.default,
        (X, W, B, M, V, 0.1, 1e-3),
        {},
        "aten._native_batch_norm_legit_no_training",
        "running",
    ),
    (
        aten._batch_norm_with_update.default,
        (X, W, B, M, V, 0.1, 1e-3),
        {},
        "aten._batch_norm_with_update",
        "batch",
    ),
    (
        aten._batch_norm_no_update.default,
        (X, W, B, M, V, 0.1, 1e-3),
        {},
        "aten._batch_norm_no_update",
        "running",
    ),
    (F.instance_norm, (X,), {"eps": 0.1}, "F.instance_norm", "input"),
    (F.instance_norm, (X, M, V), AFFINE, "F.instance_norm", "batch"),
    (F.instance_norm, (X, M, V), {"use_input_stats": False}, "F.instance_norm", "running"),
    (
        torch.instance_norm,
        (X, None, None, None, None, True, 0.1, 1e-3, False),
        {},
        "torch.instance_norm",
        "input",
    ),
    (F.layer_norm, (X, (3,)), {}, "F.layer_norm", "input"),
    (F.layer_norm, (X, [5, 3]), {"weight": rand(5, 3), "eps": 0.1}, "F.layer_norm", "input"),
    (torch.layer_norm, (X, (6, 5, 3), rand(6, 5, 3), rand(6, 5, 3, seed=1)), {}, "torch.layer_norm", "input"),
    (torch.native_layer_norm, (X, (3,), None, rand(3), 0.1), {}, "torch.native_layer_norm", "input"),
    (F.group_norm, (X, 2), AFFINE, "F.group_norm", "input"),
    (torch.group_norm, (X, 3), {"eps": 0.1}, "torch.group_norm", "input"),
    (aten.native_group_norm.default, (X, W, None, 4, 6, 15, 2, 0.01), {}, "aten.native_group_norm", "input"),
    (F.rms_norm, (X, (3,)), {}, "F.rms_norm", "input"),
    (torch.rms_norm, (X, (5, 3), rand(5, 3), 1e-3), {}, "torch.rms_norm", "input"),
    (F.normalize, (X,), {}, "F.normalize", "input"),
    (F.normalize, (X,), {"dim": -1, "eps": 4.0}, "F.normalize", "input"),
    (F.normalize, (X, 2, 0), {}, "F.normalize", "input"),
    (F.normalize, (X,), {"dim": (0, 2)}, "F.normalize", "input"),
    (F.normalize, (X,), {"dim": (1, -1)}, "F.normalize", "input"),
]


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "name", "mode"), CALLS, ids=[f"{i}-{call[3]}" for i, call in enumerate(CALLS)]
)
def test_call_computes_what_is_read(func, args, kwargs, name, mode):
    args = tuple(a.clone() if isinstance(a, torch.Tensor) and a.dim() == 1 else a for a in args)
    call = read_call(func, args, kwargs)
    assert (call.type_name, call.mode) == (name, mode)
    assert call.input is args[0]
    tensors = {key: value.numpy().copy() for key, value in call.tensors.items()}
    running = (
        RunningState(tensors["running_mean"], tensors["running_var"]) if "running_mean" in tensors else None
    )
    expected = reference.forward(
        X.numpy(),
        call.spec,
        tensors.get("weight"),
        tensors.get("bias"),
        running=running,
        training=mode != "running",
    )
    output = func(*args, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    np.testing.assert_allclose(output.numpy(), expected, rtol=0, atol=TOLERANCE)
    if running is not None:
        moved = reference.update_running(running, X.numpy(), call.spec) if mode == "batch" else running
        np.testing.assert_allclose(call.tensors["running_mean"].numpy(), moved.mean, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(call.tensors["running_var"].numpy(), moved.var, rtol=0, atol=TOLERANCE)


def test_positional_and_keyword_arguments_read_alike():
    one = read_call(F.batch_norm, (X, M, V, W, B, True, 0.3, 0.1), {})
    names = {
        "input": X,
        "running_mean": M,
        "running_var": V,
        "weight": W,
        "bias": B,
        "training": True,
        "momentum": 0.3,
        "eps": 0.1,
    }
    other = read_call(F.batch_norm, (), names)
    assert (one.spec, one.mode, list(one.tensors)) == (other.spec, other.mode, list(other.tensors))
    assert one.spec.running.momentum == 0.3


def test_a_dispatch_mode_sees_operators_that_can_be_read():
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(read_call(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with See():
        torch.nn.LayerNorm(3, eps=0.25, dtype=torch.float64)(X)
        torch.nn.BatchNorm2d(6, eps=0.5, dtype=torch.float64).eval()(X)
        torch.nn.GroupNorm(3, 6, eps=0.125, dtype=torch.float64)(X)
    found = [(call.type_name, call.spec.eps, call.mode) for call in seen if call is not None]
    assert found == [
        ("aten.native_layer_norm", 0.25, "input"),
        ("aten.native_batch_norm", 0.5, "running"),
        ("aten.native_group_norm", 0.125, "input"),
    ]


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (F.relu, (X,), {}),
        (F.normalize, (X,), {"p": 1}),
        (F.local_response_norm, (X, 2), {}),
        (torch.softmax, (X, 1), {}),
        (aten.add.Tensor, (X, X), {}),
    ],
)
def test_other_calls_are_no_normalization(func, args, kwargs):
    assert read_call(func, args, kwargs) is None
