"""The order of casts in half precision, told by bit patterns: where the weight is applied, in which arithmetic.

On bfloat16 inputs and parameters these orders give different last bits (q rounds to bfloat16, n is the normalized x):

- ``before``: q((offset + weight) n + bias): all in float32, rounded once (PyTorch's own layers, Gemma)
- ``after``: q(q((offset + weight)) q(n)), then q(. + bias): rounded before the weight (Llama, T5)
- statistics rounded: float32, but mean and denominator pass through bfloat16 (PyTorch's batch norm on the CPU with
  bfloat16 parameters)
- in bfloat16 itself: statistics and all in 8 bits; no pattern comes out
"""

from __future__ import annotations

import numpy as np
import torch

from normscope import reference
from normscope.identify.module_box import Array, ModuleBox, tensors_of
from normscope.identify.result import Evidence
from normscope.spec import Cast, NormSpec, RunningState

ALL = 0.98
"""share of elements with the same bits: float32 inside leaves a near tie in one of thousands to chance, one more
rounding to 8 bits changes about every third"""
ONE_ROUNDING = 0.33
"""bits: one rounding leaves 0.29, two leave 0.4"""
DRAWS = 8


def cast_order(
    half: ModuleBox,
    spec: NormSpec,
    weight: Array | None,
    bias: Array | None,
    running: RunningState | None,
    training: bool,
    float32_in_float64: bool,
) -> tuple[Cast | None, Evidence]:
    """The casts of a module on bfloat16 inputs whose gain and bias are what is given; None for no known order.

    ``float32_in_float64``: whether casts to float32 run also on float64 inputs, so that float32 is meant by name.
    """
    random = np.random.default_rng(31)
    told = spec.replace(eps=2.0**-23) if spec.eps is None else spec
    gains = _spread(told, weight, half.shape, told.weight_offset, "weight")
    shifts = _spread(told, bias, half.shape, 0.0, "bias") if bias is not None else np.zeros(half.shape)
    same: dict[str, list[float]] = {}
    left: list[float] = []
    for _ in range(DRAWS):
        x = rounded(random.standard_normal(half.shape) * 2 + 0.5)
        y = rounded(half(x))
        exact = reference.forward(x, told, running=running, training=training) / told.gain
        patterns = {
            "weight before": rounded(exact * gains + shifts),
            "weight after": rounded(rounded(gains) * rounded(exact)),
        }
        if bias is not None:
            patterns["weight after"] = rounded(patterns["weight after"] + shifts)
        if training and (rest := _left_by_one_rounding(told, x, y, gains, shifts)) is not None:
            left.append(float(np.mean(rest**2)))
        for name, expected in patterns.items():
            same.setdefault(name, []).append(float(np.mean(y == expected)))
    shares = {name: float(np.mean(values)) for name, values in same.items()}
    parameters = dtype_of_parameters(half)
    probe = f"{DRAWS} random bfloat16 inputs to a copy with random gains, parameters in {parameters}"
    found = next((name for name, share in shares.items() if share >= ALL), "")
    numbers = {f"same bits, {name}": share for name, share in shares.items()}
    if not found and left:
        numbers["last bits left where each set's statistics are fitted"] = rms = float(np.sqrt(np.mean(left)))
        found = "statistics rounded" if rms <= ONE_ROUNDING else ""
    evidence = Evidence(f"{parameters} parameters: {_WORDS[found]}", probe, numbers)
    if not found:
        return None, evidence
    compute = "float32" if float32_in_float64 else None
    return Cast(compute, "after" if found == "weight after" else "before"), evidence


_WORDS = {
    "weight before": "it computes in float32 and rounds once, after the weight",
    "weight after": "it computes in float32, casts back, then applies the weight",
    "statistics rounded": "its mean and denominator are rounded, the rest is float32 and rounded once",
    "": "it rounds to 8 bits on the way to its output, in no order that is known",
}


def _left_by_one_rounding(spec: NormSpec, x: Array, y: Array, gains: Array, shifts: Array) -> Array | None:
    """What is left of y, in units of its last bit, where each set has the mean and the scale that fit it best.

    One rounding leaves errors that are uniform on half a bit, of root mean square 1 / sqrt(12), whatever statistics
    were used; a second rounding on the way adds to them. They are scaled up for the numbers that were fitted.
    """
    bound = spec.bind(x.shape)
    if bound.ragged or spec.whiten or bound.set_size < 4 or not gains.all():
        return None
    erased = tuple(i for i, axis in enumerate(bound.axes) if not axis.kept)
    grid = [a.reshape(bound.shape) for a in (x, (y - shifts) / gains, 2.0**-7 * _power(y) / gains)]
    u, z, bit = grid
    weight = 1 / bit**2

    def mean(a: Array) -> Array:
        average: Array = (weight * a).sum(erased, keepdims=True) / weight.sum(erased, keepdims=True)
        return average

    level = (mean(u), mean(z)) if spec.center else (0.0, 0.0)
    slope = mean((u - level[0]) * (z - level[1])) / mean((u - level[0]) ** 2)
    free = bound.set_size - 1 - int(spec.center)
    left: Array = (z - level[1] - slope * (u - level[0])) / bit * np.sqrt(bound.set_size / free)
    return left


def _power(y: Array) -> Array:
    """The power of two at or below each number."""
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(y), 1e-30))))


def dtype_of_parameters(box: ModuleBox) -> str:
    """``"bfloat16"`` or ``"float32"``; of a module without parameters that of its input."""
    dtypes = {tensor.dtype for tensor in tensors_of(box.module).values() if tensor.is_floating_point()}
    return str(next(iter(dtypes)) if len(dtypes) == 1 else box.dtype).removeprefix("torch.")


def rounded(values: Array) -> Array:
    """To the nearest bfloat16, ties to even, through float32 as everywhere."""
    exact: Array = (
        torch.from_numpy(np.asarray(values, dtype=np.float64)).to(torch.float32).bfloat16().double().numpy()
    )
    return exact


def _spread(spec: NormSpec, value: Array | None, shape: tuple[int, ...], offset: float, what: str) -> Array:
    """A gain or a bias at every element of the input; a gain times the fixed one."""
    gain = spec.gain if what == "weight" else 1.0
    if value is None:
        return np.full(shape, gain)
    flat = spec.replace(
        weight=getattr(spec, what), bias=None, weight_offset=offset, gain=gain,
        center=False, scale="rms", correction=0, eps=0.0, eps_at="variance", running=None,
    )  # fmt: skip
    return reference.forward(np.ones(shape), flat, value)  # a set of ones has mean square 1
