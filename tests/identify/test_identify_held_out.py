"""Callables that were written after the method was finished, and that nothing was tuned on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normscope.identify.identification import identify
from normscope.spec import NormSpec

Function = Callable[[torch.Tensor], torch.Tensor]


def values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(np.random.default_rng([9, *shape]).normal(size=shape) + 0.5, dtype=dtype)


def members(dtype: torch.dtype) -> dict[str, tuple[Function, tuple[int, ...], NormSpec]]:
    heads = values(3, 1, 8, dtype=dtype)
    style = values(4, 6, 1, 1, dtype=dtype)
    c6, c8 = values(6, dtype=dtype), values(8, dtype=dtype)

    def head_norm(q: torch.Tensor) -> torch.Tensor:
        return q * (q * q).mean(-1, keepdim=True).add(1e-6).rsqrt() * heads

    def image_standardization(x: torch.Tensor) -> torch.Tensor:
        dims = (1, 2, 3)
        n = x[0].numel()
        floor = torch.tensor(n**-0.5, dtype=x.dtype)
        return (x - x.mean(dims, keepdim=True)) / torch.maximum(
            x.std(dims, keepdim=True, unbiased=False), floor
        )

    def scaled_weight(w: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(w, (1, 2, 3), keepdim=True)
        fan_in = w[0].numel()
        return (w - mean) * torch.rsqrt(torch.clamp(var * fan_in, min=1e-4)) * c6.view(-1, 1, 1, 1)

    def adaptive_instance(x: torch.Tensor) -> torch.Tensor:
        z = x.flatten(2)
        z = (z - z.mean(2, keepdim=True)) / torch.sqrt(z.var(2, keepdim=True, unbiased=True) + 1e-5)
        return z.view_as(x) * style + style.square()

    def in_place_abn(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, c6.abs() + 1e-5, c6, True, eps=1e-5)

    def group_norm_channels_last(x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x.permute(0, 3, 1, 2), 2, c8, None, 1e-6).permute(0, 2, 3, 1)

    def demodulated(w: torch.Tensor) -> torch.Tensor:
        return w * torch.rsqrt(w.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)

    def upcast(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.double(), x.shape[-1:], c8.double(), None, 1e-12).to(x.dtype)

    def by_matmul(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[-1]
        center = torch.eye(n, dtype=x.dtype) - 1 / n
        z = x @ center
        return z / (torch.linalg.vector_norm(z, dim=-1, keepdim=True) / n**0.5 + 1e-6)

    return {
        "per-head rms of queries": (
            head_norm,
            (2, 3, 5, 8),
            NormSpec("b c h w -> b c h", center=False, scale="rms", eps=1e-6, weight="c w"),
        ),
        "per image standardization": (
            image_standardization,
            (3, 4, 6, 5),
            NormSpec("... c h w -> ...", eps=120**-0.5, eps_at="max"),
        ),
        "scaled weight standardization": (
            scaled_weight,
            (6, 4, 3, 3),
            NormSpec("o i ... -> o", correction=1, eps=1e-4 / 36, eps_at="max_variance", weight="o"),
        ),
        "adaptive instance norm": (
            adaptive_instance,
            (4, 6, 5, 3),
            NormSpec("b c ... -> b c", ndim=(3, None), correction=1, weight="b c", bias="b c"),
        ),
        "in-place activated batch norm": (
            in_place_abn,
            (5, 6, 4),
            NormSpec("b c ... -> c", ndim=(2, None), weight="c", bias="c"),
        ),
        "group norm, channels last": (
            group_norm_channels_last,
            (3, 4, 5, 8),
            NormSpec("b ... (g c) -> b g", ndim=(2, None), sizes={"g": 2}, weight="(g c)", eps=1e-6),
        ),
        "demodulated weights": (
            demodulated,
            (2, 4, 5, 3, 3),
            NormSpec("b c ... -> b c", ndim=(3, None), center=False, scale="l2", eps=1e-8),
        ),
        "layer norm in float64": (
            upcast,
            (4, 5, 8),
            NormSpec("... d -> ...", eps=1e-12, weight="d"),
        ),
        "batch rms norm": (
            lambda x: x / (x.square().mean((0, 2), keepdim=True) + 1e-3).sqrt() * c6[:, None] + c6[:, None],
            (5, 6, 4),
            NormSpec(
                "b c ... -> c", ndim=(2, None), center=False, scale="rms", eps=1e-3, weight="c", bias="c"
            ),
        ),
        "mean variance normalization": (
            lambda x: (
                (x - x.mean((0, 2, 3), keepdim=True))
                / (x.var((0, 2, 3), keepdim=True, unbiased=False).sqrt() + 1e-9)
            ),
            (4, 6, 3, 5),
            NormSpec("b c ... -> c", ndim=(2, None), eps=1e-9, eps_at="std"),
        ),
        "layer norm by matrices": (
            by_matmul,
            (4, 5, 8),
            NormSpec("... d -> ...", eps=1e-6, eps_at="std"),
        ),
        "weight norm": (
            lambda w: torch._weight_norm(w, c6.view(-1, 1, 1), 0),
            (6, 4, 3),
            NormSpec("o i ... -> o", center=False, scale="l2", eps=0.0, weight="o"),
        ),
        "cosine similarity's half": (
            lambda x: x / torch.sqrt(torch.clamp(torch.sum(x * x, 1, keepdim=True), min=1e-12)),
            (4, 6, 5),
            NormSpec("b c ... -> b ...", ndim=(2, None), center=False, scale="l2", eps=1e-6, eps_at="max"),
        ),
    }


# its gain changes with the fan-in and its eps is round in no units, so nothing tells which variance was meant
UNDECIDED = {"scaled weight standardization"}
LAYOUTS = {"scaled weight standardization": "o i h w", "weight norm": "o i k"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(members(torch.float64)))
def test_members(name: str, dtype: torch.dtype) -> None:
    function, shape, expected = members(dtype)[name]
    found = identify(function, torch.zeros(shape, dtype=dtype), layout=LAYOUTS.get(name))
    assert found.spec is not None, found
    spec, n = found.spec, expected.bind(shape).set_size
    if name in UNDECIDED:
        spec, expected = spec.canonical(n), expected.canonical(n)
    assert spec == expected.replace(eps=spec.eps), found
    assert spec.eps == pytest.approx(expected.eps, rel=1e-12 if dtype == torch.float64 else 1e-5)
    assert found.max_error is not None
    assert found.max_error < (1e-9 if dtype == torch.float64 else 2e-6)


def strangers() -> dict[str, Function]:
    def evo_norm(x: torch.Tensor) -> torch.Tensor:
        std = x.view(4, 2, 3, 5).std((2, 3), keepdim=True).expand(4, 2, 3, 5).reshape(x.shape)
        return x * torch.sigmoid(x) / (std + 1e-5)

    def switchable(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * F.instance_norm(x) + 0.5 * F.layer_norm(x, x.shape[1:])

    def whitened(x: torch.Tensor) -> torch.Tensor:
        z = x - x.mean((0, 2), keepdim=True)
        cov = torch.einsum("bcl,bdl->cd", z, z) / (z.shape[0] * z.shape[2])
        values, vectors = torch.linalg.eigh(cov + 1e-5 * torch.eye(6, dtype=x.dtype))
        return torch.einsum("cd,bdl->bcl", vectors @ torch.diag(values.rsqrt()) @ vectors.T, z)

    def robust(x: torch.Tensor) -> torch.Tensor:
        z = x - x.median(-1, keepdim=True).values
        return z / (z.abs().median(-1, keepdim=True).values + 1e-6)

    def cumulative(x: torch.Tensor) -> torch.Tensor:
        n = torch.arange(1, 6, dtype=x.dtype)
        mean = x.cumsum(-1) / n
        return (x - mean) / ((x.square().cumsum(-1) / n - mean.square()).clamp(min=0) + 1e-5).sqrt()

    def partial_rms(x: torch.Tensor) -> torch.Tensor:
        return x / (x[..., :2].square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def excited(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x.mean(-1, keepdim=True))

    return {
        "EvoNorm-S0": evo_norm,
        "switchable norm": switchable,
        "whitening": whitened,
        "median and its deviation": robust,
        "cumulative layer norm": cumulative,
        "partial rms": partial_rms,
        "squeeze and excite": excited,
        "minimum to maximum": lambda x: (
            (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + 1e-6)
        ),
        "flipped layer norm": lambda x: F.layer_norm(x, (5,)).flip(-1),
        "clipped layer norm": lambda x: F.layer_norm(x, (5,)).clamp(-1, 1),
        "norm of a norm on other axes": lambda x: F.layer_norm(F.instance_norm(x), (6, 5)),
        "batch norm in evaluation, then relu": lambda x: F.relu(
            F.batch_norm(x, values(6, dtype=x.dtype), values(6, dtype=x.dtype).abs() + 0.1)
        ),
        "divisive normalization": lambda x: x.square() / (1 + x.square().sum(-1, keepdim=True)),
        "log": lambda x: torch.sign(x) * torch.log1p(x.abs()),
        "norm by the power 4": lambda x: x / (x.pow(4).mean(-1, keepdim=True) + 1e-8).pow(0.25),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(strangers()))
def test_strangers(name: str, dtype: torch.dtype) -> None:
    found = identify(strangers()[name], torch.zeros((4, 6, 5), dtype=dtype))
    assert found.spec is None, found
    assert found.fixed is None
    assert found.reason
