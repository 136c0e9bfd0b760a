"""The derived laws, measured: what the algebra says of a specification against what the reference computes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from spec_strategies import measured, shapes, specs

from normscope import reference
from normscope.spec import BoundSpec, NormSpec, Running, RunningState, canonical_factor, families

# Outputs are of size 1 to 10 and pass through some hundred roundings of 1.1e-16, amplified by at most the condition
# number of a covariance over few members; what breaks a law changes them by 1e-3 and more.
SAME, DIFFERENT = 1e-8, 1e-6


def plain(spec: NormSpec, eps: float) -> NormSpec:
    return spec.replace(
        weight=None, bias=None, weight_offset=0.0, gain=1.0, running=None, eps=eps, ndim=None, iterations=5
    )


@st.composite
def problems(draw: st.DrawFn, eps: float, *, least: int = 1) -> tuple[NormSpec, BoundSpec, np.ndarray]:
    """A plain specification and a random input whose sets have more than ``least`` elements."""
    spec = plain(draw(specs(state=False)), eps)
    bound = spec.bind(draw(shapes(spec)))
    assume(math.prod(bound.shape) <= 400)
    assume(bound.set_size > max(least, spec.correction))
    # two elements carry only the sign of their difference, which most changes leave alone
    assume(bound.set_size != 2)
    if eps == 0 and spec.whiten:
        # without eps a covariance must have full rank, and be far from losing it
        assume(bound.set_size > 3 * math.prod(bound.size_of(name) for name in spec.whiten.split()))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = [math.prod(a.size for a in bound.axes if a.dim == d) for d in sorted({a.dim for a in bound.axes})]
    return spec, bound, rng.standard_normal(shape) + 0.5


def along(bound: BoundSpec, names: Iterable[str], rng: np.random.Generator) -> np.ndarray:
    """Random numbers that vary along the named axes (all of the ellipsis for ``...``), in elementary shape."""
    wanted = set(names)
    shape = [a.size if a.name.rstrip("0123456789") in wanted or a.name in wanted else 1 for a in bound.axes]
    return rng.uniform(0.5, 3.0, shape)


def change(spec: NormSpec, x: np.ndarray, other: np.ndarray) -> float:
    a, b = reference.forward(x, spec), reference.forward(other, spec)
    return float(np.max(np.abs(a - b)))


@measured
@given(problems(eps=0.1))
def test_binding_gives_the_sets_that_the_reference_normalizes(
    problem: tuple[NormSpec, BoundSpec, Any],
) -> None:
    spec, bound, x = problem
    assume(not spec.whiten)
    grid = x.reshape(bound.shape)
    over = tuple(i for i, axis in enumerate(bound.axes) if not axis.kept)
    mean = grid.mean(over, keepdims=True)
    divided = grid - mean if spec.center else grid
    about = grid - mean if spec.center or spec.scale == "std" else grid
    n = bound.set_size
    v = (about**2).sum(over, keepdims=True) / {"std": n - spec.correction, "rms": n, "l2": 1}[spec.scale]
    denominator = {
        "variance": np.sqrt(v + 0.1),
        "std": np.sqrt(v) + 0.1,
        "max": np.maximum(np.sqrt(v), 0.1),
        "max_variance": np.sqrt(np.maximum(v, 0.1)),
    }[spec.eps_at]
    np.testing.assert_allclose(
        reference.forward(x, spec), (divided / denominator).reshape(x.shape), rtol=0, atol=1e-12
    )


@measured
@given(st.data(), problems(eps=0.1))
def test_a_shift_is_removed_exactly_where_the_law_says(data: st.DataObject, problem: tuple[Any, ...]) -> None:
    spec, bound, x = problem
    names = data.draw(st.lists(st.sampled_from(spec.pattern.names), unique=True, max_size=2))
    shift = along(bound, names, np.random.default_rng(1))
    changed = change(spec, x, (x.reshape(bound.shape) + shift).reshape(x.shape))
    if spec.properties(x.shape).removes_shift(" ".join(names)):
        assert changed < SAME
    else:
        assert changed > DIFFERENT


@measured
@given(st.data(), problems(eps=0.0, least=2))
def test_without_eps_a_scale_is_removed_exactly_where_the_law_says(data: st.DataObject, problem: Any) -> None:
    spec, bound, x = problem
    names = data.draw(st.lists(st.sampled_from(spec.pattern.names), unique=True, max_size=2))
    scale = along(bound, names, np.random.default_rng(2))
    law = spec.properties(x.shape)
    assert law.scale_invariance == "exact"
    changed = change(spec, x, (x.reshape(bound.shape) * scale).reshape(x.shape))
    if law.removes_scale(" ".join(names)):
        assert changed < SAME
    else:
        assert changed > DIFFERENT


@measured
@given(problems(eps=0.1, least=2))
def test_with_eps_a_common_scale_is_removed_to_the_degree_that_the_law_says(problem: Any) -> None:
    spec, _, x = problem
    degree = spec.properties(x.shape).scale_invariance
    changed = change(spec, x, 3 * x)
    if degree == "exact":
        assert spec.eps_at == "trace"
        assert changed < SAME
    elif degree == "above eps":
        # far above the floor it is exact, and far below it the output just grows
        assert change(spec, 1e3 * x, 3e3 * x) < SAME
        assert change(spec, 1e-6 * x, 3e-6 * x) > 1e-7
    else:
        assert degree == "approximate"
        assert changed > DIFFERENT
        assert change(spec, 1e12 * x, 3e12 * x) < SAME


@measured
@given(problems(eps=0.1), st.sampled_from(["samples", "time"]))
def test_couplings_are_where_the_law_says(problem: tuple[Any, ...], what: str) -> None:
    spec, bound, x = problem
    law = spec.properties(x.shape)
    if what == "time":
        expected, names = law.couples_time, [a.name for a in bound.axes if a.name == "t"]
    elif spec.sample_group == ("...",):
        expected, names = law.couples_samples, [a.name for a in bound.axes if a.name == "...0"]
    else:
        expected, names = law.couples_samples, [name for name in spec.sample_group or () if name != "t"]
    # "max" may sit on its floor, where companions change nothing: an input above it
    x = 10 * x
    grid = x.reshape(bound.shape)
    first = np.ones(bound.shape, dtype=bool)
    for i, axis in enumerate(bound.axes):
        if axis.name in names:
            place = np.arange(axis.size).reshape([-1 if j == i else 1 for j in range(len(bound.shape))])
            first &= place == 0
    moved = np.where(first, grid * np.random.default_rng(3).uniform(1.5, 4, grid.shape), grid).reshape(
        x.shape
    )
    difference = np.abs(reference.forward(moved, spec) - reference.forward(x, spec)).reshape(bound.shape)
    others = difference[~first]
    if expected:
        assert others.max() > DIFFERENT
    else:
        assert others.size == 0 or others.max() == 0


@measured
@given(problems(eps=0.1))
def test_later_steps_reach_back_where_the_law_says(problem: tuple[Any, ...]) -> None:
    spec, bound, x = problem
    causal = spec.properties(x.shape).causal
    at = [i for i, axis in enumerate(bound.axes) if axis.name == "t"]
    assert (causal is None) == (not at)
    assume(at)
    grid = 10 * x.reshape(bound.shape)
    last = (
        np.arange(bound.shape[at[0]]).reshape([-1 if i == at[0] else 1 for i in range(grid.ndim)])
        == grid.shape[at[0]] - 1
    )
    moved = np.where(last, grid * np.random.default_rng(3).uniform(1.5, 4, grid.shape), grid)
    y, z = (reference.forward(v.reshape(x.shape), spec).reshape(bound.shape) for v in (grid, moved))
    earlier = np.abs(y - z)[~np.broadcast_to(last, grid.shape)]
    assert earlier.max(initial=0) < SAME if causal else earlier.max() > DIFFERENT


def test_cholesky_whitening_over_steps_is_causal() -> None:
    for method, causal in (("cholesky", True), ("zca", False)):
        spec = NormSpec("b t c -> t", scale=method, whiten="t")
        law = spec.properties((6, 4, 3))
        assert (law.causal, law.couples_time) == (causal, True)
        x = np.random.default_rng(11).standard_normal((6, 4, 3))
        later = x.copy()
        later[:, 3] *= np.random.default_rng(12).uniform(1.5, 4, (6, 3))
        earlier = reference.forward(x, spec)[:, :3], reference.forward(later, spec)[:, :3]
        assert np.allclose(*earlier, atol=SAME) == causal


@measured
@given(problems(eps=0.1), st.floats(0.1, 3), st.floats(-2, 2), st.booleans())
def test_the_canonical_form_is_the_same_function(
    problem: Any, gain: float, offset: float, weighted: bool
) -> None:
    spec, bound, x = problem
    where = " ".join(name for name in spec.pattern.names if name != "...") if weighted else None
    spec = spec.replace(gain=gain, weight=where, weight_offset=offset if weighted else 0.0, bias=where)
    n = bound.set_size
    canonical = spec.canonical(n)
    assert canonical.canonical(n) == canonical
    assert (canonical.correction, canonical.weight_offset) == (0, 0)
    assert canonical.scale != "l2"
    weight = bias = other = None
    if weighted:
        weight, bias = np.random.default_rng(4).standard_normal((2, *spec.bind(x.shape).weight_shape))
        other = (offset + weight) * canonical_factor(spec, n)
        assert canonical.gain == 1
    np.testing.assert_allclose(
        reference.forward(x, spec, weight, bias),
        reference.forward(x, canonical, other, bias),
        rtol=1e-9,
        atol=1e-9,
    )
    assert spec.same_function(canonical, shape=x.shape)


POOL = [
    plain(spec, 0.1)
    for spec in (
        families.batch_norm(),
        families.instance_norm(),
        families.group_norm(1),
        families.group_norm(2),
        families.group_norm(3),
        families.group_norm(6),
        families.layer_norm(),
        families.layer_norm("l d"),
        families.layer_norm("c h w"),
        families.channels_first_layer_norm(),
        families.rms_norm(),
        families.pixel_norm(),
        families.filter_response_norm(),
        families.l2_normalize(),
        families.scale_norm(),
        families.ghost_batch_norm(number=1),
        families.ghost_batch_norm(size=2),
        families.batch_whitening(2),
        families.batch_whitening(1),
        families.weight_standardization(),
        NormSpec("b c ... -> b c", correction=1),
        NormSpec("b c ... -> c", center=False),
        NormSpec("b c ... -> c", scale="rms"),
        NormSpec("b c ... -> b c", eps_at="max"),
        NormSpec("... -> "),
        NormSpec("... -> ..."),
    )
]
SHAPES = [(2, 6, 4, 4), (1, 6, 3), (2, 6), (4, 6, 1), (2, 12, 2, 3), (6, 6, 6), (1, 6, 1, 2)]


def reads(spec: NormSpec, shape: tuple[int, ...]) -> bool:
    try:
        spec.bind(shape)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_function_says_what_the_numbers_say(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(5).standard_normal(shape) + 0.5
    pool = [spec for spec in POOL if reads(spec, shape)]
    outputs = [reference.forward(x, spec) for spec in pool]
    seen = {True: 0, False: 0}
    for a, y in zip(pool, outputs, strict=True):
        for b, z in zip(pool, outputs, strict=True):
            verdict = a.same_function(b, shape=shape)
            alike = bool(np.allclose(y, z, rtol=0, atol=1e-10, equal_nan=True))
            if trivial(a, shape) or trivial(b, shape):
                continue
            assert verdict.same == alike, (str(a), str(b), str(verdict))
            assert bool(b.same_function(a, shape=shape)) == verdict.same
            seen[alike] += 1
    assert min(seen.values()) > 20, seen


def trivial(spec: NormSpec, shape: tuple[int, ...]) -> bool:
    """Sets of one element: many functions become constants, which no specification is compared by."""
    return spec.bind(shape).set_size <= 1


def test_same_for_all_shapes_means_same_on_every_shape() -> None:
    held = 0
    for a in POOL:
        for b in POOL:
            if not a.same_function(b):
                continue
            for shape in SHAPES:
                if reads(a, shape) and reads(b, shape):
                    x = np.random.default_rng(6).standard_normal(shape)
                    np.testing.assert_allclose(
                        reference.forward(x, a), reference.forward(x, b), rtol=0, atol=1e-10, equal_nan=True
                    )
                    held += a != b
    assert held >= 10


def test_running_mode_couples_and_removes_nothing() -> None:
    spec = families.batch_norm()
    state = RunningState(np.full(3, 0.3), np.full(3, 2.0))
    x = np.random.default_rng(7).standard_normal((4, 3, 5))
    other = x.copy()
    other[1:] += 7
    y, z = (reference.forward(v, spec, running=state, training=False) for v in (x, other))
    np.testing.assert_array_equal(y[0], z[0])
    assert spec.properties().modes == ("batch", "running")
    assert spec.properties().train_differs_from_eval
    np.testing.assert_allclose(z[1:] - y[1:], 7 / np.sqrt(2 + 1e-5), rtol=1e-12)


@pytest.mark.parametrize("limits", [(1.0, 0.0), (1.0, 5.0), (3.0, 0.0), (3.0, 5.0)])
def test_renorm_reads_state_and_gives_back_what_the_law_says(limits: tuple[float, float]) -> None:
    spec = families.batch_renorm(*limits, eps=0.0, weight=False, bias=False)
    law = spec.properties()
    x = np.random.default_rng(8).standard_normal((4, 3, 5))
    states = [RunningState(np.full(3, m), np.full(3, v)) for m, v in ((0.0, 1.0), (0.2, 1.3))]

    def y(v: np.ndarray, state: RunningState = states[0]) -> np.ndarray:
        return reference.forward(v, spec, running=state)

    assert law.training_reads_state == (not np.allclose(y(x), y(x, states[1])))
    assert law.removes_shift("c") == np.allclose(y(x), y(x + 0.5))
    assert law.removes_scale("c") == np.allclose(y(x), y(1.2 * x))


def test_the_weight_folds_where_the_law_says() -> None:
    """Batch norm by stored statistics and what a layer norm keeps, folded into a linear map by hand."""
    rng = np.random.default_rng(9)
    x, matrix = rng.standard_normal((5, 4)), rng.standard_normal((6, 4))
    weight, bias, mean, var = rng.uniform(0.5, 2, (4, 6))
    spec = NormSpec("b c -> c", weight="c", bias="c", running=Running())
    assert ("norm", "before", "c", "running") in [
        (f.part, f.into, f.axis, f.mode) for f in spec.properties().folds
    ]
    scale = weight / np.sqrt(var + 1e-5)
    by_norm = reference.forward(
        x @ matrix.T, spec, weight, bias, running=RunningState(mean, var), training=False
    )
    np.testing.assert_allclose(
        by_norm, x @ (scale[:, None] * matrix).T + bias - scale * mean, rtol=0, atol=1e-12
    )

    layer = families.layer_norm()
    folds = {(f.part, f.into, f.axis) for f in layer.properties().folds}
    assert folds == {("gain", "after", "d"), ("bias", "after", "d"), ("centering", "before", "d")}
    centered = matrix - matrix.mean(0)
    rms = families.rms_norm(eps=1e-5)
    after = rng.standard_normal((3, 6))
    np.testing.assert_allclose(
        reference.forward(x @ matrix.T, layer, weight, bias) @ after.T,
        reference.forward(x @ centered.T, rms, np.ones(6)) @ (after * weight).T + after @ bias,
        rtol=0,
        atol=1e-12,
    )


@measured
@given(st.data())
def test_layouts_are_one_function_of_the_permuted_input(data: st.DataObject) -> None:
    spec = plain(data.draw(specs(whitening=False, state=False)), 0.1)
    left = [" ".join(g) if len(g) == 1 else f"({' '.join(g)})" for g in spec.pattern.left]
    assume("..." not in left)
    order = data.draw(st.permutations(range(len(left))))
    other = spec.replace(
        stats=f"{' '.join(left[i] for i in order)} -> {' '.join(spec.pattern.kept)}", sample_axis=""
    )
    verdict = spec.same_function(other, layout={})
    assert verdict, str(verdict)
    x = np.random.default_rng(10).standard_normal(data.draw(shapes(spec)))
    np.testing.assert_allclose(
        reference.forward(x, spec).transpose(order),
        reference.forward(x.transpose(order), other),
        atol=1e-12,
        rtol=0,
    )
