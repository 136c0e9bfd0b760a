"""What rounding may explain, statistic set by statistic set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from normscope import families
from normscope.identify.compare import compare
from normscope.identify.compare_gap import gap
from normscope.identify.compare_sides import Side, SpecSide

SPEC = families.batch_norm(weight=False, bias=False, running=False)


@dataclass(frozen=True)
class OfSquares(Side):
    """E[x^2] - E[x]^2; the first channel off by ``off``, relatively."""

    off: float = 0.0

    def output(self, x, mode, values=None):
        mean = x.mean(0)
        y = (x - mean) / np.sqrt((x * x).mean(0) - mean**2 + 1e-5)
        return y * np.where(np.arange(x.shape[1]) == 0, 1 + self.off, 1.0)


@pytest.mark.parametrize("known", [SPEC, None])
def test_one_channel_far_from_0_excuses_the_variance_of_squares_there_and_nowhere_else(known):
    x = np.random.default_rng(0).standard_normal((64, 3))
    x[:, 2] += 3e4
    one = SpecSide("specification", SPEC)
    straight = gap(one, OfSquares("squares", known), x, x, (0, 1), "train", (None, None))
    # u times the square of the level: 1e-16 * 1e9
    assert 1e-9 < straight.size < 1e-6
    assert not straight.real
    # far above 64 u, far below what the last channel is excused
    assert gap(one, OfSquares("off", known, off=1e-9), x, x, (0, 1), "train", (None, None)).real


def test_a_clamp_that_no_ordinary_input_reaches_is_a_difference() -> None:
    def clamped(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x.clamp(-1e6, 1e6), (6,))

    found = compare(lambda x: torch.nn.functional.layer_norm(x, (6,)), clamped, torch.zeros(4, 6))
    assert found.same is False
    assert found.modes["eval"] is False
    assert found.dtypes["float32"] is False


def test_what_only_agrees_on_what_was_tried_is_undecided_in_every_mode() -> None:
    found = compare(torch.nn.ReLU(), lambda x: x.clamp(0), torch.zeros(4, 6))
    assert found.same is None
    assert set(found.modes.values()) == {None}
    assert set(found.dtypes.values()) == {None}


def test_what_is_random_is_not_called_a_matter_of_rounding() -> None:
    noise = compare(lambda x: x + torch.rand_like(x) / 1000, lambda x: x + 0.0, torch.zeros(4, 6))
    assert noise.same is None
    assert noise.differences == ()
    assert "bfloat16" not in noise.modes
