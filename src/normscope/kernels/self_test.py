"""One small layer normalization, forward and backward, against the formula in Python floats.

It finds a library that a compiler got wrong, or that was compiled from other sources, before it serves anything. Memory
is of ctypes, since the first import may happen where PyTorch makes no real tensors (fake tensors, the meta device).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import Array, addressof, c_float, c_int64

from normscope.kernels.structs import DONE, NORM, NORM_BACKWARD, NsCall, NsRecipe

SETS, LENGTH = 3, 37  # a vector of 16, another, and a rest
EPS = 1e-5
# Values up to about 10 in float32: 64 ulp leave room for any order of summing 37 of them.
TOLERANCE = 64 * 2.0**-23 * 10


def self_test(run: Callable[[NsCall], int]) -> str:
    """What is wrong, or ""."""
    x = [math.sin(7 * i + 0.5 * j) + i for i in range(SETS) for j in range(LENGTH)]
    dy = [math.cos(3 * i + 0.9 * j) for i in range(SETS) for j in range(LENGTH)]
    weight = [1 + 0.01 * j for j in range(LENGTH)]
    bias = [0.1 * j for j in range(LENGTH)]

    x_, dy_, weight_, bias_ = map(_floats, (x, dy, weight, bias))
    y_, dx_, stats_, dweight_, dbias_ = (
        _floats([math.nan] * n) for n in (len(x), len(x), 3 * SETS, LENGTH, LENGTH)
    )
    strides = (c_int64 * 2)(LENGTH, 1)
    call = NsCall(
        what=NORM,
        ndim=2,
        threads=1,
        recipe=NsRecipe(axes=0b0010_0001, options=1, eps=EPS, gain=1.0),
        sizes=(c_int64 * 2)(SETS, LENGTH),
        x_strides=strides,
        y_strides=strides,
        x=addressof(x_),
        weight=addressof(weight_),
        bias=addressof(bias_),
        y=addressof(y_),
        stats=addressof(stats_),
    )
    if (result := run(call)) != DONE:
        return f"the forward call returned {result}"
    call.what, call.dy = NORM_BACKWARD, addressof(dy_)
    call.dx, call.dweight, call.dbias = map(addressof, (dx_, dweight_, dbias_))
    if (result := run(call)) != DONE:
        return f"the backward call returned {result}"

    expected = _layer_norm(x, dy, weight, bias)
    for name, array in (("y", y_), ("dx", dx_), ("dweight", dweight_), ("dbias", dbias_)):
        errors = [abs(got - value) for got, value in zip(array, expected[name], strict=True)]
        off = [error for error in errors if not error <= TOLERANCE]  # so written that NaN is off too
        if off:
            return f"{len(off)} values of {name} of a layer norm are off, the first by {off[0]:.3g}"
    return ""


def _floats(values: list[float]) -> Array[c_float]:
    return (c_float * len(values))(*values)


def _layer_norm(
    x: list[float], dy: list[float], weight: list[float], bias: list[float]
) -> dict[str, list[float]]:
    """y = weight (x - mean) / D + bias with D = sqrt(variance + eps), and the gradients of y . dy."""
    y: list[float] = []
    dx: list[float] = []
    dweight, dbias = [0.0] * LENGTH, [0.0] * LENGTH
    for begin in range(0, len(x), LENGTH):
        row, grad = x[begin : begin + LENGTH], dy[begin : begin + LENGTH]
        mean = math.fsum(row) / LENGTH
        denominator = math.sqrt(math.fsum((v - mean) ** 2 for v in row) / LENGTH + EPS)
        xhat = [(v - mean) / denominator for v in row]
        g = [w * d for w, d in zip(weight, grad, strict=True)]
        g_mean = math.fsum(g) / LENGTH
        g_xhat = math.fsum(a * b for a, b in zip(g, xhat, strict=True)) / LENGTH
        y += [w * v + b for w, v, b in zip(weight, xhat, bias, strict=True)]
        dx += [(a - g_mean - v * g_xhat) / denominator for a, v in zip(g, xhat, strict=True)]
        dweight = [total + d * v for total, d, v in zip(dweight, grad, xhat, strict=True)]
        dbias = [total + d for total, d in zip(dbias, grad, strict=True)]
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
