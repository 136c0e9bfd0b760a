"""Inputs that break careless arithmetic: high levels, constants, NaN and infinities, empty and one-element sets."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope import reference
from normscope.spec import NormSpec, Running

LAYER = NormSpec("b d -> b", eps=1e-5, weight="d", bias="d")


def exact(row: np.ndarray, eps: float) -> list[float]:
    """(x - mean) / sqrt(v + eps), the sums as fractions and one root rounded once."""
    values = [Fraction(float(value)) for value in row]
    mean = sum(values, Fraction(0)) / len(values)
    v = sum(((value - mean) ** 2 for value in values), Fraction(0)) / len(values) + Fraction(eps)
    root = Fraction(math.isqrt(v.numerator * v.denominator << 200), v.denominator << 100)
    return [float((value - mean) / root) for value in values]


@pytest.mark.parametrize("level", [0.0, 1e3, 1e8, 1e15, -1e12])
@pytest.mark.parametrize("spread", [1.0, 1e-2])
def test_a_high_level_costs_no_digits(level: float, spread: float) -> None:
    x = level + spread * np.random.default_rng(0).standard_normal((2, 200))
    y = reference.forward(x, NormSpec("b d -> b", eps=1e-5))
    for row, found in zip(x, y, strict=True):
        # 200 squares of relative error 1 ulp, added in order, then half: 100 ulp relative is never reached
        np.testing.assert_allclose(found, exact(row, 1e-5), rtol=0, atol=100 * 2.0**-52 * 5)


def test_single_precision_at_a_thousand() -> None:
    x = (1000 + 0.05 * np.random.default_rng(1).standard_normal((1, 4096))).astype(np.float32)
    np.testing.assert_allclose(
        reference.forward(x, NormSpec("b d -> b"))[0], exact(x[0], 1e-5), rtol=0, atol=1e-12
    )


@settings(max_examples=200, deadline=None)
@given(
    st.floats(-1e300, 1e300), st.integers(1, 300), st.sampled_from(["variance", "std", "max", "max_variance"])
)
def test_a_constant_set_gives_exactly_the_bias(level: float, n: int, eps_at: str) -> None:
    x, bias = np.full((2, n), level), np.linspace(-1, 1, n)
    spec = LAYER.replace(eps_at=eps_at)
    np.testing.assert_array_equal(reference.forward(x, spec, np.full(n, 3.0), bias), np.stack([bias, bias]))
    dx, dweight, dbias = reference.vjp(np.ones((2, n)), x, spec, np.full(n, 3.0), bias)
    # the slope is the projection over eps: ones lie in its null space, and x_hat is 0
    scale = 3.0 * n / (1e-5 if eps_at in ("std", "max") else math.sqrt(1e-5))
    assert np.abs(dx).max() <= 4e-16 * scale
    np.testing.assert_array_equal(dweight, np.zeros(n))
    np.testing.assert_array_equal(dbias, np.full(n, 2.0))


def test_a_constant_set_without_eps_is_nan_as_in_pytorch() -> None:
    y = reference.forward(np.array([[2.0, 2.0], [1.0, 3.0]]), NormSpec("b d -> b", eps=0.0))
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1], [-1, 1])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_stays_in_its_set(poison: float) -> None:
    x = np.random.default_rng(2).standard_normal((3, 5))
    clean = reference.forward(x, NormSpec("b d -> b"))
    x[1, 2] = poison
    y = reference.forward(x, NormSpec("b d -> b"))
    np.testing.assert_array_equal(y[[0, 2]], clean[[0, 2]])
    assert np.isnan(y[1]).any()
    dx = reference.vjp(np.ones((3, 5)), x, NormSpec("b d -> b"))[0]
    assert np.isfinite(dx[[0, 2]]).all()
    assert np.isnan(dx[1]).any()


@pytest.mark.filterwarnings("error")
def test_poison_reaches_the_state_of_its_channel_without_a_warning() -> None:
    x = np.random.default_rng(8).standard_normal((5, 3))
    x[0, 1], x[1, 1] = np.inf, -np.inf
    spec = NormSpec("b c -> c", running=Running())
    state = reference.RunningState(np.zeros(3), np.ones(3))
    after = reference.update_running(state, x, spec)
    np.testing.assert_array_equal(np.isnan(after.mean), [False, True, False])
    np.testing.assert_array_equal(np.isnan(after.var), [False, True, False])
    assert np.isnan(reference.forward(x, spec)[:, 1]).all()
    assert np.isnan(reference.vjp(x, x, spec)[0][:, 1]).all()
    assert np.isfinite(reference.jacobian(x, spec)[:, 0, :, 0]).all()


def test_poison_under_a_mask_reaches_nothing() -> None:
    rng = np.random.default_rng(3)
    x, lengths = rng.standard_normal((4, 6, 3)), np.array([6, 2, 1, 0])
    mask = (np.arange(6) < lengths[:, None])[:, :, None]
    spec = NormSpec("b t c -> c", weight="c", bias="c", running=Running())
    weight, bias = rng.standard_normal((2, 3))
    poisoned = np.where(mask, x, np.nan)
    state = reference.RunningState(np.zeros(3), np.ones(3))
    valid = x[mask[:, :, 0]]  # (9, 3): the same elements without padding
    flat = NormSpec("b c -> c", weight="c", bias="c", running=Running())

    y = reference.forward(poisoned, spec, weight, bias, mask=mask)
    np.testing.assert_allclose(
        y[mask[:, :, 0]], reference.forward(valid, flat, weight, bias), rtol=1e-14, atol=1e-14
    )
    assert not y[~mask[:, :, 0]].any()

    mean, v, count = reference.statistics(poisoned, spec, mask)
    np.testing.assert_array_equal(count, [9, 9, 9])
    np.testing.assert_allclose(mean, valid.mean(0), rtol=1e-14)
    np.testing.assert_allclose(v, valid.var(0), rtol=1e-14)

    after, alone = (
        reference.update_running(state, poisoned, spec, mask),
        reference.update_running(state, valid, flat),
    )
    np.testing.assert_allclose(after.mean, alone.mean, rtol=1e-14)
    np.testing.assert_allclose(after.var, alone.var, rtol=1e-14)

    grad = rng.standard_normal(x.shape)
    dx, dweight, dbias = reference.vjp(np.where(mask, grad, np.nan), poisoned, spec, weight, bias, mask=mask)
    wanted = reference.vjp(grad[mask[:, :, 0]], valid, flat, weight, bias)
    np.testing.assert_allclose(dx[mask[:, :, 0]], wanted[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(dweight, wanted[1], rtol=0, atol=1e-13)
    np.testing.assert_allclose(dbias, wanted[2], rtol=0, atol=1e-13)

    stored = reference.forward(poisoned, spec, weight, bias, running=state, training=False, mask=mask)
    np.testing.assert_allclose(stored[mask[:, :, 0]], valid / math.sqrt(1 + 1e-5) * weight + bias, rtol=1e-14)
    assert not stored[~mask[:, :, 0]].any()


def test_an_all_masked_set_is_empty_and_moves_no_state() -> None:
    x = np.full((2, 3, 2), np.nan)
    x[0] = [[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]
    mask = np.array([True, False])[:, None, None]
    spec = NormSpec("b t c -> b c", running=Running(momentum=0.5))
    mean, v, count = reference.statistics(x, spec, mask)
    np.testing.assert_array_equal(count, [[3, 3], [0, 0]])
    np.testing.assert_array_equal(mean, [[3, 5], [0, 0]])
    assert not v[1].any()
    assert not reference.forward(x, spec, mask=mask)[1].any()
    state = reference.RunningState(np.array([1.0, 1.0]), np.array([1.0, 1.0]))
    after = reference.update_running(state, x, spec, mask)  # the mean over the one sample that is there
    np.testing.assert_array_equal(after.mean, [2, 3])
    nothing = reference.update_running(state, x, spec, np.zeros((2, 1, 1), bool))
    np.testing.assert_array_equal(nothing.mean, state.mean)
    np.testing.assert_array_equal(nothing.var, state.var)
    assert (after.batches, nothing.batches) == (1, 0)


def test_a_weight_that_is_nan_spoils_its_own_channel_only() -> None:
    x = np.random.default_rng(4).standard_normal((4, 2))
    spec = NormSpec("b c -> c", weight="c")
    y = reference.forward(x, spec, [np.nan, 1.0])
    assert np.isnan(y[:, 0]).all()
    assert np.isfinite(y[:, 1]).all()
    dx, dweight, _ = reference.vjp(np.ones((4, 2)), x, spec, [np.nan, 1.0])
    assert np.isnan(dx[:, 0]).all()
    assert np.isfinite(dx[:, 1]).all()
    assert np.isfinite(dweight).all()


def test_a_weight_that_is_nan_under_the_mask_reaches_nothing() -> None:
    x, mask = np.random.default_rng(6).standard_normal((2, 4)), np.array([True, True, True, False])
    spec = NormSpec("b d -> b", weight="d")
    weight = np.array([1.0, 2.0, 3.0, np.nan])
    assert np.isfinite(reference.forward(x, spec, weight, mask=mask)).all()
    dx, dweight, _ = reference.vjp(np.ones((2, 4)), x, spec, weight, mask=mask)
    assert np.isfinite(dx).all()
    assert np.isfinite(dweight).all()
    assert np.isfinite(reference.jacobian(x, spec, weight, mask=mask)).all()


def test_the_mean_of_many_large_numbers_is_right_to_the_last_bit() -> None:
    x = 1e8 + np.random.default_rng(7).standard_normal((1, 20_000))
    mean, v, _ = reference.statistics(x, NormSpec("b d -> b"))
    exact_mean = sum(map(Fraction, x[0].tolist())) / x.size
    assert abs(Fraction(float(mean[0])) - exact_mean) <= Fraction(math.ulp(1e8))
    exact_v = float(sum((Fraction(value) - exact_mean) ** 2 for value in x[0].tolist()) / x.size)
    # sums in order of 2e4 numbers: sqrt(2e4) = 141 ulp as a rule, 2e4 at worst
    np.testing.assert_allclose(v[0], exact_v, rtol=1500 * 2.0**-53)


def test_one_element_and_no_element() -> None:
    np.testing.assert_array_equal(reference.forward([[3.0, -2.0]], NormSpec("b c -> c")), [[0.0, 0.0]])
    for shape in ((0, 3), (3, 0)):
        x = np.zeros(shape)
        specs = [NormSpec("b c -> c", weight="c"), NormSpec("b c -> b")]
        if shape[1]:
            specs += [NormSpec(stats, whiten="c", scale="zca") for stats in ("b c -> c", "b c -> b c")]
        for spec in specs:
            assert reference.forward(x, spec).shape == shape
            assert reference.vjp(x, x, spec)[0].shape == shape
            assert reference.statistics(x, spec)[2].sum() == 0
    state = reference.RunningState(np.zeros(3), np.ones(3))
    after = reference.update_running(state, np.zeros((0, 3)), NormSpec("b c -> c", running=Running()))
    assert (list(after.mean), list(after.var), after.batches) == ([0, 0, 0], [1, 1, 1], 0)


def test_too_few_elements_for_the_correction_are_nan_as_in_torch_var() -> None:
    y = reference.forward([[1.0], [2.0]], NormSpec("b c -> b", correction=1))
    assert np.isnan(y).all()


def test_negative_eps_and_huge_values_do_not_raise() -> None:
    y = reference.forward([[0.1, 0.2], [5.0, 9.0]], NormSpec("b d -> b", eps=-0.5))
    assert np.isnan(y[0]).all()
    np.testing.assert_allclose(y[1], [-2 / math.sqrt(3.5), 2 / math.sqrt(3.5)], rtol=1e-15)


def test_inputs_are_not_written_to() -> None:
    x, mask = np.random.default_rng(5).standard_normal((3, 4)), np.ones((3, 4), bool)
    spec = NormSpec("b c -> c", weight="c", bias="c", running=Running())
    state = reference.RunningState(np.zeros(4), np.ones(4))
    weight, bias = np.ones(4), np.zeros(4)
    for array in (x, mask, state.mean, state.var, weight, bias):
        array.flags.writeable = False
    reference.forward(x, spec, weight, bias, running=state, mask=mask)
    reference.vjp(x, x, spec, weight, bias, running=state, mask=mask)
    reference.jacobian(x, spec, weight, bias, running=state, mask=mask)
    reference.update_running(state, x, spec, mask)
