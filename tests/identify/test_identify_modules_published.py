"""Layers as publications and model code write them, by hand: members of the family and others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normscope.identify import identify
from normscope.spec import NormSpec, Running, families


def parameter(*shape: int, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value))


class GroupNormLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class FilterResponse(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma, self.beta = parameter(1, c, 1, 1), parameter(1, c, 1, 1, value=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-6) + self.beta


class Cosine(nn.Module):
    """Unit vectors over channels times a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = parameter(1, value=10.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.temperature * F.normalize(x, dim=1)


class GlobalLayerNorm(nn.Module):
    """Of Conv-TasNet: over channels and steps, parameters on channels."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma, self.beta = parameter(1, c, 1), parameter(1, c, 1, value=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = x.mean(1, keepdim=True).mean(2, keepdim=True)
        v = torch.pow(x - m, 2).mean(1, keepdim=True).mean(2, keepdim=True)
        return self.gamma * (x - m) / torch.pow(v + 1e-8, 0.5) + self.beta


class KerasLike(nn.Module):
    """Rebinds its buffers, stores the biased variance, and folds before it multiplies."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma, self.beta = parameter(c), parameter(c, value=0.0)
        self.register_buffer("moving_mean", torch.zeros(c))
        self.register_buffer("moving_variance", torch.ones(c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, v = self.moving_mean, self.moving_variance
        if self.training:
            m, v = x.mean((0, 1, 2)), x.var((0, 1, 2), unbiased=False)
            self.moving_mean = 0.99 * self.moving_mean + 0.01 * m
            self.moving_variance = 0.99 * self.moving_variance + 0.01 * v
        inverse = torch.rsqrt(v + 1e-3) * self.gamma
        return x * inverse + (self.beta - m * inverse)


class QueryKeyNorm(nn.Module):
    """Layer norm of each head of (b, l, h * d), one gain for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.unflatten(-1, (3, 4))).flatten(-2)


class OffsetOutside(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.delta = parameter(d, value=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.delta) * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-8)


class PerImage(nn.Module):
    """TensorFlow's per_image_standardization: the deviation is kept above 1 / sqrt(n)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = x.mean((1, 2, 3), keepdim=True)
        s = x.std((1, 2, 3), unbiased=False, keepdim=True)
        return (x - m) / s.clamp(min=1 / math.sqrt(x[0].numel()))


class BufferAffine(nn.Module):
    """Live statistics, affine part frozen in buffers."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((c,), 0.5))
        self.register_buffer("shift", torch.full((c,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, self.scale, self.shift, True, 0.0, 1e-5)


KERAS = NormSpec("b h w c -> c", weight="c", bias="c", eps=1e-3, running=Running(momentum=0.01, correction=0))
HEADS = NormSpec("b l (h d) -> b l h", sizes={"h": 3}, weight="d")
OUTSIDE = families.rms_norm(eps=1e-8).replace(eps_at="std", weight_offset=1.0)
FLOOR = families.layer_norm("c h w", weight=False, bias=False, eps=1 / math.sqrt(90)).replace(eps_at="max")


@pytest.mark.parametrize(
    ("module", "shape", "options", "expected", "mode"),
    [
        (GroupNormLast(), (4, 3, 5, 6), {}, families.group_norm(3, layout="b ... (g c)"), "input"),
        (FilterResponse(6), (4, 6, 3, 5), {}, families.filter_response_norm(), "input"),
        (
            Cosine(),
            (4, 6, 3, 5),
            {},
            families.pixel_norm(eps=1e-12).replace(scale="l2", eps_at="max", weight=""),
            "input",
        ),
        (GlobalLayerNorm(6), (4, 6, 5), {}, NormSpec("b c l -> b", weight="c", bias="c", eps=1e-8), "input"),
        (KerasLike(6), (4, 3, 5, 6), {}, KERAS, "batch"),
        (KerasLike(6), (4, 3, 5, 6), {"training": False}, KERAS, "running"),
        (QueryKeyNorm(), (2, 5, 12), {}, HEADS, "input"),
        (OffsetOutside(8), (4, 8), {}, OUTSIDE, "input"),
        (PerImage(), (4, 3, 5, 6), {}, FLOOR, "input"),
        (BufferAffine(6), (4, 6, 5), {}, families.batch_norm(running=False), "batch"),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
def test_members(
    module: nn.Module, shape: tuple[int, ...], options: dict[str, Any], expected: NormSpec, mode: str
) -> None:
    found = identify(module, torch.zeros(shape), **options)
    assert found.spec is not None, str(found)
    same = found.spec.same_function(expected, shape=shape)
    assert same, f"{same}\n{found}"
    assert found.spec.weight_offset == expected.weight_offset
    assert found.mode == mode
    assert (found.spec.running is None) == (expected.running is None)
    assert found.max_error is not None
    assert found.max_error < 1e-9


class EvoNormS0(nn.Module):
    """x sigmoid(v x) over the deviation of its group."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.v, self.gamma = parameter(1, c, 1, 1), parameter(1, c, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(1, (2, -1))
        s = groups.var((2, 3, 4), keepdim=True).add(1e-5).sqrt().expand_as(groups).flatten(1, 2)
        return x * torch.sigmoid(self.v * x) / s * self.gamma


class GlobalResponse(nn.Module):
    """Of ConvNeXt V2, with its residual."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma, self.beta = parameter(1, 1, 1, c, value=0.0), parameter(1, 1, 1, c, value=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g = x.norm(p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * g / (g.mean(-1, keepdim=True) + 1e-6)) + self.beta + x


class CumulativeLayerNorm(nn.Module):
    """Of Conv-TasNet, causal: statistics of all steps so far."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gain = parameter(1, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = torch.arange(1, x.shape[2] + 1, dtype=x.dtype) * x.shape[1]
        m, q = x.sum(1).cumsum(1) / n, x.pow(2).sum(1).cumsum(1) / n
        return self.gain * (x - m[:, None]) / (q - m * m + 1e-8).sqrt()[:, None]


class Switchable(nn.Module):
    """A learned mixture of the statistics of instance and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.w.softmax(0)
        m = a * x.mean((2, 3), keepdim=True) + b * x.mean((1, 2, 3), keepdim=True)
        v = a * x.var((2, 3), keepdim=True) + b * x.var((1, 2, 3), keepdim=True)
        return (x - m) / (v + 1e-5).sqrt()


class FusedScale(nn.Module):
    """What is left of a norm after folding: scale and shift."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.register_buffer("a", torch.linspace(0.5, 1.5, c))
        self.register_buffer("b", torch.linspace(-1.0, 1.0, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (EvoNormS0(6), (4, 6, 3, 5)),
        (GlobalResponse(6), (2, 3, 5, 6)),
        (CumulativeLayerNorm(6), (4, 6, 5)),
        (Switchable(), (4, 6, 3, 5)),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
def test_others(module: nn.Module, shape: tuple[int, ...]) -> None:
    found = identify(module, torch.zeros(shape))
    assert found.spec is None, str(found)
    assert found.fixed is None
    assert found.reason


def test_what_folding_leaves_is_a_fixed_map() -> None:
    found = identify(FusedScale(6), torch.zeros(4, 6))
    assert found.fixed is not None, str(found)
    assert found.fixed.axes == "c"
