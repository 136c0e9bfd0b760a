"""Norms whose gain and bias are computed, and what stands where a norm would: found, measured, no false alarm."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normscope as ns
import normscope.nn as own

SAMPLES, CLASSES = 32, 4


class Residual(nn.Module):
    """A pre-norm block without attention, each norm called with a condition."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.mlp = norm, nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, c):
        return x + self.mlp(self.norm(x, c))


class Tokens(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Residual(norm()) for _ in range(2)])
        self.last, self.head = norm(), nn.Linear(16, 8)

    def forward(self, x, c):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, c)
        return self.head(self.last(x, c))


class Images(nn.Module):
    def __init__(self, norm, bias=False):
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, 8, 3, padding=1, bias=bias) for n in (3, 8))
        self.norms, self.head = nn.ModuleList([norm(), norm()]), nn.Conv2d(8, 3, 1)

    def forward(self, x, c):
        x = F.relu(self.norms[0](self.first(x), c))
        return self.head(F.relu(self.norms[1](self.second(x), c)))


class HandModulated(nn.Module):
    """The modulation of a diffusion transformer, around a norm of torch or written out."""

    def __init__(self, written=False):
        super().__init__()
        self.norm = None if written else nn.LayerNorm(16, elementwise_affine=False, eps=1e-6)
        self.make = nn.Sequential(nn.SiLU(), nn.Linear(5, 32))
        nn.init.zeros_(self.make[1].weight)
        nn.init.zeros_(self.make[1].bias)

    def forward(self, x, c):
        shift, scale = self.make(c).chunk(2, -1)
        if self.norm is None:
            centered = x - x.mean(-1, keepdim=True)
            normal = centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-6)
        else:
            normal = self.norm(x)
        return normal * (1 + scale[:, None]) + shift[:, None]


class HandStyled(nn.Module):
    """Instance norm with the moments of a style, or with a gain and bias of a vector."""

    def __init__(self, vector):
        super().__init__()
        self.make = nn.Linear(5, 16) if vector else None

    def forward(self, x, style):
        mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True)
        normal = (x - mean) / (var + 1e-5).sqrt()
        if self.make is not None:
            gain, bias = self.make(style)[:, :, None, None].chunk(2, 1)
            return normal * (1 + gain) + bias
        return normal * style.std((2, 3), keepdim=True) + style.mean((2, 3), keepdim=True)


class HandSpatial(nn.Module):
    def __init__(self):
        super().__init__()
        self.free, self.shared = nn.BatchNorm2d(8, affine=False), nn.Conv2d(5, 8, 3, padding=1)
        self.gamma, self.beta = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x, labels):
        near = F.interpolate(labels, size=x.shape[2:], mode="nearest")
        made = F.relu(self.shared(near))
        return self.free(x) * (1 + self.gamma(made)) + self.beta(made)


TOKENS = (torch.randn(SAMPLES, 6, 8), torch.randn(SAMPLES, 5))
IMAGES = torch.randn(SAMPLES, 3, 10, 10)
VECTORS, CLASSED = torch.randn(SAMPLES, 5), torch.arange(SAMPLES) % CLASSES
LABELS, STYLES = torch.randn(SAMPLES, 5, 20, 20), torch.randn(SAMPLES, 8, 9, 9)
QUIET = {
    "adaptive layer norm": (Tokens, lambda: own.AdaptiveLayerNorm(16, condition_features=5), TOKENS, set()),
    "modulated by hand": (Tokens, HandModulated, TOKENS, set()),
    "modulated and written": (Tokens, lambda: HandModulated(written=True), TOKENS, set()),
    "conditional batch norm": (
        Images,
        lambda: own.ConditionalBatchNorm2d(8, classes=CLASSES),
        (IMAGES, CLASSED),
        {"NS201"},
    ),
    "adaptive group norm": (
        Images,
        lambda: own.AdaptiveGroupNorm(2, 8, condition_features=5),
        (IMAGES, VECTORS),
        set(),
    ),
    "adaptive instance norm": (Images, own.AdaptiveInstanceNorm, (IMAGES, STYLES), set()),
    "styled by hand": (Images, lambda: HandStyled(vector=False), (IMAGES, STYLES), set()),
    "styled by a vector": (Images, lambda: HandStyled(vector=True), (IMAGES, VECTORS), set()),
    "spatial": (
        Images,
        lambda: own.SpatiallyAdaptiveBatchNorm2d(8, label_channels=5, hidden=8),
        (IMAGES, LABELS),
        {"NS201"},
    ),
    "spatial by hand": (Images, HandSpatial, (IMAGES, LABELS), {"NS201", "NS804"}),
}


