"""Weight standardization: three forms of the literature, as a parametrization, and what is read of others' weights."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import normscope as ns
import normscope.nn as own
from normscope import reference
from normscope.errors import BadInput
from normscope.reading import UnknownNormalization

SHAPE = (6, 3, 3, 2)


def conv(groups=1, **given):
    torch.manual_seed(0)
    return nn.Conv2d(3 * groups, 6, (3, 2), groups=groups, dtype=torch.float64, **given)


def flat(w):
    return w.reshape(len(w), -1)


def written(w, form):
    """The formulas of the sources, in torch."""
    mean = flat(w).mean(1).view(-1, 1, 1, 1)
    deviation = flat(w).std(1, correction=form == "unbiased").view(-1, 1, 1, 1)
    if form == "unbiased":
        return (w - mean) / (deviation + 1e-5)
    if form == "biased":
        return (w - mean) / (deviation.square() + 1e-10).sqrt()
    return 1.7 * (w - mean) * torch.rsqrt((flat(w).shape[1] * deviation.square()).clamp(min=1e-4))


@pytest.mark.parametrize("form", ["unbiased", "biased", "scaled"])
def test_forms_and_gradients_are_those_of_the_sources(form):
    gamma = {"gamma": 1.7} if form == "scaled" else {}
    layer, plain = own.weight_standardization(conv(), form=form, **gamma), conv()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    w = written(plain.weight, form)
    y, wanted = layer(x), F.conv2d(x, w, plain.bias)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    y.sin().sum().backward()
    wanted.sin().sum().backward()
    original = layer.parametrizations.weight.original
    torch.testing.assert_close(original.grad, plain.weight.grad, rtol=1e-11, atol=1e-11)
    assert torch.equal(original, plain.weight)
    spec, gain = layer.parametrizations.weight[0].spec, np.ones(6) if form == "scaled" else None
    np.testing.assert_allclose(
        layer.weight.detach().numpy(), reference.forward(original.detach().numpy(), spec, gain), rtol=1e-12
    )
    assert ns.spec_of(layer, parameter="weight") == ns.spec_of(layer.parametrizations.weight[0]) == spec


def test_scaled_form_keeps_the_variance_and_floors_it_at_eps():
    """Per output, sum(w'^2) = gamma^2: white inputs of variance 1 give gamma^2. Below the floor weights only grow by
    gamma / sqrt(eps)."""
    w = torch.randn(SHAPE, dtype=torch.float64)
    scaled = own.WeightStandardization(SHAPE, "scaled", gamma=1.5, affine=False)
    squares = flat(scaled(w)).square().sum(1)
    torch.testing.assert_close(squares, torch.full_like(squares, 2.25), rtol=1e-13, atol=0)
    small = 1e-6 * (w - flat(w).mean(1).view(-1, 1, 1, 1))
    torch.testing.assert_close(scaled(small), small * 150, rtol=1e-12, atol=1e-18)


def test_groups_take_the_fan_in_of_their_own_and_steps_train_the_original():
    layer = own.weight_standardization(conv(groups=2))
    torch.testing.assert_close(
        flat(layer.weight).std(1), torch.ones(6).double(), rtol=1e-3, atol=0
    )  # eps / 0.1
    before = layer.parametrizations.weight.original.clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.randn(2, 6, 5, 5, dtype=torch.float64)).sin().sum().backward()
    optimizer.step()
    assert not torch.equal(before, layer.parametrizations.weight.original)
    torch.testing.assert_close(flat(layer.weight).mean(1), torch.zeros(6).double(), rtol=0, atol=1e-14)


def test_state_dicts_copies_casts_and_assignment():
    first, second = (own.weight_standardization(conv(), form="scaled") for _ in range(2))
    with torch.no_grad():
        second.parametrizations.weight.original.add_(torch.randn(SHAPE))
        second.parametrizations.weight[0].weight.mul_(2)
    first.load_state_dict(second.state_dict())
    assert torch.equal(first.weight, second.weight)
    assert first.half().weight.dtype == torch.float16
    raw = torch.randn(SHAPE, dtype=torch.float64)
    second.weight = raw
    assert torch.equal(second.parametrizations.weight.original, raw)
    assert torch.equal(second.weight, second.parametrizations.weight[0](raw))


def test_removed_it_leaves_the_function_and_the_parameter_that_an_optimizer_holds():
    layer = own.weight_standardization(conv())
    held, x = layer.parametrizations.weight.original, torch.randn(2, 3, 5, 5, dtype=torch.float64)
    y = layer(x)
    assert own.remove_weight_standardization(layer) is layer
    assert type(layer) is nn.Conv2d
    assert layer.weight is held
    assert torch.equal(layer(x), y)


def test_half_weights_are_computed_in_float32():
    w = torch.randn(SHAPE).bfloat16()
    layer = own.WeightStandardization(SHAPE)
    assert torch.equal(layer(w), layer(w.float()).bfloat16())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: own.WeightStandardization((8, 1, 1, 1)), "WeightStandardization needs two inputs or more for each "
         "output, or all it gives is 0; got a weight of shape (8, 1, 1, 1). Leave such a weight as it is."),
        (lambda: own.WeightStandardization((8, 3), "sample"), "WeightStandardization takes a form of 'unbiased' or "
         "'biased' or 'scaled'; got 'sample'."),
        (lambda: own.WeightStandardization((8, 3), gamma=1.7), "WeightStandardization has a gamma and a learned weight "
         "in the scaled form; got gamma=1.7 and affine=None in the unbiased form. Take form='scaled', or leave them "
         "out."),
        (lambda: own.WeightStandardization((8, 3))(torch.zeros(8, 4)), "WeightStandardization was made for a weight of "
         "shape (8, 3); got one of shape (8, 4). Make it for that one."),
        (lambda: own.weight_standardization(nn.Conv2d(3, 8, 3, bias=False), "bias"), "weight_standardization takes the "
         "name of a parameter of Conv2d; got 'bias'. Its parameters are weight."),
        (lambda: own.weight_standardization(nn.ConvTranspose2d(3, 8, 3)), "weight_standardization takes a weight whose "
         "outputs are on axis 0; got ConvTranspose2d, which has its inputs there. Standardize an ordinary "
         "convolution."),
        (lambda: own.remove_weight_standardization(parametrizations.weight_norm(nn.Linear(3, 4))),
         "remove_weight_standardization takes a parameter with that parametrization alone; 'weight' of "
         "ParametrizedLinear has _WeightNorm. torch.nn.utils.parametrize.remove_parametrizations removes them all."),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(BadInput) as caught:
        call()
    assert str(caught.value) == message


# What is read of others' weights ---------------------------------------------------------------


def old(kind, module, **given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(nn.utils, kind)(module, **given)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("hook", [True, False], ids=["hook", "parametrization"])
def test_weight_norm_of_torch(hook, dim):
    layer = old("weight_norm", conv(), dim=dim) if hook else parametrizations.weight_norm(conv(), dim=dim)
    g, v = (layer.weight_g, layer.weight_v) if hook else layer.parametrizations.weight.parameters()
    spec = ns.spec_of(layer, parameter="weight")
    assert (spec == ns.families.weight_norm()) == (dim == 0)
    gain = g.detach().numpy().reshape(spec.bind(v.shape).weight_shape)
    wanted = reference.forward(v.detach().numpy(), spec, gain)
    np.testing.assert_allclose(layer.weight.detach().numpy(), wanted, rtol=1e-13)


def test_bit_of_transformers():
    bit = pytest.importorskip("transformers.models.bit.modeling_bit")
    layer = bit.WeightStandardizedConv2d(3, 6, 3, padding=0, eps=1e-3).double()
    spec = ns.spec_of(layer, parameter="weight")
    assert spec == ns.families.biased_weight_standardization(eps=1e-3)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    w = torch.from_numpy(reference.forward(layer.weight.detach().numpy(), spec))
    torch.testing.assert_close(layer(x), F.conv2d(x, w), rtol=1e-12, atol=1e-12)
    cls = type("Other", (bit.WeightStandardizedConv2d,), {"forward": lambda self, x: x})
    with pytest.raises(UnknownNormalization, match="but overrides forward"):
        ns.spec_of(cls(3, 6, 3), parameter="weight")


def test_scaled_standardization_as_timm_writes_it():
    """Its class by name and home: batch norm of the weight, times gain * gamma / sqrt(fan-in)."""

    class ScaledStdConv2d(nn.Conv2d):
        def __init__(self, *given, gamma=1.7, eps=1e-6, **named):
            super().__init__(*given, **named)
            self.scale, self.eps = gamma * self.weight[0].numel() ** -0.5, eps
            self.gain = nn.Parameter(torch.randn(self.out_channels, 1, 1, 1, dtype=self.weight.dtype))

        def forward(self, x):
            w = self.weight.reshape(1, self.out_channels, -1)
            gain = (self.gain * self.scale).view(-1)
            w = F.batch_norm(w, None, None, weight=gain, training=True, momentum=0.0, eps=self.eps)
            return F.conv2d(x, w.reshape_as(self.weight), self.bias)

    ScaledStdConv2d.__module__, ScaledStdConv2d.__qualname__ = "timm.layers.std_conv", "ScaledStdConv2d"
    layer = ScaledStdConv2d(3, 6, 3, bias=False, dtype=torch.float64)
    spec = ns.spec_of(layer, parameter="weight")
    gain = layer.gain.detach().numpy().ravel()
    w = torch.from_numpy(reference.forward(layer.weight.detach().numpy(), spec, gain))
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.conv2d(x, w), rtol=1e-12, atol=1e-12)


def both():
    layer = own.weight_standardization(nn.Linear(4, 3))
    parametrize.register_parametrization(layer, "weight", own.WeightStandardization((3, 4)))
    return layer


SPECTRAL = (
    "is divided by its largest singular value, as power iterations find it: that is no mean square or sum of squares "
    "over any axes, so spectral norm is outside the family."
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
         f"{{}}.ParametrizedLinear: the parameter 'weight' {SPECTRAL}"),
        (lambda: old("spectral_norm", nn.Linear(4, 3)), f"torch.nn.Linear: the parameter 'weight' {SPECTRAL}"),
        (lambda: nn.Linear(4, 3),
         "torch.nn.Linear: the parameter 'weight' has nothing on it that is known to normalize."),
        (lambda: parametrizations.orthogonal(nn.Linear(4, 3)), "{}.ParametrizedLinear: the parameter 'weight' has "
         "_Orthogonal on it, which is not known to normalize."),
        (both, "{}.ParametrizedLinear: the parameter 'weight' has WeightStandardization, WeightStandardization on it, "
         "one after the other. Ask each of them by itself."),
    ],
)  # fmt: skip
def test_what_is_no_normalization_of_a_weight_is_said(make, message):
    with pytest.raises(UnknownNormalization) as caught:
        ns.spec_of(make(), parameter="weight")
    assert str(caught.value) == message.format("torch.nn.utils.parametrize")


# In a model ---------------------------------------------------------------


def test_check_knows_a_standardized_weight_and_stays_silent():
    """Layers of different fan-in have one eps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        own.weight_standardization(nn.Conv2d(3, 8, 3), form="scaled"),
        nn.ReLU(),
        own.weight_standardization(nn.Conv2d(8, 8, 3), form="scaled"),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    report = ns.check(model, torch.randn(16, 3, 8, 8))
    assert [site.name for site in report.sites] == [
        "0.parametrizations.weight.0",
        "2.parametrizations.weight.0",
    ]
    assert not report.findings
