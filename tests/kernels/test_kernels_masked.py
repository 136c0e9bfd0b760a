"""Native kernels under a mask: bit for bit those of a tensor that never had the rest, whatever stands there.

Shapes are those at which the kernels change their way: a pack and its rest, neighbours of which some count, a block of
2048, several blocks, threads inside a set, lines of whole packs, groups within a line.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normscope.kernels import bridge, formulas, library, ops
from normscope.kernels.layout import call
from normscope.spec import NormSpec, families

pytestmark = pytest.mark.skipif(library.LIBRARY is None or not ops, reason="no native kernels here")

KERNELS = torch.ops.normscope
ALL, DWEIGHT, DBIAS = 7, 2, 4
BATCH = families.batch_norm().replace(running=None)
GROUP, INSTANCE = families.group_norm(2), families.instance_norm(weight=True, bias=True)
RMS = NormSpec("b c t -> b c", weight="c", center=False, scale="rms")
# float32 and float64: an operation or two more than the formula's on sums of some thousand terms; half types: their own
# rounding, twice where the formula's falls on the other side
ROOM = {
    torch.float32: 2e-5,
    torch.float64: 1e-11,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


def codes(spec: NormSpec, ndim: int = 3) -> tuple[Any, ...]:
    c = call(spec, ndim)
    assert c.unserved == ""
    return c.axes, c.split, c.options, c.eps, c.gain, c.offset


def lying(t: Tensor, last: bool) -> Tensor:
    """(B, C, L) with the channels last in memory, or not."""
    return t.transpose(1, 2).contiguous().transpose(1, 2) if last else t.contiguous()


def masks(kind: str, b: int, t: int, random: torch.Generator) -> Tensor:
    if kind == "lengths":
        lengths = torch.randint(0, t + 1, (b, 1), generator=random)
        return torch.arange(t) < lengths
    return (
        torch.rand(b, t, generator=random)
        < {"few": 0.1, "half": 0.5, "most": 0.97, "none": 0, "all": 2}[kind]
    )


def problem(seed: int, b: int, c: int, t: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(b, c, t, generator=random, dtype=torch.float64) * 2 + level for level in (3, 0.25))
    weight, bias = (torch.randn(c, generator=random, dtype=torch.float64) for _ in range(2))
    mask = masks(kind, b, t, random)[:, None].contiguous()
    return (*(v.to(dtype) for v in (x, dy, weight, bias)), mask)


def masked(spec: NormSpec, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> list[Tensor]:
    y, stats = KERNELS.norm_masked(x, mask, weight, bias, *codes(spec))
    return [y, stats, *KERNELS.norm_masked_backward(dy, x, mask, stats, weight, *codes(spec), ALL)]


SHAPES = st.tuples(
    st.integers(1, 5),
    st.sampled_from([1, 2, 3, 4, 16, 32, 48, 64]),
    st.sampled_from([1, 2, 7, 31, 40, 64, 100, 129, 700, 2500]),
)
KINDS = st.sampled_from(["lengths", "few", "half", "most", "none", "all"])
POISON = st.sampled_from([math.nan, math.inf, 1e30])


@settings(max_examples=80, deadline=None)
@given(SHAPES, KINDS, st.sampled_from(list(ROOM)), st.booleans(), POISON, st.integers(0, 2**31))
def test_batch_norm_has_the_bits_of_what_counts_alone(shape, kind, dtype, last, poison, seed):
    x, dy, weight, bias, mask = problem(seed, *shape, kind, dtype)
    poisoned = [lying(torch.where(mask, v, torch.tensor(poison).to(dtype)), last) for v in (x, dy)]
    y, stats, dx, dweight, dbias = masked(BATCH, *poisoned, weight, bias, mask)
    counts = mask[:, 0]
    assert not y.transpose(1, 2)[~counts].any()
    assert not dx.transpose(1, 2)[~counts].any()
    assert y.stride() == poisoned[0].stride()
    assert (stats[3] == counts.sum()).all()
    if not counts.any():
        assert not stats.any()
        assert not dweight.any()
        assert not dbias.any()
        return
    alone = [lying(v.transpose(1, 2)[counts].T[None], last) for v in (x, dy)]
    wanted_y, wanted_stats = KERNELS.norm(alone[0], weight, bias, *codes(BATCH))
    backward = KERNELS.norm_backward(alone[1], None, alone[0], wanted_stats, weight, *codes(BATCH), ALL)
    wanted = [wanted_stats, *backward[1:], wanted_y, backward[0]]
    found = [stats[:3], dweight, dbias, y.transpose(1, 2)[counts].T[None], dx.transpose(1, 2)[counts].T[None]]
    # Sums have the same bits. Not where lines of channels that are no whole packs are folded without a mask, and not of
    # one position or element, whose kernel is another without a mask.
    if counts.sum() > 1 and shape[2] > 1 and (shape[1] % 32 == 0 or not last):
        assert all(torch.equal(got, right) for got, right in zip(found[:3], wanted[:3], strict=True))
    # What an element is has a product or two that may be fused: an ulp of the terms of dx, which 1 / D makes large.
    steep = float((wanted[0][2].double().square() + 1e-5).rsqrt().max())
    terms = 10 * max(1.0, float(weight.double().abs().max())) * max(1.0, steep)
    for got, right in zip(found[3:], wanted[3:], strict=True):
        assert (got.double() - right.double()).abs().max() <= 4 * torch.finfo(dtype).eps * terms


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([GROUP, INSTANCE, RMS, BATCH]),
    SHAPES,
    KINDS,
    st.sampled_from(list(ROOM)),
    st.booleans(),
    POISON,
    st.integers(0, 2**31),
)
def test_the_formula(spec, shape, kind, dtype, last, poison, seed):
    b, c, t = shape
    c, t = c + c % 2, max(t, 2)
    x, dy, weight, bias, mask = problem(seed, b, c, t, kind, dtype)
    bias = bias if spec.bias else None
    x, dy = (lying(torch.where(mask, v, torch.tensor(poison).to(dtype)), last) for v in (x, dy))
    found = masked(spec, x, dy, weight, bias, mask)
    y, stats = formulas.norm_masked(x, mask, weight, bias, *codes(spec))
    right = [y, stats, *formulas.norm_masked_backward(dy, x, mask, stats, weight, *codes(spec), ALL)]
    names = ("y", "stats", "dx", "dweight", "dbias")
    # a set of two elements that lie close divides by little: its gradient is as large, and as inexact, as that
    for name, got, wanted in zip(names, found, right, strict=True):
        if name == "stats":
            assert torch.equal(got[-1], wanted[-1])
            continue
        size = max(1.0, float(wanted.double().abs().max())) * (t * b) ** 0.5
        assert (got.double() - wanted.double()).abs().max() <= ROOM[dtype] * size, name
    outside = ~mask.expand(x.shape)
    assert not found[0][outside].any()
    assert not found[2][outside].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("spec", "shape"),
    [(BATCH, (8, 2, 9000)), (BATCH, (16, 64, 700)), (GROUP, (2, 4, 20_000)), (INSTANCE, (3, 64, 2600))],
)
def test_the_same_bits_for_any_number_of_threads(dtype, last, spec, shape):
    x, dy, weight, bias, mask = problem(3, *shape, "lengths", dtype)
    mask[:, :, 5:9] = False
    x, dy = lying(x, last), lying(dy, last)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 64):
            torch.set_num_threads(threads)
            results.append(masked(spec, x, dy, weight, bias, mask))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("last", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", ["lengths", "half"])
@pytest.mark.parametrize(("inside", "outside"), [(7, 40), (30, 33), (200, 300), (6000, 9000)])
def test_how_far_a_sample_was_padded_changes_no_bit(kind, last, inside, outside):
    """Of group and instance norm too, whose sets have no other sample: in parts of packs, in packs, past caches."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, dy, weight, bias, mask = problem(5, 3, 64 if inside > 300 else 6, outside, kind, dtype)
        mask[:, :, inside:] = False
        for spec in (BATCH, GROUP, INSTANCE):
            whole = masked(spec, lying(x, last), lying(dy, last), weight, bias, mask)
            short = [lying(v[..., :inside], last) for v in (x, dy)]
            part = masked(spec, *short, weight, bias, mask[..., :inside].contiguous())
            assert torch.equal(whole[0][..., :inside], part[0])
            assert torch.equal(whole[2][..., :inside], part[2])
            assert all(torch.equal(whole[i], part[i]) for i in (1, 3, 4))