def trained(model, inputs, passes=80):
    """With running statistics that follow these inputs."""
    model.train()
    with torch.no_grad():
        for _ in range(passes):
            model(*inputs)
    return model.eval()


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm(name):
    """In a trained model only what is so is told: samples that meet, a norm without gain that folds."""
    kind, norm, inputs, told = QUIET[name]
    torch.manual_seed(0)
    report = ns.check(trained(kind(norm), inputs), inputs)
    assert {finding.code for finding in report.findings} <= told
    assert report.ok
    if not name.endswith("hand") and "written" not in name and "vector" not in name:
        assert all(site.spec.source == "input" and site.calls for site in report.sites)
        assert not report.notes


def test_coupling_of_a_conditional_batch_norm_is_measured():
    torch.manual_seed(0)
    model = trained(Images(lambda: own.ConditionalBatchNorm2d(8, classes=CLASSES)), (IMAGES, CLASSED))
    (found,) = ns.check(model, (IMAGES, CLASSED), select=["NS201"]).findings
    assert (found.site, found.severity) == ("norms.0", "info")


def test_faults_of_a_conditional_batch_norm_are_found():
    torch.manual_seed(0)
    model = Images(lambda: own.ConditionalBatchNorm2d(8, classes=CLASSES), bias=True)
    trained(model, (3 * IMAGES + 5, CLASSED))
    found = {f.code: f for f in ns.check(model, (IMAGES, CLASSED)).findings}
    assert found["NS304"].site == "norms.0"
    assert found["NS501"].site == "norms.0"
    model.norms[1].running_var[3] = float("nan")
    (found,) = ns.check(model, (IMAGES, CLASSED), select=["NS301"]).findings
    assert found.site == "norms.1"


def test_monitor_looks_at_it():
    torch.manual_seed(0)
    model = Images(lambda: own.ConditionalBatchNorm2d(8, classes=CLASSES)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = ns.Monitor(model, optimizer=optimizer)
    with monitor:
        for _ in range(3):
            optimizer.zero_grad()
            model(IMAGES, CLASSED).square().mean().backward()
            optimizer.step()
    report = monitor.report()
    assert {site.name for site in report.sites} == {"norms.0", "norms.1"}
    assert not any("mask" in note for note in report.notes)


class Plain(nn.Module):
    """Of a norm of maps, and of its activation where it has one."""

    def __init__(self, *norm, scale=1.0):
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 8, 1), nn.Sequential(*norm), nn.Conv2d(8, 3, 1)
        self.scale = scale

    def forward(self, x):
        return self.head(self.norm(self.scale * self.first(x)))


def test_filter_response_norm_is_judged_by_its_mean_square():
    torch.manual_seed(0)
    report = ns.check(Plain(own.FilterResponseNorm2d(8), own.TLU(8)).eval(), IMAGES)
    assert not report.findings
    assert [site.type_name for site in report.sites] == ["normscope.nn.FilterResponseNorm2d"]
    (found,) = ns.check(Plain(own.FilterResponseNorm2d(8), scale=1e-4).eval(), IMAGES).findings
    assert found.code == "NS401"
    assert "eps 1e-06" in found.message
    (found,) = ns.check(Plain(own.FilterResponseNorm2d(8)).eval(), IMAGES[:, :, :1, :1]).findings
    assert found.code == "NS101"


def test_learned_eps_is_said_and_not_judged():
    torch.manual_seed(0)
    report = ns.check(Plain(own.FilterResponseNorm2d(8, learned_eps=1e-4)).eval(), IMAGES)
    assert not report.findings
    (site,) = report.sites
    assert site.spec is None
    assert "as a learned eps" in site.reason


def test_dynamic_tanh_is_listed_and_nothing_is_said_of_it():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), *(own.DynamicTanh(16) for _ in range(2)), nn.Linear(16, 4)]
    report = ns.check(nn.Sequential(*layers).eval(), torch.randn(SAMPLES, 6, 8))
    assert not report.findings
    assert not report.sites
    assert not ns.check_state(nn.Sequential(*layers).state_dict()).sites
    assert report.notes == (
        "1, 2 are norm-free (Dynamic Tanh, which takes no statistics): no rule looks at them",
    )
