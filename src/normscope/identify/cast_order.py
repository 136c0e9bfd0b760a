"""The order of casts in half precision, told by bit patterns: where the weight is applied, in which arithmetic.

On bfloat16 inputs and parameters three orders give different last bits (q rounds to bfloat16, n is the normalized x):

- ``before``: q((offset + weight) n + bias): all in float32, rounded once (PyTorch's own layers, Gemma)
- ``after``: q(q((offset + weight)) q(n)), then q(. + bias): rounded before the weight (Llama, T5)
- in bfloat16 itself: statistics and all in 8 bits; neither pattern comes out

Some layers round their statistics to the dtype of their parameters (PyTorch's batch norm on the CPU): where bfloat16
parameters give neither pattern, float32 parameters with bfloat16 inputs are tried too.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from normscope import reference
from normscope.identify.module_box import Array, ModuleBox, tensors_of
from normscope.identify.result import Evidence
from normscope.spec import Cast, NormSpec, RunningState

ALL = 0.98
"""share of elements with the same bits: float32 inside leaves a near tie in one of thousands to chance, one more
rounding to 8 bits changes about every third"""
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
    """The casts of a module on bfloat16 inputs whose gain and bias are what is given; None for neither order.

    ``float32_in_float64``: whether casts to float32 run also on float64 inputs, so that float32 is meant by name.
    """
    random = np.random.default_rng(31)
    counts = {"before": 0, "after": 0}
    total, worst = 0, 0.0
    for _ in range(DRAWS):
        x = rounded(random.standard_normal(half.shape) * 2 + 0.5)
        y = rounded(half(x))
        told = spec.replace(eps=2.0**-23) if spec.eps is None else spec
        once = rounded(reference.forward(x, told, weight, bias, running=running, training=training))
        bare = rounded(reference.forward(x, told, running=running, training=training) / spec.gain)
        gains = _spread(told, weight, x.shape, spec.weight_offset, spec.gain)
        twice = rounded(rounded(gains) * bare)
        if bias is not None:
            twice = rounded(twice + _spread(told, bias, x.shape, 0.0, 1.0, what="bias"))
        counts["before"] += int(np.sum(y == once))
        counts["after"] += int(np.sum(y == twice))
        total += y.size
        worst = max(worst, float(np.max(np.abs(y - once)) / max(float(np.max(np.abs(once))), math.ulp(0))))
    shares = {f"same bits, weight {order}": count / total for order, count in counts.items()}
    parameters = dtype_of_parameters(half)
    probe = f"{DRAWS} random bfloat16 inputs to a copy with random gains, parameters in {parameters}"
    before, after = (counts[order] / total for order in ("before", "after"))
    compute = "float32" if float32_in_float64 else None
    if before >= ALL:
        what = f"{parameters} parameters: it computes in float32 and rounds once, after the weight"
        return Cast(compute, "before"), Evidence(what, probe, shares)
    if after >= ALL:
        what = f"{parameters} parameters: it computes in float32, casts back, then applies the weight"
        return Cast(compute, "after"), Evidence(what, probe, shares)
    what = (
        f"{parameters} parameters: it rounds to 8 bits on the way to its output, in neither of the two orders"
    )
    return None, Evidence(what, probe, shares | {"largest error": worst})


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


def _spread(
    spec: NormSpec,
    value: Array | None,
    shape: tuple[int, ...],
    offset: float,
    gain: float,
    what: str = "weight",
) -> Array:
    """A parameter at every element of the input."""
    if value is None:
        return np.full(shape, gain)
    flat = spec.replace(
        weight=getattr(spec, what), bias=None, weight_offset=offset if what == "weight" else 0.0, gain=1.0,
        center=False, scale="rms", correction=0, eps=0.0, eps_at="variance", running=None,
    )  # fmt: skip
    ones = reference.forward(np.ones(shape), flat, value)  # a set of ones has mean square 1
    return gain * ones
