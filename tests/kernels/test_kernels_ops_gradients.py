"""Gradients of the eager path: first order by the native kernels, any order by composite, and what is kept for them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import normscope.reference as reference
from normscope.kernels import dispatch, library
from normscope.kernels.layout import call
from normscope.spec import NormSpec, families

SPECS = {
    "layer": families.layer_norm(),
    "rms": families.rms_norm(),
    "batch": families.batch_norm(running=False),
    "group": families.group_norm(2),
    "instance": families.instance_norm(weight=True, bias=True),
    "scale": families.scale_norm(),
    "(1 + w)": families.rms_norm(weight_offset=1.0).replace(gain=0.5),
    "eps outside": NormSpec("... d -> ...", weight="d", correction=1, eps_at="std"),
    "channels first": NormSpec("b c ... -> b ...", weight="c", bias="c"),
}
SHAPE = (2, 4, 3)


def problem(spec: NormSpec, shape=SHAPE, dtype=torch.float64):
    torch.manual_seed(1)
    bound = spec.bind(shape)
    make = lambda s: None if s is None else (torch.rand(s, dtype=dtype) + 0.5).requires_grad_()  # noqa: E731
    return (
        torch.randn(shape, dtype=dtype, requires_grad=True),
        make(bound.weight_shape),
        make(bound.bias_shape),
    )


def function(spec: NormSpec, given):
    """Of the tensors that there are."""
    c = call(spec, given[0].ndim)

    def run(x, *parameters):
        rest = iter(parameters)
        w, b = (None if t is None else next(rest) for t in given[1:])
        return dispatch.norm(x, w, b, c)

    return run, tuple(t for t in given if t is not None)


@pytest.mark.parametrize("name", SPECS)
def test_first_and_second_derivatives_are_those_of_finite_differences(name):
    run, given = function(SPECS[name], problem(SPECS[name]))
    assert gradcheck(run, given)
    assert gradgradcheck(run, given)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_the_reference(name):
    spec = SPECS[name]
    x, weight, bias = problem(spec)
    dy = torch.randn(SHAPE, dtype=torch.float64)
    dispatch.norm(x, weight, bias, call(spec, 3)).backward(dy)
    as_numpy = [None if t is None else t.detach().numpy() for t in (x, weight, bias)]
    expected = reference.vjp(dy.numpy(), as_numpy[0], spec, *as_numpy[1:])
    for t, e in zip((x, weight, bias), expected, strict=True):
        if t is not None:
            # float64, sums of at most 24 terms
            assert torch.allclose(t.grad, torch.as_tensor(e), rtol=0, atol=1e-13)


def test_residual_and_norm():
    spec = families.layer_norm()
    x, weight, bias = problem(spec)
    residual = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    c = call(spec, 3)
    run = lambda x, r, w, b: dispatch.add_norm(x, r, w, b, c)  # noqa: E731
    assert gradcheck(run, (x, residual, weight, bias))
    assert gradgradcheck(run, (x, residual, weight, bias))
    for which in (0, 1):  # a gradient reaches only one of the two results
        y = run(x, residual, weight, bias)[which]
        plain = (dispatch.norm(x + residual, weight, bias, c), x + residual)[which]
        for a, b in zip(
            torch.autograd.grad(y.sin().sum(), (x, residual)),
            torch.autograd.grad(plain.sin().sum(), (x, residual)),
            strict=True,
        ):
            assert torch.allclose(a, b, rtol=0, atol=1e-13)


def test_by_stored_statistics():
    spec = families.batch_norm()
    x, weight, bias = problem(spec)
    mean, var = torch.randn(4).double(), torch.rand(4).double() + 0.5
    c = call(spec, 3)
    run = lambda x, w, b: dispatch.fixed(x, mean, var, w, b, c)  # noqa: E731
    assert gradcheck(run, (x, weight, bias))
    assert gradgradcheck(run, (x, weight, bias))
    # statistics that want a gradient themselves
    assert gradcheck(
        lambda m, v: dispatch.fixed(x, m, v, weight, bias, c), (mean.requires_grad_(), var.requires_grad_())
    )


def test_a_weight_that_was_computed_from_the_input_does_not_count_twice():
    spec = families.rms_norm()
    c = call(spec, 2)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    run = lambda x: dispatch.norm(x, x.sin().mean(0), None, c)  # noqa: E731
    assert gradcheck(run, (x,))
    assert gradgradcheck(run, (x,))


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_only_what_is_wanted_is_computed(wanted):
    spec = families.layer_norm()
    everything = problem(spec)
    c = call(spec, 3)
    expected = torch.autograd.grad(dispatch.norm(*everything, c).sin().sum(), everything)
    some = [t.detach().requires_grad_(bool(w)) for t, w in zip(everything, wanted, strict=True)]
    dispatch.norm(*some, c).sin().sum().backward()
    for t, w, e in zip(some, wanted, expected, strict=True):
        assert (t.grad is not None) == bool(w)
        assert t.grad is None or torch.equal(t.grad, e)


@pytest.mark.parametrize(
    "dy",
    [
        torch.ones(()).expand(2, 6, 5, 5),
        torch.randn(2, 6, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(5, 5, 6, 2).permute(3, 2, 1, 0),
        torch.randn(2, 6, 5, 10)[..., ::2],
    ],
    ids=["stride 0", "channels last", "permuted", "sliced"],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_of_any_layout(dy, layout):
    spec = families.group_norm(3)
    given = problem(spec, (2, 6, 5, 5), torch.float32)
    given = (given[0].detach().to(memory_format=layout).requires_grad_(), *given[1:])
    c = call(spec, 4)
    expected = torch.autograd.grad(dispatch.norm(*given, c), given, dy.clone(memory_format=layout))
    found = torch.autograd.grad(dispatch.norm(*given, c), given, dy)
    # the same numbers in float32, and sums of at most 100 of them in another order; natively, in the same
    native = library.LIBRARY is not None
    tolerance = {"rtol": 0.0, "atol": 0.0 if native else 1e-4}
    assert all(torch.allclose(a, b, **tolerance) for a, b in zip(found, expected, strict=True))
    assert not native or found[0].stride() == given[0].stride()


def test_kept_for_backward_are_the_input_and_three_numbers_a_set():
    x = torch.randn(64, 256, requires_grad=True)
    weight = torch.ones(256, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    c = call(families.layer_norm(), 2)
    with saved_tensors_hooks(pack, lambda t: t):
        dispatch.norm(x, weight, None, c)
    if c.derived.get("norm"):  # native
        assert sum(kept.values()) <= x.nbytes + weight.nbytes + 16 * 64


@pytest.mark.skipif(library.LIBRARY is None, reason="plain torch keeps other tensors")
def test_a_change_of_what_is_needed_is_noticed():
    spec = families.batch_norm()
    x, weight, bias = problem(spec)
    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    c = call(spec, 3)
    y = dispatch.fixed(x, mean, var, weight, bias, c)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    dispatch.norm_running(x, weight, bias, mean, var, c, 0.1)
    (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)  # by the statistics that y was made with
    assert torch.equal(found, expected)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    out = torch.ones(SHAPE, dtype=torch.float64)
    product = weight.exp().sum() * out
    z = (product * out).sum()
    with torch.no_grad():
        dispatch.norm(x, weight, bias, c, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_checkpoint_copies_and_pickles():
    spec = families.layer_norm()
    c = call(spec, 3)
    given = problem(spec)
    expected = torch.autograd.grad(dispatch.norm(*given, c).sin().sum(), given)
    y = checkpoint(lambda *a: dispatch.norm(*a, c), *given, use_reentrant=False)
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(y.sin().sum(), given), expected, strict=True)
    )
    for other in (copy.deepcopy(c), pickle.loads(pickle.dumps(c))):
        assert other == c
        assert torch.equal(dispatch.norm(*given, other), dispatch.norm(*given, c))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    spec = families.batch_norm()
    given = problem(spec)
    c = call(spec, 3)
    expected = dispatch.norm(*given, c)
    with mode():
        state = torch.zeros(4).double(), torch.ones(4).double()
        assert torch.equal(dispatch.norm(*given, c), expected)
        assert torch.equal(dispatch.norm_running(*given, *state, c, 0.1), expected)
        assert not dispatch.norm(*given, c).requires_grad


def test_autocast_leaves_dtypes_as_they_are():
    c = call(families.layer_norm(), 3)
    x, weight, bias = problem(families.layer_norm(), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.norm(x, weight, bias, c).dtype == torch.float32
        assert dispatch.norm(x.bfloat16(), weight, bias, c).dtype == torch.bfloat16
