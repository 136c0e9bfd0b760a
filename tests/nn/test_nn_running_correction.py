"""Batch norm that stores the variance over M, as Keras and Flax do: ``running_correction=0``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import normscope.nn as own
from normscope.errors import BadInput
from normscope.reading import read

F64 = torch.float64
CASES = [("BatchNorm1d", (6, 3)), ("BatchNorm2d", (4, 3, 5, 2)), ("BatchNorm3d", (2, 3, 2, 2, 2))]


def data(shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 2 + 3


@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize("momentum", [0.25, None])
def test_the_variance_is_stored_over_all_elements(name, shape, momentum):
    layer = getattr(own, name)(3, momentum=momentum, dtype=F64, running_correction=0)
    torchs = getattr(torch.nn, name)(3, momentum=momentum, dtype=F64)
    mean, var = torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)
    for batch in range(3):
        x = data(shape, batch)
        torch.testing.assert_close(layer(x), torchs(x), rtol=1e-13, atol=1e-13)  # normalizing is the same
        flat = x.transpose(0, 1).flatten(1)
        share = momentum or 1 / (batch + 1)
        mean = (1 - share) * mean + share * flat.mean(1)
        var = (1 - share) * var + share * flat.var(1, correction=0)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(layer.running_var, var, rtol=1e-14, atol=1e-14)
    assert layer.num_batches_tracked == 3
    x = data(shape, 9)
    shaped = [1, 3, *[1] * (x.dim() - 2)]
    expected = (x - mean.view(shaped)) / (var.view(shaped) + layer.eps).sqrt()
    torch.testing.assert_close(layer.eval()(x), expected, rtol=1e-13, atol=1e-13)


def test_half_parameters_beside_float32_statistics():
    layer = own.BatchNorm1d(3, momentum=1.0, running_correction=0).bfloat16()
    x = data((8, 3), dtype=torch.float32).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(layer.running_var, x.float().var(0, correction=0), rtol=1e-6, atol=0)


def test_without_statistics_and_with_the_flag_off_nothing_moves():
    layer = own.BatchNorm1d(3, running_correction=0)
    layer.track_running_stats = False
    layer(data((8, 3), dtype=torch.float32))
    assert torch.equal(layer.running_var, torch.ones(3))
    bare = own.BatchNorm1d(3, track_running_stats=False, dtype=F64, running_correction=0)
    x = data((8, 3))
    torch.testing.assert_close(bare(x), torch.nn.BatchNorm1d(3, dtype=F64)(x), rtol=1e-13, atol=1e-13)
    assert read(bare).spec.running is None


def test_gradients_are_those_of_batch_norm():
    layer, torchs = own.BatchNorm1d(3, dtype=F64, running_correction=0), torch.nn.BatchNorm1d(3, dtype=F64)
    x, weights = data((6, 3)), data((6, 3), 1)
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    (layer(one) * weights).sum().backward()
    (torchs(two) * weights).sum().backward()
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(layer.weight.grad, torchs.weight.grad, rtol=1e-12, atol=1e-12)


def test_it_says_so_and_stays_with_copies():
    layer = own.BatchNorm2d(3, running_correction=0)
    assert repr(layer).endswith(", running_correction=0)")
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same.spec.running.correction == 0
        assert read(same).spec == same.spec
    assert read(own.BatchNorm2d(3)).spec.running.correction == 1


@pytest.mark.slow
def test_compiled():
    layer = own.BatchNorm1d(3, dtype=F64, running_correction=0)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for batch in range(2):
        torch.testing.assert_close(
            compiled(data((6, 3), batch)), twin(data((6, 3), batch)), rtol=1e-13, atol=1e-13
        )
    torch.testing.assert_close(layer.running_var, twin.running_var, rtol=1e-14, atol=1e-14)


def test_another_correction_is_refused():
    with pytest.raises(BadInput) as caught:
        own.BatchNorm1d(3, running_correction=2)
    assert str(caught.value) == (
        "the stored variance is over M - running_correction, which is 0 or 1; got 2. PyTorch's is 1, that of Keras and "
        "Flax 0."
    )


def test_a_script_would_lose_it():
    with pytest.raises(BadInput) as caught:
        torch.jit.script(own.BatchNorm1d(3, running_correction=0))
    assert str(caught.value).startswith(
        "torch.jit.script takes those layers of normscope.nn that torch.nn has too"
    )
    torch.jit.script(own.BatchNorm1d(3))
