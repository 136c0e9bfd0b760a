"""Norms of spiking networks against SpikingJelly's: outputs, gradients, stored statistics."""

from __future__ import annotations

import importlib

import pytest
import real_models
import torch

import normscope.nn as own

pytestmark = pytest.mark.real

T, N, C = 4, 3, 5
SHAPES = {"1d": (T, N, C, 7), "2d": (T, N, C, 6, 5), "3d": (T, N, C, 4, 3, 2)}
CLOSE = {"rtol": 1e-11, "atol": 1e-11}  # float64, sums of some hundred terms in another order


def theirs():
    real_models.folder("spikingjelly")  # skips, or fails where it must be there
    return importlib.import_module("spikingjelly.activation_based.layer")


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("kind", ["tdBN", "TEBN", "BNTT"])
def test_is_spikingjellys(kind, rank):
    layer = theirs()
    if kind == "tdBN":
        other = getattr(layer, f"ThresholdDependentBatchNorm{rank}")(2**-0.5, 0.5, C)
        norm = getattr(own, f"ThresholdBatchNorm{rank}")(C, 0.5, 2**-0.5, gain="weight")
        assert norm.weight.tolist() == other.weight.tolist()
    elif kind == "TEBN":
        other = getattr(layer, f"TemporalEffectiveBatchNorm{rank}")(T, C)
        norm = getattr(own, f"TemporalEffectiveBatchNorm{rank}")(T, C)
        with torch.no_grad():
            other.scale.copy_(torch.linspace(0.5, 2, T))
    else:
        other = getattr(layer, f"BatchNormThroughTime{rank}")(T, C, step_mode="m")
        norm = getattr(own, f"BatchNormThroughTime{rank}")(T, C, 1e-5)
    other, norm = other.double(), norm.double()
    if kind != "BNTT":  # one state dict for both
        norm.load_state_dict(other.state_dict())

    generator = torch.Generator().manual_seed(0)
    for training in (True, True, False):
        other.train(training)
        norm.train(training)
        if kind == "BNTT":
            other.reset()
        x = torch.randn(SHAPES[rank], generator=generator, dtype=torch.float64) * 2 + 1
        ours, their = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = norm(ours), other(their)
        torch.testing.assert_close(y, z, **CLOSE)
        grad = torch.cos(x)
        y.backward(grad)
        z.backward(grad)
        torch.testing.assert_close(ours.grad, their.grad, **CLOSE)

    if kind == "BNTT":
        held = {
            n: torch.stack([getattr(bn, n) for bn in other.bn_list]) for n in ("running_mean", "running_var")
        }
        grads = {"weight": torch.stack([bn.weight.grad for bn in other.bn_list])}
    else:
        held = dict(other.named_buffers())
        grads = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, tensor in held.items():
        torch.testing.assert_close(norm.state_dict()[name], tensor, **CLOSE)
    for name, parameter in norm.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-10, atol=1e-10)
