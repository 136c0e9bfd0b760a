"""Native kernels of columns: the innermost axis in memory is kept, against the float64 reference.

Batch, group and instance norm of channels-last tensors, channels-first layer norm, pixel norm. The shapes are those
at which the kernels change their way: planes that one task finishes and planes read in chunks, lines narrower than a
pack (folded, with a rest), several tiles, parts of packs, lines apart in memory, parameters along lines and outer axes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normscope import reference
from normscope.kernels import library, ops
from normscope.kernels.layout import call, kernel, runs
from normscope.spec import Cast, NormSpec, families

pytestmark = pytest.mark.skipif(library.LIBRARY is None or not ops, reason="no native kernels here")

KERNELS = torch.ops.normscope
DX, DWEIGHT, DBIAS = 1, 2, 4

# Error over the largest value of the reference. float32: roundings of xhat, factor, y and of products with dy (4 of
# 2^-24), and of sums of 64 lines, whose errors are random: as much again. float64: that of the reference is the larger
# part, sums of 1e5 terms. Half types: their own rounding, and what float32 adds to it.
ROOM = {
    torch.float32: 8 * 2.0**-24,
    torch.float64: 200 * 2.0**-53,
    torch.bfloat16: 2.0**-8,
    torch.float16: 1.001 * 2.0**-11,
}
DTYPES = tuple(ROOM)

BATCH = families.batch_norm().replace(running=None)
GROUP, INSTANCE = families.group_norm(4), families.instance_norm(weight=True, bias=True)
FIRST = NormSpec("b c h w -> b h w", weight="c", bias="c")
PIXEL = families.pixel_norm()
STEPS = NormSpec("t b c h w -> t c", weight="t c", bias="t c")
RESPONSE = NormSpec("b c h w -> b c", weight="c", bias="c", center=False, scale="rms")

Case = tuple[NormSpec, tuple[int, ...]]
CASES: dict[str, Case] = {
    "finished by one task": (INSTANCE, (9, 64, 9, 7)),
    "tiles finished by one task": (BATCH, (40, 1003)),
    "chunks": (BATCH, (16, 64, 28, 28)),
    "chunks of parts of packs": (BATCH, (1500, 1003)),
    "folded": (BATCH, (4, 21, 9, 7)),
    "folded chunks": (BATCH, (3, 3, 113, 97)),
    "folded to one line": (BATCH, (13, 6)),
    "two columns": (BATCH, (4001, 2)),
    "one line": (BATCH, (1, 70)),
    "groups": (GROUP, (9, 64, 14, 14)),
    "groups of one sample": (GROUP, (1, 64, 50, 50)),
    "groups folded": (GROUP, (3, 20, 9, 7)),
    "groups of forty": (families.group_norm(8), (2, 320, 16, 16)),
    "groups of two": (families.group_norm(16), (2, 32, 5, 5)),
    "planes in chunks": (INSTANCE, (2, 64, 70, 70)),
    "instances folded": (INSTANCE, (2, 21, 30, 31)),
    "parameters along lines": (FIRST, (4, 96, 14, 14)),
    "parameters along lines, parts": (FIRST, (3, 37, 7, 7)),
    "parameters along lines, tiles": (FIRST, (2, 65, 40, 40)),
    "parameters of each element": (NormSpec("b c l -> b l", weight="c l", bias="c l"), (6, 70, 37)),
    "parameters of each element, tiles": (NormSpec("b c l -> b l", weight="c l", bias="c l"), (2, 5, 1700)),
    "no parameters": (PIXEL, (4, 37, 9, 7)),
    "parameters along outer axes": (STEPS, (5, 4, 24, 9, 7)),
    "parameters along outer axes, chunks": (STEPS, (2, 3, 64, 40, 40)),
    "one parameter for all": (NormSpec("b c ... -> c", weight="", bias=""), (6, 40, 5, 5)),
    "a parameter a group": (
        NormSpec("b (g c) ... -> b g", weight="g", bias="g", sizes={"g": 4}),
        (6, 40, 5, 5),
    ),
    "not centered": (RESPONSE, (4, 40, 9, 7)),
    "not centered, folded": (RESPONSE, (4, 21, 9, 7)),
}
by_case = pytest.mark.parametrize(("spec", "shape"), CASES.values(), ids=CASES.keys())
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Codes(NamedTuple):
    """What follows the tensors in a call of an operator."""

    axes: int
    split: int
    options: int
    eps: float
    gain: float
    offset: float


def codes(spec: NormSpec, ndim: int, stored: bool = False) -> Codes:
    c = call(spec, ndim)
    assert c.unserved == ""
    assert c.eps is not None
    return Codes(c.stored_axes if stored else c.axes, c.split, c.options, c.eps, c.gain, c.offset)


class Problem(NamedTuple):
    spec: NormSpec
    x: Tensor
    dy: Tensor
    weight: Tensor | None
    bias: Tensor | None


def laid_out(spec: NormSpec, t: Tensor) -> Tensor:
    """Channels last, where the channels are kept."""
    channels = next((axis.dim for axis in spec.bind(t.shape).axes if axis.kept and axis.name in "cg"), -1)
    return t.movedim(channels, -1).contiguous().movedim(-1, channels)


def problem(
    spec: NormSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    level: float = 0.5,
    weight_dtype: torch.dtype | None = None,
) -> Problem:
    torch.manual_seed(0)
    bound = spec.bind(shape)

    def normal(size: tuple[int, ...] | None) -> Tensor | None:
        return (
            None
            if size is None
            else torch.randn(size, dtype=torch.float64).add(0.5).to(weight_dtype or dtype)
        )

    x, dy = (
        laid_out(spec, torch.randn(shape, dtype=torch.float64).add(mean).to(dtype)) for mean in (level, 0.25)
    )
    assert kernel(runs(spec, shape, x.stride())) == "columns"
    return Problem(spec, x, dy, normal(bound.weight_shape), normal(bound.bias_shape))


def forward(p: Problem) -> tuple[Tensor, Tensor]:
    y, stats = KERNELS.norm(p.x, p.weight, p.bias, *codes(p.spec, p.x.ndim))
    assert y.stride() == p.x.stride()
    return y, stats


def gradients(p: Problem, stats: Tensor, want: int = DX | DWEIGHT | DBIAS, dsum: Tensor | None = None) -> Any:
    return KERNELS.norm_backward(p.dy, dsum, p.x, stats, p.weight, *codes(p.spec, p.x.ndim), want)


def all_of(p: Problem) -> dict[str, Tensor]:
    y, stats = forward(p)
    want = DX | DWEIGHT * (p.weight is not None) | DBIAS * (p.bias is not None)
    found = dict(zip(("dx", "dweight", "dbias"), gradients(p, stats, want), strict=True))
    return {"y": y, "stats": stats, **{name: t for name, t in found.items() if t.numel()}}


def truth(p: Problem) -> dict[str, Any]:
    x, dy, weight, bias = (None if t is None else t.double().numpy() for t in (p.x, p.dy, p.weight, p.bias))
    dx, dweight, dbias = reference.vjp(dy, x, p.spec, weight, bias)
    return {"y": reference.forward(x, p.spec, weight, bias), "dx": dx, "dweight": dweight, "dbias": dbias}


def error(found: Tensor, expected: Any, scale: float = 0.0) -> float:
    """NaN where one of the two is not finite and the other is."""
    difference = np.abs(found.double().numpy().reshape(np.shape(expected)) - expected)
    return float(difference.max() / max(np.abs(expected).max(), scale, 1e-300))


def check(p: Problem, room: float) -> None:
    found, expected = all_of(p), truth(p)
    # A parameter's gradient is a sum, whose rounding goes with the size of its terms: where they cancel, the root of
    # their number says how large it could have been.
    uses = p.x.numel() / max(1, found["dweight"].numel() if "dweight" in found else 1)
    for name, value in found.items():
        if name != "stats":
            scale = uses**0.5 if name in ("dweight", "dbias") else 0
            assert error(value, expected[name], scale) <= room, name


# ---- laws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_case
def test_a_constant_set_gives_exactly_the_bias(dtype, spec, shape):
    p = problem(spec, shape, dtype)
    for value in (3.3, 1e6) if spec.center else ():
        y, stats = forward(p._replace(x=torch.full_like(p.x, value)))
        alone = forward(p._replace(x=torch.zeros_like(p.x)))[0]
        assert torch.equal(y, alone)
        assert torch.equal(stats[2], torch.zeros_like(stats[2]))
        if p.bias is not None and spec in (BATCH, GROUP, INSTANCE, FIRST):
            bias = p.bias.view(-1, *[1] * (len(shape) - 2))
            assert torch.equal(y, bias.expand(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_case
def test_the_same_bits_for_any_number_of_threads(dtype, spec, shape):
    p = problem(spec, shape, dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(all_of(p))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in results[0])


@pytest.mark.parametrize(
    "name", ["finished by one task", "chunks", "groups folded", "parameters along lines"]
)
def test_residual_and_norm_is_the_norm_of_the_rounded_sum(name):
    p = problem(*CASES[name], torch.bfloat16)
    y, total, stats = KERNELS.add_norm(p.x, p.dy, p.weight, p.bias, *codes(p.spec, p.x.ndim))
    assert torch.equal(total, p.x + p.dy)
    apart = forward(p._replace(x=total))
    assert torch.equal(y, apart[0])
    assert torch.equal(stats, apart[1])


@pytest.mark.parametrize(
    "name", ["finished by one task", "chunks", "groups folded", "parameters along lines"]
)
def test_what_is_not_wanted_changes_nothing_else(name):
    p = problem(*CASES[name], torch.float32)
    stats = forward(p)[1]
    everything = gradients(p, stats)
    for want in range(1, 8):
        for bit, (found, expected) in enumerate(zip(gradients(p, stats, want), everything, strict=True)):
            assert torch.equal(found, expected) if want >> bit & 1 else found.numel() == 0


@pytest.mark.parametrize(
    "name", ["finished by one task", "chunks", "groups folded", "parameters along lines"]
)
def test_a_gradient_from_elsewhere_is_added_before_rounding(name):
    p = problem(*CASES[name], torch.bfloat16)
    dsum = p.dy.flip(0).clone()
    found = gradients(p, forward(p)[1], DX, dsum)[0]
    assert error(found, truth(p)["dx"] + dsum.double().numpy()) <= ROOM[torch.bfloat16]


# ---- poison


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@by_dtype
@pytest.mark.parametrize(
    "shape", [(9, 64, 9, 7), (16, 64, 28, 28), (4, 21, 9, 7), (13, 6), (40, 1003)], ids=str
)
def test_a_column_with_a_value_that_is_not_finite_is_nan_and_no_other(bad, dtype, shape):
    for at in (0, -1):
        p = problem(BATCH, shape, dtype)
        p.x[(at, 3, *[at] * (len(shape) - 2))] = bad
        y, stats = forward(p)
        dx, dweight, dbias = gradients(p, stats)
        others = torch.arange(shape[1]) != 3
        assert y[:, 3].isnan().all()
        assert dx[:, 3].isnan().all()
        assert y[:, others].isfinite().all()
        assert dx[:, others].isfinite().all()
        assert torch.equal(dweight.isfinite(), others)
        assert dbias.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(3, 20, 9, 7), (9, 64, 14, 14), (1, 64, 50, 50)], ids=str)
def test_a_group_with_a_value_that_is_not_finite_is_nan_and_no_other(bad, shape):
    p = problem(GROUP, shape, torch.float32)
    p.x[0, shape[1] // 2, -1, -1] = bad
    expected = torch.zeros(shape, dtype=torch.bool)
    expected[0, shape[1] // 2 : shape[1] // 2 + shape[1] // 4] = True
    y, stats = forward(p)
    assert torch.equal(y.isnan(), expected)
    assert torch.equal(gradients(p, stats, DX)[0].isnan(), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_mean_squares_that_are_not_finite_are_as_in_torch(bad):
    p = problem(PIXEL, (2, 37, 9, 7), torch.float32)
    p.x[0, 7, 3, 3] = bad
    expected = p.x * torch.rsqrt(p.x.square().mean(1, keepdim=True) + 1e-8)
    assert torch.equal(forward(p)[0].isnan(), expected.isnan())


def test_values_below_the_normal_range_are_not_flushed():
    p = problem(BATCH, (300, 40), torch.float32)
    p = p._replace(x=p.x * 2.0**-130, weight=torch.full((40,), 2.0**100), bias=torch.zeros(40))
    x = p.x.double()
    assert error(forward(p)[0], ((x - x.mean(0)) * 2.0**100 / 1e-5**0.5).numpy()) <= ROOM[torch.float32]


# Sets finished by one task, in chunks, folded with a rest, in groups, in groups folded, with parameters along lines.
RANGES = (
    "finished by one task",
    "chunks",
    "folded",
    "groups",
    "groups folded",
    "parameters along lines, parts",
    "not centered, folded",
)


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("scale", "eps"), [(1e20, 1e-5), (1e-21, 1e-44)], ids=["large", "small"])
def test_columns_whose_squares_leave_the_range_of_float32(scale, eps, dtype, name):
    spec, shape = CASES[name]
    p = problem(spec.replace(eps=eps), shape, dtype)
    p = p._replace(x=(p.x.double() * scale).to(dtype))
    found, expected = all_of(p), truth(p)
    for part in ("y", "dx"):
        assert error(found[part], expected[part]) <= ROOM[dtype], part
    if "dweight" in found:
        uses = (p.x.numel() / found["dweight"].numel()) ** 0.5
        assert error(found["dweight"], expected["dweight"], uses) <= ROOM[dtype]


@pytest.mark.parametrize("spec", [BATCH, GROUP], ids=str)
def test_one_value_whose_square_is_infinite_among_others_in_columns(spec):
    p = problem(spec, (3, 20, 5, 5), torch.float32)
    p.x[0, 7, 2, 2] = 1e20
    y, stats = forward(p)
    expected = truth(p)
    assert error(y, expected["y"]) <= ROOM[torch.float32]
    assert stats.isfinite().all()
    assert error(gradients(p, stats, DX)[0], expected["dx"]) <= ROOM[torch.float32]


def test_equal_values_whose_squares_are_below_float32_give_the_bias_in_columns():
    for spec in (BATCH, GROUP):
        p = problem(spec.replace(eps=1e-44), (3, 20, 5, 5), torch.float32)
        assert p.bias is not None
        y, stats = forward(p._replace(x=torch.full_like(p.x, 3.3e-21)))
        assert torch.equal(y, p.bias.view(-1, 1, 1).expand_as(y))
        assert torch.equal(stats[2], torch.zeros_like(stats[2]))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 140),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_nothing_beyond_a_line_is_read_or_written(dtype, samples, lines, width, before, after):
    """Lines apart in memory, misaligned, between values that would be seen."""
    spec = NormSpec("b l c -> b c", weight="c", bias="c")
    torch.manual_seed(width)
    pitch = before + width + after
    x, dy = (torch.full((samples, lines, pitch), float("nan"), dtype=dtype) for _ in range(2))
    inside = np.s_[:, :, before : before + width]
    x[inside], dy[inside] = (torch.randn(samples, lines, width).to(dtype) for _ in range(2))
    out = torch.full((samples, lines, pitch), 7.0, dtype=dtype)
    weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
    KERNELS.norm_out(x[inside], weight, bias, *codes(spec, 3), out[inside])
    p = Problem(spec, x[inside].clone(), dy[inside].clone(), weight, bias)
    y, stats = forward(p)
    room = (
        4 * ROOM[dtype]
    )  # of two results: lines that follow each other may be folded, which moves the last bits
    assert error(out[inside], y.double().numpy(), 1.0) <= room
    out[inside] = 7.0
    assert torch.equal(out, torch.full_like(out, 7.0))
    apart = gradients(p._replace(x=x[inside], dy=dy[inside]), stats)
    for found, expected in zip(apart, gradients(p, stats), strict=True):
        assert error(found, expected.double().numpy(), (samples * lines) ** 0.5) <= room


@pytest.mark.parametrize(
    ("shape", "spec"), [((0, 8), BATCH), ((0, 8, 4, 4), GROUP), ((2, 8, 0, 4), INSTANCE)]
)
def test_empty_tensors_have_zero_gradients_of_parameters(shape, spec):
    x, weight = torch.empty(shape), torch.ones(8)
    y, stats = KERNELS.norm(x, weight, None, *codes(spec, len(shape)))
    dx, dweight, dbias = KERNELS.norm_backward(x, None, x, stats, weight, *codes(spec, len(shape)), 7)
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros(8))
    assert torch.equal(dbias, torch.zeros(8))


# ---- numbers


@by_dtype
@by_case
def test_shapes_and_places_of_parameters(dtype, spec, shape):
    check(problem(spec, shape, dtype), ROOM[dtype])


@by_dtype
@pytest.mark.parametrize("width", [2, 3, 8, 16, 31, 33, 48, 64, 100, 257, 2051])
def test_columns_of_any_number(dtype, width):
    check(problem(BATCH, (70, width), dtype), ROOM[dtype])


@by_case
def test_a_mean_of_ten_thousand_deviations(spec, shape):
    check(problem(spec, shape, torch.float32, level=1e4), ROOM[torch.float32])


@pytest.mark.parametrize(
    "name", ["chunks", "groups of one sample", "instances folded", "parameters along lines"]
)
def test_a_mean_of_ten_thousand_deviations_in_float64(name):
    """Against longer numbers, where NumPy has them: the reference is in float64 too."""
    p = problem(*CASES[name], torch.float64, level=1e4)._replace(weight=None, bias=None)
    over = {"chunks": (0, 2, 3), "parameters along lines": (1,), "instances folded": (2, 3)}.get(
        name, (2, 3, 4)
    )
    x = p.x.numpy().astype(np.longdouble)
    if name == "groups of one sample":
        x = x.reshape(1, 4, 16, 50, 50)
    d = x - x.mean(over, keepdims=True)
    d -= d.mean(over, keepdims=True)
    expected = d / np.sqrt((d * d).mean(over, keepdims=True) + 1e-5)
    room = 8 * 2.0**-53 if np.finfo(np.longdouble).eps < 2.0**-60 else 1e-11
    assert error(forward(p)[0], expected.reshape(p.x.shape).astype(np.float64)) <= room


def test_a_million_lines():
    check(problem(BATCH, (1_000_003, 3), torch.float32, level=1e3), ROOM[torch.float32])


@pytest.mark.parametrize("shape", [(1000, 40), (1000, 21), (20_000, 64)], ids=str)
def test_first_lines_far_from_the_others(shape):
    """Squares are summed about the mean so far, which these pull away.

    Then nearly all terms of a sum are equal, and so are their roundings: of 64 terms up to 32 ulp, a quarter of that
    on average, and half of it in the root; and they may be four times what remains.
    """
    p = problem(BATCH, shape, torch.float32)
    p.x[:9] += 1e4
    p.x[100:] *= 1e-3
    assert error(forward(p)[0], truth(p)["y"]) <= ROOM[torch.float32] + 4 * 2.0**-23


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@by_dtype
@pytest.mark.parametrize("name", ["finished by one task", "folded", "parameters along lines, parts"])
def test_parameters_of_another_dtype(dtype, weight_dtype, name):
    check(problem(*CASES[name], dtype, weight_dtype=weight_dtype), max(ROOM[dtype], ROOM[weight_dtype]))


@pytest.mark.parametrize(
    "change",
    [
        {"weight_offset": 1.0},
        {"gain": 0.7},
        {"weight_offset": 1.0, "gain": -2.0},
        {"eps_at": "std", "eps": 1e-3},
        {"eps_at": "max", "eps": 0.5},
        {"eps_at": "max", "eps": 3.0},
        {"correction": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["finished by one task", "folded", "groups folded", "parameters along lines"]
)
def test_conventions(change, name):
    spec, shape = CASES[name]
    check(problem(spec.replace(**change), shape, torch.float32), ROOM[torch.float32])


@pytest.mark.parametrize("scale", ["rms", "l2"])
def test_scales_without_a_mean(scale):
    spec = NormSpec("o i ... -> i", weight="i", center=False, scale=scale, eps=1e-6)
    x = torch.randn(9, 40, 3, 3).contiguous(memory_format=torch.channels_last)
    p = Problem(spec, x, torch.randn_like(x), torch.randn(40), None)
    check(p, ROOM[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["not centered", "not centered, folded", "parameters along lines"])
def test_xhat_rounded_before_the_weight(dtype, name):
    spec, shape = CASES[name]
    spec = spec.replace(cast=Cast(weight="after"), bias=None)
    p = problem(spec, shape, dtype)
    assert p.weight is not None
    xhat = forward(p._replace(weight=torch.ones_like(p.weight)))[0]
    assert torch.equal(forward(p)[0], xhat * p.weight.view(-1, 1, 1))


@by_dtype
@pytest.mark.parametrize("stored", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4, 40, 9, 9), (16, 64, 28, 28), (9, 21, 7, 7)], ids=str)
def test_by_stored_statistics(dtype, stored, shape):
    p = problem(BATCH, shape, dtype)
    assert p.weight is not None
    assert p.bias is not None
    mean, var = torch.randn(shape[1]).to(stored), torch.rand(shape[1]).add(0.5).to(stored)
    batch = codes(families.batch_norm(), 4, stored=True)
    y = KERNELS.fixed(p.x, mean, var, p.weight, p.bias, *batch)
    everything = KERNELS.fixed_backward(p.dy, p.x, mean, var, p.weight, *batch, 7)
    for bit, expected in enumerate(everything):
        alone = KERNELS.fixed_backward(p.dy, p.x, mean, var, p.weight, *batch, 1 << bit)
        assert torch.equal(alone[bit], expected)
    dx, dweight, dbias = everything

    x, dy, w, b, m, v = (t.double() for t in (p.x, p.dy, p.weight, p.bias, mean, var))
    w, b, m, v = (t.view(-1, 1, 1) for t in (w, b, m, v))
    d = (v + 1e-5).sqrt()
    room = 2 * ROOM[dtype]
    uses = (p.x.numel() / shape[1]) ** 0.5
    assert error(y, ((x - m) / d * w + b).numpy()) <= room
    assert error(dx, (dy * w / d).numpy()) <= room
    assert error(dweight, (dy * (x - m) / d).sum((0, 2, 3)).numpy(), uses) <= room
    assert error(dbias, dy.sum((0, 2, 3)).numpy(), uses) <= room
