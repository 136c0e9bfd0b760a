"""The operators themselves: three implementations that agree, results laid as torch would lay them, clean errors."""

from __future__ import annotations

import ctypes
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope.kernels import autograd, bridge, formulas, library, ops
from normscope.kernels.layout import call
from normscope.spec import Cast, NormSpec, families

native = pytest.mark.skipif(library.LIBRARY is None, reason="no native kernels here")

SPECS = {
    "layer": families.layer_norm(),
    "layer, no parameters": families.layer_norm(weight=False, bias=False),
    "rms": families.rms_norm(),
    "(1 + w)": families.rms_norm(weight_offset=1.0).replace(gain=0.5),
    "batch": families.batch_norm(),
    "group": families.group_norm(2),
    "instance": families.instance_norm(weight=True, bias=True),
    "channels first": NormSpec("b c ... -> b ...", weight="c", bias="c"),
    "scale": families.scale_norm(),
    "unbiased, eps outside": NormSpec("... d -> ...", weight="d", correction=1, eps_at="std"),
    "rounded first": NormSpec(
        "... d -> ...", weight="d", scale="rms", center=False, cast=Cast(weight="after")
    ),
}
SHAPE = (3, 4, 5)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def codes(spec: NormSpec, ndim: int, stored: bool = False) -> tuple[float, ...]:
    c = call(spec, ndim)
    assert c.unserved == ""
    return (c.stored_axes if stored else c.axes), c.split, c.options, c.eps or 1e-5, c.gain, c.offset


def problem(spec: NormSpec, dtype: torch.dtype, shape=SHAPE, weight_dtype=None):
    torch.manual_seed(0)
    bound = spec.bind(shape)
    x = torch.randn(shape).to(dtype)
    made = (
        None if s is None else (torch.rand(s) + 0.5).to(weight_dtype or dtype)
        for s in (bound.weight_shape, bound.bias_shape)
    )
    return (x, *made)


def close(found, expected, dtype: torch.dtype) -> bool:
    """Two roundings of the same number, and 60 terms summed in any order (in float32 at the least)."""
    eps = torch.finfo(dtype).eps
    room = 2 * eps + 60 * (torch.finfo(torch.float32).eps if dtype != torch.float64 else eps)
    scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    return found.shape == expected.shape and torch.allclose(
        found.double(), expected.double(), rtol=0, atol=room * scale
    )


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kernels", [torch.ops.normscope, bridge], ids=["registered", "ctypes"])
def test_native_operators_are_their_formulas(name, dtype, kernels):
    spec = SPECS[name]
    x, weight, bias = problem(spec, dtype)
    c = codes(spec, x.ndim)
    y, stats = kernels.norm(x, weight, bias, *c)
    y_, stats_ = formulas.norm(x, weight, bias, *c)
    assert close(y, y_, dtype)
    assert close(stats, stats_, stats.dtype)
    dy, dsum = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE).to(dtype)
    for want in (7, 1, 6) if weight is not None else (1,):
        found = kernels.norm_backward(dy, dsum, x, stats, weight, *c, want)
        expected = formulas.norm_backward(dy, dsum, x, stats, weight, *c, want)
        assert all(close(a, b, dtype) for a, b in zip(found, expected, strict=True)), want
        assert [t.numel() > 0 for t in found] == [bool(want & bit) for bit in (1, 2, 4)]
    y2, total, _ = kernels.add_norm(x, dsum, weight, bias, *c)
    assert torch.equal(total, x + dsum)
    assert torch.equal(y2, kernels.norm(total, weight, bias, *c)[0])
    out = torch.full_like(x, torch.nan)
    kernels.norm_out(x, weight, bias, *c, out)
    assert torch.equal(out, y)


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", [torch.ops.normscope, bridge], ids=["registered", "ctypes"])
@pytest.mark.parametrize("name", ["batch", "instance"])
def test_native_normalization_by_stored_statistics_is_its_formula(name, dtype, kernels):
    spec = SPECS[name]
    x, weight, bias = problem(spec, dtype)
    c = codes(spec, x.ndim, stored=True)
    mean, var = torch.randn(4), torch.rand(4) + 0.5
    assert close(
        kernels.fixed(x, mean, var, weight, bias, *c), formulas.fixed(x, mean, var, weight, bias, *c), dtype
    )
    dy = torch.randn(SHAPE).to(dtype)
    found = kernels.fixed_backward(dy, x, mean, var, weight, *c, 7)
    expected = formulas.fixed_backward(dy, x, mean, var, weight, *c, 7)
    assert all(close(a, b, dtype) for a, b in zip(found, expected, strict=True))


