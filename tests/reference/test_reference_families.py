"""Families against each other and against what they are built of: splits, stacks, transposes and whitening laws."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from normscope import reference
from normscope.reference import RunningState
from normscope.spec import NormSpec, Running
from normscope.spec import RunningState as SpecState

RNG = np.random.default_rng(20)
SEEDED = RNG.bit_generator.state
# The same sums in another order: a few hundred ulp of numbers of size 1 to 10.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
BATCH = NormSpec("b c ... -> c", weight="c", bias="c", running=Running())
WEIGHT, BIAS = RNG.standard_normal((2, 6))


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    RNG.bit_generator.state = SEEDED


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, **CLOSE)


def start(channels: int = 6) -> RunningState:
    return RunningState(np.zeros(channels), np.ones(channels))


GHOSTS = [
    (33, {"b": 32}, "short", [32, 1]),
    (33, {"b": 32}, "balanced", [17, 16]),
    (9, {"v": 4}, "short", [3, 3, 3]),
    (9, {"v": 4}, "balanced", [3, 2, 2, 2]),
    (10, {"b": 4}, "short", [4, 4, 2]),
    (10, {"b": 4}, "balanced", [4, 3, 3]),
    (8, {"v": 4}, "error", [2, 2, 2, 2]),
    (3, {"v": 4}, "balanced", [1, 1, 1]),
]


@pytest.mark.parametrize(("samples", "sizes", "remainder", "parts"), GHOSTS)
def test_ghost_norm_is_batch_norm_on_each_part_in_order(
    samples: int, sizes: dict[str, int], remainder: str, parts: list[int]
) -> None:
    x, grad = RNG.standard_normal((2, samples, 6, 5))
    spec = NormSpec(
        "(v b) c ... -> v c",
        sizes=sizes,
        remainder=remainder,
        weight="c",
        bias="c",
        running=Running(momentum=0.3),
    )
    cuts = np.cumsum(parts)[:-1]
    close(
        reference.forward(x, spec, WEIGHT, BIAS),
        np.concatenate([reference.forward(part, BATCH, WEIGHT, BIAS) for part in np.split(x, cuts)]),
    )
    each = [
        reference.vjp(g, part, BATCH, WEIGHT, BIAS)
        for g, part in zip(np.split(grad, cuts), np.split(x, cuts), strict=True)
    ]
    dx, dweight, dbias = reference.vjp(grad, x, spec, WEIGHT, BIAS)
    close(dx, np.concatenate([one[0] for one in each]))
    close(dweight, sum(one[1] for one in each))
    close(dbias, sum(one[2] for one in each))
    np.testing.assert_array_equal(reference.statistics(x, spec)[2][:, 0], [n * 5 for n in parts])

    state = start()
    for part in np.split(x, cuts):
        state = reference.update_running(state, part, BATCH.replace(running=Running(momentum=0.3)))
    after = reference.update_running(start(), x, spec)
    close(after.mean, state.mean)
    close(after.var, state.var)
    assert after.batches == state.batches == len(parts)


def test_cumulative_ghost_norm_counts_virtual_batches() -> None:
    x = RNG.standard_normal((8, 6))
    spec = NormSpec("(v b) c -> v c", sizes={"v": 4}, running=Running(momentum=None))
    after = reference.update_running(start(), x, spec)
    close(after.mean, x.mean(0))  # equal parts: the mean of means
    assert after.batches == 4


def test_group_norm_is_layer_norm_at_one_group_and_instance_norm_at_all() -> None:
    x = RNG.standard_normal((3, 6, 4, 2))
    one, every = (NormSpec("b (g c) ... -> b g", sizes={"g": g}) for g in (1, 6))
    close(reference.forward(x, one), reference.forward(x, NormSpec("b c h w -> b")))
    close(reference.forward(x, every), reference.forward(x, NormSpec("b c ... -> b c")))


def test_batch_norm_of_one_image_or_of_equal_images_is_instance_norm() -> None:
    image = RNG.standard_normal((1, 6, 4, 2))
    for x in (image, np.repeat(image, 3, 0)):
        close(reference.forward(x, BATCH), reference.forward(x, NormSpec("b c ... -> b c")))


def test_channels_first_layer_norm_is_layer_norm_of_the_transpose() -> None:
    x = RNG.standard_normal((2, 6, 3, 4))
    y = reference.forward(x, NormSpec("b c ... -> b ...", weight="c", bias="c"), WEIGHT, BIAS)
    last = NormSpec("... d -> ...", weight="d", bias="d")
    close(y.transpose(0, 2, 3, 1), reference.forward(x.transpose(0, 2, 3, 1), last, WEIGHT, BIAS))


def test_group_parameters_composed_or_apart() -> None:
    x = RNG.standard_normal((2, 6, 3))
    composed = NormSpec("b (g c) ... -> b g", sizes={"g": 2}, weight="(g c)")
    y = reference.forward(x, composed, WEIGHT)
    close(y, reference.forward(x, composed.replace(weight="g c"), WEIGHT.reshape(2, 3)))
    close(y, reference.forward(x, composed.replace(weight="c g"), WEIGHT.reshape(2, 3).T))
    close(y, reference.forward(x, composed.replace(weight=None)) * WEIGHT[None, :, None])


def test_computed_gains_of_every_sample() -> None:
    x, gain = RNG.standard_normal((2, 4, 5, 6)), RNG.standard_normal((2, 6))
    adaptive = NormSpec("b h w d -> b h w", weight="b d", source="input")
    close(
        reference.forward(x, adaptive, gain),
        reference.forward(x, NormSpec("... d -> ...")) * gain[:, None, None, :],
    )


def test_threshold_batch_norm_in_three_layouts() -> None:
    steps, samples = 4, 3
    x, grad = RNG.standard_normal((2, steps, samples, 6, 2, 2))
    fields = {"weight": "c", "bias": "c", "gain": 0.5 / math.sqrt(2), "running": Running()}
    spec = NormSpec("t b c ... -> c", **fields)
    y, flat = reference.forward(x, spec, WEIGHT, BIAS), x.reshape(-1, 6, 2, 2)
    close(y.reshape(flat.shape), reference.forward(flat, BATCH, WEIGHT * 0.5 / math.sqrt(2), BIAS))
    swapped = reference.forward(x.swapaxes(0, 1), NormSpec("b t c ... -> c", **fields), WEIGHT, BIAS)
    close(swapped, y.swapaxes(0, 1))
    folded = NormSpec("(t b) c ... -> c", sizes={"t": steps}, **fields)
    close(reference.forward(flat, folded, WEIGHT, BIAS), y.reshape(flat.shape))
    # the fixed factor reaches the gradient of the weight
    close(
        reference.vjp(grad, x, spec, WEIGHT, BIAS)[1],
        reference.vjp(grad.reshape(flat.shape), flat, BATCH, WEIGHT * 0.5 / math.sqrt(2), BIAS)[1]
        * 0.5
        / math.sqrt(2),
    )
    after, alone = (reference.update_running(start(), *given) for given in ((x, spec), (flat, BATCH)))
    close(after.var, alone.var)  # M counts steps, samples and positions
    # stored statistics act per element, so a step at a time is the whole sequence
    whole = reference.forward(x, spec, WEIGHT, BIAS, running=after, training=False)
    for t in range(steps):
        close(
            reference.forward(x[t : t + 1], spec, WEIGHT, BIAS, running=after, training=False),
            whole[t : t + 1],
        )


def test_threshold_layer_norm_over_all_steps_or_each() -> None:
    x = RNG.standard_normal((4, 3, 6, 2))
    over_all = reference.forward(x, NormSpec("t b c ... -> b", weight="c", gain=0.5), WEIGHT)
    per_step = reference.forward(x, NormSpec("t b c ... -> t b", weight="c", gain=0.5), WEIGHT)
    for b in range(3):
        s = math.sqrt(x[:, b].var() + 1e-5)
        close(over_all[:, b], 0.5 * WEIGHT[:, None] * (x[:, b] - x[:, b].mean()) / s)
    for t in range(4):
        close(
            per_step[t : t + 1],
            reference.forward(x[t : t + 1], NormSpec("t b c ... -> t b", weight="c", gain=0.5), WEIGHT),
        )
    # per step a past step does not see a later one
    later = x.copy()
    later[3] += RNG.standard_normal(later[3].shape)
    np.testing.assert_array_equal(
        reference.forward(later, NormSpec("t b c ... -> t b"))[:3],
        reference.forward(x, NormSpec("t b c ... -> t b"))[:3],
    )


def test_batch_norm_through_time_is_one_batch_norm_a_step() -> None:
    x, weight = RNG.standard_normal((4, 5, 6, 2)), RNG.standard_normal((4, 6))
    spec = NormSpec("t b c ... -> t c", weight="t c", running=Running())
    state = RunningState(np.zeros((4, 6)), np.ones((4, 6)))
    y, after = reference.forward(x, spec, weight), reference.update_running(state, x, spec)
    for t in range(4):
        close(y[t], reference.forward(x[t], BATCH, weight[t]))
        alone = reference.update_running(start(), x[t], BATCH)
        close(after.mean[t], alone.mean)
        close(after.var[t], alone.var)
    folded = spec.replace(stats="(t b) c ... -> t c", sizes={"t": 4})
    close(reference.forward(x.reshape(20, 6, 2), folded, weight), y.reshape(20, 6, 2))


def test_weight_standardization_and_its_fan_in_form() -> None:
    w = RNG.standard_normal((4, 6, 3, 3))
    common = reference.forward(w, NormSpec("o i ... -> o", correction=1, eps_at="std"))
    fan = NormSpec("o i ... -> o", weight="o", eps=1e-4, eps_at="max_variance", gain=54**-0.5)
    for o in range(4):
        close(common[o], (w[o] - w[o].mean()) / (w[o].std(ddof=1) + 1e-5))
        close(
            reference.forward(w, fan, WEIGHT[:4])[o],
            WEIGHT[o] * (w[o] - w[o].mean()) / math.sqrt(54 * w[o].var()),
        )


def test_pixel_scale_and_filter_response_norms() -> None:
    x = RNG.standard_normal((2, 6, 3, 4))
    pixel = reference.forward(x, NormSpec("b c ... -> b ...", center=False, scale="rms", eps=1e-8))
    close(pixel, x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-8))
    scale = NormSpec("... d -> ...", weight="", center=False, scale="l2", eps=1e-5, eps_at="max")
    close(reference.forward(x, scale, 1.5), 1.5 * x / np.linalg.norm(x, axis=-1, keepdims=True))
    close(reference.forward(x, scale, [1.5]), 1.5 * x / np.linalg.norm(x, axis=-1, keepdims=True))
    response = NormSpec("b c ... -> b c", weight="c", bias="c", center=False, scale="rms", eps=1e-6)
    nu2 = (x**2).mean((2, 3), keepdims=True)
    wanted = x / np.sqrt(nu2 + 1e-6) * WEIGHT[:, None, None] + BIAS[:, None, None]
    close(reference.forward(x, response, WEIGHT, BIAS), wanted)


# Batch renormalization -------------------------------------------------------------------------------------------


def renorm(r_max: float, d_max: float) -> NormSpec:
    return BATCH.replace(running=Running(renorm=(r_max, d_max)))


STATE = RunningState(RNG.normal(0, 1, 6), RNG.uniform(0.3, 3, 6), 5)


def test_renorm_without_room_is_batch_norm_and_without_limits_is_the_stored_statistics() -> None:
    x = RNG.normal(1, 2, (8, 6, 3))
    given = (x, renorm(1, 0), WEIGHT, BIAS)
    close(reference.forward(*given, running=STATE), reference.forward(x, BATCH, WEIGHT, BIAS))
    free = reference.forward(x, renorm(math.inf, math.inf), WEIGHT, BIAS, running=STATE)
    close(free, reference.forward(x, BATCH, WEIGHT, BIAS, running=STATE, training=False))
    other = RunningState(STATE.mean + 1, STATE.var)
    assert (
        np.abs(
            reference.forward(x, renorm(3, 5), running=other)
            - reference.forward(x, renorm(3, 5), running=STATE)
        ).max()
        > 0.1
    )


def test_renorm_clips_both_corrections() -> None:
    x = np.array([[0.0], [4.0]])  # mean 2, variance 4
    spec = NormSpec("b c -> c", eps=0.0, running=Running(renorm=(1.5, 0.25)))
    # r = 2 / sqrt(0.25) = 4 -> 1.5, d = (2 - 0) / 0.5 = 4 -> 0.25
    y = reference.forward(x, spec, running=RunningState(np.zeros(1), np.full(1, 0.25)))
    np.testing.assert_allclose(y[:, 0], [-1.25, 1.75], rtol=1e-15)
    # r = 2 / 4 -> 1 / 1.5, d = (2 - 9) / 4 -> -0.25
    y = reference.forward(x, spec, running=RunningState(np.full(1, 9.0), np.full(1, 16.0)))
    np.testing.assert_allclose(y[:, 0], [-1 / 1.5 - 0.25, 1 / 1.5 - 0.25], rtol=1e-15)


def test_renorm_takes_its_corrections_as_constants_in_the_backward() -> None:
    x, grad = RNG.normal(1, 2, (2, 8, 6, 3))
    m, s = x.mean((0, 2)), np.sqrt(x.var((0, 2)) + 1e-5)
    sigma = np.sqrt(STATE.var + 1e-5)
    r, d = np.clip(s / sigma, 1 / 2, 2), np.clip((m - STATE.mean) / sigma, -1, 1)
    dx, dweight, _ = reference.vjp(grad, x, renorm(2, 1), WEIGHT, BIAS, running=STATE)
    plain = reference.vjp(grad, x, BATCH, WEIGHT * r, BIAS)
    close(dx, plain[0])
    close(dweight, plain[1] * r + grad.sum((0, 2)) * d)
    dense = reference.jacobian(x[:2], renorm(2, 1), WEIGHT, running=STATE)
    close(
        np.tensordot(grad[:2], dense, 3),
        reference.vjp(grad[:2], x[:2], renorm(2, 1), WEIGHT, running=STATE)[0],
    )


# Whitening ---------------------------------------------------------------------------------------------------------


def whitening(scale: str, **fields: Any) -> NormSpec:
    given = {"sizes": {"g": 2}, "whiten": "c", "scale": scale, "eps": 1e-3} | fields
    return NormSpec("b (g c) ... -> g c", **given)


def mixed(samples: int = 40) -> np.ndarray[Any, Any]:
    x = RNG.standard_normal((samples, 6, 5))
    return np.einsum("ij,bjp->bip", RNG.standard_normal((6, 6)), x) + 2.0


def covariance(x: np.ndarray[Any, Any], group: int, **how: Any) -> np.ndarray[Any, Any]:
    return np.cov(x.swapaxes(0, 1)[3 * group : 3 * group + 3].reshape(3, -1), **how)


@pytest.mark.parametrize("scale", ["zca", "cholesky", "iternorm"])
def test_whitened_groups_have_unit_covariance(scale: str) -> None:
    x = mixed()
    y = reference.forward(x, whitening(scale, eps=0.0, iterations=60))
    for group in range(2):
        np.testing.assert_allclose(covariance(y, group, bias=True), np.eye(3), rtol=0, atol=1e-10)
    np.testing.assert_allclose(y.mean((0, 2)), 0, atol=1e-12)


@pytest.mark.parametrize("eps_at", ["variance", "trace"])
def test_the_whitening_matrix_is_what_its_name_says(eps_at: str) -> None:
    x = mixed()
    for scale in ("zca", "cholesky"):
        y = reference.forward(x, whitening(scale, eps_at=eps_at))
        for group in range(2):
            sigma = covariance(x, group, bias=True)
            sigma = sigma + np.eye(3) * 1e-3 * (1 if eps_at == "variance" else np.trace(sigma) / 3)
            rows = slice(3 * group, 3 * group + 3)
            flat = x.swapaxes(0, 1)[rows].reshape(3, -1)
            centered = flat - flat.mean(1, keepdims=True)
            w = np.linalg.lstsq(centered.T, y.swapaxes(0, 1)[rows].reshape(3, -1).T, rcond=None)[0].T
            np.testing.assert_allclose(w @ sigma @ w.T, np.eye(3), rtol=0, atol=1e-10)
            wanted = w.T if scale == "zca" else np.tril(w)
            np.testing.assert_allclose(w, wanted, rtol=0, atol=1e-10)
            assert (np.linalg.eigvals(w).real > 0).all()


def test_newton_steps_approach_zca_and_one_step_is_the_formula() -> None:
    x = mixed()
    errors = [
        np.abs(
            reference.forward(x, whitening("iternorm", iterations=n)) - reference.forward(x, whitening("zca"))
        ).max()
        for n in (1, 3, 5, 60)
    ]
    assert errors[0] > errors[1] > errors[2] > 1e-9 > errors[3]
    y = reference.forward(x, whitening("iternorm", iterations=1))
    sigma = covariance(x, 0, bias=True) + 1e-3 * np.eye(3)
    w = (1.5 * np.eye(3) - 0.5 * sigma / np.trace(sigma)) / math.sqrt(np.trace(sigma))
    close(y[:, :3], np.einsum("ij,bjp->bip", w, x[:, :3] - x[:, :3].mean((0, 2), keepdims=True)))


@pytest.mark.parametrize("scale", ["zca", "cholesky"])
def test_whitening_one_channel_is_batch_norm(scale: str) -> None:
    x = mixed()
    spec = whitening(scale, sizes={"g": 6}, weight="(g c)", bias="(g c)", correction=1)
    close(
        reference.forward(x, spec, WEIGHT, BIAS),
        reference.forward(x, BATCH.replace(eps=1e-3, correction=1), WEIGHT, BIAS),
    )


@pytest.mark.parametrize("state", ["covariance", "whitening"])
def test_stored_whitening_repeats_the_batch_at_momentum_one(state: str) -> None:
    x = mixed()
    spec = whitening("zca", whiten_state=state, running=Running(momentum=1.0, correction=0))
    begin = RunningState(np.zeros((2, 3)), np.stack([np.eye(3)] * 2))
    after = reference.update_running(begin, x, spec)
    close(reference.forward(x, spec, running=after, training=False), reference.forward(x, spec))
    if state == "covariance":
        half = reference.update_running(begin, x, spec.replace(running=Running(momentum=0.5)))
        for group in range(2):
            close(half.var[group], 0.5 * np.eye(3) + 0.5 * covariance(x, group))
        mean, cov, count = reference.statistics(x, spec)
        assert (mean.shape, cov.shape, count.shape) == ((2, 3), (2, 3, 3), (2, 3))
        close(cov[1], covariance(x, 1, bias=True))


def test_whitening_under_a_mask_and_in_virtual_batches() -> None:
    x = mixed(10)
    mask = np.arange(10)[:, None, None] < 7
    masked = reference.forward(np.where(mask, x, np.nan), whitening("zca"), mask=mask)
    close(masked[:7], reference.forward(x[:7], whitening("zca")))
    assert not masked[7:].any()
    ghost = NormSpec(
        "(v b) (g c) ... -> v g c",
        sizes={"g": 2, "b": 4},
        remainder="short",
        whiten="c",
        scale="zca",
        eps=1e-3,
    )
    parts = [reference.forward(part, whitening("zca")) for part in np.split(x, [4, 8])]
    close(reference.forward(x, ghost), np.concatenate(parts))


# States -----------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_in_its_own_type_and_is_not_changed() -> None:
    x = RNG.standard_normal((5, 6))
    mine, theirs = start(), SpecState([0.0] * 6, [1.0] * 6, 2)
    loose = SimpleNamespace(mean=np.zeros(6), var=np.ones(6), batches=0)
    for state, kind in ((mine, RunningState), (theirs, SpecState), (loose, RunningState)):
        after = reference.update_running(state, x, BATCH)
        assert type(after) is kind
        assert after.batches == state.batches + 1
        assert not np.any(state.mean)
    np.testing.assert_array_equal(mine.var, np.ones(6))


def test_over_shares_one_entry_between_sets() -> None:
    x = RNG.standard_normal((3, 6, 4))
    spec = NormSpec("b (g c) ... -> b g c", sizes={"g": 2}, running=Running(momentum=1.0, over="g"))
    after = reference.update_running(RunningState(np.zeros(2), np.ones(2)), x, spec)
    close(after.mean, x.reshape(3, 2, 3, 4).mean((0, 2, 3)))
    close(after.var, x.var(2, ddof=1).reshape(3, 2, 3).mean((0, 2)))
    composed = spec.replace(running=Running(momentum=1.0, over="(g c)"))
    after = reference.update_running(start(), x, composed)
    close(after.mean, x.mean((0, 2)))
    y = reference.forward(x, composed, running=after, training=False)
    close(y, (x - after.mean[:, None]) / np.sqrt(after.var[:, None] + 1e-5))


def test_the_sample_axis_carries_no_state() -> None:
    x = RNG.standard_normal((3, 6, 4))
    spec = NormSpec("n c l -> n c", sample_axis="n", running=Running(momentum=1.0))
    close(reference.update_running(start(), x, spec).mean, x.mean((0, 2)))


def test_a_stored_mean_square() -> None:
    x = RNG.standard_normal((5, 6))
    spec = NormSpec("b c -> c", center=False, scale="rms", running=Running(momentum=1.0))
    after = reference.update_running(start(), x, spec)
    close(after.var, (x**2).mean(0))
    close(reference.forward(x, spec, running=after, training=False), reference.forward(x, spec))
