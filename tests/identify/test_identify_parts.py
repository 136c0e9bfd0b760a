"""The parts of identification: factors of an axis, units, round numbers, the answer, adapters, the callable package."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import normscope as ns
from normscope.errors import BadInput
from normscope.identify.box import Boxed, box_of
from normscope.identify.identification import identify
from normscope.identify.partition import Factor, factors_of
from normscope.identify.result import Evidence, FixedAffine, Identification
from normscope.identify.ties import digits_of
from normscope.spec import NormSpec

# Factors of an axis --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(2, 4), st.booleans()), min_size=1, max_size=4), st.integers(0, 10**6))
def test_factors_are_read_back(drawn: list[tuple[int, bool]], place: int) -> None:
    """Neighbours of one kind are one factor; a position's set shows them all."""
    factors: list[tuple[int, bool]] = []
    for size, kept in drawn:
        if factors and factors[-1][1] == kept:
            size *= factors.pop()[0]
        factors.append((size, kept))
    shape = [size for size, _ in factors]
    total = int(np.prod(shape))
    at = np.unravel_index(place % total, shape)
    index = tuple(int(i) if kept else slice(None) for i, (_, kept) in zip(at, factors, strict=True))
    along = np.zeros(shape, dtype=bool)
    along[index] = True
    assert factors_of(along.ravel(), total) == tuple(Factor(size, kept) for size, kept in factors)


def test_what_is_no_product_has_no_factors() -> None:
    assert factors_of(np.array([1, 1, 1, 0], bool), 4) is None
    assert factors_of(np.array([0, 1, 1, 0, 0, 0], bool), 6) is None


# Ties ----------------------------------------------------------------------------------------------------------------


def test_digits() -> None:
    assert [digits_of(x, 1e-12) for x in (1.0, 1e-5, 1.5e-3, 0.125, 1 / 3)] == [1, 1, 2, 3, 9]
    # seven digits of noise leave room for four
    assert digits_of(1.0000001e-5, 1e-6) == 1
    assert digits_of(1.2345678e-5, 1e-4) == 9


def conclusions(found: Identification) -> list[str]:
    return [e.conclusion for e in found.evidence]


def test_a_second_size_decides() -> None:
    """An eps that is round in no units, and one that is round in the wrong ones."""

    def unbiased(x: torch.Tensor) -> torch.Tensor:
        # 5 elements: the canonical eps is 1e-6, round, though the unbiased variance is meant
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1.25e-6).sqrt()

    found = identify(unbiased, torch.zeros(4, 6, 5, dtype=torch.float64))
    assert found.spec == NormSpec("... d -> ...", correction=1, eps=1.25e-6)
    assert found.equivalent[0].stats == "b c ... -> b c"
    assert not any(other.correction == 0 for other in found.equivalent)
    assert "the spread is measured by the unbiased variance" in conclusions(found)


def test_roundness_decides_where_the_size_is_fixed() -> None:
    weight = torch.tensor([0.5, 1.5, -1.0, 2.0, 0.3], dtype=torch.float64)

    def textbook(x: torch.Tensor) -> torch.Tensor:
        return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)

    found = identify(textbook, torch.zeros(4, 6, 5, dtype=torch.float64))
    spec = NormSpec("... d -> ...", correction=1, eps=1e-6, eps_at="std", weight="d")
    assert found.spec == spec
    biased = next(other for other in found.equivalent if other.correction == 0)
    # sqrt(5 / 4) std + 1e-6 is sqrt(5 / 4) (std + 1e-6 sqrt(4 / 5))
    assert biased.eps == pytest.approx(1e-6 * 0.8**0.5, rel=1e-13)
    assert spec.same_function(biased, shape=(4, 6, 5))
    assert "the spread is taken as the unbiased variance: its numbers are the roundest" in conclusions(found)