@native
@pytest.mark.parametrize("kernels", [torch.ops.normscope, bridge], ids=["registered", "ctypes"])
@pytest.mark.parametrize("state", DTYPES, ids=str)
def test_running_statistics_follow_the_batch(kernels, state):
    """As torch.nn.functional.instance_norm: averaged over samples, the variance with n / (n - 1)."""
    x = torch.randn(3, 4, 5)
    stats = torch.ops.normscope.norm(x, None, None, *codes(families.instance_norm(), 3))[1]
    mean, var = torch.randn(4).to(state), (torch.rand(4) + 0.5).to(state)
    mean_, var_ = mean.double().clone(), var.double().clone()
    kernels.update_running(mean, var, stats, 0.1, 5.0, 1.0)
    dtype = torch.float32 if state == torch.float64 else state  # that of the batch's statistics
    assert close(mean, 0.9 * mean_ + 0.1 * x.double().mean(2).mean(0), dtype)
    assert close(var, 0.9 * var_ + 0.1 * x.double().var(2).mean(0), dtype)


@native
@pytest.mark.parametrize("kernels", [torch.ops.normscope, bridge], ids=["registered", "ctypes"])
def test_parameters_may_be_wider_than_the_input_and_of_two_dtypes(kernels):
    spec = SPECS["layer"]
    x, weight, bias = problem(spec, torch.bfloat16, weight_dtype=torch.float32)
    c = codes(spec, x.ndim)
    y, stats = kernels.norm(x, weight, bias.double(), *c)
    assert y.dtype == torch.bfloat16
    assert close(y, formulas.norm(x, weight, bias, *c)[0], torch.bfloat16)
    dweight, dbias = kernels.norm_backward(x, None, x, stats, weight, *c, 6)[1:]
    assert dweight.dtype == dbias.dtype == torch.float32


