"""Numbers that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from normscope import reference
from normscope.reference import RunningState
from normscope.spec import NormSpec, Running

LAYER = NormSpec("... d -> ...", eps=0.1)
BATCH = NormSpec("b c ... -> c", eps=0.01)
DIGITS = {"rtol": 0, "atol": 5e-11}  # the literals below have ten decimals


def test_layer_norm_of_1_2_4() -> None:
    # mean 7/3, variance 14/9, s = sqrt(14/9 + 0.1)
    s = math.sqrt(14 / 9 + 0.1)
    np.testing.assert_allclose(
        reference.forward([1, 2, 4], LAYER), (np.array([1, 2, 4]) - 7 / 3) / s, rtol=1e-15
    )
    dense = reference.jacobian([1, 2, 4], LAYER)
    np.testing.assert_allclose(dense[0], [0.2399383587, -0.3286112304, 0.0886728717], **DIGITS)
    np.testing.assert_allclose(dense, dense.T, atol=1e-16)
    np.testing.assert_allclose(dense @ np.ones(3), 0, atol=1e-15)
    centered = np.array([1, 2, 4]) - 7 / 3
    np.testing.assert_allclose(dense @ centered, 0.1 / s**3 * centered, rtol=0, atol=1e-15)
    np.testing.assert_allclose(np.linalg.eigvalsh(dense), [0, 0.1 / s**3, 1 / s], rtol=0, atol=1e-15)


def test_a_common_shift_is_gone() -> None:
    # 2.5 ulp of 14: the mean 37/3 of (11, 12, 14) is rounded at a higher level than 7/3
    np.testing.assert_allclose(
        reference.forward([11, 12, 14], LAYER), reference.forward([1, 2, 4], LAYER), rtol=0, atol=4e-15
    )
    negative = reference.forward([-1, -2, -4], LAYER)
    np.testing.assert_array_equal(negative, -reference.forward([1, 2, 4], LAYER))


@pytest.mark.parametrize(("b", "first"), [(2.0, -0.9950371902), (-2.0, 0.9950371902), (0.0, 0.0)])
def test_batch_norm_of_0_and_b(b: float, first: float) -> None:
    y = reference.forward([[0.0], [b]], BATCH)
    np.testing.assert_allclose(y[:, 0], [first, -first], **DIGITS)
    np.testing.assert_allclose(y[0, 0], -b / math.sqrt(b * b + 4 * 0.01), rtol=1e-15)


def test_output_variance_is_v_over_v_plus_eps() -> None:
    x = np.array([1.0, 2.0, 4.0, 9.0])
    v = x.var()
    np.testing.assert_allclose(reference.forward(x, LAYER).var(), v / (v + 0.1), rtol=1e-15)


@pytest.mark.parametrize(
    ("fields", "s"),
    [
        ({}, math.sqrt(2 / 3 + 0.5)),
        ({"eps_at": "std"}, math.sqrt(2 / 3) + 0.5),
        ({"eps_at": "max"}, math.sqrt(2 / 3)),
        ({"eps_at": "max", "eps": 0.9}, 0.9),
        ({"eps_at": "max_variance"}, math.sqrt(2 / 3)),
        ({"eps_at": "max_variance", "eps": 0.81}, 0.9),
        ({"correction": 1}, math.sqrt(1.5)),
        ({"correction": 1.5}, math.sqrt(2 / 1.5 + 0.5)),
        ({"scale": "rms"}, math.sqrt(2 / 3 + 0.5)),
        ({"scale": "l2", "eps": 2.0}, 2.0),
    ],
)
def test_every_denominator_of_1_2_3(fields: dict[str, float], s: float) -> None:
    spec = NormSpec("d -> ", **({"eps": 0.5} | fields))
    np.testing.assert_allclose(
        reference.forward([1, 2, 3], spec), np.array([-1, 0, 1]) / s, rtol=0, atol=1e-15
    )


def test_uncentered_scales_of_3_4() -> None:
    for scale, s in (("rms", math.sqrt(12.5)), ("l2", 5.0), ("std", 0.5)):
        spec = NormSpec("d -> ", center=False, scale=scale, eps=0.0)
        np.testing.assert_allclose(reference.forward([3, 4], spec), [3 / s, 4 / s], rtol=1e-15)


def test_offset_gain_weight_and_bias() -> None:
    spec = NormSpec("b c -> c", eps=0.0, weight="c", bias="", weight_offset=1.0, gain=0.5)
    y = reference.forward([[1.0, 5.0], [3.0, 9.0]], spec, [1.0, -3.0], 0.25)
    np.testing.assert_array_equal(y, [[-1 + 0.25, 1 + 0.25], [1 + 0.25, -1 + 0.25]])
    # without a weight the factor (offset + weight) is 1, and the gain stays
    np.testing.assert_array_equal(
        reference.forward([[1.0, 5.0], [3.0, 9.0]], spec), [[-0.5, -0.5], [0.5, 0.5]]
    )


def test_running_updates_by_each_convention() -> None:
    x, start = [[1.0], [2.0], [6.0]], RunningState(np.array([10.0]), np.array([20.0]), 3)
    for rule, mean, var in (
        (Running(momentum=0.1), 0.9 * 10 + 0.1 * 3, 0.9 * 20 + 0.1 * 7),
        (Running(momentum=0.1, correction=0), 0.9 * 10 + 0.1 * 3, 0.9 * 20 + 0.1 * 14 / 3),
        (Running(momentum=None), 0.75 * 10 + 0.25 * 3, 0.75 * 20 + 0.25 * 7),
        (Running(momentum=1.0), 3.0, 7.0),
        (Running(momentum=0.0), 10.0, 20.0),
        (Running(momentum=-1.2), 2.2 * 10 - 1.2 * 3, 2.2 * 20 - 1.2 * 7),
    ):
        after = reference.update_running(start, x, NormSpec("b c -> c", running=rule))
        np.testing.assert_allclose([after.mean[0], after.var[0]], [mean, var], rtol=1e-15)
        assert after.batches == 4


@pytest.mark.parametrize(
    ("compute", "dtype", "eps"),
    [
        (None, np.float16, 2.0**-23),
        (None, np.float32, 2.0**-23),
        (None, np.float64, 2.0**-52),
        (None, np.int64, 2.0**-52),
        ("input", np.float16, 2.0**-10),
        ("float64", np.float32, 2.0**-52),
        ("bfloat16", np.float32, 2.0**-7),
    ],
)
def test_eps_none(compute: str | None, dtype: type, eps: float) -> None:
    from normscope.spec import Cast

    spec = NormSpec("d -> ", center=False, scale="l2", eps=None, cast=Cast(compute=compute))
    # x = 0 in all but one place: y = x / sqrt(x^2 + eps)
    x = np.array([1, 0], dtype=dtype)
    assert reference.forward(x, spec)[0] == 1 / math.sqrt(1 + eps)
