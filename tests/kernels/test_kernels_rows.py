"""Native kernels of rows: sets made of contiguous segments, against the float64 reference.

Sets are rows (layer, RMS and L2 norms) or planes (batch, group and instance norm of contiguous tensors). The shapes
are those at which the kernels change their way: a pack and its rest, a block of 2048, several sets at a time, threads
inside a set, parameters summed by chunks of sets or by blocks of parameters.
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

# Error over the largest value of the reference. float32: roundings of xhat, factor, y (3 of 2^-24), and of sums of 2048
# terms in 64 lanes, whose errors are random: as much again. float64: that of the reference is the larger part, numpy's
# sums of 1e6 terms. Half types: their own rounding, and what float32 adds to it. The baseline has no fused
# multiply-add, so that each product is rounded too: there it is what is promised.
FUSED = library.LIBRARY is None or library.LIBRARY.isa != "base"
ROOM = {
    torch.float32: 6 * 2.0**-24 if FUSED else 1e-6,
    torch.float64: 200 * 2.0**-53,
    torch.bfloat16: 2.0**-8,
    torch.float16: 1.001 * 2.0**-11,
}
DTYPES = tuple(ROOM)

LAYER, RMS = families.layer_norm(), families.rms_norm(eps=1e-6)
BATCH = families.batch_norm().replace(running=None)
GROUP, INSTANCE = families.group_norm(2), families.instance_norm(weight=True, bias=True)


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


def problem(
    spec: NormSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    level: float = 0.5,
    weight_dtype: torch.dtype | None = None,
) -> Problem:
    assert kernel(runs(spec, shape)) == "rows"
    torch.manual_seed(0)
    bound = spec.bind(shape)

    def normal(size: tuple[int, ...] | None) -> Tensor | None:
        return (
            None
            if size is None
            else torch.randn(size, dtype=torch.float64).add(0.5).to(weight_dtype or dtype)
        )

    x, dy = (torch.randn(shape, dtype=torch.float64).add(mean).to(dtype) for mean in (level, 0.25))
    return Problem(spec, x, dy, normal(bound.weight_shape), normal(bound.bias_shape))


def forward(p: Problem) -> tuple[Tensor, Tensor]:
    y, stats = KERNELS.norm(p.x, p.weight, p.bias, *codes(p.spec, p.x.ndim))
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
    return float(difference.max() / max(np.abs(expected).max(), scale))


def check(p: Problem, room: float) -> None:
    found, expected = all_of(p), truth(p)
    # A parameter's gradient is a sum, whose rounding goes with the size of its terms: where they cancel, the root of
    # their number says how large it could have been.
    uses = p.x.numel() / max(1, found["dweight"].numel() if "dweight" in found else 1)
    for name, value in found.items():
        if name != "stats":
            assert error(value, expected[name], uses**0.5 if name != "y" and name != "dx" else 0) <= room, (
                name
            )


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- laws


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 3.3, -7e-3, 1e6])
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (LAYER, (5, 768)),
        (LAYER, (2, 4099)),
        (LAYER, (1, 70_001)),
        (BATCH, (4, 3, 7, 7)),
        (BATCH, (2, 3, 70, 70)),
        (GROUP, (2, 4, 5, 7)),
    ],
)
def test_a_constant_set_gives_exactly_the_bias(dtype, value, spec, shape):
    p = problem(spec, shape, dtype)
    p = p._replace(x=torch.full(shape, min(value, 6e4), dtype=dtype))
    y, stats = forward(p)
    assert p.bias is not None
    assert torch.equal(y, (p.bias if len(shape) == 2 else p.bias.view(-1, 1, 1)).expand(shape))
    assert torch.equal(stats[2], torch.zeros_like(stats[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (LAYER, (300, 768)),
        (LAYER, (1, 100_001)),
        (LAYER, (40, 20_001)),
        (RMS, (3, 70_000)),
        (BATCH, (8, 2, 70, 70)),
        (BATCH, (8, 64, 14, 14)),
        (GROUP, (1, 4, 240, 100)),
        (INSTANCE, (2, 2, 150, 150)),
    ],
)
def test_the_same_bits_for_any_number_of_threads(dtype, spec, shape):
    p = problem(spec, shape, dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(all_of(p))
    finally:
        torch.set_num_threads(before)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize(
    ("spec", "shape"), [(LAYER, (9, 131)), (RMS, (70, 768)), (LAYER, (2, 40_000)), (GROUP, (2, 4, 9, 9))]
)
def test_residual_and_norm_is_the_norm_of_the_rounded_sum(spec, shape):
    p = problem(spec, shape, torch.bfloat16)
    residual = torch.randn(shape).to(torch.bfloat16)
    y, total, stats = KERNELS.add_norm(p.x, residual, p.weight, p.bias, *codes(spec, p.x.ndim))
    assert torch.equal(total, p.x + residual)
    apart = forward(p._replace(x=total))
    assert torch.equal(y, apart[0])
    assert torch.equal(stats, apart[1])


@pytest.mark.parametrize("spec", [LAYER, RMS])
@pytest.mark.parametrize("shape", [(21, 131), (3, 20_001)])
def test_what_is_not_wanted_changes_nothing_else(spec, shape):
    p = problem(spec, shape, torch.float32)
    stats = forward(p)[1]
    everything = gradients(p, stats)
    for want in range(1, 8):
        for bit, (found, expected) in enumerate(zip(gradients(p, stats, want), everything, strict=True)):
            assert torch.equal(found, expected) if want >> bit & 1 else found.numel() == 0


def test_a_gradient_from_elsewhere_is_added_before_rounding():
    p = problem(LAYER, (9, 131), torch.bfloat16)
    stats = forward(p)[1]
    dsum = torch.randn(p.x.shape).to(torch.bfloat16)
    found = gradients(p, stats, DX, dsum)[0]
    assert error(found, truth(p)["dx"] + dsum.double().numpy()) <= ROOM[torch.bfloat16]


# ---- poison


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_set_with_a_value_that_is_not_finite_is_nan_and_no_other(bad, dtype):
    p = problem(LAYER, (6, 100), dtype)
    p.x[2, 7] = bad
    assert torch.equal(forward(p)[0].isnan().all(1), torch.arange(6) == 2)
    assert torch.equal(forward(p)[0].isnan().any(1), torch.arange(6) == 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_root_mean_squares_that_are_not_finite_are_as_in_torch(bad):
    p = problem(RMS, (6, 100), torch.float32)
    p.x[2, 7] = bad
    expected = torch.nn.functional.rms_norm(p.x, (100,), p.weight, 1e-6)
    assert torch.equal(forward(p)[0].isnan(), expected.isnan())


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1e20, 1e38])
@pytest.mark.parametrize("spec", [LAYER.replace(eps=1e-90), RMS.replace(eps=1e-90), LAYER], ids=str)
def test_squares_beyond_the_range_of_float32(size, spec):
    p = problem(spec, (4, 1000), torch.float32)
    p = p._replace(x=p.x.clamp(-1, 1) * size)
    y = forward(p)[0]
    # 1 / D of 1e38 is subnormal: its last bit is 2^-149, of 1e-38 that is 1.4e-7.
    assert error(y, truth(p)["y"]) <= ROOM[torch.float32] + 1.4e-7


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(2, 200), st.integers(0, 3))
def test_nothing_beyond_a_row_is_read_or_written(dtype, n, offset):
    p = problem(LAYER, (1, n), dtype)
    x, dy = (torch.full((offset + n + 64,), float("nan"), dtype=dtype) for _ in range(2))
    out = torch.full((offset + n + 64,), 7.0, dtype=dtype)
    inside = slice(offset, offset + n)
    x[inside], dy[inside] = p.x[0], p.dy[0]
    KERNELS.norm_out(x[inside][None], p.weight, p.bias, *codes(LAYER, 2), out[inside][None])
    expected, stats = forward(p)
    assert torch.equal(out[inside], expected[0])
    assert torch.equal(out[offset + n :], torch.full((64,), 7.0, dtype=dtype))
    cut = p._replace(x=x[inside][None], dy=dy[inside][None])
    assert all(torch.equal(a, b) for a, b in zip(gradients(cut, stats), gradients(p, stats), strict=True))


@pytest.mark.parametrize(("shape", "spec"), [((0, 8), LAYER), ((0, 3, 4, 4), BATCH), ((0, 8), RMS)])
def test_empty_tensors_have_zero_gradients_of_parameters(shape, spec):
    p = problem(LAYER, (2, 8), torch.float32)
    c = shape[1]
    p = p._replace(spec=spec, x=torch.empty(shape), dy=torch.empty(shape), weight=torch.ones(c))
    y, stats = KERNELS.norm(p.x, p.weight, None, *codes(spec, len(shape)))
    dx, dweight, dbias = gradients(p, stats)
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros(c))
    assert torch.equal(dbias, torch.zeros(c))


# ---- numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [3, 31, 32, 33, 64, 65, 100, 1003, 4096, 4097, 20_001])
@pytest.mark.parametrize("spec", [LAYER, RMS], ids=["layer", "rms"])
def test_rows_of_any_length(dtype, n, spec):
    check(problem(spec, (6, n), dtype), ROOM[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (BATCH, (4, 5, 9, 7)),
        (BATCH, (16, 21, 7, 7)),
        (BATCH, (2, 2, 70, 70)),
        (BATCH, (2, 1, 40_001)),
        (GROUP, (3, 8, 9, 7)),
        (GROUP, (1, 4, 70, 70)),
        (INSTANCE, (3, 5, 11, 13)),
        (NormSpec("b c h w -> b", weight="c h w", bias="c h w"), (5, 3, 9, 8)),
        (NormSpec("b l d -> b l", weight="l d", bias="l d"), (6, 5, 40)),
        (NormSpec("b c h w -> b", weight="w", bias="w"), (3, 4, 5, 70)),
        (NormSpec("... d -> ...", weight="", bias=""), (7, 90)),
        (NormSpec("b c h w -> b c"), (2, 3, 6, 11)),
    ],
)
def test_planes_and_other_places_of_parameters(dtype, spec, shape):
    check(problem(spec, shape, dtype), ROOM[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (LAYER, (5, 100)),
        (LAYER, (64, 768)),
        (LAYER, (1, 300_001)),
        (BATCH, (4, 5, 9, 7)),
        (BATCH, (3, 2, 120, 100)),
        (GROUP, (2, 4, 70, 70)),
        (INSTANCE, (3, 5, 11, 13)),
    ],
)
def test_a_mean_of_ten_thousand_deviations(dtype, spec, shape):
    check(problem(spec, shape, dtype, level=1e4), ROOM[dtype])


def test_a_first_value_far_from_the_others():
    """Squares are taken from a value guessed from the first elements, and guessed again where that was bad.

    Then nearly all terms of a sum are equal, and so are their roundings: of 32 terms in a lane up to 16 ulp, a quarter
    of that on average, and half of it in the root.
    """
    p = problem(LAYER, (4, 4000), torch.float32)
    p.x[:, :40] += 1e4
    p.x[:, 100:] *= 1e-3
    y = forward(p)[0]
    assert error(y, truth(p)["y"]) <= ROOM[torch.float32] + 2 * 2.0**-23


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("spec", "shape"), [(LAYER, (9, 131)), (RMS, (5, 768)), (BATCH, (4, 5, 9, 9))])
def test_parameters_of_another_dtype(dtype, weight_dtype, spec, shape):
    check(problem(spec, shape, dtype, weight_dtype=weight_dtype), max(ROOM[dtype], ROOM[weight_dtype]))


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
    ("spec", "shape"), [(LAYER, (9, 131)), (BATCH, (4, 5, 9, 9)), (GROUP, (3, 4, 70, 70))]
)
def test_conventions(change, spec, shape):
    check(problem(spec.replace(**change), shape, torch.float32), ROOM[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_xhat_rounded_before_the_weight(dtype):
    spec = NormSpec("... d -> ...", weight="d", scale="rms", center=False, cast=Cast(weight="after"))
    p = problem(spec, (5, 100), dtype)
    plain = problem(spec.replace(weight=None), (5, 100), dtype)
    assert p.weight is not None
    assert torch.equal(forward(p)[0], forward(plain)[0] * p.weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4, 5, 9, 9), (2, 2, 70, 70), (9, 7, 7, 7)])
def test_by_stored_statistics(dtype, stored, shape):
    p = problem(BATCH, shape, dtype)
    assert p.weight is not None
    assert p.bias is not None
    mean, var = torch.randn(shape[1]).to(stored), torch.rand(shape[1]).add(0.5).to(stored)
    batch = codes(families.batch_norm(), 4, stored=True)
    y = KERNELS.fixed(p.x, mean, var, p.weight, p.bias, *batch)
    dx, dweight, dbias = KERNELS.fixed_backward(p.dy, p.x, mean, var, p.weight, *batch, 7)

    x, dy, w, b, m, v = (t.double() for t in (p.x, p.dy, p.weight, p.bias, mean, var))
    w, b, m, v = (t.view(-1, 1, 1) for t in (w, b, m, v))
    d = (v + 1e-5).sqrt()
    room = 2 * ROOM[dtype]
    uses = (p.x.numel() / shape[1]) ** 0.5
    assert error(y, ((x - m) / d * w + b).numpy()) <= room
    assert error(dx, (dy * w / d).numpy()) <= room
    assert error(dweight, (dy * (x - m) / d).sum((0, 2, 3)).numpy(), uses) <= room
    assert error(dbias, dy.sum((0, 2, 3)).numpy(), uses) <= room


@pytest.mark.parametrize("where", [np.s_[:, :, 2:11, :8], np.s_[:, ::2, 1:10, 1:9]])
def test_segments_apart_in_memory(where):
    """One set of several segments, each element with a parameter of its own."""
    spec = NormSpec("b c h w -> b", weight="c h w", bias="c h w")
    x = torch.randn(5, 6, 20, 12)[where]
    p = problem(spec, tuple(x.shape), torch.float32)
    found = all_of(p._replace(x=x))
    expected = all_of(p._replace(x=x.contiguous()))
    assert found.keys() == expected.keys()
    for name in found:
        assert error(found[name], expected[name].double().numpy()) <= 2 * ROOM[torch.float32]


# ---- sums of many terms of one size

# Of equal terms, one added to a sum of many is rounded the same way each time: errors add up, where those of random
# terms cancel. This is what is promised of float32.
PROMISED = 1e-6

# Sets of all but the first axis, and of channels; the last two axes are pieces, apart in memory once cropped.
WHOLE = NormSpec("b c h w -> b", weight="c h w", bias="c h w")
WHOLE_RMS = NormSpec("b c h w -> b", weight="c h w", bias="c h w", scale="rms", center=False)
PIECES = [(2000, 2), (700, 3), (256, 8), (300, 24), (200, 49), (60, 100), (2, 4000)]


def of_one_size(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Terms of a size that is no power of two, so that sums of them are rounded; pieces of the last axis are apart."""
    size, shape = float(torch.rand(()) * 3 + 0.3), (*shape[:-1], shape[-1] + 1)
    some = (torch.rand(shape) > 0.5).float()
    terms = {"equal": torch.ones(shape), "of either sign": 2 * some - 1, "or zero": some}[kind]
    return (size * terms)[..., 1:]


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("kind", ["equal", "of either sign", "or zero"])
@pytest.mark.parametrize(
    "spec", [WHOLE, WHOLE_RMS, BATCH, INSTANCE], ids=["layer", "rms", "batch", "instance"]
)
def test_short_pieces_of_equal_terms_are_not_added_up_in_one_lane(spec, kind, pieces):
    shape = (2, 3, *pieces)
    for seed in range(3):
        p = problem(spec, shape, torch.float32)
        torch.manual_seed(seed)
        check(p._replace(x=of_one_size(kind, shape), dy=of_one_size("of either sign", shape)), PROMISED)


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("kind", ["of either sign", "or zero"])
def test_gradients_of_parameters_from_short_pieces_of_equal_terms(kind, pieces):
    shape = (2, 3, *pieces)
    for seed in range(3):
        p = problem(BATCH, shape, torch.float32)
        torch.manual_seed(seed)
        p = p._replace(x=of_one_size(kind, shape), dy=of_one_size("equal", shape))
        found, expected = all_of(p), truth(p)
        assert error(found["dbias"], expected["dbias"]) <= PROMISED
        # dy xhat of one sign, by dy that follows x
        p = p._replace(dy=p.x)
        found, expected = all_of(p), truth(p)
        assert error(found["dweight"], expected["dweight"]) <= PROMISED


