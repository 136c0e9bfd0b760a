"""BatchRenorm against the paper's formulas and its limit cases."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
import normscope.nn as own
from normscope.errors import BadInput

INF = math.inf


def made(**more):
    """A layer of two channels whose stored statistics are unlike those of `batch`."""
    norm = own.BatchRenorm1d(2, dtype=torch.float64, **more)
    with torch.no_grad():
        norm.running_mean.copy_(torch.tensor([0.25, -2.0]))
        norm.running_var.copy_(torch.tensor([2.0, 0.5]))
        norm.weight.copy_(torch.tensor([1.5, -0.5]))
    return norm


def batch(n=6):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 + 0.5


def test_algorithm_1_written_out():
    """Three steps, clipped on one side in one channel: outputs and both averages, in NumPy."""
    norm = made(r_max=1.2, d_max=0.6, momentum=0.3)
    mu, sigma = norm.running_mean.numpy().copy(), np.sqrt(norm.running_var.numpy() + 1e-5)
    for step in range(3):
        x = batch() + step
        mean, s = x.numpy().mean(0), np.sqrt(x.numpy().var(0) + 1e-5)
        r, d = np.clip(s / sigma, 1 / 1.2, 1.2), np.clip((mean - mu) / sigma, -0.6, 0.6)
        wanted = ((x.numpy() - mean) / s * r + d) * norm.weight.detach().numpy()
        mu, sigma = mu + 0.3 * (mean - mu), sigma + 0.3 * (s - sigma)
        np.testing.assert_allclose(norm(x).detach().numpy(), wanted, rtol=1e-13)
        np.testing.assert_allclose(
            norm.running_mean.numpy(), mu, rtol=0, atol=1e-15
        )  # sums of numbers below 4
        np.testing.assert_allclose(np.sqrt(norm.running_var.numpy() + 1e-5), sigma, rtol=1e-14)
    assert norm.num_batches_tracked == 3


@pytest.mark.parametrize("averages", ["denominator", "variance"])
def test_unclipped_it_is_evaluation(averages):
    norm = made(r_max=INF, d_max=INF, averages=averages)
    x = batch()
    wanted = norm.eval()(x)
    torch.testing.assert_close(norm.train()(x), wanted, rtol=1e-13, atol=1e-13)


def test_with_limits_of_1_and_0_it_is_batch_norm():
    norm = made(r_max=1, d_max=0, averages="variance", momentum=0.1)
    plain = nn.BatchNorm1d(2, dtype=torch.float64)
    plain.load_state_dict(norm.state_dict(), strict=True)
    for _ in range(2):
        x, z = batch().requires_grad_(), batch().requires_grad_()
        y, wanted = norm(x), plain(z)
        torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)
        y.sin().sum().backward()
        wanted.sin().sum().backward()
        torch.testing.assert_close(x.grad, z.grad, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict(), rtol=1e-13, atol=1e-13)


def test_no_gradient_goes_through_r_and_d():
    """dy/dx of weight (r x_hat + d) is that of batch norm times r, with r held."""
    norm, x = made(r_max=INF, d_max=INF), batch().requires_grad_()
    s, sigma = (x.var(0, correction=0) + 1e-5).sqrt().detach(), (norm.running_var + 1e-5).sqrt().clone()
    norm(x).sin().sum().backward()
    z = batch().requires_grad_()
    x_hat = (z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt()
    d = (z.mean(0).detach() - torch.tensor([0.25, -2.0], dtype=torch.float64)) / sigma
    (norm.weight.detach() * (x_hat * (s / sigma) + d)).sin().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-12, atol=1e-13)


def test_verify_passes():
    report = ns.verify.run_layer(own.BatchRenorm1d(3, r_max=3, d_max=5))
    assert "FAILED" not in str(report)


def test_half_types_and_masks_take_another_way_and_agree():
    """bfloat16 is computed in float32: within its own rounding, and to the bit in the statistics."""
    x = batch(8).bfloat16()
    half, whole = (made(r_max=1.5, d_max=0.5).float() for _ in range(2))
    half.bfloat16()
    whole.weight.data = half.weight.data.float()
    y, wanted = half(x), whole(x.float())
    torch.testing.assert_close(y.float(), wanted, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(half.running_var, whole.running_var, rtol=2**-22, atol=0)
    masked = made(r_max=1.5, d_max=0.5)(batch(), mask=torch.ones(6, 2, dtype=torch.bool))
    torch.testing.assert_close(masked, made(r_max=1.5, d_max=0.5)(batch()), rtol=1e-13, atol=1e-13)


def test_warm_up_of_the_paper():
    norm = own.BatchRenorm2d(3)
    limits = {}
    for step in (0, 5_000, 15_000, 25_000, 40_000, 10**6):
        norm.num_batches_tracked.fill_(step)
        limits[step] = norm.spec.running.renorm
    assert limits == {
        0: (1.0, 0.0), 5_000: (1.0, 0.0), 15_000: (1 + 2 * (10 / 35), 2.5), 25_000: (1 + 2 * (20 / 35), 5.0),
        40_000: (3.0, 5.0), 10**6: (3.0, 5.0),
    }  # fmt: skip


def test_training_takes_the_limits_of_its_step():
    """The layer at a step, and one with that step's limits as numbers, are the same function."""
    norm = made(r_max=(1, 2, 0, 10), d_max=(0, 1, 0, 10))
    norm.num_batches_tracked.fill_(3)
    torch.testing.assert_close(norm(batch()), made(r_max=1.3, d_max=0.3)(batch()), rtol=1e-14, atol=0)


