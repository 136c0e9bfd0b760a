"""Exactness of whatever path runs, over specifications, shapes, strides and dtypes: against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import normscope as ns
from normscope import reference
from normscope.spec import Cast, NormSpec, families

SPECS = {
    "batch": (families.batch_norm(running=False), (2, 5)),
    "layer": (families.layer_norm(), (1, 5)),
    "layer l d": (families.layer_norm("l d"), (2, 5)),
    "layer c h w": (NormSpec("b c h w -> b", weight="c h w", bias="c h w"), (4, 4)),
    "channels first": (families.channels_first_layer_norm(), (2, 5)),
    "group": (families.group_norm(3), (2, 5)),
    "instance": (families.instance_norm(weight=True, bias=True, running=False), (3, 5)),
    "rms": (families.rms_norm(eps=1e-6), (1, 5)),
    "gemma": (families.gemma_rms_norm(), (1, 4)),
    "pixel": (families.pixel_norm(), (2, 5)),
    "scale": (families.scale_norm(), (1, 4)),
    "l2": (families.l2_normalize(), (1, 4)),
    "td": (families.td_batch_norm(running=False), (3, 5)),
    "through time": (families.batch_norm_through_time(running=False), (3, 5)),
    "td layer": (families.td_layer_norm(per_step=True), (3, 5)),
    "unbiased": (families.layer_norm().replace(correction=1), (2, 4)),
    "eps outside": (families.layer_norm().replace(eps_at="std", eps=1e-3), (2, 4)),
}
HALF = (torch.bfloat16, torch.float16)


@dataclass
class Problem:
    spec: NormSpec
    x: Tensor
    parameters: list[Tensor | None]
    dy: Tensor


def repr_of(case: Problem) -> str:
    x, dy = case.x, case.dy
    return (
        f"{case.spec!r} on {tuple(x.shape)} at {x.stride()}, {x.dtype}, mean {x.mean()}, parameters {case.parameters}, "
        f"dy {dy.flatten()[:3]} at {dy.stride()}"
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A specification, an input somewhere in memory, its parameters and a gradient of the output."""
    spec, (low, high) = SPECS[draw(st.sampled_from(sorted(SPECS)))]
    ndim = draw(st.integers(low, high))
    size = st.one_of(st.integers(1, 5), st.sampled_from([16, 21, 33, 64, 70]))
    shape = [draw(size) if i >= ndim - 2 else draw(st.integers(1, 5)) for i in range(ndim)]
    for i, group in enumerate(spec.pattern.left):
        if len(group) > 1:
            shape[i] = 3 * draw(st.integers(1, 5))
    if spec.correction and shape[-1] < 2:
        shape[-1] = 2
    dtype = draw(st.sampled_from([torch.float32, torch.float64, *HALF]))
    mean = draw(st.sampled_from([0.0, 1.0, 1e4])) if dtype not in HALF else draw(st.sampled_from([0.0, 3.0]))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    order = draw(st.permutations(range(ndim)))
    gap = draw(st.integers(1, 2))
    whole = torch.randn([*(shape[i] for i in order), gap], generator=noise, dtype=torch.float64) + mean
    x = whole.to(dtype)[..., 0].permute([order.index(i) for i in range(ndim)])
    if draw(st.integers(0, 5)) == 0:
        x = x[:1].expand(shape)
    bound = spec.bind(shape)
    parameters = [
        None if s is None else (torch.randn(s, generator=noise, dtype=torch.float64) + 1).to(dtype)
        for s in (bound.weight_shape, bound.bias_shape)
    ]
    dy = torch.randn(shape, generator=noise, dtype=torch.float64).to(dtype)
    return Problem(spec, x, parameters, dy.sum().expand(shape) if draw(st.integers(0, 5)) == 0 else dy)


def exact(t: Tensor | None) -> np.ndarray | None:
    return None if t is None else t.detach().double().numpy()


def off(found: Tensor, true: np.ndarray, terms: float) -> float:
    """Error by the largest true value; ``terms`` is the size of what cancels, where all does. A value beyond the dtype
    is infinite."""
    have, want = exact(found).ravel(), true.ravel()
    beyond = np.abs(want) > torch.finfo(found.dtype).max
    assert not (beyond & np.isfinite(have)).any()
    have, want = have[~beyond], want[~beyond]
    largest = max(float(np.abs(want).max(initial=0.0)), terms)
    return float(np.abs(have - want).max(initial=0.0)) / largest if largest else 0.0


