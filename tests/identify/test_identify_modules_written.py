"""Hand-written layers: other conventions of the family, and layers that look like it and are not of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normscope.identify.modules import identify_module
from normscope.identify.result import Identification
from normscope.spec import NormSpec, Running, families


def claims(found: Identification, expected: NormSpec, shape: tuple[int, ...]) -> None:
    assert found.spec is not None, str(found)
    assert found.spec.same_function(expected, shape=shape), str(found)
    assert found.max_error is not None
    assert found.max_error < 1e-9


class Textbook(nn.Module):
    """The annotated transformer's layer norm: unbiased deviation, eps outside the root."""

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


def test_textbook_variant() -> None:
    found = identify_module(Textbook(12), torch.zeros(4, 3, 12))
    expected = families.layer_norm(eps=1e-6).replace(correction=1, eps_at="std")
    claims(found, expected, (4, 3, 12))
    assert found.spec is not None
    assert (found.spec.correction, found.spec.eps_at, found.spec.eps) == (1, "std", 1e-6)


class RootOfVariance(Textbook):
    """As the textbook's, but through a root of its own, which has no derivative at 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True).sqrt() + self.eps) + self.b_2
        )


def test_gradients_at_a_constant_input() -> None:
    """torch's own std has the gradient 0 there; a root of the variance has 0 times infinity."""
    told = {
        kind: [
            e.conclusion for e in identify_module(kind(12), (4, 3, 12)).evidence if "gradient" in e.conclusion
        ]
        for kind in (Textbook, RootOfVariance)
    }
    assert told == {
        Textbook: ["at a constant input the gradient is finite"],
        RootOfVariance: ["at a constant input (0 and 1.5) the gradient is not finite"],
    }


