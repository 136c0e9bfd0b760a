"""Whitening layers: the limit cases of the papers, masks, what is stored, and what a singular covariance does."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch

import normscope as ns
import normscope.nn as own
from normscope import reference
from normscope.errors import BadInput

LAYERS = {
    "zca": lambda **k: own.BatchWhitening(6, 3, **k),
    "cholesky": lambda **k: own.BatchWhitening(6, 3, method="cholesky", **k),
    "iternorm": lambda **k: own.IterNorm(6, 3, **k),
    "group": lambda **k: own.GroupWhitening(3, 6, **k),
}
BATCH = [name for name in LAYERS if name != "group"]


def correlated(*shape, dtype=torch.float64):
    """Channels that go together, with conditions of their covariance about 100."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (x + 0.7 * x.roll(1, 1) + torch.arange(shape[1]).view(-1, *[1] * (len(shape) - 2))).to(dtype)


def covariance(rows):
    """Of (groups, k, members), about the mean."""
    rows = rows - rows.mean(-1, keepdim=True)
    return rows @ rows.mT / rows.shape[-1]


def rows(y, k, *, each_sample=False):
    """(groups, k, members): k channels of all samples, or k groups of channels of each sample."""
    if each_sample:
        return y.reshape(len(y), k, -1)
    return y.movedim(1, 0).reshape(y.shape[1] // k, k, -1)


# The limit cases ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["zca", "cholesky", "group"])
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_covariance_of_the_output_is_the_identity(name, eps):
    """W S W^T = 1 with S = covariance + eps: so W covariance W^T = 1 - eps W W^T, whose trace is that of S^-1."""
    x, each = correlated(8, 6, 5), name == "group"
    y = LAYERS[name](eps=eps, affine=False)(x)
    got = covariance(rows(y, 3, each_sample=each))
    s = covariance(rows(x, 3, each_sample=each)) + eps * torch.eye(3)
    if eps == 0:
        torch.testing.assert_close(got, torch.eye(3).double().expand_as(got), rtol=1e-12, atol=1e-12)
    trace = 3 - eps * torch.linalg.inv(s).diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(got.diagonal(dim1=1, dim2=2).sum(-1), trace, rtol=1e-12, atol=1e-12)


def test_eps_relative_to_the_trace_follows_the_scale_of_the_input():
    norm = own.BatchWhitening(6, 3, eps=1e-2, eps_at="trace")
    x = correlated(8, 6, 5)
    torch.testing.assert_close(norm(1e3 * x), norm(x), rtol=1e-11, atol=1e-11)
    assert (own.BatchWhitening(6, 3, eps=1e-2)(1e-3 * x) - norm(x)).abs().max() > 0.1


def test_zca_is_the_symmetric_one_and_cholesky_the_triangular():
    """y = W (x - mean): a least-squares fit gives W back."""
    x = correlated(40, 3)
    centered = x - x.mean(0)
    for method in ("zca", "cholesky"):
        y = own.BatchWhitening(3, 3, method=method, affine=False)(x)
        w = torch.linalg.lstsq(centered, y).solution.T
        other = w.T if method == "zca" else w.tril()
        torch.testing.assert_close(w, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "make", [lambda **k: own.IterNorm(6, 3, **k), LAYERS["group"]], ids=["batch", "group"]
)
def test_newton_iterations_go_to_zca(make):
    x = correlated(8, 6, 5)
    batch = isinstance(make(), own.IterNorm)
    zca = (own.BatchWhitening(6, 3, affine=False) if batch else make(affine=False))(x)
    method = {} if batch else {"method": "iternorm"}
    steps = [make(affine=False, iterations=n, **method)(x) for n in (1, 3, 5, 7, 40)]
    apart = [(y - zca).abs().max().item() for y in steps]
    assert apart == sorted(apart, reverse=True)
    assert apart[0] > 0.1
    assert apart[-1] < 1e-13  # and stays there: roundings do not grow from step to step


@pytest.mark.parametrize("method", ["zca", "cholesky"])
@pytest.mark.parametrize("state", ["covariance", "whitening"])
def test_groups_of_one_are_batch_norm(method, state):
    """Of the same absolute eps; the covariance is stored over M, and W is 1 / sqrt of it."""
    white = own.BatchWhitening(5, 1, eps=1e-3, method=method, state=state).double()
    batch = own.BatchNorm1d(5, eps=1e-3, running_correction=0).double()
    for _ in range(2):
        x, z = (correlated(7, 5, 4).requires_grad_() for _ in range(2))
        y, wanted = white(x), batch(z)
        torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)
        y.sin().sum().backward()
        wanted.sin().sum().backward()
        torch.testing.assert_close(x.grad, z.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(white.running_mean, batch.running_mean, rtol=1e-14, atol=1e-14)
    if state == "covariance":
        torch.testing.assert_close(white.running_covariance.flatten(), batch.running_var, rtol=1e-13, atol=0)
        torch.testing.assert_close(white.eval()(x), batch.eval()(x), rtol=1e-13, atol=1e-13)


def test_one_group_is_layer_norm_over_all_but_the_samples():
    x = correlated(4, 6, 5)
    layer = own.LayerNorm((6, 5), elementwise_affine=False)
    torch.testing.assert_close(own.GroupWhitening(1, 6)(x), layer(x), rtol=1e-13, atol=1e-13)


# Gradients ---------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_right_where_eigenvalues_coincide(name):
    """Three channels of one covariance, a multiple of the identity: eigenvectors have no derivative there."""
    if name == "group":
        layer, x = own.GroupWhitening(2, 2, eps=0.1), torch.tensor([[[1.0, 1, -1, -1], [1.0, -1, 1, -1]]])
    else:
        layer = LAYERS[name](eps=0.1)
        cube = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
        x = torch.cat([cube, cube], 1)
    layer.double()
    x = x.double().requires_grad_()
    reset = {key: tensor.clone() for key, tensor in layer.state_dict().items()}

    def fresh(x):
        layer.load_state_dict(reset)
        return layer(x)

    assert torch.autograd.gradcheck(fresh, x, atol=1e-7)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (got,) = torch.autograd.grad(layer(x), x, grad)
    weight, bias = np.ones(layer.weight.shape), np.zeros(layer.bias.shape)
    wanted, _, _ = reference.vjp(grad.numpy(), x.detach().numpy(), layer.spec, weight, bias)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)


