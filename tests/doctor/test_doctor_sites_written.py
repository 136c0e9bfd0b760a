"""Norms written by hand are found, as their own module and inside a larger forward; what resembles one is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normscope
from normscope.doctor.session import Session
from normscope.doctor.site import Site
from normscope.doctor.sites import find_sites

Body = Callable[["Part", Tensor], Tensor]


class Part(nn.Module):
    """A module of six features whose forward is ``body``."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.ones(6))
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Between(nn.Module):
    """``body`` in a module of its own, or inlined, between two linear layers."""

    def __init__(self, body: Body, inlined: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.part = Part(body)
        self.inlined = inlined

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.inlined:
            return self.after(self.part.body(self.part, torch.relu(x)))
        return self.after(self.part(x))


def found(body: Body, inlined: bool) -> list[Site]:
    with Session(Between(body, inlined)) as session:
        return find_sites(session, (torch.randn(4, 6),))


def textbook(p: Part, x: Tensor) -> Tensor:
    return p.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + p.bias


def from_the_formula(p: Part, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * p.weight + p.bias


def rms_in_float32(p: Part, x: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return p.weight * y.to(x.dtype)


def rms_by_a_factor(p: Part, x: Tensor) -> Tensor:
    return x * (1.0 / (torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True)) + 1e-8)) * (1 + p.weight)


def unit_length(p: Part, x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def scale_norm(p: Part, x: Tensor) -> Tensor:
    return 6**0.5 * x / torch.linalg.norm(x, dim=-1, keepdim=True)


def batch_by_moments(p: Part, x: Tensor) -> Tensor:
    mean = x.mean(0)
    variance = (x * x).mean(0) - mean * mean
    return (x - mean) * (p.weight / (variance + 1e-5).sqrt()) + p.bias


def batch_as_scale_and_shift(p: Part, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, 0, unbiased=False)
    scale = p.weight * torch.rsqrt(variance + 1e-5)
    return x * scale + (p.bias - mean * scale)


def groups_by_views(p: Part, x: Tensor) -> Tensor:
    y = x.view(len(x), 2, -1)
    variance, mean = torch.var_mean(y, -1, keepdim=True)
    return ((y - mean) / (variance + 1e-5) ** 0.5).view_as(x) * p.weight + p.bias


def in_place(p: Part, x: Tensor) -> Tensor:
    x = x.clone()
    x -= x.mean(-1, keepdim=True)
    x /= x.pow(2).mean(-1, keepdim=True).add_(1e-5).sqrt_()
    return x


def reciprocal_root(p: Part, x: Tensor) -> Tensor:
    return (x - x.mean(1, True)) * x.var(1, keepdim=True, unbiased=False).add(1e-5).sqrt().reciprocal()


def masked(p: Part, x: Tensor) -> Tensor:
    mask = (x > -2).float()
    count = mask.sum(-1, keepdim=True)
    mean = (x * mask).sum(-1, keepdim=True) / count
    variance = (((x - mean) ** 2) * mask).sum(-1, keepdim=True) / count
    return (x - mean) / torch.sqrt(variance + 1e-5)


def added_to_the_bias(p: Part, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    inverse = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-5)
    return torch.addcmul(p.bias, x - mean, inverse)


NORMS = [
    textbook, from_the_formula, rms_in_float32, rms_by_a_factor, unit_length, scale_norm, batch_by_moments,
    batch_as_scale_and_shift, groups_by_views, in_place, reciprocal_root, masked,
    added_to_the_bias,
]  # fmt: skip


@pytest.mark.parametrize("body", NORMS)
def test_a_module_that_is_a_norm_by_hand_is_a_site(body: Body) -> None:
    (site,) = found(body, inlined=False)
    assert (site.name, site.path, site.kind) == ("part", "part", "hand-written")
    assert site.type_name.endswith("Part")
    assert (site.spec, site.reason) == (None, "hand-written; not identified")
    assert set(site.tensors) == {"weight", "bias"}
    (call,) = site.calls
    assert (call.shape, call.dtype) == ((4, 6), "float32")
    assert [(n.kind, n.path, n.through, n.feature_axis) for n in call.fed_by] == [("linear", "before", (), 1)]
    assert [(n.kind, n.path, n.through, n.feature_axis) for n in call.feeds] == [("linear", "after", (), 1)]
    assert call.fed_by[0].consumers == 1


PLAIN = Part(textbook)
PLAIN.weight, PLAIN.bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.0))
USES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, mean: x * mean,
    lambda x, mean: x * x.sum(-1, keepdim=True),
    lambda x, mean: x * x.square().mean(-1, keepdim=True),
    lambda x, mean: x * mean.expand_as(x),
    lambda x, mean: x / mean,
    lambda x, mean: torch.maximum(x, mean),
    lambda x, mean: x.clamp(min=x.mean()),
    lambda x, mean: torch.where(x > mean, x, mean),
    lambda x, mean: torch.cat([x, mean], -1),
    lambda x, mean: unit_length(PLAIN, x) * mean,
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("body", [from_the_formula, rms_by_a_factor, reciprocal_root])
def test_a_norm_of_what_a_mean_was_used_for_too_is_a_site(
    use: Callable[[Tensor, Tensor], Tensor], body: Body
) -> None:
    """The mean of an input gates or bounds it, or both are put together, and the result is normalized."""

    def forward(p: Part, x: Tensor) -> Tensor:
        return x + body(PLAIN, use(x, x.mean(-1, keepdim=True))).sum(-1, keepdim=True)

    assert len(found(forward, inlined=True)) == 1 + (use is USES[-1])


