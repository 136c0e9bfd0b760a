"""What normalization does to space: one axis vanishes, one shrinks, the rest scales.

With P = I - 11'/d, c = P x, s = sqrt(c'c/d + eps): y = c / s and dy/dx = (P - c c' / (d s^2)) / s, whose eigenvalues
are 0 along 1, eps / s^3 along c, and 1 / s elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from normscope import reference
from normscope.reading import spec_of
from normscope.verify.evidence import Evidence
from normscope.verify.float64 import ULP, convention, differences, gap, jacobian, normal, numpy, tensor

TOPIC = "geometry"
X, EPS, STEP = [1.0, 2.0, 4.0], 0.1, 1e-5
FEW = "a dozen rounded operations on either side, on numbers of at most 1"


def _layer(eps: float = EPS, dims: int = 3) -> nn.LayerNorm:
    return nn.LayerNorm(dims, eps=eps, elementwise_affine=False, dtype=torch.float64)


def _evidence(claim: str, layer: nn.Module, **rest: Any) -> Evidence:
    rest = {"input": X, "tolerance": 32 * ULP, "because": FEW, **rest}
    return Evidence(topic=TOPIC, claim=claim, convention=convention(layer), eps=layer.eps, **rest)  # type: ignore[arg-type]


def _centered_and_scale(eps: float) -> tuple[Any, float]:
    centered = np.array(X) - np.mean(X)
    return centered, float(np.sqrt(np.mean(centered**2) + eps))


def projection() -> Iterator[Evidence]:
    d = len(X)
    p = np.eye(d) - np.ones((d, d)) / d
    worst = max(gap(p @ p, p), gap(p.T, p), gap(_layer()(tensor(X)), _layer()(tensor((p @ X).tolist()))))
    yield _evidence(
        "I - 11'/d is a projection, and the layer sees x through it alone", _layer(), measured=worst
    )


def closed_formula() -> Iterator[Evidence]:
    layer = _layer()
    closed, automatic = reference.jacobian(X, spec_of(layer)), jacobian(layer, tensor(X))
    yield _evidence(
        "autograd's Jacobian is the closed formula",
        layer,
        measured=gap(closed, automatic),
        result={"rows": np.round(automatic, 10).tolist()},
    )


def null_direction() -> Iterator[Evidence]:
    j = jacobian(_layer(), tensor(X))
    worst = max(gap(j @ np.ones(3), 0), gap(np.ones(3) @ j, 0))
    yield _evidence("the all-ones direction is invisible: J 1 = 0 and 1'J = 0", _layer(), measured=worst)


def eigenvalues() -> Iterator[Evidence]:
    found = np.linalg.eigvalsh(jacobian(_layer(), tensor(X)))
    _, s = _centered_and_scale(EPS)
    expected = [0.0, EPS / s**3, 1 / s]
    yield _evidence(
        "the eigenvalues of J are 0, eps/s^3 and 1/s",
        _layer(),
        measured=gap(found, expected),
        result={"found": found.tolist(), "expected": expected},
    )


def radial_direction() -> Iterator[Evidence]:
    c, s = _centered_and_scale(EPS)
    moved = jacobian(_layer(), tensor(X)) @ c
    yield _evidence(
        "along the centered vector c, J c = eps/s^3 c: the radial direction is faint",
        _layer(),
        measured=gap(moved, EPS / s**3 * c),
        result={"eps/s^3": EPS / s**3},
    )


def radial_vanishes() -> Iterator[Evidence]:
    c, _ = _centered_and_scale(0.0)
    moved = jacobian(_layer(0.0), tensor(X)) @ c
    yield _evidence(
        "at eps 0 the radial direction vanishes too: J c = 0", _layer(0.0), measured=gap(moved, 0)
    )


def finite_differences() -> Iterator[Evidence]:
    layer = _layer()
    rough = differences(layer, tensor(X), STEP)
    yield _evidence(
        "central differences agree with the Jacobian",
        layer,
        measured=gap(rough, jacobian(layer, tensor(X))),
        tolerance=1e-9,
        because=f"step {STEP:g}: step^2/6 times a third derivative below 10 is 2e-10, and 4 ulp / step is 9e-11",
        result={"step": STEP},
    )


def shift_is_lost() -> Iterator[Evidence]:
    layer, low, high = _layer(), tensor(X), tensor([11.0, 12.0, 14.0])
    one, other = layer(low), layer(high)
    gains, biases = normal(1000, 3, seed=0), normal(1000, 3, seed=1)
    apart = gap(numpy(gains * one + biases), numpy(gains * other + biases))
    yield _evidence(
        "(1, 2, 4) and (11, 12, 14) give one output, and no gain and bias tell them apart",
        layer,
        input=[X, high.tolist()],
        measured=max(gap(one, other), apart),
        tolerance=5 * 4 * 16 * ULP,
        because="4 operations on numbers below 16; 1000 random normal gains, none above 5",
        result={"output": one.tolist(), "other output": other.tolist()},
    )
    yield _evidence(
        "a bypass does tell them apart: x + norm(x) differs by the shift",
        layer,
        input=[X, high.tolist()],
        measured=float(torch.min(high + other - low - one)),
        tolerance=10 - 4 * 16 * ULP,
        because="the shift is 10, less the rounding of 4 operations on numbers below 16",
        at_least=True,
    )


def positive_scale() -> Iterator[Evidence]:
    y = _layer(0.0)(tensor(X))
    worst = max(gap(_layer(0.0)(k * tensor(X)), y) for k in (1e-3, 0.5, 7.0, 1e3))
    yield _evidence(
        "at eps 0 a positive scale is invisible",
        _layer(0.0),
        input={"x": X, "scales": [1e-3, 0.5, 7.0, 1e3]},
        measured=worst,
        tolerance=64 * ULP,
        because="two dozen rounded operations on either side, on numbers of at most 2",
    )
    small = _layer()(1e-3 * tensor(X))
    yield _evidence(
        "above eps 0 a small scale vanishes into eps: the output shrinks with it",
        _layer(),
        input={"x": X, "scale": 1e-3},
        measured=float(_layer()(tensor(X)).norm() / small.norm()),
        tolerance=100,
        because="the denominator moves from s to sqrt(eps), a ratio of 4.1, while x shrinks by 1000",
        result={"norm of the output": float(small.norm())},
        at_least=True,
    )


def negative_scale() -> Iterator[Evidence]:
    layer = _layer()
    yield _evidence(
        "a negative scale flips the sign: norm(-x) = -norm(x)",
        layer,
        measured=gap(layer(-tensor(X)), -layer(tensor(X))),
        tolerance=0.0,
        because="rounding is symmetric about 0, so that not one bit may differ",
    )


def output_length() -> Iterator[Evidence]:
    c, s = _centered_and_scale(EPS)
    v = float(np.mean(c**2))
    length = float(_layer()(tensor(X)).norm())
    yield _evidence(
        "the output lies on one sphere, ||y||^2 = d v / (v + eps), below d",
        _layer(),
        measured=abs(length**2 - 3 * v / s**2),
        result={"||y||^2": length**2, "d": 3},
        tolerance=3 * 32 * ULP,
        because="a dozen rounded operations on numbers of at most 3",
    )


def two_samples() -> Iterator[Evidence]:
    eps = 0.01

    def first_of(b: float) -> float:
        layer = nn.BatchNorm1d(1, eps=eps, affine=False, dtype=torch.float64)
        return float(layer(tensor([[0.0], [b]]))[0, 0])

    layer = nn.BatchNorm1d(1, eps=eps, affine=False, dtype=torch.float64)
    values = [2.0, -2.0, 0.3, 1e-3]
    found = [first_of(b) for b in values]
    expected = [-b / float(np.sqrt(b**2 + 4 * eps)) for b in values]
    yield _evidence(
        "batch norm of the sample 0 beside b is -b / sqrt(b^2 + 4 eps)",
        layer,
        input={"batch": "{0, b}", "b": values},
        measured=gap(found, expected),
        result={"first output": found, "expected": expected},
    )
    yield _evidence(
        "its companion's sign flips the sample's output",
        layer,
        input={"batch": "{0, b}", "b": [2.0, -2.0]},
        measured=abs(found[0] + found[1]),
        tolerance=0.0,
        because="rounding is symmetric about 0, so that not one bit may differ",
        result={"first outputs": found[:2]},
    )


CHECKS: tuple[Callable[[], Iterator[Evidence]], ...] = (
    projection,
    closed_formula,
    null_direction,
    eigenvalues,
    radial_direction,
    radial_vanishes,
    finite_differences,
    shift_is_lost,
    positive_scale,
    negative_scale,
    output_length,
    two_samples,
)
