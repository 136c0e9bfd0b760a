"""Gain and bias of any norm go into the layers behind it, and centering into the layer before: the same function."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import normscope.nn as own
from normscope.transforms import fold

torch.set_num_threads(1)
C = 4
VECTORS: tuple[Any, ...] = (nn.LayerNorm, nn.RMSNorm, own.LayerNorm, own.RMSNorm)
IMAGES: tuple[Any, ...] = (
    lambda c: nn.GroupNorm(2, c),
    lambda c: own.GroupNorm(1, c),
    lambda c: nn.InstanceNorm2d(c, affine=True),
    own.ChannelsFirstLayerNorm,
)


def filled(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


class Fan(nn.Module):
    """A layer, a norm, and some readers of it."""

    def __init__(self, first: nn.Module, norm: nn.Module, readers: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.readers = first, norm, nn.ModuleList(readers)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.norm(self.first(x))
        return [reader(y) for reader in self.readers]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*VECTORS, *IMAGES]),
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, C]),
    st.integers(0, 2**31),
)
def test_gains_and_centering(
    norm: Any, biases: list[bool], first_bias: bool, center: bool, groups: int, seed: int
) -> None:
    layer: Any
    if norm in VECTORS:
        layer = lambda bias: nn.Linear(C, C, bias=bias)  # noqa: E731
        x = torch.randn(3, 5, C, generator=torch.Generator().manual_seed(seed))
    else:
        layer = lambda bias: nn.Conv2d(C, C, 2, groups=groups, bias=bias)  # noqa: E731
        x = torch.randn(3, C, 5, 6, generator=torch.Generator().manual_seed(seed))
    model = filled(Fan(layer(first_bias), norm(C), [layer(bias) for bias in biases]), seed).double().eval()
    before = copy.deepcopy(model.state_dict())
    folded, report = fold(model, x.double(), center=center)
    assert [site.name for site in report.done] == ["norm"]
    assert report.folds[0].into == tuple(f"readers.{i}" for i in range(len(biases)))
    centered = center and norm in (nn.LayerNorm, own.LayerNorm)
    assert report.folds[0].centering == ("first" if centered else "")
    assert type(folded.norm).__name__ == ("RMSNorm" if centered else type(model.norm).__name__)
    for got, wanted in zip(folded(x.double()), model(x.double()), strict=True):
        # float64: sums of at most sixteen products of numbers of about 1, divided by a deviation that may be small
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(IMAGES), st.sampled_from(["zeros", "reflect", "circular"]), st.integers(0, 2**31))
def test_a_border_of_zeros_keeps_the_bias(norm: Any, mode: str, seed: int) -> None:
    model = nn.Sequential(norm(C), nn.Conv2d(C, 2, 3, padding=1, padding_mode=mode))
    x = torch.randn(2, C, 5, 5, generator=torch.Generator().manual_seed(seed)).double()
    model = filled(model, seed).double().eval()
    folded, report = fold(model, x)
    assert bool(report.done) == (mode != "zeros")
    torch.testing.assert_close(folded(x), model(x), rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        model[0].bias.zero_()
    assert bool(fold(model, x)[1].done) == (mode != "zeros"), "which keys there are does not depend on values"
    model[0].bias = None
    folded, report = fold(model, x)
    assert report.done, "a norm that cannot have a shift leaves the border right"
    torch.testing.assert_close(folded(x), model(x), rtol=1e-9, atol=1e-9)