@pytest.mark.parametrize("body", NORMS)
def test_a_norm_by_hand_inside_a_larger_forward_is_a_site(body: Body) -> None:
    (site,) = found(body, inlined=True)
    assert (site.name, site.path, site.kind) == ("hand-written", "", "inlined")
    (call,) = site.calls
    assert [(n.kind, n.path, n.through) for n in call.fed_by] == [("linear", "before", ("relu",))]


def hand_softmax(p: Part, x: Tensor) -> Tensor:
    e = torch.exp(x - x.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def attention(p: Part, x: Tensor) -> Tensor:
    return (x @ x.T / math.sqrt(6)).softmax(-1) @ x


def hand_attention(p: Part, x: Tensor) -> Tensor:
    e = (x @ x.T / torch.sqrt(torch.tensor(6.0))).exp()
    return (e / e.sum(-1, keepdim=True)) @ x


def cosine(p: Part, x: Tensor) -> Tensor:
    y = x.roll(1, 0)
    return x * ((x * y).sum(-1, keepdim=True) / (x.norm(dim=-1, keepdim=True) * y.norm(dim=-1, keepdim=True)))


def cosine_function(p: Part, x: Tensor) -> Tensor:
    return x * F.cosine_similarity(x, x.roll(1, 0), dim=-1)[:, None]


def variance_loss(p: Part, x: Tensor) -> Tensor:
    return x + (1 - torch.sqrt(x.var(0) + 1e-4)).relu().mean()


def covariance_loss(p: Part, x: Tensor) -> Tensor:
    z = x - x.mean(0)
    c = z.T @ z / (len(x) - 1)
    return x * (c.pow(2).sum() - c.diagonal().pow(2).sum())


def hand_gelu(p: Part, x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def squeeze_excite(p: Part, x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean(0))


def response_gate(p: Part, x: Tensor) -> Tensor:
    g = x.norm(dim=0, keepdim=True)
    return p.weight * (x * (g / (g.mean(-1, keepdim=True) + 1e-6))) + p.bias + x


def graph_degrees(p: Part, x: Tensor) -> Tensor:
    a = (x @ x.T).abs()
    d = a.sum(-1).pow(-0.5)
    return (a * d[:, None] * d[None]) @ x


def root_mean_square_error(p: Part, x: Tensor) -> Tensor:
    return x * ((x - x.roll(1, 0)) ** 2).mean().sqrt()


def quantized(p: Part, x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def pooled_statistics(p: Part, x: Tensor) -> Tensor:
    a = x.softmax(0)
    mean = (a * x).sum(0)
    return x + mean + ((a * x * x).sum(0) - mean * mean).clamp(min=1e-6).sqrt()


def scaled_noise(p: Part, x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x) * x.std()


def radial_basis(p: Part, x: Tensor) -> Tensor:
    return x * torch.exp(-(x - x.roll(1, 0)).pow(2).sum(-1, keepdim=True) / 2)


def learned_variance(p: Part, x: Tensor) -> Tensor:
    return x / F.softplus(x).sqrt()


def rotary(p: Part, x: Tensor) -> Tensor:
    return x * p.weight.cos() + torch.cat([-x[:, 3:], x[:, :3]], -1) * p.weight.sin()


def weight_standardized(p: Part, x: Tensor) -> Tensor:
    w = (p.weight - p.weight.mean()) / (p.weight.std() + 1e-5)
    return x * w


INNOCENT = [
    hand_softmax, attention, hand_attention, cosine, cosine_function, variance_loss, covariance_loss, hand_gelu,
    squeeze_excite, response_gate, graph_degrees, root_mean_square_error, quantized, pooled_statistics, scaled_noise,
    radial_basis, learned_variance, rotary, weight_standardized,
]  # fmt: skip


@pytest.mark.parametrize("inlined", [False, True])
@pytest.mark.parametrize("body", INNOCENT)
def test_what_only_resembles_a_norm_is_no_site(body: Body, inlined: bool) -> None:
    assert found(body, inlined) == []


BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(1),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(1),
    "square": torch.square,
    "norm": lambda x: x.norm(dim=1),
    "rsqrt of a second moment": lambda x: x.pow(2).mean(1).rsqrt(),
    "mean, relu and clone": lambda x: x.mean(1).relu().clone(),
    "less its mean": lambda x: x - x.mean(1, keepdim=True),
    "less the norm's own mean": lambda x: x - x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(1),
}


def centered_first(p: Part, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return p.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Before(nn.Module):
    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        return self.made(x)


@pytest.mark.parametrize("between", [nn.Identity(), nn.ReLU()])
@pytest.mark.parametrize("body", [textbook, from_the_formula, rms_in_float32, unit_length, centered_first])
@pytest.mark.parametrize("before", BEFORE)
def test_a_norm_by_hand_of_a_moment_is_a_module_of_its_own(
    before: str, body: Body, between: nn.Module
) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Before(BEFORE[before]), between, Part(body), nn.Linear(6, 2))
    with Session(model) as session:
        (site,) = find_sites(session, (torch.randn(4, 5, 6),))
    assert (site.name, site.kind) == ("3", "hand-written")
    assert [n.path for n in site.calls[0].feeds] == ["4"]


class Applied(nn.Module):
    """A norm in two modules: one takes the moment, the other divides; both are told by their caller."""

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x.var(-1, keepdim=True) + 1e-5)

    class Quotient(nn.Module):
        def forward(self, x: Tensor, root: Tensor) -> Tensor:
            return x / root

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.linear, self.root, self.quotient = nn.Linear(6, 6), self.Root(), self.Quotient()
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        centered = x - x.mean(-1, keepdim=True)
        return self.quotient(centered, self.root(x)) if self.apart else centered / self.root(x)


@pytest.mark.parametrize("apart", [False, True])
def test_a_norm_over_several_modules_is_still_one(apart: bool) -> None:
    with Session(Applied(apart)) as session:
        assert len(find_sites(session, (torch.randn(4, 6),))) == 1


@pytest.mark.parametrize("before", ["mean", "std", "square", "less its mean"])
@pytest.mark.parametrize("body", INNOCENT)
def test_what_only_resembles_a_norm_of_a_moment_is_no_site(before: str, body: Body) -> None:
    made = BEFORE[before]
    model = nn.Sequential(nn.Linear(6, 6), Before(made), Part(body), nn.Linear(6, 2))
    with Session(model) as session:
        given = torch.randn(4, 6) if before in ("square", "less its mean") else torch.randn(4, 5, 6)
        assert find_sites(session, (given,)) == []


class BatchNormByHand(nn.Module):
    """As taught: batch statistics in training, stored ones in eval; ``kept`` says how they are stored."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(1, 6)), nn.Parameter(torch.zeros(1, 6))
        if kept == "buffer":
            self.register_buffer("moving_mean", torch.zeros(1, 6))
            self.register_buffer("moving_var", torch.ones(1, 6))
        else:
            self.moving_mean, self.moving_var = torch.zeros(1, 6), torch.ones(1, 6)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            y = (x - self.moving_mean) / torch.sqrt(self.moving_var + 1e-5)
        else:
            mean = x.mean(dim=0)
            variance = ((x - mean) ** 2).mean(dim=0)
            y = (x - mean) / torch.sqrt(variance + 1e-5)
            self.moving_mean = 0.9 * self.moving_mean + 0.1 * mean
            self.moving_var = 0.9 * self.moving_var + 0.1 * variance
        return self.gamma * y + self.beta


@pytest.mark.parametrize("kept", ["buffer", "attribute"])
def test_a_batch_norm_by_hand_is_found_in_eval_mode_too_and_its_modes_are_seen(kept: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), BatchNormByHand(kept), nn.Linear(6, 6)).eval()
    with Session(model) as session:
        (site,) = find_sites(session, (torch.randn(4, 6),))
    assert (site.name, site.kind) == ("1", "hand-written")
    assert (site.mode_train, site.mode_eval, site.mode_now) == ("batch", "running", "running")
    assert [n.path for n in (*site.calls[0].fed_by, *site.calls[0].feeds)] == ["0", "2"]


def test_a_diffusion_step_and_an_input_scaling_are_no_norms() -> None:
    class Innocent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("std", torch.ones(6))
            self.register_buffer("alphas", torch.linspace(0.1, 0.9, 6))
            self.net = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = (x - self.mean) / self.std
            noise = self.net(x)
            return (x - (1 - self.alphas) / torch.sqrt(1 - self.alphas) * noise) / torch.sqrt(self.alphas)

    with Session(Innocent()) as session:
        assert find_sites(session, (torch.randn(4, 6),)) == []


def test_a_norm_by_hand_used_twice_is_one_site_with_two_calls() -> None:
    part = Part(textbook)
    with Session(nn.Sequential(part, nn.Linear(6, 6), part)) as session:
        (site,) = find_sites(session, (torch.randn(4, 6),))
    assert (site.name, [c.index for c in site.calls]) == ("0", [0, 1])


def test_two_norms_inlined_in_one_forward_are_numbered_in_their_order() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part(textbook)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(unit_length(self.part, x))
            return torch.sigmoid(from_the_formula(self.part, F.layer_norm(y, (6,))))

    with Session(Two()) as session:
        sites = find_sites(session, (torch.randn(4, 6),))
    assert [(s.name, s.calls[0].order) for s in sites] == [
        ("hand-written", 0),
        ("F.layer_norm", 1),
        ("hand-written#2", 2),
    ]


@pytest.mark.parametrize(
    ("family", "config", "norms"),
    [
        ("Llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-6}, 5),
        ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}, 9),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}, 9),
    ],
)
def test_every_norm_of_a_real_language_model_is_found(
    family: str, config: dict[str, object], norms: int
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    settings = getattr(transformers, f"{family}Config")(**sizes, **config)
    model = getattr(transformers, f"{family}Model")(settings)
    with Session(model) as session:
        sites = find_sites(session, (), {"input_ids": torch.arange(16).view(2, 8)})
    assert len(sites) == norms
    assert {(s.kind, s.spec and s.spec.eps) for s in sites} == {("module", 1e-6)}  # read as what they compute
    assert {s.expected_eps for s in sites} == {1e-6}
    assert {s.name for s in sites} == {
        n for n, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")
    }


def test_every_norm_of_t5_is_found() -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50)
    with Session(transformers.T5EncoderModel(settings)) as session:
        sites = find_sites(session, (), {"input_ids": torch.arange(16).view(2, 8)})
    assert [(s.kind, s.expected_eps) for s in sites] == [("module", 1e-6)] * 5


@pytest.mark.parametrize("broken", [False, True])
def test_a_hook_was_left_out_where_a_weight_is_not_finite(broken: bool) -> None:
    def body(p: Part, x: Tensor) -> Tensor:
        return p.weight * x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()

    model = Between(body, inlined=False)
    model.part.register_forward_hook(lambda module, inputs, output: 2 * output)
    if broken:
        model.part.weight.data[0] = math.nan
    (site,) = normscope.check(model, torch.randn(4, 6)).sites
    assert site.spec == normscope.families.rms_norm(eps=1e-3, cast=normscope.Cast("input")).replace(gain=2.0)
