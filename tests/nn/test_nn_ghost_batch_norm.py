"""GhostBatchNorm against batch norm of every virtual batch, its remainders and its two policies."""

import math

import pytest
import torch
from torch import nn

import normscope.nn as own
from normscope.errors import BadInput


def batch(n, *positions):
    x = torch.randn(n, 3, *positions, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x * 2 + 1 + torch.arange(n, dtype=torch.float64).reshape(-1, *(1 for _ in x.shape[1:]))


def ghost(**more):
    return own.GhostBatchNorm2d(3, dtype=torch.float64, **more)


def plain():
    return nn.BatchNorm2d(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("samples", "given", "parts"),
    [
        (6, {"size": 3}, (3, 3)),
        (6, {"number": 3}, (2, 2, 2)),
        (33, {"size": 32, "remainder": "short"}, (32, 1)),
        (33, {"size": 32, "remainder": "balanced"}, (17, 16)),
        (5, {"size": 32, "remainder": "short"}, (5,)),
        (7, {"number": 3, "remainder": "balanced"}, (3, 2, 2)),
    ],
)
def test_each_virtual_batch_is_a_batch_of_batch_norm(samples, given, parts):
    """Outputs, gradients and statistics are those of batch norm called on one part after the other."""
    x, z = batch(samples, 2, 2).requires_grad_(), batch(samples, 2, 2).requires_grad_()
    norm, one = ghost(**given), plain()
    y, wanted = norm(x), torch.cat([one(part) for part in z.split(parts)])
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    y.sin().sum().backward()
    wanted.sin().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(norm.state_dict(), one.state_dict(), rtol=1e-13, atol=1e-13)
    assert norm.num_batches_tracked == len(parts)
    torch.testing.assert_close(norm.eval()(x), one.eval()(z), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("updates", ["each", "once"])
def test_when_the_virtual_batch_is_the_batch_it_is_batch_norm(updates):
    norm, one, x = ghost(size=6, updates=updates), plain(), batch(6, 2, 2)
    assert torch.equal(norm(x), own.BatchNorm2d(3, dtype=torch.float64)(x))
    one(x)
    torch.testing.assert_close(norm.state_dict(), one.state_dict(), rtol=1e-13, atol=1e-13)


def test_once_moves_by_the_mean_of_the_virtual_batches():
    norm, x = ghost(size=2, updates="once", momentum=0.25), batch(6, 2, 2)
    torch.testing.assert_close(norm(x), ghost(size=2)(x), rtol=1e-12, atol=1e-12)
    parts = [part.transpose(0, 1).flatten(1) for part in x.split(2)]
    mean = torch.stack([part.mean(1) for part in parts]).mean(0)
    var = torch.stack([part.var(1) for part in parts]).mean(0)
    torch.testing.assert_close(norm.running_mean, 0.25 * mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(norm.running_var, 0.75 + 0.25 * var, rtol=1e-13, atol=0)
    assert norm.num_batches_tracked == 1


def test_cumulative_statistics_count_virtual_batches():
    norm, x = ghost(size=2, momentum=None), batch(6, 2, 2)
    for _ in range(2):
        norm(x)
    means = torch.stack([part.mean((0, 2, 3)) for part in x.split(2)])
    torch.testing.assert_close(norm.running_mean, means.mean(0), rtol=1e-13, atol=0)
    assert norm.num_batches_tracked == 6


@pytest.mark.parametrize("updates", ["each", "once"])
def test_masks_count_exactly_and_an_empty_virtual_batch_moves_nothing(updates):
    x = batch(6, 2, 2)
    x[3:] = math.nan
    x.requires_grad_()
    padded, short = ghost(size=2, updates=updates, momentum=None), plain()
    short.momentum = None
    y = padded(x, mask=(torch.arange(6) < 2).reshape(6, 1, 1, 1))
    y.sin().sum().backward()
    torch.testing.assert_close(y[:2], short(batch(6, 2, 2)[:2]), rtol=1e-12, atol=1e-12)
    assert (y[2:] == 0).all()
    assert x.grad.isfinite().all()
    torch.testing.assert_close(padded.state_dict(), short.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "GhostBatchNorm2d takes the size of its virtual batches or their number, one of the two; got size=None, "
         "number=None. Write size=32."),
        ({"size": 0}, "GhostBatchNorm2d needs every size in size to be an integer of 1 or more; got 0. Write size=32."),
        ({"size": 2, "remainder": "drop"}, "GhostBatchNorm2d takes remainder of 'error', 'short', 'balanced'; got "
         "'drop'. Leave it at 'error'."),
    ],
)  # fmt: skip
def test_a_bad_argument_says_what_is_wrong(arguments, message):
    with pytest.raises(BadInput) as caught:
        ghost(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "shape", "message"),
    [
        ({"size": 4}, (6, 3, 2, 2), "GhostBatchNorm2d with virtual batches of size 4 needs a batch that falls into "
         "them evenly; got an input of shape (6, 3, 2, 2). Use remainder='balanced' or 'short', or drop_last=True in "
         "the loader."),
        ({"size": 4, "remainder": "short"}, (5, 3, 1, 1), "GhostBatchNorm2d takes the variance of more than one value "
         "a channel in every virtual batch; got virtual batches of 4, 1 of an input of shape (5, 3, 1, 1). Use larger "
         "ones, or remainder='balanced'."),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_says_so_and_moves_nothing(given, shape, message):
    norm = ghost(**given)
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    with pytest.raises(BadInput) as caught:
        norm(torch.zeros(shape, dtype=torch.float64))
    assert str(caught.value) == message
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())