def test_large_and_small_values_do_not_leave_the_range_of_float():
    mask = torch.ones(2, 1, 100, dtype=torch.bool)
    mask[1, :, 40:] = False
    for last in (False, True):
        for scale in (1e25, 1e-25):
            x = lying(torch.randn(2, 32, 100, generator=torch.Generator().manual_seed(0)) * scale, last)
            spec = BATCH.replace(eps=0.0)
            y, _stats = KERNELS.norm_masked(x.masked_fill(~mask, math.nan), mask, None, None, *codes(spec))
            wanted, _ = formulas.norm_masked(x, mask, None, None, *codes(spec))
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def test_strides_and_masks_that_are_no_loops_of_memory():
    x, dy, weight, bias, mask = problem(7, 4, 6, 50, "half", torch.float32)
    wanted = masked(BATCH, x, dy, weight, bias, mask)
    shuffled = [v.permute(2, 0, 1).contiguous().permute(1, 2, 0) for v in (x, dy)]  # the positions outermost
    apart = [torch.stack([v, v], -1)[..., 0] for v in (x, dy)]  # every other element
    for given_x, given_dy in (shuffled, apart, (x, dy.expand(x.shape))):
        found = masked(BATCH, given_x, given_dy, weight, bias, mask)
        for got, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    for thin in (mask[:1], mask[..., :1]):  # one for all samples, one for all positions
        found = masked(BATCH, x, dy, weight, bias, thin)
        right = masked(BATCH, x, dy, weight, bias, thin.expand(mask.shape).contiguous())
        for got, other in zip(found, right, strict=True):
            torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("last", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(3, 5, 40), (8, 32, 900), (2, 2, 60_000)])
