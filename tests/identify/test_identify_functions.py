"""Functions whose formula is known: torch's own, the textbook's variants, and NumPy's, in float64 and float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normscope import reference
from normscope.identify.identification import identify
from normscope.spec import NormSpec, families

C, D = 6, 5
IMAGE, ROWS, TABLE = (4, C, 3, D), (4, C, D), (8, C)
Function = Callable[[Any], Any]


def values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(list(shape))
    return torch.tensor(rng.normal(size=shape) + 0.3, dtype=dtype)


def centered(x: Any, dim: int = -1) -> Any:
    return x - x.mean(dim, keepdim=True)


def torch_cases(dtype: torch.dtype) -> dict[str, tuple[Function, tuple[int, ...], NormSpec]]:
    """name -> function, shape, what it is"""
    c, d, cd = values(C, dtype=dtype), values(D, dtype=dtype), values(C, D, dtype=dtype)
    batch = families.batch_norm(running=False)
    group, instance = families.group_norm(3), families.instance_norm
    layer, rms, l2 = families.layer_norm, families.rms_norm, families.l2_normalize
    bare = layer(weight=False, bias=False)
    return {
        "batch norm": (lambda x: F.batch_norm(x, None, None, c, c, True), IMAGE, batch),
        "batch norm of a table": (lambda x: F.batch_norm(x, None, None, c, c, True), TABLE, batch),
        "batch norm, bare": (
            lambda x: F.batch_norm(x, None, None, None, None, True),
            IMAGE,
            families.batch_norm(running=False, weight=False, bias=False),
        ),
        "layer norm": (lambda x: F.layer_norm(x, (D,), d, d), ROWS, layer()),
        "layer norm over two": (lambda x: F.layer_norm(x, (C, D), cd, cd), ROWS, layer("l d")),
        "layer norm over three": (
            lambda x: F.layer_norm(x, IMAGE[1:]),
            IMAGE,
            layer("c h w", weight=False, bias=False),
        ),
        "layer norm, eps 0": (lambda x: F.layer_norm(x, (D,), eps=0.0), ROWS, bare.replace(eps=0.0)),
        "group norm": (lambda x: F.group_norm(x, 3, c, c), IMAGE, group),
        "group norm of one group": (lambda x: F.group_norm(x, 1, c, c), IMAGE, families.group_norm(1)),
        "group norm of C groups": (
            lambda x: F.group_norm(x, C, c, c),
            IMAGE,
            instance(weight=True, bias=True),
        ),
        "instance norm": (lambda x: F.instance_norm(x), IMAGE, instance()),
        "rms norm": (lambda x: F.rms_norm(x, (D,), d), ROWS, rms()),
        "rms norm, eps 1e-6": (lambda x: F.rms_norm(x, (D,), d, 1e-6), ROWS, rms(eps=1e-6)),
        "normalize": (lambda x: F.normalize(x, dim=-1), ROWS, l2()),
        "normalize channels": (
            lambda x: F.normalize(x),
            IMAGE,
            families.pixel_norm().replace(scale="l2", eps=1e-12, eps_at="max"),
        ),
        "channels first": (
            lambda x: (
                c.view(-1, 1, 1)
                * centered(x, 1)
                / (centered(x, 1).pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
            ),
            IMAGE,
            families.channels_first_layer_norm(bias=False),
        ),
        "pixel norm": (
            lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8),
            IMAGE,
            families.pixel_norm(),
        ),
        "filter response norm": (
            lambda x: c.view(-1, 1, 1) * x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-6),
            IMAGE,
            families.filter_response_norm().replace(bias=None),
        ),
        "textbook": (
            lambda x: d * centered(x) / (x.std(-1, keepdim=True) + 1e-6) + d,
            ROWS,
            layer(eps=1e-6).replace(correction=1, eps_at="std"),
        ),
        "root of the variance": (
            lambda x: centered(x) / (x.var(-1, keepdim=True, unbiased=False) + 1e-3).sqrt(),
            ROWS,
            bare.replace(eps=1e-3),
        ),
        "unbiased, inside the root": (
            lambda x: centered(x) / (x.var(-1, keepdim=True) + 1e-3).sqrt(),
            ROWS,
            bare.replace(eps=1e-3, correction=1),
        ),
        "clamped variance": (
            lambda x: centered(x) / x.var(-1, keepdim=True, unbiased=False).clamp(min=1e-5).sqrt(),
            ROWS,
            bare.replace(eps_at="max_variance"),
        ),
        "clamped norm": (
            lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-4),
            ROWS,
            l2(eps=1e-4),
        ),
        "scale norm": (
            lambda x: 2.5 * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5),
            ROWS,
            families.scale_norm(),
        ),
        "norm plus eps": (
            lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6),
            ROWS,
            l2(eps=1e-6).replace(eps_at="std"),
        ),
        "deviation without centering": (
            lambda x: x / (x.std(-1, keepdim=True) + 1e-5),
            ROWS,
            bare.replace(center=False, correction=1, eps_at="std"),
        ),
        "ghost batches of 4": (
            lambda x: torch.cat([F.batch_norm(v, None, None, c, c, True) for v in x.split(4)]),
            TABLE,
            families.ghost_batch_norm(size=4, running=False),
        ),
        "ghost batches of 3": (
            lambda x: torch.cat([F.batch_norm(v, None, None, c, c, True) for v in x.split(3)]),
            TABLE,
            families.ghost_batch_norm(size=3, remainder="short", running=False),
        ),
        "2 ghost batches": (
            lambda x: torch.cat([F.batch_norm(v, None, None, c, c, True) for v in x.chunk(2)]),
            TABLE,
            families.ghost_batch_norm(number=2, running=False),
        ),
        "channels last": (
            lambda x: F.batch_norm(x.movedim(-1, 1), None, None, d, d, True).movedim(1, -1),
            ROWS,
            families.batch_norm(running=False, layout="b ... c"),
        ),
        "shuffled groups": (
            lambda x: (
                F.group_norm(x.view(4, 2, 3, D).transpose(1, 2).reshape(ROWS), 3)
                .view(4, 3, 2, D)
                .transpose(1, 2)
                .reshape(ROWS)
            ),
            ROWS,
            NormSpec("b (l0 l) d -> b l", sizes={"l0": 2}),
        ),
        "of everything": (
            lambda x: (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt(),
            ROWS,
            NormSpec("b l d ->"),
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(torch_cases(torch.float64)))
def test_torch_functions(name: str, dtype: torch.dtype) -> None:
    function, shape, expected = torch_cases(dtype)[name]
    found = identify(function, torch.zeros(shape, dtype=dtype))
    assert found.spec == expected, found
    assert found.mode == "input"
    # 1e-9 is what is promised in float64; float32 rounds each of some dozen steps by 6e-8
    assert found.max_error is not None
    assert found.max_error < (1e-9 if dtype == torch.float64 else 2e-6)
    x = torch.tensor(np.random.default_rng(7).normal(size=shape), dtype=dtype)
    y = reference.forward(x.numpy(), found.spec, found.weight, found.bias)
    assert np.abs(function(x).numpy() - y).max() < (1e-9 if dtype == torch.float64 else 2e-5)


def test_parameters_come_back() -> None:
    w, b = values(C, dtype=torch.float64), values(1, C, dtype=torch.float64)[0]
    w[2] = 0.0  # a channel without gain shows no set of its own
    found = identify(lambda x: F.group_norm(x, 3, w, b), torch.zeros(IMAGE, dtype=torch.float64))
    assert found.weight is not None
    assert found.bias is not None
    np.testing.assert_allclose(found.weight, w.numpy(), rtol=0, atol=1e-14)
    np.testing.assert_allclose(found.bias, b.numpy(), rtol=0, atol=1e-14)
    assert found.notes == (
        "60 of 360 outputs never change: their gain is 0, or lost in the rounding of their bias; their sets were "
        "told by the others",
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numpy_functions(dtype: Any) -> None:
    def norm(x: Any) -> Any:
        spread = np.sqrt(np.mean(x * x, axis=(1, 2), keepdims=True) + dtype(1e-4))
        return x / spread

    found = identify(norm, np.zeros((3, 4, 5), dtype))
    assert found.spec == NormSpec("... l d -> ...", center=False, scale="rms", eps=1e-4)
    assert found.name == f"function norm, on NumPy {np.dtype(dtype).name}"


def test_a_norm_of_a_norm_is_a_norm() -> None:
    found = identify(
        lambda x: F.layer_norm(F.layer_norm(x, (D,)), (D,)), torch.zeros(ROWS, dtype=torch.float64)
    )
    assert found.spec is not None
    assert found.weight is not None
    # sqrt(v / (v + e) + e) sqrt(v + e) = sqrt(v (1 + e) + e^2), so eps is e^2 / (1 + e) and the gain 1 / sqrt(1 + e)
    assert found.spec.eps == pytest.approx(1e-10 / (1 + 1e-5), rel=1e-12)
    assert found.weight == pytest.approx((1 + 1e-5) ** -0.5, rel=1e-14)


def test_layout_names_the_axes() -> None:
    def norm(x: Any) -> Any:
        return (x - x.mean((1, 3), keepdims=True)) / np.sqrt(x.var((1, 3), keepdims=True) + 1e-5)

    assert identify(norm, (4, 6, 3, 5), layout="b c t f").spec == NormSpec("b c t f -> b t")

    def over_time(x: Any) -> Any:
        return (x - x.mean((0, 1, 3), keepdims=True)) / np.sqrt(x.var((0, 1, 3), keepdims=True) + 1e-5)

    found = identify(over_time, (3, 4, 6, 5), layout="t b c l")
    assert found.spec == NormSpec("t b c ... -> c", ndim=(3, None))


def test_float32_inside() -> None:
    """As in a cast to float32: the answer is right, judged by what float32 gives, and says so."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).double()

    found = identify(norm, torch.zeros(ROWS, dtype=torch.float64))
    assert found.spec == families.rms_norm(eps=1e-6, weight=False)
    assert "computes in float32 inside" in [e.conclusion for e in found.evidence]

    def half_of_it(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)

    found = identify(half_of_it, torch.zeros(ROWS, dtype=torch.float64))
    assert found.spec == families.rms_norm(eps=1e-6, weight=False)
    assert found.notes == (
        "its arithmetic is float32: eps is known to 1e-06 of itself, and any eps within that computes the same",
        "part of its arithmetic is float32: it errs by some 1e-7, and was judged by that",
    )