def test_the_number_of_ghost_batches_or_their_size() -> None:
    def two_batches(x: np.ndarray) -> np.ndarray:
        z = x.reshape(2, -1, x.shape[1])
        return ((z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-5)).reshape(x.shape)

    found = identify(two_batches, (8, 3))
    assert found.spec == NormSpec("(v b) c ... -> v c", sizes={"v": 2})
    assert "the number of the blocks along axis 0 is fixed" in conclusions(found)


def test_a_batch_of_one() -> None:
    def batch(x: np.ndarray) -> np.ndarray:
        return (x - x.mean((0, 2), keepdims=True)) / np.sqrt(x.var((0, 2), keepdims=True) + 1e-5)

    found = identify(batch, (1, 6, 5))
    assert found.spec == NormSpec("b c ... -> c", ndim=(2, None))
    assert found.notes == ("axis 0, of one element in the example, was probed with 3",)

    def of_one_only(x: np.ndarray) -> np.ndarray:
        if x.shape[0] != 1:
            raise ValueError("one sample")
        return batch(x)

    found = identify(of_one_only, (1, 6, 5))
    assert found.spec == NormSpec("b c ... -> c", ndim=(2, None))
    assert NormSpec("... d -> ...") in found.equivalent
    assert found.notes == (
        "axis 0 has one element in the example and takes no more: whether statistics run over it cannot be seen",
    )


def test_a_large_example_is_shortened() -> None:
    shapes = []

    def norm(x: np.ndarray) -> np.ndarray:
        shapes.append(x.shape)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    found = identify(norm, (40, 60, 16))
    assert found.spec == NormSpec("... d -> ...", center=False, scale="rms", eps=1e-6)
    # checked for repeats, and verified, at the example's own shape
    assert 4 < shapes.count((40, 60, 16)) < 12 < len(shapes)


def test_without_eps() -> None:
    found = identify(lambda x: F.layer_norm(x, (5,), eps=0.0), torch.zeros(4, 6, 5, dtype=torch.float64))
    assert "a set without spread gives NaN" in conclusions(found)
    assert found.notes == ()
    found = identify(
        lambda x: torch.nan_to_num(F.layer_norm(x, (5,), eps=0.0)), torch.zeros(4, 6, 5, dtype=torch.float64)
    )
    assert found.spec is not None
    assert found.spec.eps == 0
    assert found.notes == (
        "no eps shows down to the smallest inputs, yet a set without spread gives no NaN: eps is too small to be "
        "seen (below about 4e-292 inside the root or 5e-148 outside), or 0 / 0 is caught",
    )


def test_a_bias_that_hides_the_rest() -> None:
    weight, bias = torch.full((5,), 1e-3), torch.full((5,), 100.0)
    reason = identify(lambda x: F.layer_norm(x, (5,), weight, bias), torch.zeros(4, 6, 5)).reason
    assert reason is not None
    assert reason.endswith(
        "too little to be told from rounding: the bias hides the rest. Pass a callable and an example of float64"
    )
    assert identify(
        lambda x: F.layer_norm(x, (5,), weight.double(), bias.double()),
        torch.zeros(4, 6, 5, dtype=torch.float64),
    ).spec == NormSpec("... d -> ...", weight="", bias="")


# The answer ----------------------------------------------------------------------------------------------------------


