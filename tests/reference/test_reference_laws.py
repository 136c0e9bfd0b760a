"""Laws on random specifications: the definition, finite differences, and what the closed formulas must agree on."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_problems import Problem, problems, second_opinion

from normscope import reference
from normscope.spec import NormSpec

many = settings(max_examples=150, deadline=None)
some = settings(max_examples=60, deadline=None)


def forward(p: Problem, **changed: Any) -> Any:
    given = {"x": p.x, "weight": p.weight, "bias": p.bias} | changed
    return reference.forward(given["x"], p.spec, given["weight"], given["bias"], **p.keywords)


def well_posed(p: Problem) -> None:
    """No set with too few elements for its correction, and no denominator near the corner of a maximum."""
    _, v, count = reference.statistics(p.x, p.spec, p.mask)
    assume(bool(np.isfinite(v).all()))
    if p.spec.eps_at in ("max", "max_variance"):
        corner = p.spec.eps**2 if p.spec.eps_at == "max" else p.spec.eps
        assume(bool((np.abs(v - corner) > 0.05 * (count > 0)).all()))
    if p.spec.eps_at in ("std", "max"):  # sqrt(v) is not smooth at 0, where it does not stay for good
        alone = (count <= 1) & (p.spec.center or p.spec.scale == "std")
        assume(bool(((v > 0.05) | (count == 0) | alone).all()))


@many
@given(problems())
def test_the_definition(p: Problem) -> None:
    # Up to about 700 elements of size 10, summed plainly here and exactly there: 700 ulp relative is the worst case.
    np.testing.assert_allclose(forward(p), second_opinion(p), rtol=1e-12, atol=1e-12)


def slope(f: Any, at: Any, along: Any) -> Any:
    """Derivative of f at ``at`` along ``along``: five points, step 1e-3.

    Error h^4 |f'''''| / 30: the fifth derivative grows as 1 / s^5, a few 1000 at the smallest denominators drawn (0.2),
    which makes 1e-10 along a unit direction; rounding adds 10 ulp / h = 2e-12.
    """
    h = 1e-3
    return (8 * (f(at + h * along) - f(at - h * along)) - (f(at + 2 * h * along) - f(at - 2 * h * along))) / (
        12 * h
    )


@many
@given(problems(), st.integers(0, 2**32 - 1))
def test_gradients_against_finite_differences(p: Problem, seed: int) -> None:
    well_posed(p)
    rng = np.random.default_rng(seed)
    grad = rng.standard_normal(p.x.shape)
    gradients = reference.vjp(grad, p.x, p.spec, p.weight, p.bias, **p.keywords)
    for name, value, gradient in zip(
        ("x", "weight", "bias"), (p.x, p.weight, p.bias), gradients, strict=True
    ):
        if value is None:
            assert gradient is None
            continue
        assert gradient.shape == value.shape
        along = rng.standard_normal(value.shape)
        along /= max(1.0, float(np.linalg.norm(along)))
        measured = slope(lambda v, name=name: (grad * forward(p, **{name: v})).sum(), value, along)
        assert abs(measured - (gradient * along).sum()) < 2e-9 * max(1.0, float(np.linalg.norm(gradient)))


@some
@given(problems(), st.integers(0, 2**32 - 1))
def test_jacobian_and_vjp_are_one_map(p: Problem, seed: int) -> None:
    grad = np.random.default_rng(seed).standard_normal(p.x.shape)
    dense = reference.jacobian(p.x, p.spec, p.weight, p.bias, **p.keywords)
    assert dense.shape == p.x.shape * 2
    dx = reference.vjp(grad, p.x, p.spec, p.weight, p.bias, **p.keywords)[0]
    if np.isfinite(dense).all():
        np.testing.assert_allclose(np.tensordot(grad, dense, p.x.ndim), dx, rtol=1e-11, atol=1e-11)
    else:
        assert np.isnan(dx).any()


@some
@given(problems(state=False))
def test_the_jacobian_is_zero_between_sets_and_along_a_common_shift(p: Problem) -> None:
    well_posed(p)
    dense = reference.jacobian(p.x, p.spec, p.weight, mask=p.mask).reshape(p.x.size, p.x.size)
    right = p.spec.stats.partition("->")[2].split()
    sets = [tuple(p.coordinates(index)[name] for name in right) for index in np.ndindex(p.x.shape)]
    apart = np.array([[a != b for b in sets] for a in sets])
    assert not dense[apart].any()
    if p.spec.center:
        for one in set(sets):
            ones = np.array([member == one for member in sets], dtype=float)
            assert np.abs(dense @ ones).max() < 1e-12 * max(1.0, np.abs(dense).max()) * p.x.size


@some
@given(st.integers(2, 12), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-3, 0.1, 2.0]))
def test_eigenvalues_are_0_and_eps_over_s_cubed_and_1_over_s(n: int, seed: int, eps: float) -> None:
    x = np.random.default_rng(seed).normal(2, 1.5, n)
    spec = NormSpec("d -> ", eps=eps)
    centered = x - x.mean()
    s = np.sqrt(centered @ centered / n + eps)
    assume(s > 0.1)
    dense = reference.jacobian(x, spec)
    # entries up to 1/s <= 10, each with a few roundings, times n
    close = {"rtol": 0, "atol": 1e-13 * n}
    np.testing.assert_allclose(dense @ np.ones(n), 0, **close)
    np.testing.assert_allclose(dense @ centered, eps / s**3 * centered, **close)
    expected = np.sort([0, eps / s**3, *[1 / s] * (n - 2)])
    np.testing.assert_allclose(np.linalg.eigvalsh(dense), expected, **close)
    if eps == 0:
        projection = s * dense
        np.testing.assert_allclose(projection @ projection, projection, **close)


@some
@given(problems())
def test_statistics_are_those_that_normalize(p: Problem) -> None:
    mean, v, count = reference.statistics(p.x, p.spec, p.mask)
    right = p.spec.stats.partition("->")[2].split()
    assert mean.shape == v.shape == count.shape == tuple(p.sizes[name] for name in right)
    mask = np.ones(p.x.shape, bool) if p.mask is None else np.broadcast_to(p.mask, p.x.shape)
    assert count.sum() == mask.sum()
    assert (mean[count == 0] == 0).all()
    assert (v[count == 0] == 0).all()


@some
@given(problems(state=False))
def test_a_masked_element_is_as_good_as_absent(p: Problem) -> None:
    if p.mask is None:
        p.mask = np.random.default_rng(0).random(p.x.shape) < 0.6
        p.keywords["mask"] = p.mask
    mask = np.broadcast_to(p.mask, p.x.shape)
    poisoned = np.where(mask, p.x, np.nan)
    y = forward(p)
    np.testing.assert_array_equal(forward(p, x=poisoned), y)
    assert not y[~mask].any()
    grad = np.where(mask, 1.5, np.inf)
    clean = reference.vjp(np.where(mask, 1.5, 0.0), p.x, p.spec, p.weight, p.bias, **p.keywords)
    dirty = reference.vjp(grad, poisoned, p.spec, p.weight, p.bias, **p.keywords)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not dirty[0][~mask].any()
