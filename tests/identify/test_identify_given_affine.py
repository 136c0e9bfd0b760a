"""Gain and bias that come with the call: told by the source of the specification, with the shape that they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from normscope import nn as own
from normscope.identify import identify

SEED = torch.Generator().manual_seed(0)
X, TOKENS = torch.zeros(4, 6, 3, 5), torch.zeros(4, 5, 6)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=SEED)


class Given(nn.Module):
    """A norm with a gain and a bias that the call gives for each sample and channel."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return gain[:, :, None, None] * self.norm(x) + bias[:, :, None, None]


class ByClass(nn.Module):
    """A batch norm with gains and biases looked up by the class of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.BatchNorm2d(6, affine=False), nn.Embedding(5, 12)
        self.table.weight.data = drawn(5, 12)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        gain, bias = self.table(label)[:, :, None, None].chunk(2, 1)
        return gain * self.norm(x) + bias


GAIN, BIAS = drawn(4, 6), drawn(4, 6)
GIVEN: dict[str, tuple[nn.Module, Any, tuple[str, str, str]]] = {
    "no parameters": (Given(nn.InstanceNorm2d(6)), (X, GAIN, BIAS), ("b c ... -> b c", "b c", "b c")),
    "batch norm": (Given(nn.BatchNorm2d(6, affine=False)), (X, GAIN, BIAS), ("b c ... -> c", "b c", "b c")),
    "ones and zeros": (
        Given(nn.InstanceNorm2d(6)),
        (X, torch.ones(4, 6), torch.zeros(4, 6)),
        ("b c ... -> b c", "b c", "b c"),
    ),
    "adaptive instance norm": (
        own.AdaptiveInstanceNorm(),
        (X, drawn(4, 6, 3, 5)),
        ("b c ... -> b c", "b c", "b c"),
    ),
    "adaptive layer norm": (
        own.AdaptiveLayerNorm(6),
        {"input": TOKENS, "scale": GAIN, "shift": BIAS},
        ("b l d -> b l", "b d", "b d"),
    ),
    "by class": (ByClass(), (X, torch.tensor([0, 1, 2, 3])), ("b c ... -> c", "b c", "b c")),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_affine_map_that_the_call_gives(name: str) -> None:
    module, example, expected = GIVEN[name]
    found = identify(module, example)
    assert found.spec is not None, str(found)
    assert (found.spec.stats, found.spec.weight, found.spec.bias) == expected
    assert found.spec.source == "input"
    assert any(note.startswith("its gain and bias follow input ") for note in found.notes)
    if isinstance(module, Given):
        # float64 with errors of 1e-15 of an output, divided by an input of 1 and more: six digits to spare
        np.testing.assert_allclose(found.weight, example[1].double(), rtol=1e-9)
        np.testing.assert_allclose(found.bias, example[2].double(), rtol=1e-9, atol=1e-9)


class GivenEps(nn.Module):
    """What the call gives is no gain."""

    def forward(self, x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        return 2 * (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()


class Unused(nn.LayerNorm):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "given"), [(GivenEps(), torch.tensor(1e-3)), (Unused(6), GAIN)], ids=["eps", "unused"]
)
def test_other_inputs_that_are_no_affine_map(module: nn.Module, given: torch.Tensor) -> None:
    found = identify(module, (TOKENS, given))
    assert found.spec is not None
    assert found.spec.source == "parameter"
    assert not any("its gain and bias follow" in note for note in found.notes)