def test_a_constant_input_gives_the_bias_and_no_gradient():
    for make in LAYERS.values():
        x = torch.full((4, 6, 5), 1234.5, requires_grad=True)
        y = make()(x)
        y.square().sum().backward()
        assert not y.any()
        assert not x.grad.any()


# Masks ---------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_masked_is_the_reference_of_what_counts(name, poison):
    layer = LAYERS[name](eps=1e-3).double()
    lengths = torch.tensor([5, 2, 4, 0, 3])
    inside = torch.arange(5) < lengths[:, None, None]
    clean = correlated(5, 6, 5)
    x = torch.where(inside, clean, poison).requires_grad_()
    spec, mask = layer.spec, inside.numpy()
    y = layer(x, lengths=lengths)
    ones, zeros = np.ones(6), np.zeros(6)
    wanted = reference.forward(clean.numpy(), spec, ones, zeros, mask=mask)
    np.testing.assert_allclose(y.detach().numpy(), wanted, rtol=1e-11, atol=1e-11)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y.backward(torch.where(inside, grad, poison))
    dx, *_ = reference.vjp(grad.numpy(), clean.numpy(), spec, ones, zeros, mask=mask)
    np.testing.assert_allclose(x.grad.numpy(), dx, rtol=1e-10, atol=1e-10)
    if name in BATCH:
        start = reference.RunningState(np.zeros(6), np.broadcast_to(np.eye(3), (2, 3, 3)).copy())
        after = reference.update_running(start, clean.numpy(), spec, mask)
        mean, matrix = (getattr(layer, held).numpy() for held in layer.statistics)
        np.testing.assert_allclose(mean, after.mean, rtol=1e-12)
        np.testing.assert_allclose(matrix, after.var, rtol=1e-10, atol=1e-12)
        before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
        layer(x.detach(), lengths=torch.zeros(5, dtype=torch.long))
        assert all(torch.equal(before[key], tensor) for key, tensor in layer.state_dict().items())


