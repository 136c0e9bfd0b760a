"""The gradients of whitening: against differences, and against batch norm where one channel is whitened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from normscope import reference
from normscope.spec import NormSpec, Running

WEIGHT, BIAS = np.random.default_rng(0).standard_normal((2, 6))


def problem(scale: str, **fields: Any) -> tuple[NormSpec, Any, Any]:
    rng = np.random.default_rng(1)
    x = np.einsum("ij,bjp->bip", rng.standard_normal((6, 6)), rng.standard_normal((5, 6, 4))) + 2.0
    given = {"sizes": {"g": 2}, "whiten": "c", "scale": scale, "eps": 0.1, "weight": "(g c)", "bias": "(g c)"}
    return NormSpec("b (g c) ... -> g c", **(given | fields)), x, rng.standard_normal(x.shape)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"eps_at": "trace"}, {"correction": 1}, {"center": False}, {"gain": 0.5}], ids=str
)
@pytest.mark.parametrize("scale", ["zca", "cholesky", "iternorm"])
def test_gradients_against_finite_differences(scale: str, fields: dict[str, Any], masked: bool) -> None:
    spec, x, grad = problem(scale, **fields)
    mask = np.random.default_rng(2).random((5, 1, 4)) < 0.7 if masked else None
    values = {"x": x, "weight": WEIGHT, "bias": BIAS}
    gradients = reference.vjp(grad, x, spec, WEIGHT, BIAS, mask=mask)
    for number, (name, value) in enumerate(values.items()):
        along = np.random.default_rng(3).standard_normal(value.shape)
        along /= np.linalg.norm(along)

        def loss(step: float, name: str = name, along: Any = along) -> float:
            moved = values | {name: values[name] + step * along}
            return float(
                (grad * reference.forward(moved["x"], spec, moved["weight"], moved["bias"], mask=mask)).sum()
            )

        # five points, h = 1e-3: h^4 / 30 times a fifth derivative of some 1000 / s^5, s^2 at least 0.1
        slope = (8 * (loss(1e-3) - loss(-1e-3)) - (loss(2e-3) - loss(-2e-3))) / 12e-3
        assert abs(slope - (gradients[number] * along).sum()) < 1e-8


@pytest.mark.parametrize("scale", ["zca", "cholesky", "iternorm"])
def test_the_jacobian_and_the_vjp_are_one_map(scale: str) -> None:
    spec, x, grad = problem(scale)
    dense = reference.jacobian(x, spec, WEIGHT, BIAS)
    dx = reference.vjp(grad, x, spec, WEIGHT, BIAS)[0]
    np.testing.assert_allclose(np.tensordot(grad, dense, 3), dx, rtol=0, atol=1e-11)
    assert not dense[:, :3, :, :, 3:].any()  # groups do not meet
    np.testing.assert_allclose(dense.sum((3, 5)), 0, atol=1e-12)  # a common shift of a channel is removed


@pytest.mark.parametrize("scale", ["zca", "cholesky"])
def test_one_channel_is_batch_norm(scale: str) -> None:
    spec, x, grad = problem(scale, sizes={"g": 6})
    plain = NormSpec("b c ... -> c", eps=0.1, weight="c", bias="c")
    pairs = zip(
        reference.vjp(grad, x, spec, WEIGHT, BIAS), reference.vjp(grad, x, plain, WEIGHT, BIAS), strict=True
    )
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def test_stored_whitening_is_linear() -> None:
    spec, x, grad = problem("zca", running=Running())
    state = reference.update_running(
        reference.RunningState(np.zeros((2, 3)), np.stack([np.eye(3)] * 2)), x, spec
    )
    given = {"running": state, "training": False}
    dx = reference.vjp(grad, x, spec, WEIGHT, BIAS, **given)[0]
    step = np.random.default_rng(4).standard_normal(x.shape)
    change = reference.forward(x + step, spec, WEIGHT, BIAS, **given) - reference.forward(
        x, spec, WEIGHT, BIAS, **given
    )
    np.testing.assert_allclose((grad * change).sum(), (dx * step).sum(), rtol=1e-12)


@pytest.mark.parametrize("scale", ["zca", "cholesky", "iternorm"])
def test_poison_stays_in_its_group(scale: str) -> None:
    spec, x, grad = problem(scale)
    clean, clean_dx = reference.forward(x, spec), reference.vjp(grad, x, spec)[0]
    x[0, 1, 0] = np.nan
    y, dx = reference.forward(x, spec), reference.vjp(grad, x, spec)[0]
    assert np.isnan(y[:, :3]).all()
    assert np.isnan(dx[:, :3]).all()
    np.testing.assert_array_equal(y[:, 3:], clean[:, 3:])
    np.testing.assert_array_equal(dx[:, 3:], clean_dx[:, 3:])