class LayerNorm2d(nn.LayerNorm):
    """As in timm: layer norm over the channels of NCHW, by permuting."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNextNorm(nn.Module):
    """As in ConvNeXt: written out over axis 1."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = x.mean(1, keepdim=True)
        x = (x - u) / torch.sqrt((x - u).pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@pytest.mark.parametrize("module", [LayerNorm2d(6, eps=1e-6), ConvNextNorm(6)], ids=["timm", "convnext"])
def test_channels_first_layer_norm(module: nn.Module) -> None:
    found = identify_module(module, torch.zeros(4, 6, 3, 5))
    claims(found, families.channels_first_layer_norm(), (4, 6, 3, 5))


class FrozenBatchNorm2d(nn.Module):
    """As in detectron: four buffers, which nothing moves."""

    def __init__(self, c: int) -> None:
        super().__init__()
        for name, start in (("weight", 1.5), ("bias", 0.5), ("running_mean", 0.25), ("running_var", 2.0)):
            self.register_buffer(
                name, start + torch.rand(c, generator=torch.Generator().manual_seed(len(name)))
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


def test_frozen_batch_norm() -> None:
    module = FrozenBatchNorm2d(6)
    found = identify_module(module, torch.zeros(4, 6, 3, 5))
    assert found.spec is not None, str(found)
    assert (found.spec.stats, found.mode) == ("b c ... -> c", "frozen")
    assert (found.spec.eps, found.spec.eps_at, found.spec.weight) == (1e-5, "variance", "c")
    np.testing.assert_array_equal(found.weight, module.weight.double().numpy())
    assert found.max_error is not None
    assert found.max_error < 1e-9


class OpaqueNames(nn.Module):
    """A batch norm that keeps a biased variance under names that say nothing, eps outside the root, momentum 0.3."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.zeros(c)), nn.Parameter(torch.zeros(c))
        self.register_buffer("s", torch.zeros(1, c, 1))
        self.register_buffer("t", torch.ones(1, c, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, v = self.s, self.t
        if self.training:
            m, v = x.mean((0, 2), keepdim=True), x.var((0, 2), keepdim=True, unbiased=False)
            self.s.lerp_(m, 0.3)
            self.t.lerp_(v, 0.3)
        return (1 + self.p[:, None]) * (x - m) / (v.sqrt() + 1e-4) + self.q[:, None]


@pytest.mark.parametrize("training", [True, False])
def test_names_do_not_matter(training: bool) -> None:
    found = identify_module(OpaqueNames(6), torch.zeros(4, 6, 5), training=training)
    expected = families.batch_norm(eps=1e-4, momentum=0.3, running_correction=0).replace(
        eps_at="std", weight_offset=1.0
    )
    claims(found, expected, (4, 6, 5))
    assert found.mode == ("batch" if training else "running")
    assert found.spec is not None
    assert found.spec.weight_offset == 1
    assert found.spec.running == expected.running


class AbsoluteGain(nn.BatchNorm2d):
    """As in in-place activated batch norm: the gain is |weight| + eps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight.abs() + 1e-5,
            self.bias,
            self.training,
            0.1,
            1e-5,
        )


@pytest.mark.parametrize("training", [True, False])
def test_absolute_gain_is_not_of_the_family(training: bool) -> None:
    found = identify_module(AbsoluteGain(6), torch.zeros(4, 6, 3, 5), training=training)
    assert found.spec is None
    assert found.reason == (
        "weight is a gain, but the factor is |weight| + constant (output at -1 over output at 1 1, "
        "output at 0 over output at 1 9.9999e-06, output at 4 over output at 1 3.99997)"
    )


class LearnedEps(nn.Module):
    """As in filter response normalization with a learned eps."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(c, 1, 1)), nn.Parameter(torch.zeros(c, 1, 1))
        self.eps = nn.Parameter(torch.full((c, 1, 1), 1e-4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + self.eps.abs()) + self.beta


def test_learned_eps_is_not_of_the_family() -> None:
    found = identify_module(LearnedEps(6), torch.zeros(4, 6, 3, 5))
    assert found.spec is None
    assert found.reason is not None
    assert found.reason.startswith("eps bends the output of training, as a learned eps or exponent does")


class MaskedMean(nn.Module):
    """Layer norm over steps and features that counts valid steps only; ``honest=False`` forgets to."""

    def __init__(self, honest: bool) -> None:
        super().__init__()
        self.honest = honest

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        w = torch.ones_like(x) if mask is None else mask.to(x.dtype)[:, :, None].expand_as(x)
        counts = w if self.honest else torch.ones_like(w)
        n = counts.sum((1, 2), keepdim=True)
        m = (x * counts).sum((1, 2), keepdim=True) / n
        v = ((x - m).pow(2) * counts).sum((1, 2), keepdim=True) / n
        return (x - m) / torch.sqrt(v + 1e-5) * w


@pytest.mark.parametrize("honest", [True, False])
def test_masks_are_tried(honest: bool) -> None:
    found = identify_module(MaskedMean(honest), torch.zeros(4, 6, 5))
    claims(found, families.layer_norm("l d", weight=False, bias=False), (4, 6, 5))
    told = [e.conclusion for e in found.evidence if "mask" in e.conclusion]
    if honest:
        assert told == [
            "mask is honoured (boolean on axes 0 and 1, True is valid): what is masked does not reach what is valid"
        ]
        assert not any("mask" in note for note in found.notes)
    else:
        assert told == ["mask is not honoured: content under the mask changes valid outputs"]
        assert told[0] in found.notes


class ByPosition(nn.LayerNorm):
    """Statistics of each position, so that a mask can only erase."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x)
        return y if mask is None else y * mask[:, :, None]


def test_a_mask_that_only_erases() -> None:
    found = identify_module(ByPosition(5), torch.zeros(4, 6, 5))
    claims(found, families.layer_norm(), (4, 6, 5))
    told = [e.conclusion for e in found.evidence if "mask" in e.conclusion]
    assert told == ["mask makes no difference to valid outputs, and other content under it neither"]
    assert not any("mask" in note for note in found.notes)


class Lengths(nn.Module):
    """Batch norm over valid steps; lengths must be passed."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c))
        self.register_buffer("mean", torch.zeros(c))
        self.register_buffer("var", torch.ones(c))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        k = (torch.arange(x.shape[1])[None] < lengths[:, None]).to(x.dtype)[..., None]
        m, v = self.mean, self.var
        if self.training:
            n = k.sum()
            m = (x * k).sum((0, 1)) / n
            v = ((x - m).pow(2) * k).sum((0, 1)) / n
            self.mean.lerp_(m, 0.05)
            self.var.lerp_(v * n / (n - 1), 0.05)
        return (x - m) * torch.rsqrt(v + 1e-5) * self.weight * k


def test_lengths_are_passed_and_tried() -> None:
    found = identify_module(Lengths(6), torch.zeros(4, 5, 6))
    expected = NormSpec("b l c -> c", weight="c", running=Running(momentum=0.05))
    claims(found, expected, (4, 5, 6))
    assert [e.conclusion for e in found.evidence if "lengths" in e.conclusion] == [
        "lengths is honoured (valid lengths along axis 1): what is masked does not reach what is valid"
    ]
    assert not [
        e for e in identify_module(Lengths(6).eval(), (4, 5, 6)).evidence if "lengths" in e.conclusion
    ]


class Floored(nn.Module):
    """The variance is kept above 1e-3, in training as in evaluation."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(c))
        self.register_buffer("v", torch.ones(c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, v = self.m, self.v
        if self.training:
            m, v = x.mean(0), x.var(0, unbiased=False)
            self.m.lerp_(m, 0.1)
            self.v.lerp_(v, 0.1)
        return (x - m) / v.clamp(min=1e-3).sqrt()


@pytest.mark.parametrize("training", [True, False])
def test_a_floor_under_the_root(training: bool) -> None:
    found = identify_module(Floored(6), torch.zeros(8, 6), training=training)
    assert found.spec is not None, str(found)
    assert (found.spec.eps, found.spec.eps_at) == (1e-3, "max_variance")


class Required(MaskedMean):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, mask)


def test_a_mask_that_must_be_passed_masks_nothing() -> None:
    found = identify_module(Required(True), torch.zeros(4, 6, 5))
    claims(found, families.layer_norm("l d", weight=False, bias=False), (4, 6, 5))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(F.gelu(self.norm(x)))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * x


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Softmax(-1), (4, 8)),
        (nn.Dropout(0.5).train(), (4, 8)),
        (nn.Linear(8, 8), (4, 8)),
        (nn.Conv2d(4, 4, 3, padding=1), (2, 4, 5, 5)),
        (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), (4, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (4, 8)),
        (Residual(), (4, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 4, 8)),
        (nn.LocalResponseNorm(3), (2, 6, 4, 4)),
        (nn.GELU(), (4, 8)),
        (nn.Sequential(nn.LayerNorm(8), nn.ReLU()), (4, 8)),
        (nn.AdaptiveAvgPool2d(1), (2, 4, 5, 5)),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
def test_not_a_normalization(module: nn.Module, shape: tuple[int, ...]) -> None:
    found = identify_module(module, torch.zeros(shape))
    assert found.spec is None, str(found)
    assert found.fixed is None, str(found)
    assert found.reason


def test_dropout_is_random() -> None:
    found = identify_module(nn.Dropout(0.5), torch.zeros(4, 8))
    assert found.reason is not None
    assert found.reason.startswith("it is random: with other random numbers the output moves by ")


def test_a_scale_without_statistics_is_a_fixed_map() -> None:
    found = identify_module(LayerScale(), torch.zeros(4, 8))
    assert found.spec is None
    assert found.fixed is not None
    assert "none of its tensors acts as a stored variance" in found.notes