def test_a_packed_sequence_is_its_frames():
    sequences = [correlated(n, 6) for n in (7, 3, 5)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    got, frames = LAYERS["zca"]()(packed), LAYERS["zca"]()(torch.cat(sequences))
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(got, batch_first=True)
    together = torch.cat([row[:n] for row, n in zip(padded, lengths, strict=True)])
    torch.testing.assert_close(together, frames, rtol=1e-11, atol=1e-11)


# What is stored ---------------------------------------------------------------


def test_evaluation_by_what_one_batch_left():
    """With a momentum of 1 it is that batch's: evaluation then gives what training gave."""
    for name in BATCH:
        for state in ("covariance", "whitening"):
            layer = LAYERS[name](momentum=1.0, state=state).double()
            x = correlated(8, 6, 5)
            y = layer(x)
            torch.testing.assert_close(layer.eval()(x), y, rtol=1e-11, atol=1e-11)
            alone = layer(x[:1])
            torch.testing.assert_close(alone, y[:1], rtol=1e-11, atol=1e-11)
            twin = LAYERS[name](state=state).double().eval()
            twin.load_state_dict(layer.state_dict())
            assert torch.equal(twin(x), layer(x))


def test_stored_covariances_are_the_plain_average_without_a_momentum():
    layer, batches = (
        own.BatchWhitening(4, 2, momentum=None).double(),
        [correlated(9, 4), 3 * correlated(9, 4)],
    )
    for x in batches:
        layer(x)
    wanted = torch.stack([covariance(rows(x, 2)) for x in batches]).mean(0)
    torch.testing.assert_close(layer.running_covariance, wanted, rtol=1e-13, atol=1e-13)
    assert layer.num_batches_tracked == 2


@pytest.mark.parametrize("name", ["zca", "cholesky"])
def test_near_singular_covariances_in_float32(name):
    """Channels of deviation 100 that differ by 0.001: float32 rounds the stored covariance by more than eps.

    W has entries up to 1 / sqrt(eps), so y is off by that times the rounding of what it multiplies, of 3 channels.
    """
    z = 100 * torch.randn(256, 1, generator=torch.Generator().manual_seed(0))
    x = z + 1e-3 * torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
    layer = LAYERS[name](momentum=1.0)
    y = layer(x.requires_grad_())
    wanted = reference.forward(x.detach().double().numpy(), layer.spec, np.ones(6), np.zeros(6))
    bound = 3 * 2 * 2**-24 * x.abs().max().item() / math.sqrt(1e-5)
    assert np.abs(y.detach().numpy() - wanted).max() < bound
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert torch.linalg.eigvalsh(layer.running_covariance.double()).min() < -1e-5
    stored = layer.eval()(x)
    assert stored.isfinite().all()
    assert (
        stored.abs().max() < 100
    )  # 0.69e-3 of rounding are 0.026 away, 8 times the deviation that eps leaves


# What is done to models ---------------------------------------------------------------


@pytest.mark.parametrize("name", BATCH)
def test_freezing_and_checking_know_that_a_matrix_is_stored(name):
    """Frozen, it is what it is in evaluation, and nothing moves; a checkpoint of it misses no variance."""
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 6, 3), LAYERS[name]())
    _, report = ns.transforms.freeze(model)
    assert "1: frozen at mean 0 and variance 1" in str(report)
    x = torch.randn(64, 2, 9, generator=torch.Generator().manual_seed(3))
    for _ in range(60):
        model(x)
    frozen, _ = ns.transforms.freeze(model)
    wanted, before = frozen.eval()(x), {key: tensor.clone() for key, tensor in frozen.state_dict().items()}
    assert torch.equal(frozen.train()(x), wanted)
    assert all(torch.equal(before[key], tensor) for key, tensor in frozen.state_dict().items())
    assert not ns.check_state(model.state_dict()).findings
    assert {finding.code for finding in ns.check(model, x).findings} == {"NS201", "NS501"}
    assert {finding.severity for finding in ns.check(model, x).findings} == {"info"}


