"""What is a member but for less than float32 rounds is told from a member whose arithmetic is float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normscope.identify.identification import identify
from normscope.spec import NormSpec

Function = Callable[[torch.Tensor], torch.Tensor]
X = torch.zeros(4, 6, 10, dtype=torch.float64)


def centered(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def norm(x: torch.Tensor) -> torch.Tensor:
    return centered(x) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def float32_variance(x: torch.Tensor) -> torch.Tensor:
    return centered(x) / (x.var(-1, unbiased=False, keepdim=True).float().double() + 1e-5).sqrt()


NEAR: dict[str, Function] = {
    "a layer norm of an rms norm": lambda x: norm(rms(x)),
    "the 2.0001-norm": lambda x: F.normalize(centered(x), 2.0001, -1),
    "a factor that follows the outputs": lambda x: norm(x) * (1 + 1e-6 * (norm(x) ** 4).mean()),
    "next to all of the mean": lambda x: (x - 0.99999 * x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "a little of the input": lambda x: norm(x) + 1e-7 * x,
    "a little of its tanh": lambda x: norm(x) + 1e-5 * torch.tanh(x),
}
FLOAT32: dict[str, Function] = {
    "the input": lambda x: norm(x.float()).double(),
    "the output": lambda x: norm(x).float().double(),
    "the variance": float32_variance,
}


@pytest.mark.parametrize("name", NEAR)
def test_a_smooth_misfit_in_float64_is_not_explained_by_float32(name: str) -> None:
    found = identify(NEAR[name], X)
    assert found.spec is None
    assert found.reason


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_inside_a_function_of_float64_is_shown_and_allowed_for(name: str) -> None:
    found = identify(FLOAT32[name], X)
    assert str(found.spec).startswith("... d -> ...; centered; std, biased; eps 1e-05 inside the root"), found
    assert found.weight is None
    assert found.bias is None
    assert found.max_error is not None
    assert 1e-10 < found.max_error < 1e-6  # a few roundings of 6e-8
    assert any("float32 inside" in entry.conclusion for entry in found.evidence)


GAINS = {"every other": [1.0, 0, 1, 0, 1, 0], "none at the start": [0.0, 0, 1, 2, 0, 1]}


@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_gains_of_0_in_a_pattern_do_not_look_like_groups(gains: str, groups: int) -> None:
    weight = torch.tensor(GAINS[gains], dtype=torch.float64)
    found = identify(lambda x: F.group_norm(x, groups, weight), X)
    assert found.spec is not None, found
    stats = {1: "b c ... -> b", 2: "b (g c) ... -> b g", 6: "b c ... -> b c"}[groups]
    assert found.spec.replace(weight=None).same_function(
        NormSpec(stats, sizes={"g": 2} if groups == 2 else {})
    )
    assert found.weight is not None
    assert np.allclose(found.weight.ravel(), weight.numpy(), rtol=0, atol=1e-12)  # a thousand roundings
