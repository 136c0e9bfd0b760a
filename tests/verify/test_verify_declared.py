"""Hand-written layers against what they are declared to compute: right ones pass, wrong declarations fail clearly."""

import pytest
import torch
from torch import nn

from normscope import NormSpec, Running, families, verify
from normscope.errors import BadInput

torch.set_num_threads(1)

LAYER = NormSpec("... d -> ...", weight="d", bias="d")


class Layer(nn.Module):
    """Layer norm over the last axis, with every convention to choose."""

    def __init__(self, size=5, *, correction=0, outside=False, eps=1e-5, offset=0.0, forget_bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.bias = nn.Parameter(torch.zeros(size))
        self.correction, self.outside, self.eps, self.offset = correction, outside, eps, offset
        self.forget_bias = forget_bias

    def forward(self, x):
        v = x.var(-1, correction=self.correction, keepdim=True)
        below = v.sqrt() + self.eps if self.outside else (v + self.eps).sqrt()
        y = (self.offset + self.weight) * (x - x.mean(-1, keepdim=True)) / below
        return y if self.forget_bias else y + self.bias


class ChannelsFirst(nn.Module):
    def __init__(self, channels=6):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x):
        centered = x - x.mean(1, keepdim=True)
        return self.gamma * centered / (centered.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() + self.beta


class SinglePrecisionRMS(nn.Module):
    """As in language models: computed in float32 whatever comes in, (1 + w)."""

    def __init__(self, size=8):
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1 + self.learned.float())).to(x.dtype)


class Batch(nn.Module):
    def __init__(self, channels=3, *, momentum=0.1, stored=1, batch_in_eval=False, writes_in_eval=False):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(channels, 1)), nn.Parameter(torch.zeros(channels, 1))
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_var", torch.ones(channels))
        self.momentum, self.stored = momentum, stored
        self.batch_in_eval, self.writes_in_eval = batch_in_eval, writes_in_eval

    def forward(self, x):
        mean, var = x.mean((0, 2)), x.var((0, 2), correction=0)
        if self.training or self.writes_in_eval:
            with torch.no_grad():
                kept = x.var((0, 2), correction=self.stored)
                self.moving_mean += self.momentum * (mean - self.moving_mean)
                self.moving_var += self.momentum * (kept - self.moving_var)
        if not (self.training or self.batch_in_eval):
            mean, var = self.moving_mean, self.moving_var
        x = (x - mean[:, None]) / (var[:, None] + 1e-5).sqrt()
        return self.scale * x + self.shift


class Groups(nn.Module):
    """Two groups; a gain in a module of its own."""

    def __init__(self):
        super().__init__()
        self.affine = nn.Module()
        self.affine.by_channel = nn.Parameter(torch.ones(6))

    def forward(self, x):
        h = x.reshape(len(x), 2, -1)
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return h.reshape(x.shape) * self.affine.by_channel.reshape(-1, *[1] * (x.ndim - 2))


class OverTime(nn.Module):
    """A wrapper: the tensors are those of a part, and a fixed gain of 0.5 comes between gain and bias."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.norm(x.reshape(-1, x.shape[2], 6)).reshape(x.shape)
        bias = self.norm.bias.reshape(-1, 1, 1)
        return 0.5 * (y - bias) + bias


class Twice(nn.Module):
    def forward(self, value):
        return 2 * value


def parametrized():
    layer = ChannelsFirst()
    nn.utils.parametrize.register_parametrization(layer, "gamma", Twice())
    return layer


class Ghost(nn.Module):
    def forward(self, x):
        return torch.cat([(p - p.mean(0)) / (p.var(0, correction=0) + 1e-5).sqrt() for p in x.split(4)])


class Cumulative(Batch):
    """The plain mean of all batches, by a counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_batches_tracked", torch.tensor(3))

    def forward(self, x):
        if self.training:
            self.num_batches_tracked += 1
            self.momentum = 1 / self.num_batches_tracked.item()
        return super().forward(x)


