"""Norms whose gain and bias are computed: limit cases, the papers' formulas, masks, one rounding, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normscope.nn as own
from normscope import reference
from normscope.errors import BadInput
from normscope.spec import families


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Limit cases -------------------------------------------------------------------------------------------------


def same(got, wanted):
    """But for a few roundings of values of a few units."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=32 * 2.0**-52)


def test_a_new_layer_is_its_norm_alone_whatever_the_condition():
    x, tokens, vector, classes = draw(4, 6, 3, 3), draw(4, 3, 6), draw(4, 5), torch.tensor([0, 2, 1, 2])
    for offset in (1.0, 0.0):
        made = {"condition_features": 5, "offset": offset, "dtype": torch.float64}
        bare = own.LayerNorm(6, eps=1e-6, elementwise_affine=False)
        same(own.AdaptiveLayerNorm(6, **made)(tokens, vector), bare(tokens))
        same(own.AdaptiveGroupNorm(3, 6, **made)(x, vector), own.GroupNorm(3, 6, affine=False)(x))
        table = own.ConditionalBatchNorm2d(6, classes=3, offset=offset, dtype=torch.float64)
        bare = own.BatchNorm2d(6, affine=False, dtype=torch.float64)
        for _ in range(2):
            same(table(x, classes), bare(x))
        same(table.running_var, bare.running_var)
        same(table.eval()(x, classes), bare.eval()(x))


def test_as_many_groups_as_channels_is_instance_norm():
    x, scale, shift = draw(2, 4, 5, 5), draw(2, 4), draw(2, 4, seed=1)
    y = own.AdaptiveGroupNorm(4, 4)(x, scale=scale, shift=shift)
    wanted = F.instance_norm(x) * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
    torch.testing.assert_close(y, wanted, rtol=0, atol=64 * 2.0**-52)


def test_zero_false_starts_as_torch_does_and_a_table_about_one():
    torch.manual_seed(0)
    ours = own.AdaptiveLayerNorm(6, condition_features=5, zero=False).modulation
    torch.manual_seed(0)
    assert torch.equal(ours.weight, nn.Linear(5, 12).weight)
    table = own.ConditionalBatchNorm2d(500, classes=20, offset=0.0, zero=False).modulation.weight
    assert abs(float(table[:, :500].detach().mean()) - 1) < 5 * 0.02 / 100  # of 10,000 numbers
    assert not table[:, 500:].any()


# The papers' formulas ----------------------------------------------------------------------------------------


