"""PyTorch in float64, every normalization layer and mode: output, gradients, stored statistics."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normscope import reference
from normscope.reference import RunningState
from normscope.spec import NormSpec, families

# Both sides sum at most 500 numbers of size below 30 in float64, in different orders: 500 ulp of relative error in a
# sum is the worst case (1e-13), and values after division and gain stay below about 10.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
FLAGS = list(itertools.product([True, False], repeat=2))
SHAPES: dict[str, list[tuple[int, ...]]] = {"1d": [(6, 4, 5)], "2d": [(3, 4, 5, 2)], "3d": [(3, 4, 2, 3, 2)]}


def tensor(shape: tuple[int, ...], seed: int, *, level: float = 3.0, spread: float = 2.0) -> torch.Tensor:
    noise = np.random.default_rng(seed).standard_normal(shape)
    return torch.tensor(level + spread * noise, dtype=torch.float64)


def randomize(module: nn.Module) -> None:
    """Gains, biases and stored statistics that are not 1 and 0."""
    for number, (name, value) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        if name != "num_batches_tracked":
            drawn = tensor(tuple(value.shape), 100 + number, level=0.5, spread=1.0)
            value.data.copy_(drawn.abs() + 0.5 if name == "running_var" else drawn)


def array(value: torch.Tensor | None) -> np.ndarray[Any, Any] | None:
    return None if value is None else value.detach().numpy().copy()


def agree(module: Any, spec: NormSpec, x: torch.Tensor) -> None:
    """One call in the module's own mode, forwards, backwards and its effect on stored statistics."""
    randomize(module)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    mean, var = array(getattr(module, "running_mean", None)), array(getattr(module, "running_var", None))
    state = None if mean is None else RunningState(mean, var, int(module.num_batches_tracked))
    x = x.clone().requires_grad_()
    y = module(x)
    grad = tensor(tuple(y.shape), 7, level=0.3, spread=1.0)
    y.backward(grad)

    how: dict[str, Any] = {"running": state, "training": module.training}
    given = (x.detach().numpy(), spec, array(weight), array(bias))
    np.testing.assert_allclose(reference.forward(*given, **how), array(y), **CLOSE)
    gradients = reference.vjp(grad.numpy(), *given, **how)
    for mine, theirs in zip(gradients, (x, weight, bias), strict=True):
        if theirs is None:
            assert mine is None
        else:
            np.testing.assert_allclose(mine, theirs.grad.numpy(), **CLOSE)
    if state is not None and module.training:
        after = reference.update_running(state, x.detach().numpy(), spec)
        np.testing.assert_allclose(after.mean, array(module.running_mean), **CLOSE)
        np.testing.assert_allclose(after.var, array(module.running_var), **CLOSE)
        # instance norm's counter never moves in PyTorch; ours counts the updates
        assert after.batches == 1
        assert state.batches == 0
        if "Batch" in type(module).__name__:
            assert int(module.num_batches_tracked) == 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
@pytest.mark.parametrize(("affine", "track"), FLAGS)
@pytest.mark.parametrize(("rank", "shape"), [("1d", (7, 4)), *((k, s) for k, v in SHAPES.items() for s in v)])
def test_batch_norm(
    rank: str, shape: tuple[int, ...], affine: bool, track: bool, momentum: float | None, training: bool
) -> None:
    module = getattr(nn, f"BatchNorm{rank}")(
        4, eps=1e-3, momentum=momentum, affine=affine, track_running_stats=track, dtype=torch.float64
    ).train(training)
    spec = families.batch_norm(eps=1e-3, momentum=momentum, weight=affine, bias=affine, running=track)
    agree(module, spec, tensor(shape, 1))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("affine", "track"), FLAGS)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("rank", SHAPES)
def test_instance_norm(rank: str, batched: bool, affine: bool, track: bool, training: bool) -> None:
    shape = SHAPES[rank][0] if batched else SHAPES[rank][0][1:]
    module = getattr(nn, f"InstanceNorm{rank}")(
        4, eps=1e-3, momentum=0.3, affine=affine, track_running_stats=track, dtype=torch.float64
    ).train(training)
    spec = families.instance_norm(
        eps=1e-3, momentum=0.3, weight=affine, bias=affine, running=track, batched=batched
    )
    agree(module, spec, tensor(shape, 2))


@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("axes", "sizes"), [("d", (5,)), ("l d", (4, 5)), ("c l d", (3, 4, 5))])
def test_layer_norm(axes: str, sizes: tuple[int, ...], affine: bool, bias: bool) -> None:
    module = nn.LayerNorm(sizes, eps=1e-3, elementwise_affine=affine, bias=bias, dtype=torch.float64)
    agree(
        module,
        families.layer_norm(axes, eps=1e-3, weight=affine, bias=affine and bias),
        tensor((2, 3, 4, 5), 3),
    )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("shape", [(3, 6, 4), (2, 6, 3, 4), (2, 6, 2, 3, 2)])
