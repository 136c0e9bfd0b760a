"""RMS norm: its formula and gradient, what it does not remove, and what half precision does to its sum of squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from normscope import reference
from normscope.reading import read_call, spec_of
from normscope.verify.evidence import Evidence
from normscope.verify.float64 import ULP, convention, gap, normal, numpy, tensor

TOPIC = "RMS norm"
X, EPS = [3.0, -4.0, 12.0], 1e-3
FEW = "a dozen rounded operations on either side, on numbers of at most 2"


def _layer(size: int = 3, eps: float | None = EPS) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=eps, dtype=torch.float64)


def _evidence(claim: str, layer: nn.RMSNorm, **rest: Any) -> Evidence:
    rest = {"input": X, "tolerance": 64 * ULP, "because": FEW, **rest}
    return Evidence(topic=TOPIC, claim=claim, convention=convention(layer), eps=layer.eps, **rest)


def formula() -> Iterator[Evidence]:
    layer = _layer()
    y = numpy(layer(tensor(X)))
    by_hand = np.array(X) / np.sqrt(169 / 3 + EPS)
    yield _evidence(
        "y = x / sqrt(mean(x^2) + eps), and mean(x^2) = 169/3",
        layer,
        measured=max(gap(y, by_hand), gap(y, reference.forward(X, spec_of(layer)))),
        result={"output": y.tolist()},
    )


def gradient() -> Iterator[Evidence]:
    layer = _layer()
    with torch.no_grad():
        layer.weight.copy_(tensor([0.5, -2.0, 1.5]))
    x, g = tensor(X).requires_grad_(), tensor([1.0, -1.0, 2.0])
    dx, dw = torch.autograd.grad(layer(x), [x, layer.weight], g)
    expected = reference.vjp(numpy(g), X, spec_of(layer), numpy(layer.weight))
    yield _evidence(
        "the gradient is (h - x_hat mean(h x_hat)) / rms with h = weight * g, and g * x_hat for the weight",
        layer,
        measured=max(gap(dx, expected[0]), gap(dw, expected[1])),
        result={"dx": dx.tolist(), "dweight": dw.tolist()},
        tolerance=4 * 64 * ULP,
        because="two dozen rounded operations on either side, on numbers of at most 4",
    )


def shift_is_kept() -> Iterator[Evidence]:
    layer = _layer()
    yield _evidence(
        "RMS norm does not center: a common shift shows in its output",
        layer,
        input=[X, [value + 10 for value in X]],
        measured=gap(layer(tensor(X)), layer(tensor(X) + 10)),
        tolerance=0.1,
        because="a change that nobody would call rounding",
        at_least=True,
    )


def eps_of_the_dtype() -> Iterator[Evidence]:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        layer = _layer(eps=None).to(dtype)
        compute = torch.promote_types(dtype, torch.float32)
        eps = torch.finfo(compute).eps
        x = torch.tensor([eps**0.5, -(eps**0.5), eps**0.5], dtype=dtype)
        values = numpy(x)
        y = numpy(layer(x))
        yield _evidence(
            f"eps=None on {_name(dtype)} is the machine epsilon of {_name(compute)}",
            layer,
            input=values.tolist(),
            measured=gap(y, values / np.sqrt(np.mean(values**2) + eps)),
            tolerance=8 * torch.finfo(dtype).eps,
            because="eight rounded operations on numbers of at most 1",
            result={"eps": eps, "output": y.tolist()},
        )


def half_precision_accumulates_in_single() -> Iterator[Evidence]:
    n, level = 4096, 300.0
    for dtype in (torch.float16, torch.bfloat16):
        x = (level * (1 + 0.1 * normal(n, seed=0))).to(dtype)
        y = functional.rms_norm(x, (n,), eps=EPS)
        call = read_call(functional.rms_norm, (x, (n,)), {"eps": EPS})
        assert call is not None
        expected = reference.forward(numpy(x), call.spec)
        largest = float(np.max(np.abs(expected)))
        yield Evidence(
            TOPIC,
            f"on {_name(dtype)} the squares are summed in float32, and only the output is rounded",
            f"{n} numbers, {level:g} * (1 + 0.1 * standard normal), seed 0, in {_name(dtype)}",
            f"{call.type_name}: {call.spec}",
            EPS,
            measured=gap(y, expected),
            tolerance=largest * (torch.finfo(dtype).eps / 2 + n**0.5 * torch.finfo(torch.float32).eps),
            because=f"half a unit of {_name(dtype)} at {largest:.3g}, and sqrt({n}) roundings of float32",
            result={
                "sum of squares": float(np.sum(numpy(x) ** 2)),
                f"the same summed one by one in {_name(dtype)}": _summed_one_by_one(x * x),
                f"largest {_name(dtype)}": torch.finfo(dtype).max,
            },
        )


def _summed_one_by_one(values: torch.Tensor) -> float:
    """What a loop in the dtype itself gives: it overflows, or stops moving."""
    total = values.new_zeros(())
    for value in values:
        total = total + value
    return float(total)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CHECKS: tuple[Callable[[], Iterator[Evidence]], ...] = (
    formula,
    gradient,
    shift_is_kept,
    eps_of_the_dtype,
    half_precision_accumulates_in_single,
)