def test_masks_count_exactly_and_let_no_nan_through():
    x = batch(8)
    x[5:] = math.nan
    padded, short = made(r_max=2, d_max=1), made(r_max=2, d_max=1)
    x.requires_grad_()
    y = padded(x, mask=torch.arange(8)[:, None] < 5)
    y.sin().sum().backward()
    torch.testing.assert_close(y[:5], short(batch(8)[:5]), rtol=1e-13, atol=1e-13)
    assert (y[5:] == 0).all()
    assert (x.grad[5:] == 0).all()
    torch.testing.assert_close(padded.state_dict(), short.state_dict(), rtol=1e-13, atol=1e-13)
    before = {name: tensor.clone() for name, tensor in padded.state_dict().items()}
    padded(x.detach(), mask=torch.zeros(8, 1, dtype=torch.bool))
    assert all(torch.equal(before[name], tensor) for name, tensor in padded.state_dict().items())


def test_statistics_stay_where_they_are_not_tracked():
    norm = made(r_max=2, d_max=1)
    norm.track_running_stats = False
    y = norm(batch())
    assert norm.running_mean.tolist() == [0.25, -2.0]
    assert norm.num_batches_tracked == 0
    torch.testing.assert_close(y, made(r_max=2, d_max=1)(batch()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"r_max": 0.5}, "BatchRenorm1d takes r_max of 1 or more, or a schedule of four numbers whose steps rise; got "
         "0.5. Write a number such as 3, or (from, to, step, step) such as (1.0, 3.0, 5000, 40000)."),
        ({"d_max": (0, 5, 9, 9)}, "BatchRenorm1d takes d_max of 0 or more, or a schedule of four numbers whose steps "
         "rise; got (0, 5, 9, 9). Write a number such as 2, or (from, to, step, step) such as (0.0, 5.0, 5000, "
         "25000)."),
        ({"averages": "std"}, "BatchRenorm1d averages the 'denominator' (as the paper) or the 'variance' (as torch's "
         "batch norm); got 'std'. Leave it at 'denominator'."),
    ],
)  # fmt: skip
def test_a_bad_argument_says_what_is_wrong(arguments, message):
    with pytest.raises(BadInput) as caught:
        own.BatchRenorm1d(3, **arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2), "BatchRenorm1d in training takes the variance of more than one value a channel; got an input of shape "
         "(1, 2). Use a larger batch (drop_last=True in the loader), or eval()."),
        ((4, 3), "BatchRenorm1d was made for 2 channels on axis 1; got an input of shape (4, 3). Move the channels "
         "there (x.movedim), or make the layer for x.shape[1]."),
        ((4,), "BatchRenorm1d takes an input of 2 or 3 axes, samples first and channels second; got an input of shape "
         "(4,). For one sample use x.unsqueeze(0)."),
    ],
)  # fmt: skip
def test_a_bad_input_says_what_is_wrong(shape, message):
    with pytest.raises(BadInput) as caught:
        made()(torch.zeros(shape, dtype=torch.float64))
    assert str(caught.value) == message