def test_moments_alone_and_a_gradient_by_sums_that_are_given(shape, last):
    """What synchronized norms are made of."""
    x, dy, weight, bias, mask = problem(11, *shape, "half", torch.float32)
    x, dy = lying(x, last), lying(dy, last)
    before = x.clone()
    _y, stats = KERNELS.norm(x, weight, bias, *codes(BATCH))
    assert torch.equal(KERNELS.moments(x, None, *codes(BATCH)), stats)
    assert torch.equal(
        KERNELS.moments(x, mask, *codes(BATCH)), KERNELS.norm_masked(x, mask, None, None, *codes(BATCH))[1]
    )
    assert torch.equal(x, before)
    dx, dweight, _dbias = KERNELS.norm_backward(dy, None, x, stats, weight, *codes(BATCH), ALL)
    one = torch.ones(shape[1], dtype=torch.float64)
    _, along, total = KERNELS.norm_backward(dy, None, x, stats, one, *codes(BATCH), DWEIGHT | DBIAS)
    torch.testing.assert_close(along.float(), dweight, rtol=1e-6, atol=1e-5)
    n = x.numel() / shape[1]
    sums = torch.stack([weight.double() * total / n, weight.double() * along / n])
    found = KERNELS.norm_backward_by(dy, x, stats, sums, weight, *codes(BATCH))
    # the same sums, in one more rounding
    torch.testing.assert_close(found, dx, rtol=2e-6, atol=2e-6)
    right = formulas.norm_backward_by(dy, x, stats, sums, weight, *codes(BATCH))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_ctypes_gives_the_same_bits():
    x, dy, weight, bias, mask = problem(13, 3, 4, 90, "half", torch.float32)
    found = masked(BATCH, x, dy, weight, bias, mask)
    y, stats = bridge.norm_masked(x, mask, weight, bias, *codes(BATCH))
    other = [y, stats, *bridge.norm_masked_backward(dy, x, mask, stats, weight, *codes(BATCH), ALL)]
    assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))
    assert torch.equal(bridge.moments(x, mask, *codes(BATCH)), stats)
    plain, sums = bridge.moments(x, None, *codes(BATCH)), torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(
        bridge.norm_backward_by(dy, x, plain, sums, weight, *codes(BATCH)),
        KERNELS.norm_backward_by(dy, x, plain, sums, weight, *codes(BATCH)),
    )


def test_operators_refuse_what_does_not_fit():
    x, dy, weight, _bias, mask = problem(17, 2, 3, 5, "half", torch.float32)
    for wrong in (mask.float(), mask[:, :, :4], mask[0]):
        for operator in (KERNELS.norm_masked, bridge.norm_masked):
            with pytest.raises(
                RuntimeError, match="mask is not boolean, or not of x's axes, each of its size or 1"
            ):
                operator(x, wrong, None, None, *codes(BATCH))
    stats = KERNELS.moments(x, None, *codes(BATCH))
    with pytest.raises(RuntimeError, match="sums are float64"):
        KERNELS.norm_backward_by(dy, x, stats, torch.ones(2, 3), weight, *codes(BATCH))
    with pytest.raises(RuntimeError, match="no native kernel serves these axes"):  # neighbours of other sets
        KERNELS.norm_masked(torch.randn(4, 6), torch.rand(4, 6) < 0.5, None, None, *codes(BATCH, 2))