def rms(x: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def test_the_answer_reads_well() -> None:
    text = str(identify(rms, (4, 6)))
    assert text.startswith(
        "function rms, on NumPy float64:\n"
        "  ... d -> ...; not centered; rms; eps 1e-06 inside the root; no weight; no bias, mode input\n"
        "  largest error on fresh inputs "
    )
    assert "\n  because: eps is 1e-06, inside the root (from inputs of the size 2^-64 to 2^" in text
    assert str(Evidence("a thing", "a probe", {"size": 0.25, "shape": (2, 3)})) == (
        "a thing (from a probe: size 0.25, shape (2, 3))"
    )
    assert str(FixedAffine(np.array([1.0, 2.0]), np.array([0.0, 0.0]), "c")) == (
        "y = a * x + b, on c; a of shape (2,), 1 to 2, b of shape (2,), all 0"
    )


def test_the_answer_is_plain_data() -> None:
    found = identify(lambda x: 2.5 * rms(x) + 1, (4, 6))
    data = json.loads(json.dumps(found.to_json()))
    assert NormSpec.from_json(data["spec"]) == found.spec
    assert data["weight"] == pytest.approx(2.5)
    assert data["bias"] == 1.0
    assert [NormSpec.from_json(other) for other in data["equivalent"]] == list(found.equivalent)
    affine = json.loads(json.dumps(identify(lambda x: 2 * x, (4, 6)).to_json()))
    assert affine["fixed"] == {"a": 2.0, "b": 0.0, "axes": ""}


def test_equivalents_are_the_same_function() -> None:
    """Each with its own weight: the reference agrees at this shape, once gain and units are put into the weight."""
    found = identify(lambda x: F.layer_norm(x, (5,)) * 3, torch.zeros(4, 6, 5, dtype=torch.float64))
    assert found.spec is not None
    x = np.random.default_rng(0).normal(size=(4, 6, 5))
    expected = ns.reference.forward(x, found.spec, found.weight)
    for other in found.equivalent:
        y = ns.reference.forward(x, other, None if other.weight is None else 1.0)
        scale = (expected * y).sum() / (y * y).sum()
        np.testing.assert_allclose(y * scale, expected, rtol=0, atol=1e-12)
    assert any(other.gain == pytest.approx(3, rel=1e-12) for other in found.equivalent)


# The package and the boxes -------------------------------------------------------------------------------------------


def test_the_package_is_the_function() -> None:
    module = importlib.import_module("normscope.identify")
    assert ns.identify is module
    assert ns.identify(rms, (4, 6)).spec == NormSpec("... d -> ...", center=False, scale="rms", eps=1e-6)
    assert list(inspect.signature(ns.identify).parameters) == ["fn", "example", "layout", "training"]
    assert module.Identification is Identification is ns.Identification
    with pytest.raises(AttributeError, match=r"module 'normscope\.identify' has no attribute 'norm'"):
        _ = module.norm


def test_no_torch_for_numpy() -> None:
    code = (
        "import sys, normscope as ns, normscope.identify.box\n"
        "assert 'numpy' in sys.modules and 'torch' not in sys.modules\n"
        "f = lambda x: x / (abs(x) ** 2).mean(-1, keepdims=True) ** 0.5\n"
        "assert ns.identify(f, (4, 6)).spec.eps == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_shape_finds_out_what_the_function_takes() -> None:
    assert box_of(rms, (4, 6)).name == "function rms, on NumPy float64"
    assert box_of(F.gelu, (4, 6)).name == "function gelu, on torch float64"
    assert box_of(torch.nn.LayerNorm(6), (4, 6)).name == "LayerNorm, on torch float32"
    assert box_of(F.gelu, torch.zeros(4, 6)).roundoff == 2.0**-24


def test_a_function_may_write_into_its_input() -> None:
    def in_place(x: torch.Tensor) -> torch.Tensor:
        return x.div_(x.square().mean(-1, keepdim=True).add_(1e-6).sqrt_())

    example = torch.ones(4, 6, dtype=torch.float64)
    assert identify(in_place, example).spec == NormSpec("... d -> ...", center=False, scale="rms", eps=1e-6)
    assert torch.equal(example, torch.ones(4, 6, dtype=torch.float64))


def test_a_boxed_module_is_left_as_it_was() -> None:
    module = torch.nn.BatchNorm1d(6)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    box = box_of(module, (4, 6))
    first = box(np.arange(24.0).reshape(4, 6))
    assert np.array_equal(box(np.arange(24.0).reshape(4, 6)), first)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_boxes_return_arrays() -> None:
    with pytest.raises(BadInput) as error:
        Boxed("function f", 2.0**-53, lambda x: x.astype(complex))(np.zeros(3))
    assert str(error.value) == (
        "a callable to identify returns one array of real numbers; function f returned an array of complex128. "
        "Wrap it in a function that picks the array out."
    )
