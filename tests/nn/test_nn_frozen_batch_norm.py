"""Frozen batch norm: nothing moves it, and it loads what detection models hold."""

from __future__ import annotations

import pytest
import torch

import normscope.nn as own


@pytest.fixture
def trained():
    norm = torch.nn.BatchNorm2d(4)
    norm(3 * torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0)) + 1)
    with torch.no_grad():
        norm.weight.mul_(2)
        norm.bias.add_(0.5)
    return norm.eval()


def torchvision_style(norm, *, counter):
    """A state dict with the keys of torchvision's class, in its order, with the counter of older checkpoints or not."""
    state = dict(norm.state_dict())
    count = state.pop("num_batches_tracked")
    return state | ({"num_batches_tracked": count} if counter else {})


@pytest.mark.parametrize("counter", [True, False])
def test_loads_with_and_without_counter(trained, counter):
    frozen = own.FrozenBatchNorm(4)
    state = torchvision_style(trained, counter=counter)
    assert not frozen.load_state_dict(state, strict=True).missing_keys
    assert ("num_batches_tracked" in state) == counter  # the caller's dict is left alone
    assert list(frozen.state_dict()) == ["weight", "bias", "running_mean", "running_var"]
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(frozen(x), trained(x))


def test_inside_a_model_only_its_own_counter_is_dropped(trained):
    model = torch.nn.ModuleDict({"norm": own.FrozenBatchNorm(4), "other": torch.nn.BatchNorm2d(4)})
    twin = torch.nn.ModuleDict({"norm": trained, "other": torch.nn.BatchNorm2d(4)})
    model.load_state_dict(twin.state_dict(), strict=True)


def test_nothing_moves_it(trained):
    frozen = own.FrozenBatchNorm(4)
    frozen.load_state_dict(trained.state_dict())
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    in_train = frozen.train()(x)
    in_train.sum().backward()
    assert torch.equal(in_train, frozen.eval()(x))
    assert list(frozen.parameters()) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.state_dict().items())
    assert x.grad is not None


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (2, 4, 3, 3), (2, 4, 3, 3, 3)])
def test_any_rank(trained, shape):
    frozen = own.FrozenBatchNorm(4)
    frozen.load_state_dict(trained.state_dict())
    x = torch.randn(shape)
    wanted = torch.nn.functional.batch_norm(
        x, trained.running_mean, trained.running_var, trained.weight, trained.bias
    )
    torch.testing.assert_close(frozen(x), wanted)


def test_no_batch_norm_by_class():
    assert not isinstance(own.FrozenBatchNorm(4), torch.nn.modules.batchnorm._BatchNorm)