def test_modulation_of_a_diffusion_transformer():
    """Its linear layer gives the shifts first: halves swapped, the weights are ours."""
    x, c = draw(3, 5, 8), draw(3, 4)
    theirs = nn.Linear(4, 16).double()
    norm = own.AdaptiveLayerNorm(8, condition_features=4, dtype=torch.float64)
    with torch.no_grad():
        for name in ("weight", "bias"):
            shift, scale = getattr(theirs, name).chunk(2)
            getattr(norm.modulation, name).copy_(torch.cat([scale, shift]))
    shift, scale = theirs(F.silu(c)).chunk(2, 1)
    wanted = F.layer_norm(x, (8,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(norm(x, F.silu(c)), wanted, rtol=0, atol=64 * 2.0**-52)


def test_film_between_a_batch_norm_and_its_activation():
    x, gamma, beta = draw(4, 3, 5, 5), draw(4, 3), draw(4, 3, seed=1)
    y = own.ConditionalBatchNorm2d(3, offset=0.0, dtype=torch.float64)(x, scale=gamma, shift=beta)
    normal = nn.BatchNorm2d(3, affine=False).double()(x)
    wanted = gamma[:, :, None, None] * normal + beta[:, :, None, None]
    torch.testing.assert_close(y, wanted, rtol=0, atol=128 * 2.0**-52)


def test_one_class_is_batch_norm():
    """Its row of the table holds weight and bias; outputs, gradients and statistics, in both modes."""
    table = own.ConditionalBatchNorm2d(3, classes=1, offset=0.0, dtype=torch.float64)
    plain = own.BatchNorm2d(3, dtype=torch.float64)
    with torch.no_grad():
        for part, (name, seed) in zip(
            table.modulation.weight.split(3, 1), (("weight", 1), ("bias", 2)), strict=True
        ):
            part.copy_(draw(1, 3, seed=seed))
            getattr(plain, name).copy_(part[0])
    x, z = (draw(4, 3, 5, 5).requires_grad_() for _ in range(2))
    for training in (True, False):
        y, wanted = table.train(training)(x, torch.zeros(4, dtype=torch.long)), plain.train(training)(z)
        same(y, wanted)
        y.sin().sum().backward()
        wanted.sin().sum().backward()
    # each a sum of 100 products of a few units
    close = {"rtol": 0, "atol": 100 * 16 * 2.0**-52}
    torch.testing.assert_close(x.grad, z.grad, **close)
    row = torch.cat([plain.weight.grad, plain.bias.grad])
    torch.testing.assert_close(table.modulation.weight.grad[0], row, **close)
    same(table.running_mean, plain.running_mean)
    same(table.running_var, plain.running_var)


def test_a_style_without_one_of_its_own_is_instance_norm():
    """Of mean 0 and variance 1 - eps; a constant style leaves sqrt(eps) of the content about it."""
    x, layer = draw(2, 3, 4, 4), own.AdaptiveInstanceNorm(eps=1e-4)
    unit = torch.tensor([-1.0, 1.0], dtype=torch.float64).mul(math.sqrt(1 - 1e-4)).expand(2, 3, 2)
    normal = F.instance_norm(x, eps=1e-4)
    same(layer(x, unit), normal)
    same(layer(x, torch.full_like(unit, 5.0)), 5 + 1e-2 * normal)


@pytest.mark.parametrize("correction", [0, 1])
def test_instance_norm_takes_mean_and_deviation_of_the_style(correction):
    """Against the float64 reference, also where a level of 10,000 leaves float32 three digits of a style."""
    layer = own.AdaptiveInstanceNorm(correction=correction)
    x, style = draw(2, 3, 7, dtype=torch.float32), 1e4 + draw(2, 3, 4, 4, dtype=torch.float32, seed=1)
    of = style.double().numpy().reshape(2, 3, 16)
    mean, deviation = of.mean(-1), np.sqrt(of.var(-1, ddof=correction) + 1e-5)
    wanted = reference.forward(x.double().numpy(), layer.spec, deviation, mean)
    got = layer(x, style)
    # one rounding of a value near 10,000, and a gain and a normalized value of a few units
    torch.testing.assert_close(got.double(), torch.from_numpy(wanted), rtol=2.0**-23, atol=16 * 2.0**-23)
    assert layer.spec.correction == correction
    double = [t.double().requires_grad_() for t in (x[:1, :1], draw(1, 1, 4))]
    assert torch.autograd.gradcheck(layer, double)


def test_spade_is_the_papers_and_takes_its_state_dict():
    class Paper(nn.Module):
        def __init__(self):
            super().__init__()
            self.param_free_norm = nn.BatchNorm2d(3, affine=False)
            self.mlp_shared = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU())
            self.mlp_gamma, self.mlp_beta = (nn.Conv2d(4, 3, 3, padding=1) for _ in range(2))

        def forward(self, x, labels):
            normal = self.param_free_norm(x)
            made = self.mlp_shared(F.interpolate(labels, size=x.shape[2:], mode="nearest"))
            return normal * (1 + self.mlp_gamma(made)) + self.mlp_beta(made)

    paper, ours = (
        Paper().double(),
        own.SpatiallyAdaptiveBatchNorm2d(3, label_channels=2, hidden=4).double(),
    )
    x, labels = draw(2, 3, 4, 4), draw(2, 2, 10, 7)
    paper(x, labels)
    state = paper.state_dict()
    names = list(state)
    ours.load_state_dict(state)
    assert list(state) == names  # the caller's is as it was
    for training in (True, False):
        y, wanted = ours.train(training)(x, labels), paper.train(training)(x, labels)
        torch.testing.assert_close(y, wanted, rtol=0, atol=256 * 2.0**-52)
    torch.testing.assert_close(ours.running_var, paper.param_free_norm.running_var)
    instance = own.SpatiallyAdaptiveInstanceNorm2d(3)
    y = instance(x, scale=draw(2, 3, 4, 4, seed=1), shift=draw(2, 3, 4, 4, seed=2))
    wanted = F.instance_norm(x) * (1 + draw(2, 3, 4, 4, seed=1)) + draw(2, 3, 4, 4, seed=2)
    torch.testing.assert_close(y, wanted, rtol=0, atol=64 * 2.0**-52)


# Numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(dtype):
    """The float32 result, rounded: a product of rounded factors is off by up to two units more."""
    x, scale, shift = (t.to(dtype) for t in (draw(4, 3, 8), draw(4, 8), draw(4, 8, seed=1)))
    norm = own.AdaptiveLayerNorm(8)
    wanted = norm(x.float(), scale=scale.float(), shift=shift.float()).to(dtype)
    assert torch.equal(norm(x, scale=scale, shift=shift), wanted)
    assert torch.equal(norm(x, scale=scale.float(), shift=shift.float()), wanted)


# Masks -------------------------------------------------------------------------------------------------------


def test_padding_reaches_nothing():
    """Padded with NaN, two samples give what they give alone, and the gradient there is 0."""
    x, scale, shift = draw(2, 4, 5), draw(2, 4), draw(2, 4, seed=1)
    x[1, :, 3:] = float("nan")
    x.requires_grad_()
    for norm, padded, given in (
        (own.AdaptiveGroupNorm(2, 4), x, {"scale": scale, "shift": shift}),
        (own.AdaptiveInstanceNorm(), x, {"style": draw(2, 4, 6)}),
        (own.AdaptiveLayerNorm(4), x.mT, {"scale": scale, "shift": shift}),
    ):
        y = norm(padded, lengths=[5, 3], **given)
        tokens = padded is not x
        y = y.mT if tokens else y
        alone = norm((x[1:, :, :3].mT if tokens else x[1:, :, :3]), **{n: t[1:] for n, t in given.items()})
        torch.testing.assert_close(y[1:, :, :3], alone.mT if tokens else alone, rtol=0, atol=64 * 2.0**-52)
        assert not y[1, :, 3:].any()
        (grad,) = torch.autograd.grad(y.sin().sum(), x, retain_graph=True)
        assert torch.isfinite(grad).all()
        assert not grad[1, :, 3:].any()


def test_batch_statistics_are_of_what_counts():
    """As the reference says, with NaN in the gains of places that do not count; the fill is 0 or the shift."""
    x, scale, shift = draw(3, 2, 4, 4), draw(3, 2, 4, 4, seed=1), draw(3, 2, 4, 4, seed=2)
    mask = torch.arange(4)[None, None, None, :] < torch.tensor([4, 2, 3])[:, None, None, None]
    x, scale = x.masked_fill(~mask, float("nan")), scale.masked_fill(~mask, float("nan")).requires_grad_()
    norm = own.SpatiallyAdaptiveBatchNorm2d(2).double()
    y = norm(x.requires_grad_(), scale=scale, shift=shift, mask=mask)
    spec = families.batch_norm(weight=False, bias=False)
    plain = reference.forward(x.detach().nan_to_num().numpy(), spec, mask=mask.numpy())
    wanted = torch.where(mask, torch.from_numpy(plain) * (1 + scale) + shift, 0.0)
    torch.testing.assert_close(y, wanted, rtol=0, atol=256 * 2.0**-52)
    y.sum().backward()
    for tensor in (x, scale):
        assert torch.isfinite(tensor.grad).all()
        assert not tensor.grad[~mask.expand(tensor.shape)].any()
    by_length = own.SpatiallyAdaptiveInstanceNorm2d(2)(x, scale=scale, shift=shift, lengths=[4, 2, 3])
    assert torch.equal(
        by_length, own.SpatiallyAdaptiveInstanceNorm2d(2)(x, scale=scale, shift=shift, mask=mask)
    )
    filled = norm.eval()(x, scale=scale, shift=shift, mask=mask, fill="bias")
    assert torch.equal(filled[~mask.expand(3, 2, 4, 4)], shift[~mask.expand(3, 2, 4, 4)])


def test_style_mask():
    x, style = draw(2, 3, 4), draw(2, 3, 6)
    mask = (torch.arange(6) < 4)[None, None]
    style[:, :, 4:] = float("nan")
    y = own.AdaptiveInstanceNorm()(x, style, style_mask=mask)
    torch.testing.assert_close(y, own.AdaptiveInstanceNorm()(x, style[:, :, :4]), rtol=0, atol=32 * 2.0**-52)


# Errors ------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3, 4, 4)
WRONG = {
    "two sources": (
        lambda: own.AdaptiveLayerNorm(4, condition_features=2, classes=3),
        "AdaptiveLayerNorm makes scale and shift of a vector (condition_features) or of a class (classes); got "
        "condition_features=2 and classes=3. Give one of them.",
    ),
    "offset": (
        lambda: own.AdaptiveGroupNorm(1, 4, offset=float("nan")),
        "AdaptiveGroupNorm needs a finite offset; got nan. It is 1.0, or 0.0 for FiLM's gain.",
    ),
    "groups": (
        lambda: own.AdaptiveGroupNorm(3, 4),
        "AdaptiveGroupNorm cuts the channels into equal groups; got 4 channels and 3 groups. Take a number of groups "
        "that divides the channels.",
    ),
    "condition to none": (
        lambda: own.ConditionalBatchNorm2d(3)(X, torch.zeros(2, 3)),
        "ConditionalBatchNorm2d was made without a condition and takes scale= and shift=; got a condition. Pass both, "
        "or make the layer with condition_features=.",
    ),
    "scale to a condition": (
        lambda: own.ConditionalBatchNorm2d(3, classes=2)(X, scale=torch.zeros(2, 3)),
        "ConditionalBatchNorm2d makes scale and shift of the condition and takes that alone; got scale. Pass "
        "layer(x, condition).",
    ),
    "shape of a scale": (
        lambda: own.AdaptiveLayerNorm(4)(X, scale=torch.zeros(2, 1, 1, 4), shift=torch.zeros(2, 4)),
        "AdaptiveLayerNorm takes a scale of shape (2, 4) with this input; got (2, 1, 1, 4). It has a number for every "
        "sample and channel, and no axes of size 1.",
    ),
    "classes that are none": (
        lambda: own.ConditionalBatchNorm2d(3, classes=5)(X, torch.zeros(2)),
        "ConditionalBatchNorm2d takes classes, whole numbers below 5, of shape (2,) with this input; got torch.float32 "
        "of shape (2,). There is one for every sample.",
    ),
    "one value": (
        lambda: own.ConditionalBatchNorm2d(3)(
            X[:1, :, :1, :1], scale=torch.zeros(1, 3), shift=torch.zeros(1, 3)
        ),
        "ConditionalBatchNorm2d in training takes the variance of more than one value a channel; got an input of shape "
        "(1, 3, 1, 1). Use a larger batch (drop_last=True in the loader), or eval().",
    ),
    "no samples": (
        lambda: own.AdaptiveLayerNorm(4)(X[0, 0, 0], scale=X[0, 0], shift=X[0, 0]),
        "AdaptiveLayerNorm takes samples on axis 0 and features on the last; got an input of shape (4,). For one "
        "sample use x.unsqueeze(0).",
    ),
    "channels": (
        lambda: own.AdaptiveGroupNorm(2, 4)(X, scale=X, shift=X),
        "AdaptiveGroupNorm was made for inputs (N, 4, ...); got an input of shape (2, 3, 4, 4). Move the channels to "
        "axis 1 (x.movedim), or make the layer for x.shape[1].",
    ),
    "style": (
        lambda: own.AdaptiveInstanceNorm()(X, X[:1]),
        "AdaptiveInstanceNorm takes x and style (N, C, ...) of the same samples and channels, each with one position "
        "axis or more; got shapes (2, 3, 4, 4) and (1, 3, 4, 4). For one sample use x.unsqueeze(0); one style for all "
        "samples is style.expand(len(x), ...).",
    ),
    "correction": (
        lambda: own.AdaptiveInstanceNorm(correction=2),
        "AdaptiveInstanceNorm divides squares by M - correction, which is 0 or 1; got 2. The paper's is 0, that of "
        "torch.var 1.",
    ),
    "kernel": (
        lambda: own.SpatiallyAdaptiveInstanceNorm2d(3, label_channels=2, kernel_size=4),
        "SpatiallyAdaptiveInstanceNorm2d needs an odd kernel_size, to keep sizes; got 4. The paper's is 3.",
    ),
    "labels": (
        lambda: own.SpatiallyAdaptiveBatchNorm2d(3, label_channels=2)(X, X),
        "SpatiallyAdaptiveBatchNorm2d takes a label map (N, 2, H, W) with a map for every sample of an input (2, 3, 4, "
        "4); got shape (2, 3, 4, 4). Classes are one-hot channels.",
    ),
    "no labels": (
        lambda: own.SpatiallyAdaptiveBatchNorm2d(3, label_channels=2)(X),
        "SpatiallyAdaptiveBatchNorm2d makes scale and shift of the label map and takes that alone. Pass "
        "layer(x, labels).",
    ),
    "no maps": (
        lambda: own.SpatiallyAdaptiveInstanceNorm2d(3)(X, X),
        "SpatiallyAdaptiveInstanceNorm2d was made without label_channels and takes scale= and shift=. Pass both, or "
        "make the layer for label maps.",
    ),
    "scale of a sample": (
        lambda: own.SpatiallyAdaptiveBatchNorm2d(3)(X, scale=torch.zeros(2, 3, 1, 1), shift=X),
        "SpatiallyAdaptiveBatchNorm2d takes a scale of the shape of its input, (2, 3, 4, 4); got (2, 3, 1, 1). Where "
        "it is one for all positions, use ConditionalBatchNorm2d.",
    ),
    "maps of tokens": (
        lambda: own.SpatiallyAdaptiveInstanceNorm2d(3)(X[0], scale=X, shift=X),
        "SpatiallyAdaptiveInstanceNorm2d was made for inputs (N, 3, H, W); got an input of shape (3, 4, 4). Move the "
        "channels to axis 1 (x.movedim), or make the layer for x.shape[1].",
    ),
    "fill": (
        lambda: own.AdaptiveLayerNorm(4)(X, scale=X[:, 0, 0], shift=X[:, 0, 0], fill="nan"),
        "fill says what stands where the mask is False, 'zero' or 'bias'; got 'nan'.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_is_wanted_what_came_and_the_fix(name):
    call, text = WRONG[name]
    with pytest.raises(BadInput) as caught:
        call()
    assert str(caught.value) == text


IDS = {
    "beyond": (
        torch.tensor([0, 3]),
        "ConditionalBatchNorm1d was made for 3 classes, counted from 0; got class 3. Make the layer with a larger "
        "classes=, or give the unknown ones a class of their own.",
    ),
    "negative": (
        torch.tensor([0, -1]),
        "ConditionalBatchNorm1d was made for 3 classes, counted from 0; got class -1. Make the layer with a larger "
        "classes=, or give the unknown ones a class of their own.",
    ),
    "complex": (
        torch.tensor([0j, 1j]),
        "ConditionalBatchNorm1d takes classes, whole numbers below 3, of shape (2,) with this input; got "
        "torch.complex64 of shape (2,). There is one for every sample.",
    ),
    "list": (
        [0, 1],
        "ConditionalBatchNorm1d takes classes, whole numbers below 3, as a tensor of shape (2,); got [0, 1]. Use "
        "torch.tensor.",
    ),
}


@pytest.mark.parametrize("case", IDS)
def test_ids_that_are_no_class_are_said_before_anything_moves(case):
    given, text = IDS[case]
    norm = own.ConditionalBatchNorm1d(4, classes=3)
    with pytest.raises(BadInput) as caught:
        norm(draw(2, 4).float(), given)
    assert str(caught.value) == text
    assert int(norm.num_batches_tracked) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_every_whole_type(dtype):
    norm, x, ids = (
        own.ConditionalBatchNorm1d(4, classes=3, zero=False),
        draw(2, 4).float(),
        torch.tensor([2, 0]),
    )
    assert torch.equal(norm(x, ids.to(dtype)), norm(x, ids))


def test_conditions_of_another_dtype():
    x = draw(2, 4, 3, 3).float()
    with pytest.raises(BadInput) as caught:
        own.ConditionalBatchNorm2d(4, condition_features=3)(x, draw(2, 3))
    assert str(caught.value) == (
        "ConditionalBatchNorm2d takes a condition in the dtype of its modulation, torch.float32; got torch.float64. "
        "Use condition.to(layer.modulation.weight.dtype)."
    )
    with pytest.raises(BadInput) as caught:
        own.SpatiallyAdaptiveInstanceNorm2d(4, label_channels=2)(x, torch.ones(2, 2, 3, 3, dtype=torch.long))
    assert str(caught.value) == (
        "SpatiallyAdaptiveInstanceNorm2d takes a label map in the dtype of its convolutions, torch.float32; got "
        "torch.int64. Use labels.to(layer.mlp_gamma.weight.dtype)."
    )


def test_adaptive_norms_take_no_packed_sequence():
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2, 4)])
    with pytest.raises(BadInput, match="AdaptiveLayerNorm takes a tensor; got a packed sequence"):
        own.AdaptiveLayerNorm(4)(packed, scale=torch.zeros(1, 4), shift=torch.zeros(1, 4))