def test_group_norm(shape: tuple[int, ...], groups: int, affine: bool) -> None:
    module = nn.GroupNorm(groups, 6, eps=1e-3, affine=affine, dtype=torch.float64)
    agree(module, families.group_norm(groups, eps=1e-3, weight=affine, bias=affine), tensor(shape, 4))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-6, 0.5])
@pytest.mark.parametrize(("axes", "sizes"), [("d", (5,)), ("l d", (4, 5))])
def test_rms_norm(axes: str, sizes: tuple[int, ...], eps: float | None, affine: bool) -> None:
    module = nn.RMSNorm(sizes, eps=eps, elementwise_affine=affine, dtype=torch.float64)
    agree(module, families.rms_norm(axes, eps=eps, weight=affine), tensor((2, 3, 4, 5), 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_eps_none_is_the_machine_epsilon_of_the_computing_dtype(dtype: torch.dtype) -> None:
    # At |x| = 2^-10 the mean square is 2^-20, so that float32's 2^-23 shows and float16's 2^-10 would swamp it.
    x = torch.full((4,), 2.0**-10, dtype=dtype)
    theirs = F.rms_norm(x, (4,)).double().numpy()
    spec = families.rms_norm(eps=None, weight=False)
    given = x.float().numpy().astype(np.float16) if dtype == torch.float16 else x.double().numpy()
    if dtype == torch.bfloat16:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        given = given.astype(ml_dtypes.bfloat16)
    if dtype == torch.float32:
        given = given.astype(np.float32)
    # one rounding to the output's dtype, and a few of float32
    np.testing.assert_allclose(reference.forward(given, spec), theirs, rtol=float(torch.finfo(dtype).eps) * 4)


def test_synchronized_batch_norm_in_eval() -> None:
    agree(nn.SyncBatchNorm(4, dtype=torch.float64).eval(), families.batch_norm(), tensor((3, 4, 5), 6))


@pytest.mark.parametrize("level", [1.0, 1e-14])
def test_normalize(level: float) -> None:
    x = (tensor((3, 5), 8, level=0.0) * level).requires_grad_()
    y = F.normalize(x, dim=1)
    grad = tensor((3, 5), 9)
    y.backward(grad)
    spec = families.l2_normalize()
    np.testing.assert_allclose(reference.forward(x.detach().numpy(), spec), array(y), **CLOSE)
    dx, _, _ = reference.vjp(grad.numpy(), x.detach().numpy(), spec)
    assert x.grad is not None
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-12, atol=1e-12 / level)


def test_weight_norm() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3, dtype=torch.float64), dim=0)
    g, v = linear.parametrizations.weight.original0, linear.parametrizations.weight.original1
    spec = NormSpec("o i -> o", center=False, scale="l2", eps=0.0, weight="o")
    y = reference.forward(v.detach().numpy(), spec, g.detach().numpy().ravel())
    np.testing.assert_allclose(y, linear.weight.detach().numpy(), **CLOSE)
    grad = tensor((3, 5), 10)
    (linear.weight * grad).sum().backward()
    dv, dg, _ = reference.vjp(grad.numpy(), v.detach().numpy(), spec, g.detach().numpy().ravel())
    np.testing.assert_allclose(dv, v.grad.numpy(), **CLOSE)
    np.testing.assert_allclose(dg, g.grad.numpy().ravel(), **CLOSE)


def test_several_batches_in_a_row_cumulative_and_exponential() -> None:
    for momentum in (0.2, None):
        module = nn.BatchNorm1d(4, momentum=momentum, dtype=torch.float64)
        spec = families.batch_norm(momentum=momentum)
        state = RunningState(np.zeros(4), np.ones(4))
        for seed in range(4):
            x = tensor((6 + seed, 4), seed)
            module(x)
            state = reference.update_running(state, x.numpy(), spec)
        np.testing.assert_allclose(state.mean, array(module.running_mean), **CLOSE)
        np.testing.assert_allclose(state.var, array(module.running_var), **CLOSE)
        assert state.batches == int(module.num_batches_tracked) == 4


def test_double_precision_jacobian_against_autograd() -> None:
    x = tensor((2, 6, 3), 11)
    weight = tensor((6,), 12)
    for spec, run in (
        (families.group_norm(2, bias=False), lambda v: F.group_norm(v, 2, weight)),
        (
            families.batch_norm(bias=False, running=False),
            lambda v: F.batch_norm(v, None, None, weight, training=True),
        ),
        (families.instance_norm(weight=True), lambda v: F.instance_norm(v, weight=weight)),
    ):
        theirs = torch.autograd.functional.jacobian(run, x).numpy()
        np.testing.assert_allclose(reference.jacobian(x.numpy(), spec, weight.numpy()), theirs, **CLOSE)
