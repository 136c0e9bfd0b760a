"""Modules written after the method stood: what each is, or why it is of no specification."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normscope import nn as own
from normscope.identify import identify
from normscope.spec import NormSpec, Running, families


class GhostBatchNorm(nn.BatchNorm1d):
    """Virtual batches of four samples; state moves once for each, in order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        return torch.cat([super(GhostBatchNorm, self).forward(part) for part in x.split(4)])


class BatchRenorm(nn.Module):
    """Training output depends on the stored statistics."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))
        self.register_buffer("running_mean", torch.zeros(c))
        self.register_buffer("running_std", torch.ones(c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            m, s = x.mean(0), (x.var(0, unbiased=False) + 1e-3).sqrt()
            r = (s / self.running_std).clamp(1 / 3, 3)
            d = ((m - self.running_mean) / self.running_std).clamp(-5, 5)
            z = (x - m) / s * r + d
            self.running_mean.lerp_(m, 0.01)
            self.running_std.lerp_(s, 0.01)
        else:
            z = (x - self.running_mean) / self.running_std
        return self.weight * z + self.bias


class DeviationStored(nn.Module):
    """A batch norm that stores the standard deviation, eps added to it."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.register_buffer("mu", torch.zeros(c))
        self.register_buffer("sd", torch.ones(c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, s = self.mu, self.sd
        if self.training:
            m, s = x.mean(0), x.std(0, unbiased=False)
            self.mu.lerp_(m, 0.1)
            self.sd.lerp_(s, 0.1)
        return (x - m) / (s + 1e-5)


class ExponentialGain(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.log_gain = nn.Parameter(torch.zeros(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.log_gain.exp() * F.layer_norm(x, x.shape[-1:])


class HeadNorm(nn.Module):
    """RMS norm inside each attention head of (b, l, h * d), one gain for each feature of all heads."""

    def __init__(self, heads: int, d: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, nn.Parameter(torch.ones(heads * d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        parts = x.reshape(b, n, self.heads, -1)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-6)
        return parts.reshape(b, n, -1) * self.scale


class TwoGains(nn.Module):
    """A layer norm followed by a layer scale: the gain is a product."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.gamma = nn.LayerNorm(d), nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * self.norm(x)


class ThresholdBatchNorm(nn.BatchNorm2d):
    """tdBN on (t, b, c, h, w): a fixed gain alpha * v_threshold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x.flatten(0, 1))
        return (0.5 / math.sqrt(2.0) * (y - self.bias[:, None, None]) + self.bias[:, None, None]).view_as(x)


class ScaledNorm(nn.Module):
    """g * x / |x|, the scalar gain starting at sqrt(d)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(math.sqrt(d)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)


class DynamicTanh(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class PartialRMS(nn.Module):
    """pRMSNorm: the mean square of the first quarter divides all."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x[..., : x.shape[-1] // 4]
        return self.weight * x * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1e-6)


class Adaptive(nn.Module):
    """Adaptive layer norm: gain and bias come from a second input."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(3, 2 * d)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        gain, bias = self.modulation(condition)[:, None].chunk(2, -1)
        return F.layer_norm(x, x.shape[-1:]) * (1 + gain) + bias


class BatchNormThroughTime(nn.Module):
    """(t, b, c): one batch norm for each of three steps, inlined."""

    def __init__(self, t: int, c: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(t, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, v = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        return (x - m) / (v + 1e-4).sqrt() * self.weight[:, None]


class InstanceOrBatch(nn.Module):
    """Half the channels by instance norm, half by batch norm (IBN-a)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.instance, self.batch = nn.InstanceNorm2d(c // 2, affine=True), nn.BatchNorm2d(c // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, 1)
        return torch.cat([self.instance(one), self.batch(two)], 1)


class MovingCount(nn.BatchNorm1d):
    """Momentum halves with every batch: no rule of the family."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.momentum = (self.momentum or 0.5) / 2
        return super().forward(x)


class Widened(nn.Module):
    """A batch norm that computes float32 whatever comes, over the last axis, and casts back."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(c, momentum=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(torch.float32).transpose(1, 2)).transpose(1, 2).type_as(x)


class Scripted(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


GHOST = families.ghost_batch_norm(size=4)
LAST = NormSpec("b l c -> c", weight="c", bias="c", running=Running(momentum=0.2))
HEADS = NormSpec("b l (h d) -> b l h", sizes={"h": 3}, weight="(h d)", center=False, scale="rms", eps=1e-6)
THROUGH_TIME = NormSpec("t b c -> t c", weight="t c", eps=1e-4)
TDBN = NormSpec("t b c ... -> c", weight="c", bias="c", gain=0.5 / math.sqrt(2.0), running=Running())


@pytest.mark.parametrize(
    ("module", "shape", "options", "expected", "mode"),
    [
        (GhostBatchNorm(6), (8, 6), {}, GHOST, "batch"),
        (GhostBatchNorm(6), (8, 6), {"training": False}, GHOST, "running"),
        (HeadNorm(3, 4), (2, 5, 12), {}, HEADS, "input"),
        (ThresholdBatchNorm(6), (2, 3, 6, 4, 5), {"layout": "t b c h w"}, TDBN, "batch"),
        (ScaledNorm(16), (4, 16), {}, families.scale_norm(), "input"),
        (BatchNormThroughTime(3, 6), (3, 8, 6), {"layout": "t b c"}, THROUGH_TIME, "batch"),
        (Widened(6), (4, 5, 6), {}, LAST, "batch"),
        (Widened(6), (4, 5, 6), {"training": False}, LAST, "running"),
        (torch.jit.script(Scripted(6)), (4, 6), {}, families.rms_norm(eps=1e-6), "input"),
    ],
    ids=["ghost", "ghost eval", "head", "tdbn", "scale", "through time", "widened", "widened eval", "scripted"],
)  # fmt: skip
def test_members(
    module: nn.Module, shape: tuple[int, ...], options: dict[str, Any], expected: NormSpec, mode: str
) -> None:
    found = identify(module, torch.zeros(shape), **options)
    assert found.spec is not None, str(found)
    same = found.spec.same_function(expected, shape=shape)
    assert same, f"{same}\n{found}"
    assert found.mode == mode
    assert (found.spec.running is None) == (expected.running is None)
    if found.spec.running is not None and expected.running is not None:
        assert found.spec.running.momentum == expected.running.momentum
    assert found.max_error is not None
    assert found.max_error < 1e-9


@pytest.mark.parametrize(
    ("module", "shape", "options", "reason"),
    [
        (
            BatchRenorm(6), (8, 6), {},
            "its output depends on running_mean and running_std, which the call itself moves, and on statistics of the "
            "input, as in batch renormalization",
        ),
        (
            DeviationStored(6), (8, 6), {"training": False},
            "sd is a stored standard deviation: 1/a is a line in it, a the slope of the map, where a specification "
            "stores the variance",
        ),
        (ExponentialGain(6), (4, 3, 6), {}, "log_gain bends the output of training, as a learned eps or exponent does"),
        (DynamicTanh(6), (4, 6), {}, "every output follows its own input alone, and no straight line"),
        (PartialRMS(12), (4, 12), {}, "inputs do not fall into sets that share statistics"),
        (InstanceOrBatch(6), (4, 6, 3, 5), {}, "inputs do not fall into sets that share statistics"),
        (
            MovingCount(6), (8, 6), {},
            "training moves running_mean and running_var by no known rule: neither an exponential nor a plain average "
            "of the batches' statistics",
        ),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)  # fmt: skip
def test_others(module: nn.Module, shape: tuple[int, ...], options: dict[str, Any], reason: str) -> None:
    found = identify(module, torch.zeros(shape), **options)
    assert found.spec is None, str(found)
    assert found.reason is not None
    assert found.reason.startswith(reason)


def test_a_gain_made_of_several_tensors() -> None:
    module = TwoGains(6)
    with torch.no_grad():
        for seed, p in enumerate(module.parameters()):
            p.copy_(torch.rand(6, generator=torch.Generator().manual_seed(seed)) + 0.5)
    found = identify(module, torch.zeros(4, 3, 6))
    assert found.spec is not None, str(found)
    assert found.spec.same_function(families.layer_norm(), shape=(4, 3, 6))
    assert found.weight is not None
    gamma, weight = (p.detach().double().numpy() for p in (module.gamma, module.norm.weight))
    np.testing.assert_allclose(found.weight, gamma * weight, rtol=1e-12)
    assert "its gain and bias are made of several tensors: gamma, norm.weight, norm.bias" in found.notes


def test_gain_and_bias_from_a_second_input() -> None:
    x, condition = torch.zeros(4, 5, 6), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    module = Adaptive(6)
    found = identify(module, (x, condition))
    assert found.spec is not None, str(found)
    assert (found.spec.stats, found.spec.weight, found.spec.source) == ("b l d -> b l", "b d", "input")
    gain = 1 + module.modulation(condition).detach().double().numpy()[:, :6]
    # the module's own linear map ran in float64 on float32 numbers, this one in float32, whose sum may cancel
    np.testing.assert_allclose(found.weight, gain, rtol=1e-5, atol=1e-6)
    assert "its gain and bias follow input 1, at the values of the example" in found.notes


def test_batch_renorm_is_what_it_states_where_it_was_not_seen():
    torch.manual_seed(0)
    norm = own.BatchRenorm2d(4, momentum=0.02, r_max=3.0, d_max=5.0)
    for _ in range(20):
        norm(torch.randn(8, 4, 3, 3) + 1)
    found = identify(norm.eval(), torch.randn(8, 4, 3, 3))
    assert found.spec.running == replace(norm.spec.running, over=found.spec.running.over)
    assert found.spec.running.renorm == (3.0, 5.0)
    assert "how training moves them was not seen: the update is as the module states it" in found.notes
    training = identify(norm.train(), torch.randn(8, 4, 3, 3))
    assert training.spec is None
    assert training.notes[-1] == f"not seen, but stated by the module: {norm.spec}"
