"""Norms by hand that normalize by stored statistics are found in any mode; other constants are no statistics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normscope
from normscope.doctor.session import Session
from normscope.doctor.site import Site
from normscope.doctor.sites import find_sites

CHANNELS = 6
Body = Callable[["Held", Tensor], Tensor]


class Held(nn.Module):
    """Buffers as norms have them, parameters as well, and ``body`` as forward."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        for name in ("weight", "bias", "running_mean", "running_var", "other_var"):
            self.register_buffer(name, torch.rand(CHANNELS) + 0.5)
        self.gamma, self.beta = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def wide(vector: Tensor) -> Tensor:
    return vector[:, None, None]


def folded(h: Held, x: Tensor) -> Tensor:
    """Frozen batch norm of the detection packages, eps as a constant in the code."""
    w, b = h.weight.reshape(1, -1, 1, 1), h.bias.reshape(1, -1, 1, 1)
    scale = w * (h.running_var.reshape(1, -1, 1, 1) + 1e-5).rsqrt()
    return x * scale + (b - h.running_mean.reshape(1, -1, 1, 1) * scale)


def folded_before_views(h: Held, x: Tensor) -> Tensor:
    scale = h.gamma / torch.sqrt(h.running_var + 1e-5)
    return wide(h.beta - h.running_mean * scale) + x * wide(scale)


def folded_without_bias(h: Held, x: Tensor) -> Tensor:
    scale = (h.running_var + 1e-5) ** -0.5
    return x * wide(scale) - wide(h.running_mean * scale)


def folded_in_half(h: Held, x: Tensor) -> Tensor:
    scale = torch.rsqrt(h.running_var + 1e-5)
    return (x.double() * wide(scale)).float() + wide(h.bias - h.running_mean * scale).float()


def fused(h: Held, x: Tensor) -> Tensor:
    scale = h.weight * torch.rsqrt(h.running_var + 1e-5)
    return torch.addcmul(wide(h.bias - h.running_mean * scale), x, wide(scale))


def divided_apart(h: Held, x: Tensor) -> Tensor:
    deviation = (h.running_var + 1e-5).sqrt()
    return x / wide(deviation) - wide(h.running_mean / deviation)


def centered_by_slices(h: Held, x: Tensor) -> Tensor:
    y = (x - wide(h.running_mean)) / (wide(h.running_var) + 1e-5).sqrt()
    return y * wide(h.gamma) + wide(h.beta)


def gain_that_is_a_buffer(h: Held, x: Tensor) -> Tensor:
    return (x - wide(h.running_mean)) * wide(h.weight * (h.running_var + 1e-5).rsqrt()) + wide(h.bias)


NORMS = [
    folded, folded_before_views, folded_without_bias, folded_in_half, fused, divided_apart, centered_by_slices,
    gain_that_is_a_buffer,
]  # fmt: skip


def between(part: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3), part, nn.Conv2d(CHANNELS, 4, 3))


def sites_of(model: nn.Module) -> list[Site]:
    with Session(model) as session:
        return find_sites(session, (torch.rand(4, 3, 8, 8),))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("body", NORMS)
def test_a_frozen_norm_by_hand_is_a_site(body: Body, training: bool) -> None:
    (site,) = sites_of(between(Held(body)).train(training))
    assert (site.name, site.kind, site.reason) == ("1", "hand-written", "hand-written; not identified")
    assert (site.mode_train, site.mode_eval, site.mode_now) == ("frozen",) * 3
    assert {"running_mean", "running_var"} <= set(site.tensors)
    (call,) = site.calls
    assert [n.path for n in (*call.fed_by, *call.feeds)] == ["0", "2"]


class InAModel(nn.Module):
    """The same formula in the forward of a larger module."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.conv, self.held = nn.Conv2d(3, CHANNELS, 3), Held(body)

    def forward(self, x: Tensor) -> Tensor:
        return self.held.body(self.held, torch.relu(self.conv(x))).relu()


@pytest.mark.parametrize("body", NORMS)
def test_a_frozen_norm_inside_a_larger_forward_is_a_site(body: Body) -> None:
    (site,) = sites_of(InAModel(body))
    assert (site.name, site.kind, site.mode_eval) == ("hand-written", "inlined", "frozen")


class Switching(nn.Module):
    """Batch statistics in training, which move buffers in place; stored ones in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))
        self.register_buffer("running_mean", torch.zeros(CHANNELS))
        self.register_buffer("running_var", torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)
                self.running_var.lerp_(var, 0.1)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - wide(mean)) / (wide(var) + 1e-5).sqrt() * wide(self.gamma) + wide(self.beta)


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_that_moves_its_buffers_in_place_is_a_site(training: bool) -> None:
    model = between(Switching()).train(training)
    (site,) = sites_of(model)
    assert (site.name, site.kind) == ("1", "hand-written")
    assert (site.mode_train, site.mode_eval) == ("batch", "running")
    assert site.mode_now == ("batch" if training else "running")
    assert not model[1].running_mean.any(), "the forward in train mode is undone"