# Errors ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: own.BatchWhitening(6, 4), "BatchWhitening takes a group_size that divides the number of channels; got "
         "4 for 6 channels. Those are 1, 2, 3, 6."),
        (lambda: own.IterNorm(6, 3, eps=-1.0), "IterNorm needs an eps of 0 or more, which it adds to the diagonal; got "
         "-1.0. Leave it at 1e-5."),
        (lambda: own.GroupWhitening(2, 6, method="pca"), "GroupWhitening takes a method of 'zca' or 'cholesky' or "
         "'iternorm'; got 'pca'."),
        (lambda: own.BatchWhitening(6, 3, eps=0.0)(torch.zeros(3, 6)), "BatchWhitening with eps=0 needs more elements "
         "a set than the 3 it whitens together, or their covariance has no inverse; got 3 in an input of shape "
         "(3, 6). Give an eps such as 1e-5, or a larger batch, smaller groups."),
        (lambda: own.BatchWhitening(6, 3, eps=0.0)(torch.zeros(4, 6, 5), lengths=[1, 1, 0, 1]), "BatchWhitening with "
         "eps=0 needs more elements a set than the 3 it whitens together, or their covariance has no inverse; got 3 "
         "in an input of shape (4, 6, 5). Give an eps such as 1e-5, or a larger batch, smaller groups."),
        (lambda: own.GroupWhitening(3, 6, eps=0.0)(torch.zeros(3, 6)), "GroupWhitening with eps=0 needs more elements "
         "a set than the 3 it whitens together, or their covariance has no inverse; got 2 in an input of shape "
         "(3, 6). Give an eps such as 1e-5, or fewer groups."),
        (lambda: own.BatchWhitening(6, 3)(torch.zeros(1, 6)), "BatchWhitening in training takes the covariance of more "
         "than one value a channel; got an input of shape (1, 6). Use a larger batch (drop_last=True in the loader), "
         "or eval()."),
        (lambda: own.GroupWhitening(3, 6)(torch.zeros(2, 5)), "GroupWhitening was made for an input (N, 6, ...); got "
         "an input of shape (2, 5). For one sample use x.unsqueeze(0)."),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(BadInput) as caught:
        call()
    assert str(caught.value) == message


def test_small_sets_are_whitened_as_far_as_eps_lets_them():
    """Three samples of three channels: rank 2, and the third direction is eps."""
    y = own.BatchWhitening(3, 3, affine=False)(correlated(3, 3))
    values = torch.linalg.eigvalsh(covariance(rows(y, 3))[0])
    torch.testing.assert_close(values, torch.tensor([0.0, 1, 1]).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("asked", [{"eps_at": "trace"}, {"eps": 0.0}])
def test_constant_channels_give_the_bias_and_a_gradient_of_0(name, asked):
    """Their covariance is 0, and no eps is added."""
    state = {"state": "whitening"} if name != "group" else {}
    norm = LAYERS[name](**asked, **state).double()
    torch.nn.init.constant_(norm.bias, 0.25)
    x = correlated(8, 6, 5)
    still = (slice(3), slice(None)) if name == "group" else (slice(None), slice(3))
    x[still] = 3.7
    x.requires_grad_()
    y = norm(x)
    (dx,) = torch.autograd.grad(y, x, correlated(8, 6, 5))
    assert (y[still] == 0.25).all()
    assert not dx[still].any()
    held = {"weight": norm.weight.detach().numpy(), "bias": norm.bias.detach().numpy()}
    wanted = reference.forward(x.detach().numpy(), norm.spec, **held)
    assert np.abs(y.detach().numpy() - wanted).max() < 1e-9
    assert all(torch.isfinite(stored).all() for stored in norm.buffers())


def test_a_state_never_takes_a_matrix_that_is_none():
    norm = own.BatchWhitening(2, 2, eps=0.0, state="whitening", method="cholesky").double()
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).repeat(4, 2)  # a covariance of ones
    with pytest.raises(BadInput) as caught:
        norm(x)
    assert str(caught.value) == (
        "whitening with eps=0 that stores W needs a covariance with an inverse; got channels that are constant or "
        "combinations of others. Give an eps such as 1e-5."
    )
    assert torch.equal(norm.running_whitening, torch.eye(2).double()[None])


def test_group_whitening_of_no_samples_under_a_mask():
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    assert own.GroupWhitening(2, 4)(torch.randn(0, 4, 6), mask=mask).shape == (0, 4, 6)


def test_a_norm_over_all_ranks_is_copied_and_saved(tmp_path):
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        whole = torch.distributed.group.WORLD
        norm = pickle.loads(pickle.dumps(copy.deepcopy(own.IterNorm(4, 2, group=whole))))
        assert norm.group is whole
    finally:
        torch.distributed.destroy_process_group()
    assert norm.group is None
