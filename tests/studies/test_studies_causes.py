"""The layer with a switch for each property is PyTorch's where the switches are those of one of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from normscope.studies.causes import ARMS, BATCH, LAYER, Varied


@pytest.mark.parametrize(
    ("arm", "other"),
    [
        (ARMS[BATCH], lambda: nn.BatchNorm2d(6)),
        (
            ARMS["coupling: samples apart"],
            lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        ),
        (ARMS["instance norm"], lambda: nn.InstanceNorm2d(6)),
        (LAYER, lambda: nn.LayerNorm([6, 5, 5], eps=1e-6)),
    ],
    ids=["batch", "samples apart", "instance", "layer"],
)
def test_the_switches_give_the_layers_of_pytorch(arm: Any, other: Any) -> None:
    """float64; sums of 200 numbers round to 200 x 1e-16 at most."""
    x = 3 + torch.randn(4, 6, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer, theirs = Varied(arm, 6, 5).double(), other().double()
    for training in (True, False):
        for module in (layer, theirs):
            module.train(training)
        assert torch.allclose(layer(x), theirs(x), rtol=0, atol=1e-12)