def test_without_data_modules_with_running_statistics_are_listed() -> None:
    model = nn.Sequential(between(Switching()), nn.BatchNorm2d(4), Held(folded))
    with Session(model) as session:
        sites = find_sites(session)
    assert [(site.name, site.kind, site.spec is None) for site in sites] == [
        ("1", "module", False),
        ("0.1", "hand-written", True),
        ("2", "hand-written", True),
    ]
    model[0][1].running_var[0] = -1.0
    report = normscope.check(model, select=["NS301"])
    assert [(f.code, f.site) for f in report.findings] == [("NS301", "0.1")]


def affine(h: Held, x: Tensor) -> Tensor:
    return x * wide(h.weight) + wide(h.bias)


def centered_affine(h: Held, x: Tensor) -> Tensor:
    return x * wide(h.weight) + wide(h.bias - h.running_mean * h.weight)


def layer_scale(h: Held, x: Tensor) -> Tensor:
    return x + wide(h.gamma) * torch.relu(x)


def act_norm(h: Held, x: Tensor) -> Tensor:
    return wide(h.gamma).exp() * (x + wide(h.beta))


def act_norm_in_buffers(h: Held, x: Tensor) -> Tensor:
    return wide(h.weight).exp() * (x + wide(h.bias)) - wide(h.running_mean)


def attention(h: Held, x: Tensor) -> Tensor:
    tokens = x.flatten(2).mT
    scores = (tokens @ tokens.mT) / torch.sqrt(torch.tensor(float(CHANNELS))) - wide(h.bias)[0, 0, 0]
    return (scores.softmax(-1) @ tokens).mT.reshape(x.shape)


def dequantized(h: Held, x: Tensor) -> Tensor:
    return (x - wide(h.running_mean)) * wide(h.weight)


def input_scaling(h: Held, x: Tensor) -> Tensor:
    return (x - wide(h.running_mean)) / wide(h.running_var)


def scaled_by_a_root(h: Held, x: Tensor) -> Tensor:
    return x / wide(h.running_var).sqrt() + wide(h.bias)


def shifted_by_another_root(h: Held, x: Tensor) -> Tensor:
    scale, other = (h.running_var + 1e-5).rsqrt(), (h.other_var + 1e-5).rsqrt()
    return x * wide(scale) + wide(h.bias - h.running_mean * other)


def learned_scale(h: Held, x: Tensor) -> Tensor:
    scale = (h.gamma.square() + 1e-5).rsqrt()
    return x * wide(scale) + wide(h.beta - h.running_mean * scale)


def diffusion_step(h: Held, x: Tensor) -> Tensor:
    alpha = h.running_var[2]
    return (x - (1 - alpha).sqrt() * torch.tanh(x)) / alpha.sqrt() + h.other_var[1] * torch.ones_like(x)


INNOCENT = [
    affine, centered_affine, layer_scale, act_norm, act_norm_in_buffers, attention, dequantized, input_scaling,
    scaled_by_a_root, shifted_by_another_root, learned_scale, diffusion_step,
]  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("body", INNOCENT)
def test_constants_that_are_no_stored_statistics_make_no_site(body: Body, training: bool) -> None:
    assert sites_of(between(Held(body)).train(training)) == []
    assert sites_of(InAModel(body).train(training)) == []


def test_a_report_knows_the_frozen_norm_that_no_reader_knows() -> None:
    class FrozenBatchNorm2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, torch.rand(CHANNELS) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return folded(self, x)  # type: ignore[arg-type]

    model = between(FrozenBatchNorm2d())
    report = normscope.check(model, torch.rand(8, 3, 9, 9))
    assert [(row.name, row.kind) for row in report.sites] == [("1", "hand-written")]
    (site,) = report.sites
    assert site.spec is not None
    assert (site.spec.stats, site.spec.eps) == ("b c ... -> c", 1e-5)
    assert (site.mode_train, site.mode_eval, site.reason) == ("frozen", "frozen", "")
    assert "NS304" not in report.passed


def test_a_gap_that_cannot_be_measured_has_not_passed() -> None:
    known = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).train()
    for _ in range(100):
        known(torch.rand(32, 3, 9, 9))
    model = nn.Sequential(known, between(Crooked())).eval()
    report = normscope.check(model, torch.rand(32, 3, 9, 9), select=["NS304"])
    assert (report.findings, report.passed) == ((), ())
    ((site, reason),) = ((entry.site, entry.reason) for entry in report.not_run)
    assert site == "1.1"
    assert reason.startswith("hand-written; not identified: ")


class Crooked(Switching):
    """Its gain is |gamma| + 0.1, which no specification says."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - wide(self.beta)) / wide(self.gamma) * wide(self.gamma.abs() + 0.1)


def test_a_gap_of_a_norm_by_hand_is_measured() -> None:
    model = between(Switching()).train()
    for _ in range(100):
        model(torch.rand(32, 3, 9, 9))
    report = normscope.check(model.eval(), torch.rand(32, 3, 9, 9), select=["NS304"])
    assert (report.findings, report.passed) == ((), ("NS304",))
    moved = normscope.check(model, torch.rand(32, 3, 9, 9) + 2, select=["NS304"])
    assert [(f.code, f.site) for f in moved.findings] == [("NS304", "1")]