class Scale(nn.Module):
    """One scalar gain over the length."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return self.g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)


class Pixel(nn.Module):
    def forward(self, x):
        return x / (x.pow(2).mean(1, keepdim=True) + 1e-8).sqrt()


BATCH = NormSpec("b c l -> c", weight="c", bias="c", running=Running())
GROUPS = NormSpec("b (g c) ... -> b g", sizes={"g": 2}, weight="(g c)")
RIGHT = {
    "layer norm": (Layer(), LAYER),
    "unbiased": (Layer(correction=1), LAYER.replace(correction=1)),
    "eps outside": (Layer(outside=True), LAYER.replace(eps_at="std")),
    "torch's std, and eps outside": (
        Layer(correction=1, outside=True),
        LAYER.replace(correction=1, eps_at="std"),
    ),
    "offset": (Layer(offset=1.0), LAYER.replace(weight_offset=1.0)),
    "wide": (Layer(768), LAYER),
    "half": (Layer(64).bfloat16(), LAYER),
    "channels first": (ChannelsFirst(), families.channels_first_layer_norm(eps=1e-6)),
    "float32 inside": (SinglePrecisionRMS(), families.gemma_rms_norm()),
    "batch norm": (Batch(), BATCH),
    "batch norm with biased storage": (
        Batch(stored=0),
        BATCH.replace(running=Running(correction=0)),
    ),
    "batch norm without state": (
        nn.BatchNorm1d(3, track_running_stats=False),
        BATCH.replace(running=None),
    ),
    "group norm": (Groups(), GROUPS),
    "over time": (
        OverTime(),
        NormSpec("t b c h w -> c", weight="c", bias="c", gain=0.5, running=Running(), sizes={"h": 2, "w": 3}),
    ),
    "parametrized": (parametrized(), families.channels_first_layer_norm(eps=1e-6)),
    "ghost batch norm": (Ghost(), NormSpec("(v b) c -> v c", sizes={"b": 4})),
    "cumulative": (Cumulative(), BATCH.replace(running=Running(momentum=None))),
    "scale norm": (Scale(), families.scale_norm()),
    "pixel norm": (Pixel(), families.pixel_norm()),
    "torch's own": (nn.BatchNorm2d(4), families.batch_norm(ndim=(4, 4))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_declaration_passes(name):
    layer, spec = RIGHT[name]
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    report = verify.run_layer(layer, spec=spec)
    assert report.passed, "\n".join(str(item) for item in report.failed)
    assert len(report.evidence) >= 15
    assert all("declared: " in item.convention for item in report.evidence)
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())


WRONG = {
    "declared biased, layer unbiased": (Layer(correction=1), LAYER, "correction=1"),
    "declared unbiased, layer biased": (Layer(), LAYER.replace(correction=1), "correction=0"),
    "declared inside, eps outside": (Layer(outside=True), LAYER, "eps_at='std'"),
    "declared outside, eps inside": (Layer(), LAYER.replace(eps_at="std"), "eps_at='variance'"),
    "both": (Layer(correction=1, outside=True), LAYER, "correction=1, eps_at='std'"),
    "eps": (Layer(eps=1e-6), LAYER, "eps=1e-06"),
    "offset": (Layer(offset=1.0), LAYER, "weight_offset=1.0"),
    "centered": (Layer(), LAYER.replace(center=False), "center=True"),
    "float32 inside": (
        SinglePrecisionRMS(),
        families.gemma_rms_norm().replace(cast=families.rms_norm().cast),
        "cast=Cast(compute='float32', weight='before')",
    ),
    "axes": (Pixel(), NormSpec("b c ... -> b", center=False, scale="rms", eps=1e-8), "no specification near"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_fails_and_names_the_right_one(name):
    layer, spec, instead = WRONG[name]
    report = verify.run_layer(layer, spec=spec)
    first = report.failed[0]
    assert first.claim == "in train it computes its specification, on small integers"
    assert first.measured > 1e6 * first.tolerance
    assert instead in first.result["it would pass with"]
    assert f"it would pass with = {first.result['it would pass with']}" in str(report)


def test_an_eps_far_below_the_data_fails_where_it_rules():
    report = verify.run_layer(Layer(64, eps=1e-12), spec=LAYER.replace(eps=1e-12, eps_at="std"))
    small = [item for item in report.failed if "so small that eps rules" in item.claim]
    assert len(small) == 2
    assert all(item.measured > 0.1 for item in small)


def test_a_forgotten_bias_fails_though_a_fresh_one_is_zero():
    report = verify.run_layer(Layer(forget_bias=True), spec=LAYER)
    assert [item.claim for item in report.failed] == [
        "in train it does so with another gain, bias and state",
        "in eval it does so with another gain, bias and state",
    ]


@pytest.mark.parametrize(
    ("layer", "claim"),
    [
        (Batch(momentum=0.01), "in train a forward moves its state by 0.1 of the way to the batch"),
        (Batch(stored=0), "in train a forward moves its state by 0.1 of the way to the batch"),
        (Batch(writes_in_eval=True), "in eval a forward leaves its state alone"),
        (Batch(batch_in_eval=True), "in eval beside other companions a sample's output stays (gain 1)"),
    ],
)
def test_a_wrong_mode_or_state_fails(layer, claim):
    report = verify.run_layer(layer, spec=BATCH)
    assert claim in [item.claim for item in report.failed]


class Named(nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x):
        return x


class Viewed(Named):
    """Names its gain by a property."""

    @property
    def weight(self):
        return self.a.view(-1)

    @property
    def bias(self):
        return self.c

    def forward(self, x):
        centered = x - x.mean(-1, keepdim=True)
        return self.a * centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() + self.c


def test_properties_say_which_tensor_is_which():
    layer = Viewed(c=torch.zeros(4), a=torch.ones(1, 4))
    assert verify.run_layer(layer, spec=LAYER).passed


HERE = "test_verify_declared"
ERRORS = {
    "ambiguous": (
        Named(p=torch.ones(3), q=torch.ones(3)),
        LAYER,
        f"{HERE}.Named: weight and bias of the specification cannot be told from p (3,), q (3,): {LAYER}. Call them "
        "weight or gamma or scale or gain and bias or beta or shift or offset, or give the layer properties of those "
        "names",
    ),
    "missing": (
        Named(weight=torch.ones(3)),
        LAYER,
        f"{HERE}.Named: bias of the specification not found; it has none left: {LAYER}. Call them bias or beta or "
        "shift or offset, or give the layer properties of those names",
    ),
    "left over": (
        Named(weight=torch.ones(3), bias=torch.ones(3)),
        LAYER.replace(bias=None),
        f"{HERE}.Named holds bias (3,), which its specification does not name, so what it does is not declared: "
        f"{LAYER.replace(bias=None)}. Say weight= or bias= with the axes that it lives on",
    ),
    "whitens": (
        Named(),
        families.batch_whitening(2, weight=False, bias=False),
        f"{HERE}.Named is declared to whiten, and verify checks scalar denominators only: "
        f"{families.batch_whitening(2, weight=False, bias=False)}",
    ),
    "adaptive": (
        Named(),
        NormSpec("... d -> ...", weight="d", source="input"),
        f"{HERE}.Named is declared to compute its gain and bias from a second input, and verify calls layer(x). "
        "Verify the normalization before them: a layer of one argument, declared without weight and bias",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_one_message(name):
    layer, spec, message = ERRORS[name]
    with pytest.raises(BadInput) as error:
        verify.run_layer(layer, spec=spec)
    assert str(error.value) == message


def test_shapes_that_do_not_fit():
    with pytest.raises(
        BadInput, match=r"Layer.weight is the weight and has shape \(5,\); on an input of shape \(2, 4\)"
    ):
        verify.run_layer(Layer(), spec=LAYER, shape=(2, 4))
    with pytest.raises(BadInput, match=r"the input shape of .* does not fit its specification"):
        verify.run_layer(Batch(), spec=BATCH, shape=(2, 3))
    with pytest.raises(BadInput, match="two samples or more"):
        verify.run_layer(Layer(), spec=LAYER, shape=(1, 5))
    with pytest.raises(BadInput, match="shape is that of a declared layer's input"):
        verify.run_layer(nn.LayerNorm(5), shape=(2, 5))


class Picky(Layer):
    def forward(self, x):
        if x.shape != (2, 7, 5):
            raise RuntimeError("only (2, 7, 5)")
        return super().forward(x)


def test_a_layer_that_takes_one_shape_is_told_it():
    with pytest.raises(
        BadInput, match=r"\(3, 5\) raised RuntimeError: only .* Name a shape that it takes: \(layer, spec"
    ):
        verify.run_layer(Picky(), spec=LAYER)
    assert verify.run_layer(Picky(), spec=LAYER, shape=(2, 7, 5)).passed
