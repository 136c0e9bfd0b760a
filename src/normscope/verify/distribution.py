"""What normalization does to a distribution: its first two moments, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from normscope.verify.evidence import Evidence
from normscope.verify.float64 import ULP, Array, convention, gap, normal, numpy

TOPIC = "the distribution that comes out"
N = 1000
INPUT = f"{N} numbers exp(standard normal), seed 0, as a batch ({N}, 1)"
TOLERANCE = N * 16 * ULP
BECAUSE = f"sums of {N} terms: {N} ulp at worst, on numbers below 16"


def _x() -> torch.Tensor:
    return normal(N, 1, seed=0).exp()


def _layer(eps: float) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(1, eps=eps, track_running_stats=False, dtype=torch.float64)


def _evidence(claim: str, layer: nn.BatchNorm1d, **rest: Any) -> Evidence:
    rest = {"input": INPUT, "tolerance": TOLERANCE, "because": BECAUSE, **rest}
    return Evidence(topic=TOPIC, claim=claim, convention=convention(layer), eps=layer.eps, **rest)


def _standardized_moment(x: Array, order: int) -> float:
    centered = x - x.mean()
    return float(np.mean(centered**order) / np.mean(centered**2) ** (order / 2))


def variance() -> Iterator[Evidence]:
    v = float(np.var(numpy(_x())))
    for eps in (1e-5, 1.0):
        layer = _layer(eps)
        found = float(np.var(numpy(layer(_x()))))
        yield _evidence(
            f"the output variance is v / (v + eps), not 1: eps {eps:g}",
            layer,
            measured=abs(found - v / (v + eps)),
            result={"v": v, "output variance": found},
        )


def shape_is_unchanged() -> Iterator[Evidence]:
    layer = _layer(0.1)
    x, y = numpy(_x()), numpy(layer(_x()))
    for name, order in (("skewness", 3), ("kurtosis", 4)):
        before, after = _standardized_moment(x, order), _standardized_moment(y, order)
        yield _evidence(
            f"the {name} does not change: nothing becomes Gaussian",
            layer,
            measured=abs(before - after) / abs(before),
            result={"before": before, "after": after, "of a Gaussian": 0 if order == 3 else 3},
            tolerance=order * TOLERANCE,
            because=f"relative; powers of order {order} of {BECAUSE}",
        )


def gain_and_bias_undo() -> Iterator[Evidence]:
    layer, eps = _layer(0.1), 0.1
    x = _x()
    with torch.no_grad():
        layer.weight.copy_(torch.sqrt(x.var(correction=0) + eps))
        layer.bias.copy_(x.mean())
    yield _evidence(
        "gain sqrt(v + eps) and bias mean undo batch norm on its batch",
        layer,
        measured=gap(layer(x), x),
        result={"gain": layer.weight.tolist(), "bias": layer.bias.tolist()},
        tolerance=2 * TOLERANCE,
        because=f"{BECAUSE}, there and back",
    )


CHECKS: tuple[Callable[[], Iterator[Evidence]], ...] = (variance, shape_is_unchanged, gain_and_bias_undo)