def test_overlapping_pieces_of_a_view():
    x = torch.randn(700).as_strided((1, 500, 3), (0, 1, 1))
    spec = NormSpec("b l d -> b", weight="l d", bias="l d")
    p = problem(spec, (1, 500, 3), torch.float32)
    check(p._replace(x=x), ROOM[torch.float32])


@pytest.mark.parametrize("kind", ["equal", "of either sign", "or zero"])
@pytest.mark.parametrize("spec", [LAYER, RMS], ids=["layer", "rms"])
def test_a_long_row_of_equal_terms(spec, kind):
    for length in (4096, 99_999, 1_000_000):
        p = problem(spec, (1, length), torch.float32)
        x, dy = of_one_size(kind, (1, length)), of_one_size("of either sign", (1, length))
        check(p._replace(x=x.contiguous(), dy=dy.contiguous()), PROMISED)


@pytest.mark.parametrize("sets", [16, 31, 64, 100, 3000])
@pytest.mark.parametrize("spec", [LAYER, GROUP], ids=["layer", "group"])
def test_gradients_of_parameters_that_many_sets_share(spec, sets):
    p = problem(spec, (sets, 6), torch.float32)
    for dy in (0.7, 1 / 3, 2.9):
        p = p._replace(dy=torch.full((sets, 6), dy))
        assert error(all_of(p)["dbias"], truth(p)["dbias"]) <= ROOM[torch.float32]