# Layouts ------------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw) -> torch.Tensor:
    """Contiguous, permuted, sliced, expanded, with axes of size 1 and 0."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    pad = [draw(st.integers(0, 1)) for _ in sizes]
    step = [draw(st.integers(1, 2)) for _ in sizes]
    base = torch.randn([(n + p) * s for n, p, s in zip(sizes, pad, step, strict=True)])
    order = draw(st.permutations(range(len(sizes))))
    x = base.permute(order)
    x = x[tuple(slice(0, sizes[d] * step[d], step[d]) for d in order)]
    if draw(st.booleans()):
        d = draw(st.integers(0, x.ndim - 1))
        x = x.narrow(d, 0, min(1, x.shape[d])).expand(x.shape)
    return x


@native
@given(tensors())
@settings(max_examples=150, deadline=None)
def test_results_lie_as_empty_like_lays_them(x):
    # an eps of 1: with a small one, sets of one element make a gradient of the difference of two large numbers
    spec = families.layer_norm(weight=False, bias=False, eps=1.0)
    c = codes(spec, x.ndim)
    like = torch.empty_like(x).stride()
    dy = torch.randn(x.shape)
    for kernels in (torch.ops.normscope, bridge):
        y, stats = kernels.norm(x, None, None, *c)
        y2, total, _ = kernels.add_norm(x, dy, None, None, *c)
        dx = kernels.norm_backward(dy, None, x, stats, None, *c, 1)[0]
        assert [t.stride() for t in (y, y2, total, dx)] == [like] * 4
        if x.numel():
            assert close(y, formulas.norm(x, None, None, *c)[0], torch.float32)
            assert close(y2, formulas.norm(x + dy, None, None, *c)[0], torch.float32)
            expected = formulas.norm_backward(dy, None, x, stats, None, *c, 1)[0]
            assert close(dx, expected, torch.float32)


@native
@given(tensors())
@settings(max_examples=60, deadline=None)
def test_results_may_be_written_into_a_tensor_of_any_layout(out):
    x = torch.randn(out.shape)
    if (
        out.numel()
        and 0 in out.stride()
        and any(n > 1 for n, s in zip(out.shape, out.stride(), strict=True) if s == 0)
    ):
        return  # one place for several results
    c = codes(families.layer_norm(weight=False, bias=False), x.ndim)
    torch.ops.normscope.norm_out(x, None, None, *c, out)
    if x.numel():
        assert close(out, formulas.norm(x, None, None, *c)[0], torch.float32)


@native
@pytest.mark.parametrize("kernels", [torch.ops.normscope, bridge], ids=["registered", "ctypes"])
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 4, 0), (3, 0, 5)])
def test_of_nothing_comes_nothing(kernels, shape):
    spec = families.layer_norm()
    x, weight, bias = problem(spec, torch.float32, shape)
    c = codes(spec, 3)
    y, stats = kernels.norm(x, weight, bias, *c)
    dx, dweight, dbias = kernels.norm_backward(y, None, x, stats, weight, *c, 7)
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros(shape[-1]))
    assert torch.equal(dbias, torch.zeros(shape[-1]))


@native
def test_out_may_be_the_input():
    x, weight, bias = problem(SPECS["layer"], torch.float32)
    c = codes(SPECS["layer"], 3)
    y = torch.ops.normscope.norm(x, weight, bias, *c)[0]
    torch.ops.normscope.norm_out(x, weight, bias, *c, x)
    assert torch.equal(x, y)


# What torch asks of an operator ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layer", "rms", "group", "batch"])
def test_opcheck(name):
    assert autograd.Norm  # which registers the gradients
    spec = SPECS[name]
    x, weight, bias = problem(spec, torch.float32)
    c = codes(spec, 3)
    n = torch.ops.normscope
    y, stats = n.norm(x, weight, bias, *c)
    check = torch.library.opcheck
    check(n.norm.default, (x, weight, bias, *c))
    check(n.norm_backward.default, (y, None, x, stats, weight, *c, 7))
    check(n.add_norm.default, (x, y, weight, bias, *c))
    check(n.norm_out.default, (x, weight, bias, *c, torch.empty_like(x)))
    grad = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    check(n.normalize.default, (*grad, *c))
    check(n.add_normalize.default, (grad[0], y.clone().requires_grad_(), *grad[1:], *c))
    if name == "batch":
        c = codes(spec, 3, stored=True)
        mean, var = torch.randn(4), torch.rand(4)
        check(n.fixed.default, (x, mean, var, weight, bias, *c))
        check(n.fixed_backward.default, (y, x, mean, var, weight, *c, 7))
        check(n.update_running.default, (mean, var, stats, 0.1, 15.0, 1.0))
        check(n.normalize_by.default, (grad[0], mean, var, *grad[1:], *c))


@pytest.mark.parametrize("kernels", [torch.ops.normscope, bridge], ids=["registered", "ctypes"])
@native
def test_errors_say_what_does_not_fit(kernels):
    x, weight, bias = problem(SPECS["layer"], torch.float32)
    c = codes(SPECS["layer"], 3)

    def message(f, *arguments):
        with pytest.raises(RuntimeError) as error:
            f(*arguments)
        return str(error.value).splitlines()[0]

    assert (
        message(kernels.norm, x, weight[:3], bias, *c)
        == "normscope: weight has 3 values where there are 5 parameters"
    )
    assert (
        message(kernels.norm, x, weight, bias.repeat(2), *c)
        == "normscope: bias has 10 values where there are 5 parameters"
    )
    assert (
        message(kernels.add_norm, x, x[:2], weight, bias, *c)
        == "normscope: residual is not of x's shape and dtype"
    )
    assert (
        message(kernels.norm, x.long(), weight, bias, *c)
        == "normscope: x is not of dtype float32, float64, bfloat16 or float16"
    )
    assert (
        message(kernels.norm_out, x, weight, bias, *c, x.double())
        == "normscope: out is not of x's shape and dtype"
    )
    stats = kernels.norm(x, weight, bias, *c)[1]
    assert (
        message(kernels.norm_backward, x, None, x, stats[:1], weight, *c, 7)
        == "normscope: stats has 12 values where there are 36 statistics"
    )


@native
def test_tensors_that_fail_are_not_lost():
    """Arguments of a call that raises are freed like those of one that does not."""
    x, weight, bias = problem(SPECS["layer"], torch.float32)
    c = codes(SPECS["layer"], 3)
    seen = [weakref.ref(t) for t in (x, bias)]
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.ops.normscope.norm(x, weight[:2], bias, *c)
    del x, bias
    # the tensor that Python holds goes with its last owner, and one that an operator lost would keep it
    assert [s() for s in seen] == [None, None]


@native
def test_the_shim_refuses_what_it_was_not_tested_with():
    register = getattr(library.LIBRARY.functions, "ns_register", None)
    if register is None:
        pytest.skip("no shim in this library")
    register.argtypes = [ctypes.c_char_p]
    assert [register(v) for v in (b"2.6.0", b"1.13.1+cpu", b"3.0.0", b"unknown")] == [1, 1, 1, 1]


def test_the_operators_agree_with_their_formula_here():
    assert ops.self_test() == ""
