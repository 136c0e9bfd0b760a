"""Norms of spiking networks: laws of time steps, layouts, gains; masks; how they run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import normscope as ns
import normscope.nn as own
from normscope.errors import BadInput
from normscope.kernels import composite, layout, library

T, N, C = 4, 3, 6
SHAPE = (T, N, C, 5, 4)
BATCH = {
    "tdBN": lambda **more: own.ThresholdBatchNorm2d(C, 0.5, 2**-0.5, **more),
    "BNTT": lambda **more: own.BatchNormThroughTime2d(T, C, **more),
    "TEBN": lambda **more: own.TemporalEffectiveBatchNorm2d(T, C, **more),
}
SAMPLE = {
    "tdLN": lambda **more: own.ThresholdLayerNorm(C, 0.5, **more),
    "tdGN": lambda **more: own.ThresholdGroupNorm(2, C, 0.5, **more),
    "tdRMS": lambda **more: own.ThresholdRMSNorm(C, 0.5, **more),
}
EVERY = {
    **BATCH,
    **SAMPLE,
    "tdLN over all": lambda **more: own.ThresholdLayerNorm(C, 0.5, per_step=False, **more),
}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of 240 terms


def sequence(dtype=torch.float64, seed=0):
    drift = torch.arange(T).view(T, 1, 1, 1, 1)
    return (
        torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + drift
    ).to(dtype)


def filled(layer):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(0.5 + noise.abs() if name == "running_var" else 0.5 + noise)
    return layer


# Time ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_layouts_are_one_function(name):
    """In training too, with what is stored."""
    x = sequence()
    forms = {
        "t b c ...": (x, lambda y: y),
        "b t c ...": (x.transpose(0, 1).contiguous(), lambda y: y.transpose(0, 1)),
        "(t b) c ...": (x.flatten(0, 1), lambda y: y.unflatten(0, (T, N))),
    }
    outputs, states = [], []
    for form, (value, back) in forms.items():
        steps = {"steps": T} if form.startswith("(") and "Threshold" in repr(EVERY[name]()) else {}
        layer = filled(EVERY[name](layout=form, **steps).double())
        outputs.append(back(layer(value)))
        states.append(layer.state_dict())
    for y, state in zip(outputs[1:], states[1:], strict=True):
        torch.testing.assert_close(y, outputs[0], **CLOSE)
        torch.testing.assert_close(state, states[0], **CLOSE)


@pytest.mark.parametrize("form", ["t b c ...", "b t c ...", "(t b) c ..."])
def test_tdbn_evaluates_step_by_step_as_on_the_whole_bit_for_bit(form):
    norm = filled(own.ThresholdBatchNorm2d(C, 0.5, layout=form, steps=T)).eval()
    x = sequence(torch.float32)
    given = {"t b c ...": x, "b t c ...": x.transpose(0, 1), "(t b) c ...": x.flatten(0, 1)}[form]
    whole = norm(given)
    whole = {"t b c ...": lambda y: y, "b t c ...": lambda y: y.transpose(0, 1)}.get(
        form, lambda y: y.unflatten(0, (T, N))
    )(whole)
    assert all(torch.equal(norm.step(x[t]), whole[t]) for t in range(T))


@pytest.mark.parametrize("name", SAMPLE)
def test_norms_of_each_step_go_step_by_step_in_training(name):
    norm, x = filled(SAMPLE[name]()), sequence(torch.float32)
    assert torch.equal(torch.stack([norm.step(step) for step in x]), norm(x))
    assert norm.spec.properties().causal


@pytest.mark.parametrize("momentum", [0.3, None])
def test_bntt_goes_step_by_step_with_all_it_stores(momentum):
    whole, steps = (filled(own.BatchNormThroughTime2d(T, C, momentum=momentum)) for _ in range(2))
    for seed in range(3):
        x = sequence(torch.float32, seed)
        assert torch.equal(torch.stack([steps.step(x[t], t) for t in range(T)]), whole(x))
    torch.testing.assert_close(steps.state_dict(), whole.state_dict(), rtol=1e-6, atol=0)
    assert int(steps.num_batches_tracked) == 3


def test_bntt_is_a_batch_norm_for_every_step():
    norm, x = own.BatchNormThroughTime2d(T, C).double(), sequence()
    singles = [torch.nn.BatchNorm2d(C, 1e-4).double() for _ in range(T)]
    torch.testing.assert_close(norm(x), torch.stack([bn(x[t]) for t, bn in enumerate(singles)]), **CLOSE)
    torch.testing.assert_close(norm.running_var, torch.stack([bn.running_var for bn in singles]), **CLOSE)


def test_over_all_steps_no_step_stands_alone():
    x = sequence(torch.float32)
    for norm, text in (
        (
            own.ThresholdBatchNorm2d(C),
            "ThresholdBatchNorm2d normalizes by the statistics of all time steps here, which one step alone does not "
            "have. Call it on the whole sequence, or eval() with running statistics.",
        ),
        (
            own.ThresholdLayerNorm(C, per_step=False),
            "ThresholdLayerNorm with per_step=False normalizes by the statistics of all time steps, which one step "
            "alone does not have. Call it on the whole sequence, or make it with per_step=True.",
        ),
    ):
        with pytest.raises(BadInput) as caught:
            norm.step(x[0])
        assert str(caught.value) == text
        changed = x.clone()
        changed[-1] += 1
        assert (
            norm(changed)[0] - norm(x)[0]
        ).abs().max() > 1e-2  # the last step reaches the first: not causal
        assert not norm.spec.properties().causal or norm.spec.running


# Thresholds ---------------------------------------------------------------------------------------------------------


def test_tdbn_is_the_formula_of_the_paper():
    norm, x = filled(own.ThresholdBatchNorm2d(C, 0.5, 2**-0.5).double()), sequence()
    over = (0, 1, 3, 4)
    unit = (x - x.mean(over, keepdim=True)) / (x.var(over, unbiased=False, keepdim=True) + 1e-5).sqrt()
    at = (1, 1, C, 1, 1)
    wanted = norm.weight.view(at) * (2**-0.5 * 0.5 * unit) + norm.bias.view(at)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    torch.testing.assert_close(norm(x), wanted, **CLOSE)
    torch.testing.assert_close(norm.running_mean, 0.9 * mean + 0.1 * x.mean(over), **CLOSE)
    torch.testing.assert_close(norm.running_var, 0.9 * var + 0.1 * x.var(over), **CLOSE)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (own.ThresholdBatchNorm2d, 1),
        (own.ThresholdBatchNorm2d, T),
        (lambda c: own.TemporalEffectiveBatchNorm2d(1, c), 1),
        (lambda c: own.BatchNormThroughTime2d(1, c, eps=1e-5, bias=True), 1),
    ],
    ids=["tdBN-1", "tdBN", "TEBN-1", "BNTT-1"],
)
def test_of_unit_gain_it_is_batch_norm_bit_for_bit(make, steps):
    """tdBN over all steps as over samples; BNTT, whose steps are apart, and TEBN of one step."""
    x, norm, plain = sequence(torch.float32)[:steps], make(C), own.BatchNorm2d(C)
    for _ in range(2):
        assert torch.equal(norm(x).flatten(0, 1), plain(x.flatten(0, 1)))
    assert torch.equal(norm.eval()(x).flatten(0, 1), plain.eval()(x.flatten(0, 1)))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(norm.state_dict()[name].reshape(tensor.shape), tensor)


@pytest.mark.parametrize("kind", ["layer", "group", "rms"])
def test_norms_of_each_step_are_torchs_times_the_threshold(kind):
    x, at = sequence(), (C, 1, 1)
    plain = {
        "layer": lambda s: F.layer_norm(s, s.shape[1:]),
        "group": lambda s: F.group_norm(s, C),
        "rms": lambda s: F.rms_norm(s, s.shape[1:], eps=1e-5),
    }[kind]
    norm = {
        "layer": own.ThresholdLayerNorm(C, 0.5, 2.0**-0.5),
        "group": own.ThresholdGroupNorm(C, C, 0.5, 2.0**-0.5),
        "rms": own.ThresholdRMSNorm(C, 0.5, 2.0**-0.5),
    }[kind]
    norm = filled(norm.double())
    shift = 0.0 if norm.bias is None else norm.bias.view(at)
    wanted = norm.weight.view(at) * 2.0**-0.5 * 0.5 * torch.stack([plain(step) for step in x]) + shift
    torch.testing.assert_close(norm(x), wanted, **CLOSE)


def test_where_the_gain_stands_changes_how_it_trains():
    """One function at the start; the gradient of one's weight is the gain times that of the other's."""
    x, gain = sequence(), 0.25
    forward = own.ThresholdBatchNorm2d(C, 0.5, 0.5).double()
    weight = own.ThresholdBatchNorm2d(C, 0.5, 0.5, gain="weight").double()
    assert weight.weight.tolist() == [gain] * C
    y, z = forward(x), weight(x)
    torch.testing.assert_close(y, z, **CLOSE)
    target = torch.sin(x)
    ((y - target) ** 2).sum().backward()
    ((z - target) ** 2).sum().backward()
    torch.testing.assert_close(forward.weight.grad, gain * weight.weight.grad, rtol=1e-10, atol=0)
    assert forward.spec.same_function(weight.spec).weight == "second's weight = first's weight * 0.25"


def test_tebn_is_batch_norm_with_a_factor_for_every_step():
    norm, x = filled(own.TemporalEffectiveBatchNorm2d(T, C).double()), sequence()
    plain = torch.nn.BatchNorm2d(C).double()
    plain.load_state_dict({name: t for name, t in norm.state_dict().items() if name != "scale"})
    scale = norm.scale.detach().clone().requires_grad_()
    y, z = norm(x), plain(x.flatten(0, 1)).unflatten(0, (T, N)) * scale.view(T, 1, 1, 1, 1)
    torch.testing.assert_close(y, z, **CLOSE)
    y.cos().sum().backward()
    z.cos().sum().backward()
    torch.testing.assert_close(norm.scale.grad, scale.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.running_var, plain.running_var, **CLOSE)


# Masks, kernels, the doctor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["t b c ...", "(t b) c ..."])
@pytest.mark.parametrize("name", EVERY)
def test_steps_that_do_not_count_reach_nothing(name, form):
    lengths = torch.tensor([4, 2, 3])
    inside = (torch.arange(T)[:, None] < lengths).view(T, N, 1, 1, 1)
    x = sequence().masked_fill(~inside, math.nan)
    given, mask = (x, inside) if form == "t b c ..." else (x.flatten(0, 1), inside.flatten(0, 1))
    steps = {"steps": T} if form.startswith("(") and "Threshold" in repr(EVERY[name]()) else {}
    layers = [filled(EVERY[name](layout=form, **steps).double()) for _ in range(2)]
    given = given.requires_grad_()
    y = layers[0](given, lengths=lengths)
    assert torch.equal(y, layers[1](given.detach(), mask=mask))
    y.sin().sum().backward()
    assert (y.masked_select(~mask) == 0).all()
    assert (given.grad.masked_select(~mask) == 0).all()
    assert given.grad.isfinite().all()

    spec = layers[0].spec
    layer = filled(EVERY[name](layout=form, **steps).double())
    state = layer.state_dict()
    weight, bias = layer.by_step() if name == "TEBN" else (state.get("weight"), state.get("bias"))
    numbers = [None if t is None else t.detach().numpy() for t in (weight, bias)]
    wanted = ns.reference.forward(given.detach().numpy(), spec, *numbers, mask=mask.numpy())
    torch.testing.assert_close(y.detach(), torch.from_numpy(wanted), **CLOSE)
    if spec.running is not None:
        start = ns.reference.RunningState(state["running_mean"].numpy(), state["running_var"].numpy())
        after = ns.reference.update_running(start, given.detach().numpy(), spec, mask.numpy())
        np.testing.assert_allclose(layers[0].running_var.numpy(), after.var, rtol=1e-12)


@pytest.mark.skipif(library.LIBRARY is None, reason="no native library")
@pytest.mark.parametrize("form", ["t b c ...", "b t c ...", "(t b) c ..."])
@pytest.mark.parametrize("name", EVERY)
def test_runs_on_the_native_kernels(name, form, monkeypatch):
    steps = {"steps": T} if form.startswith("(") and "Threshold" in repr(EVERY[name]()) else {}
    layer = filled(EVERY[name](layout=form, **steps))
    x = sequence(torch.float32)
    x = {"t b c ...": x, "b t c ...": x.transpose(0, 1).contiguous()}.get(form, x.flatten(0, 1))
    monkeypatch.setattr(composite, "normalize", None)
    layer(x.requires_grad_()).sum().backward()


def test_tdbn_merges_time_into_the_outer_run():
    assert [str(run) for run in layout.runs(own.ThresholdBatchNorm2d(64).spec, (4, 8, 64, 14, 14))] == [
        *(str(run) for run in layout.runs(own.BatchNorm2d(64).spec, (32, 64, 14, 14)))
    ]


class Spiking(torch.nn.Module):
    """Convolutions of every step, tdBN over all steps, thresholds."""

    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [torch.nn.Conv2d(2, 8, 3, bias=False), torch.nn.Conv2d(8, 8, 3, bias=False)]
        )
        self.norms = torch.nn.ModuleList([own.ThresholdBatchNorm2d(8, 0.5), own.ThresholdBatchNorm2d(8, 0.5)])
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        x = x.transpose(0, 1)  # samples first outside, steps first inside
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])) - 0.5
            x = torch.sigmoid(4 * x)
        return self.head(x.mean((0, 3, 4)))


def test_doctor_reads_tdbn_and_finds_nothing_in_a_healthy_net():
    torch.manual_seed(0)
    model, x, labels = Spiking(), torch.rand(48, T, 2, 8, 8), torch.arange(48) % 3
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    report = ns.check(model.eval(), x, labels)
    assert [finding.code for finding in report.findings if finding.severity != "info"] == []
    assert {site.name: site.spec for site in report.sites} == {
        f"norms.{i}": norm.spec for i, norm in enumerate(model.norms)
    }


def test_tdbn_folds_into_the_convolution():
    torch.manual_seed(0)
    model, x = Spiking().double(), torch.rand(8, T, 2, 8, 8, dtype=torch.float64)
    for _ in range(30):
        model(x)
    folded, report = ns.transforms.fold(model.eval(), x)
    assert len(report.done) == 2
    assert not [m for m in folded.modules() if isinstance(m, own.ThresholdBatchNorm2d)]
    torch.testing.assert_close(folded(x), model(x), **CLOSE)


@pytest.mark.parametrize("name", ["BNTT", "TEBN"])
def test_what_differs_from_step_to_step_is_not_folded(name):
    model, x = Spiking(), torch.rand(8, T, 2, 8, 8)
    kind = {"BNTT": own.BatchNormThroughTime2d, "TEBN": own.TemporalEffectiveBatchNorm2d}[name]
    model.norms = torch.nn.ModuleList([kind(T, 8), kind(T, 8)])
    report = ns.transforms.fold(model.eval(), x)[1]
    what = {"BNTT": "stored statistics differ", "TEBN": "gain differs"}[name]
    assert {change.reason for change in report.left} == {
        f"its {what} along t and c, and the layer beside it has one weight a feature"
    }


def test_tebn_whose_factors_are_frozen_says_so():
    norm = own.TemporalEffectiveBatchNorm2d(T, C)
    assert ns.reading.read(norm).tensors["weight"].requires_grad
    norm.requires_grad_(False)
    assert not ns.reading.read(norm).tensors["weight"].requires_grad


ERRORS = {
    "layout": (
        lambda: own.ThresholdBatchNorm1d(3, layout="b c t"),
        "ThresholdBatchNorm1d knows the layouts 't b c ...', 'b t c ...', '(t b) c ...' (t steps, b samples, c "
        "channels); got 'b c t'. Move the axes of the input (x.movedim).",
    ),
    "steps": (
        lambda: own.ThresholdLayerNorm(3, layout="(t b) c ..."),
        "ThresholdLayerNorm with the layout '(t b) c ...' needs the number of time steps; got steps=None. Write "
        "steps=4.",
    ),
    "threshold": (
        lambda: own.ThresholdRMSNorm(3, 0.0),
        "ThresholdRMSNorm scales to the firing threshold, so v_threshold is a number above 0; got 0.0. Usual is 1.0.",
    ),
    "gain": (
        lambda: own.ThresholdBatchNorm1d(3, affine=False, gain="weight"),
        "ThresholdBatchNorm1d applies alpha * v_threshold in the 'forward', or starts its 'weight' there, which needs "
        "affine=True; got gain='weight', affine=False. Leave gain at 'forward'.",
    ),
    "axes": (
        lambda: own.ThresholdBatchNorm2d(3)(torch.zeros(2, 3, 4, 4)),
        "ThresholdBatchNorm2d takes an input 't b c ...' of 5 axes; got one of shape (2, 3, 4, 4). For one time step "
        "alone call step().",
    ),
    "channels": (
        lambda: own.ThresholdLayerNorm(3)(torch.zeros(2, 3, 4)),
        "ThresholdLayerNorm was made for 3 channels on axis 2; got an input of shape (2, 3, 4). Say where they are "
        "with layout=, or make the layer for that number.",
    ),
    "number of steps": (
        lambda: own.BatchNormThroughTime1d(4, 3)(torch.zeros(2, 5, 3)),
        "BatchNormThroughTime1d was made for 4 time steps on axis 0 of 't b c ...'; got an input of shape (2, 5, 3). "
        "Make the layer for that number, or call step().",
    ),
    "step": (
        lambda: own.BatchNormThroughTime1d(4, 3).step(torch.zeros(5, 3), 4),
        "BatchNormThroughTime1d has 4 time steps, counted from 0; got number=4. Start again at 0 with every sequence.",
    ),
    "groups": (
        lambda: own.ThresholdGroupNorm(2, 3),
        "ThresholdGroupNorm has groups of equally many channels; got num_groups=2, num_channels=3. Take a divisor.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, text = ERRORS[case]
    with pytest.raises(BadInput) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize("number", [True, 1.0, -1, 3])
def test_a_step_of_bntt_is_a_number_of_its_steps(number):
    norm = own.BatchNormThroughTime1d(3, 4)
    with pytest.raises(BadInput) as caught:
        norm.step(torch.randn(5, 4), number)
    assert str(caught.value) == (
        f"BatchNormThroughTime1d has 3 time steps, counted from 0; got number={number!r}. Start again at 0 with every "
        "sequence."
    )


def test_the_plain_average_of_bntt_may_begin_at_a_later_step():
    norm, x = own.BatchNormThroughTime1d(3, 4, momentum=None), torch.randn(5, 4)
    norm.step(x, 1)
    torch.testing.assert_close(norm.running_mean[1], x.mean(0))


def test_steps_and_channels_in_the_wrong_order_are_said():
    with pytest.raises(BadInput) as caught:
        own.TemporalEffectiveBatchNorm1d(6, 4)(torch.randn(4, 3, 6))
    assert str(caught.value) == (
        "TemporalEffectiveBatchNorm1d was made for 4 channels on axis 2; got an input of shape (4, 3, 6). The number "
        "of steps comes first, TemporalEffectiveBatchNorm1d(steps, num_features), then that of channels; or say where "
        "they are with layout=, or make the layer for that number."
    )
