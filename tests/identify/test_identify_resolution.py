"""How far an answer can be trusted: what rounding hides, and other sizes, at which it may be another function."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import normscope as ns
from normscope.identify import Identification

SHAPE = (4, 6, 10)
DOUBLE, SINGLE = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE)


def over(x: Tensor, constant: Tensor | float) -> Tensor:
    """Layer norm with what is added to the variance."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + constant).sqrt()


def said(found: Identification, part: str) -> list[str]:
    return [note for note in found.notes if part in note]


def test_the_resolution_is_told() -> None:
    double, single = (ns.identify(lambda x: F.layer_norm(x, (10,)), x) for x in (DOUBLE, SINGLE))
    for found, roundoff in ((double, 2.0**-53), (single, 2.0**-24)):
        assert found.max_error is not None
        assert found.resolution is not None
        # 64 roundings, sqrt(10) for the sums, and a mean a few spreads high
        assert 100 * roundoff < found.resolution < 1e5 * roundoff
        assert found.max_error < found.resolution
        told = f"largest error on fresh inputs {found.max_error:.1e}; below {found.resolution:.1e} it may be rounding"
        assert told in str(found)
        assert found.to_json()["resolution"] == found.resolution
    assert not said(double, "float32")
    assert ns.identify(torch.nn.LayerNorm(10), SINGLE).resolution == 1e-9


def test_an_eps_within_the_sight_of_float32() -> None:
    for eps in (1e-5, 1e-5 * (1 + 3e-7)):
        found = ns.identify(lambda x, eps=eps: over(x, eps), SINGLE)
        assert found.spec is not None
        assert found.spec.eps == 1e-5
        assert said(found, "eps is known to 1e-06 of itself, and any eps within that computes the same")
    assert ns.identify(lambda x: over(x, 1.0001e-5), SINGLE).spec == ns.NormSpec(
        "... d -> ...", eps=1.0001e-5
    )


def test_a_deviation_that_float32_hides() -> None:
    """tanh beside the norm is below the misfit of float32, and above its usual error."""
    found = ns.identify(lambda x: over(x, 1e-5) + 1e-5 * torch.tanh(x), SINGLE)
    assert found.spec is not None
    assert (found.spec.stats, found.spec.weight, found.spec.bias) == ("... d -> ...", None, None)
    assert found.max_error is not None
    (note,) = said(found, "is more than single roundings of float32 leave (6e-08)")
    assert f"the largest error, {found.max_error:.1e}, " in note
    assert not said(ns.identify(lambda x: over(x, 1e-5), SINGLE), "single roundings")
    assert ns.identify(lambda x: over(x, 1e-5) + 1e-5 * torch.tanh(x), DOUBLE).spec is None


@pytest.mark.parametrize("example", [DOUBLE, SINGLE], ids=["float64", "float32"])
def test_an_eps_that_follows_the_batch(example: Tensor) -> None:
    reason = ns.identify(lambda x: over(x, 1e-3 * x.var() / x.shape[0]), example).reason
    assert reason == (
        "x - mean is divided by one number for each set over axis 2, and that number follows inputs outside the set "
        "too: a set has 10 elements, and one input moves 240 outputs. No specification divides by a statistic, or adds "
        "an eps, that other sets change"
    )


def test_an_eps_that_follows_a_size() -> None:
    by_samples = ns.identify(lambda x: over(x, 1e-3 / x.shape[0]), DOUBLE)
    assert by_samples.spec == ns.NormSpec("... d -> ...", eps=2.5e-4)
    (note,) = said(by_samples, "another function")
    assert note.startswith("at the shape (3, 5, 10) it is another function, off by ")
    assert note.endswith(
        " of the largest output: something in it depends on the size. What is told here holds at (4, 6, 10)"
    )
    by_features = ns.identify(lambda x: over(x, 1e-3 / x.shape[-1]), DOUBLE)
    assert by_features.spec == ns.NormSpec("... d -> ...", eps=1e-4)
    told = (
        "at sets of 11 elements eps is 0.909091 times that at 10: it depends on the size of the set, and is told for "
        "this size"
    )
    assert told in by_features.notes
    of_one = ns.identify(lambda x: over(x, 1e-3 * x.shape[0]), DOUBLE[:1])
    assert ns.NormSpec("... d -> ...", eps=1e-3) in (of_one.spec, *of_one.equivalent)
    assert of_one.notes[:2] == (
        "what was found at a shape of more elements along short axes, or fewer along long ones, does not hold at "
        "(1, 6, 10): something in it depends on the size. What is told here holds at that shape",
        "axis 0 has one element in the example and is another function with more: whether statistics run over it "
        "cannot be seen",
    )
    neither = ns.identify(lambda x: over(x, 1e-3), DOUBLE)
    assert not said(neither, "size")
    assert "it is the same at another shape" in [e.conclusion for e in neither.evidence]


def test_a_bound_on_what_was_not_seen() -> None:
    def caught(x: np.ndarray) -> np.ndarray:
        return np.nan_to_num(x / np.sqrt((x * x).mean(-1, keepdims=True)))

    found = ns.identify(caught, np.zeros((4, 6), np.float32))
    assert found.spec is not None
    assert found.spec.eps == 0
    (evidence,) = (e for e in found.evidence if e.conclusion == "no eps is to be seen")
    # inputs of 2^-48 are as large as others once divided, to a thousandth
    assert 2.0**-98 * 1e-3 < evidence.numbers["hidden_inside_the_root"] < 2.0**-90 * 1e-3
    assert said(found, "eps is too small to be seen (below about ")


def test_a_correction_of_two_is_told_by_a_second_size() -> None:
    found = ns.identify(
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=2) + 1e-6).sqrt(),
        DOUBLE,
    )
    assert found.spec == ns.NormSpec("... d -> ...", correction=2, eps=1e-6)
    assert not said(found, "size")


def test_refusals_say_what_contradicted() -> None:
    overflows = ns.identify(lambda x: F.layer_norm(x, (10,)) * torch.exp(0 * x.exp()), DOUBLE).reason
    assert overflows is not None
    assert overflows.endswith("that are NaN or infinite, as where a square or an exponential overflows")
    negative = ns.identify(lambda x: over(x, -1e-5), DOUBLE).reason
    assert negative is not None
    assert negative.endswith("that are NaN or infinite, as under a negative eps")

    class Subtracts(torch.nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    assert ns.identify(Subtracts(6), SINGLE).reason == (
        "bias is added with a negative sign in training, where statistics of the input normalize: a bias is added as "
        "it is"
    )
