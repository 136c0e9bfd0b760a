"""Numbers of very different sizes in one callable: a gain beside a bias, and a floor far above ordinary inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normscope as ns

SHAPE = (4, 6, 10)
RANDOM = np.random.default_rng(3)
WEIGHT, BIAS = torch.from_numpy(RANDOM.standard_normal((2, 10)))
DOUBLE, SINGLE = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE)


@pytest.mark.parametrize("size", [1e6, 1e12, 1e18])
def test_a_big_gain_hides_no_bias(size: float) -> None:
    found = ns.identify(lambda x: F.layer_norm(x, (10,), size * WEIGHT, BIAS), DOUBLE)
    assert found.spec == ns.NormSpec("... d -> ...", weight="d", bias="d")
    assert found.weight is not None
    assert found.bias is not None
    assert found.max_error is not None
    np.testing.assert_allclose(found.weight, size * WEIGHT, rtol=1e-12)
    # the bias is seen at inputs so small that nothing of the gain is left
    np.testing.assert_allclose(found.bias, BIAS, rtol=1e-14)
    assert found.max_error < 1e-13
    assert not [e for e in found.evidence if "float32" in e.conclusion]


def test_a_big_gain_where_eps_is_tiny_or_absent() -> None:
    def standard(x: Tensor, eps: float) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (x.std(-1, keepdim=True) + eps) * (1e9 * WEIGHT) + BIAS

    deep = ns.identify(lambda x: standard(x, 1e-25), DOUBLE)
    assert deep.spec == ns.NormSpec(
        "... d -> ...", correction=1, eps=1e-25, eps_at="std", weight="d", bias="d"
    )
    without = ns.identify(lambda x: standard(x, 0.0), DOUBLE)
    assert without.spec is not None
    assert without.spec.eps == 0
    assert without.bias is not None
    # both outputs round in units of 1e9 2^-53, and no smaller input shows the bias alone
    np.testing.assert_allclose(without.bias, BIAS, rtol=0, atol=64 * 1e9 * 2.0**-53)


@pytest.mark.parametrize("floor", [20.0, 1000.0, 1e8])
def test_a_floor_far_above_ordinary_inputs(floor: float) -> None:
    """Under it outputs follow their own inputs alone, and even an outlier of the ordinary size does not lift a set."""
    rms = ns.NormSpec("... d -> ...", center=False, scale="rms", eps=floor, eps_at="max")
    std = rms.replace(scale="std", correction=1)
    assert ns.identify(lambda x: x / x.std(-1, keepdim=True).clamp(min=floor), DOUBLE).spec == std
    assert ns.identify(lambda x: x / x.std().clamp(min=floor), DOUBLE).spec == std.replace(stats="b l d ->")
    found = ns.identify(lambda x: x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=floor), DOUBLE)
    assert found.spec is not None
    assert rms in (found.spec, *found.equivalent)
    l2 = ns.identify(lambda x: F.normalize(x, dim=-1, eps=floor), SINGLE)
    assert l2.spec == rms.replace(scale="l2")


def test_a_floor_far_above_ordinary_inputs_with_groups_and_of_a_module() -> None:
    def groups(x: Tensor) -> Tensor:
        y = x.unflatten(1, (3, -1))
        return (y / y.std((2, 3), keepdim=True).clamp(min=100)).reshape(x.shape)

    found = ns.identify(groups, DOUBLE)
    assert found.spec == ns.NormSpec(
        "b (g c) ... -> b g",
        ndim=(2, None),
        sizes={"g": 3},
        center=False,
        correction=1,
        eps=100.0,
        eps_at="max",
    )

    class Floored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(WEIGHT.float())

        def forward(self, x: Tensor) -> Tensor:
            return x / x.std(-1, keepdim=True).clamp(min=100) * self.weight

    module = ns.identify(Floored(), SINGLE)
    assert module.spec is not None
    assert (module.spec.stats, module.spec.center, module.spec.correction) == ("... d -> ...", False, 1)
    assert (module.spec.eps, module.spec.eps_at, module.spec.weight) == (100.0, "max", "d")


def test_what_follows_its_own_input_at_all_scales_is_an_activation() -> None:
    for f in (torch.tanh, lambda x: x / x.abs().clamp(min=1000), lambda x: F.hardtanh(x, -1000, 1000)):
        reason = ns.identify(f, DOUBLE).reason
        assert reason is not None
        assert reason.startswith(
            "every output follows its own input alone, and no straight line: an activation, or "
        )


def test_a_bias_that_hides_the_rest_in_float64() -> None:
    found = ns.identify(lambda x: F.layer_norm(x, (10,), WEIGHT, 1e15 * BIAS), DOUBLE)
    assert found.reason is not None
    assert found.reason.endswith("too little to be told from rounding: the bias hides the rest")
    assert found.notes[0].endswith(
        "outputs never change: their gain is 0, or lost in the rounding of their bias; their sets were told by the "
        "others"
    )


def test_a_bias_beside_which_no_scale_can_be_measured() -> None:
    single = torch.zeros(4, 6, 8)
    found = ns.identify(lambda x: F.layer_norm(x, (8,)) + torch.arange(8.0) * 1e3, single)
    assert found.spec is None
    assert found.reason == (
        "the bias hides the rest: outputs of the size 1 are added to a bias of up to 7e+03, which is known to 0.007. "
        "Pass a callable and an example of float64"
    )


@pytest.mark.parametrize("c", [1e3, 1e7])
@pytest.mark.parametrize("where", ["input", "variance"])
def test_a_clamp_that_only_large_inputs_reach(c: float, where: str) -> None:
    def clamped(x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(-c, c) if where == "input" else x
        variance = x.var(-1, keepdim=True, unbiased=False)
        variance = variance.clamp(max=c**2) if where == "variance" else variance
        return (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()

    found = ns.identify(clamped, DOUBLE)
    assert found.spec is None
    assert found.sizes is None
    assert found.reason is not None
    # what contradicts it first is found at large inputs, by the sets or at the end by the verification
    assert (
        "(the size 10^8) it is off by" in found.reason or "within one set the outputs are no" in found.reason
    )


def test_a_clamp_before_stored_statistics() -> None:
    norm = torch.nn.BatchNorm1d(10).eval()
    found = ns.identify(lambda x: norm.double()(x.clamp(-1e5, 1e5)), DOUBLE[0])
    assert found.fixed is None
    assert found.reason is not None
    assert found.reason.startswith(
        (
            "scaled inputs give a * x + b of each element alone, but a fresh input is off",
            "every output follows its own input alone, and no straight line: an activation",
        )
    )


def test_the_answer_says_the_sizes_it_was_verified_for() -> None:
    for f in (lambda x: F.layer_norm(x, (10,)), torch.nn.LayerNorm(10), torch.nn.BatchNorm1d(6).eval()):
        found = ns.identify(f, DOUBLE)
        assert found.sizes == (1e-6, 1e8)
        assert "\n  verified for inputs of size 1e-6 to 1e8\n" in str(found)