@given(problems())
@settings(max_examples=400, deadline=None)
def test_values_and_gradients(case: Problem) -> None:
    spec, dy = case.spec, case.dy
    x, weight, bias = (None if t is None else t.detach().requires_grad_() for t in (case.x, *case.parameters))
    assert x is not None
    y = ns.normalize(x, spec, weight, bias)
    wanted = [t for t in (x, weight, bias) if t is not None]
    found = torch.autograd.grad(y, wanted, dy)
    arguments = (exact(x), spec, exact(weight), exact(bias))
    true_y = reference.forward(*arguments)
    true = [g for g in reference.vjp(exact(dy), *arguments) if g is not None]

    half = x.dtype in HALF
    # float32: what is promised, 1e-6 of the largest value; float64: what the reference is good for, which adds up
    # to 1e5 terms one after the other; half types: the rounding of the output and one step of it
    single = x.dtype == torch.float32 or spec.cast.compute == "float32"
    allowed = torch.finfo(x.dtype).eps * 1.5 if half else 1e-6 if single else 1e-11
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    if ns.kernels.status().isa:  # plain PyTorch lays a result out as its arithmetic does
        assert steps(y) == steps(torch.empty_like(x))
    scale = float(dy.abs().max()) * (1 if weight is None else 1 + float(weight.detach().abs().max()))
    # A set of one element, or a constant one, has no deviation: a gradient is then what is left of terms that cancel,
    # each some dy * weight / sqrt(eps).
    v = statistics_of(spec, exact(x))
    steep = 1 / max(
        float(np.sqrt(v.min(initial=1.0))),
        float(spec.eps or 1e-16) ** (0.5 if spec.eps_at == "variance" else 1),
    )
    assert off(y, true_y, 0.0) <= allowed
    # A gradient of parameters is a sum of many, and may come out small: it is measured by what such a sum usually is,
    # or where it cancels (that of a weight, where dy is the same everywhere) by the sum of what cancels.
    n = x.numel() / max(1, 0 if weight is None else weight.numel())
    for i, (have, want) in enumerate(zip(found, true, strict=True)):
        cancels = float(np.abs(want).max(initial=0.0)) < scale
        terms = scale * (steep if i == 0 else n if cancels else n**0.5)
        assert off(have, want, terms) <= allowed, (i, repr_of(case))


def steps(t: Tensor) -> list[int]:
    """Strides that mean something."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def statistics_of(spec: NormSpec, x: np.ndarray) -> np.ndarray:
    return np.asarray(reference.statistics(x, spec)[1], dtype=float)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("name", [name for name, (spec, _) in SPECS.items() if spec.center])
@given(value=st.sampled_from([1e6, -3.3, 1e-20, 6e4, 0.1]), seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None)
def test_a_constant_set_gives_exactly_the_bias(
    name: str, dtype: torch.dtype, value: float, seed: int
) -> None:
    spec, (_, high) = SPECS[name]
    shape = [3, 6, 7, 5, 4][:high]
    noise = torch.Generator().manual_seed(seed)
    x = torch.full(shape, value, dtype=torch.float64).to(dtype)
    if not torch.isfinite(x).all():
        return
    bound = spec.bind(shape)
    weight = (
        None if bound.weight_shape is None else torch.randn(bound.weight_shape, generator=noise).to(dtype)
    )
    bias = None if bound.bias_shape is None else torch.randn(bound.bias_shape, generator=noise).to(dtype)
    y = ns.normalize(x, spec, weight, bias)
    zero = None if bias is None else torch.zeros_like(bias)
    alone = ns.normalize(torch.zeros_like(x), spec, weight, bias)  # of zeros there is nothing to subtract
    assert torch.equal(y, alone)
    assert not ns.normalize(x, spec, weight, zero).any()


@pytest.mark.parametrize("cast", [Cast(), Cast(weight="after")], ids=["before", "after"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_weights_before_and_after_the_cast(dtype: torch.dtype, cast: Cast) -> None:
    torch.manual_seed(0)
    spec = families.rms_norm(eps=1e-6, cast=cast)
    x, weight = torch.randn(8, 768).to(dtype), torch.randn(768).to(dtype)
    xhat = x.float() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
    want = xhat.to(dtype) * weight if cast.weight == "after" else (xhat * weight.float()).to(dtype)
    got = ns.normalize(x, spec, weight)
    assert (got != want).float().mean() < 0.01  # a float32 rounding of xhat that falls on the other side
