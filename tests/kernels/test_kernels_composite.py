"""The composite path against the float64 reference: every family, any pattern, masks, state, derivatives, exactness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from composite_problems import agree, copied, state_of, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jacfwd, jacrev, jvp, vmap

from normscope import reference
from normscope.errors import BadInput
from normscope.kernels import composite
from normscope.spec import Cast, NormSpec, Running, RunningState, families
from normscope.spec.pattern import PatternError

# float64 against float64 over at most some hundred elements: sums of n terms are off by at most n ulp, gradients
# divide by the denominator up to three times and are differences of terms as large as the largest result.
TOLERANCE = 2000 * 2.0**-52
# Whitening divides by differences from an eigendecomposition; matrices here have condition numbers up to about 1e3.
WHITENING = 1e3 * TOLERANCE

FAMILIES: dict[str, tuple[NormSpec, tuple[int, ...]]] = {
    "batch_norm": (families.batch_norm(), (7, 6, 5)),
    "batch_norm, cumulative": (families.batch_norm(momentum=None), (7, 6)),
    "batch_renorm": (families.batch_renorm(), (7, 6, 5)),
    "batch_renorm, clipped": (families.batch_renorm(1.1, 0.1), (7, 6, 5)),
    "batch_renorm, denominators": (families.batch_renorm(averages="denominator"), (7, 6, 5)),
    "keras_batch_normalization": (families.keras_batch_normalization(), (7, 4, 6)),
    "ghost_batch_norm": (families.ghost_batch_norm(size=3), (9, 4, 5)),
    "ghost_batch_norm, once": (families.ghost_batch_norm(size=3, updates="once"), (9, 4, 5)),
    "ghost_batch_norm, short": (families.ghost_batch_norm(size=5, remainder="short"), (13, 4, 3)),
    "ghost_batch_norm, balanced": (families.ghost_batch_norm(number=5, remainder="balanced"), (13, 4, 3)),
    "ghost_batch_norm, cumulative": (
        families.ghost_batch_norm(size=5, remainder="short").replace(running=Running(momentum=None)),
        (13, 4, 3),
    ),
    "td_batch_norm": (families.td_batch_norm(0.5, layout="(t b) c ...", steps=2), (8, 3, 5)),
    "td_layer_norm": (families.td_layer_norm(0.5), (4, 2, 3, 5)),
    "batch_norm_through_time": (families.batch_norm_through_time(), (3, 5, 4, 2)),
    "layer_norm": (families.layer_norm(), (4, 3, 7)),
    "layer_norm over three": (families.layer_norm("c h w"), (4, 3, 5, 2)),
    "channels_first_layer_norm": (families.channels_first_layer_norm(), (4, 6, 3, 2)),
    "group_norm": (families.group_norm(2), (4, 6, 5)),
    "instance_norm": (families.instance_norm(weight=True, bias=True, running=True), (4, 6, 5)),
    "rms_norm": (families.rms_norm(eps=1e-5), (4, 3, 7)),
    "rms_norm, own eps": (families.rms_norm(eps=None), (4, 3, 7)),
    "gemma_rms_norm": (families.gemma_rms_norm().replace(cast=Cast()), (4, 7)),
    "pixel_norm": (families.pixel_norm(), (4, 6, 5)),
    "scale_norm": (families.scale_norm(), (4, 7)),
    "filter_response_norm": (families.filter_response_norm(), (4, 3, 5)),
    "l2_normalize": (families.l2_normalize(), (4, 7)),
    "tf_l2_normalize": (families.tf_l2_normalize(), (4, 7)),
    "weight_standardization": (families.weight_standardization(), (4, 3, 5)),
    "scaled_weight_standardization": (families.scaled_weight_standardization(), (4, 3, 5)),
    "weight_norm": (families.weight_norm(), (4, 3, 5)),
    "zca": (families.batch_whitening(3), (8, 6, 5)),
    "zca, stored matrix": (families.batch_whitening(3, state="whitening"), (8, 6, 5)),
    "cholesky": (families.batch_whitening(3, method="cholesky", eps_at="trace"), (8, 6, 5)),
    "iternorm": (families.batch_whitening(3, method="iternorm", iterations=4), (8, 6, 5)),
    "zca, not centered": (families.batch_whitening(2, eps_at="trace").replace(center=False), (8, 6, 5)),
    "whitening over two axes": (
        NormSpec("n (g c) d ... -> g c d", sizes={"g": 2}, scale="zca", whiten="d c", weight="d (g c)"),
        (9, 4, 2, 3),
    ),
}


def problem(name: str) -> tuple[NormSpec, Any, Any, Any, RunningState | None]:
    spec, shape = FAMILIES[name]
    rng, bound = np.random.default_rng(3), spec.bind(shape)
    x = rng.normal(0.7, 1.5, shape)
    weight, bias = (
        None if s is None else rng.normal(0.5, 1, s) for s in (bound.weight_shape, bound.bias_shape)
    )
    return spec, x, weight, bias, state_of(spec, shape, rng)


def tolerance(spec: NormSpec) -> float:
    return WHITENING if spec.whiten else TOLERANCE


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, training: bool, masked: bool) -> None:
    spec, x, weight, bias, running = problem(name)
    mask = None
    if masked:  # positions of the first axis and the last, alike for all channels
        rng = np.random.default_rng(5)
        mask = rng.random([n if i in (0, x.ndim - 1) else 1 for i, n in enumerate(x.shape)]) < 0.8
        x = np.where(mask, x, np.nan)
        if spec.whiten and x.ndim > 3:
            mask = mask.any(axis=-1, keepdims=True)
            x = np.nan_to_num(x)
    agree(spec, x, weight, bias, running, training, mask, tolerance=tolerance(spec))


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Any pattern of one to four axes, some factored; parameters on any axes; any convention, mask and state."""
    pool, groups, sizes, given = list("bvtcghwd"), [], {}, {}
    for _ in range(draw(st.integers(1, 4))):
        group = [pool.pop(0) for _ in range(draw(st.sampled_from([1, 1, 2])))]
        groups.append(group)
        sizes |= {name: draw(st.integers(1, 3)) for name in group}
        given |= {name: sizes[name] for name in group[1:]}
    flat = [name for group in groups for name in group]
    left = " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)
    right = draw(st.lists(st.sampled_from(flat), unique=True, max_size=len(flat) - 1))
    places = [None, "", *(f"({' '.join(group)})" for group in groups if len(group) == 2)]
    places += [" ".join(draw(st.permutations(flat))[:2])]
    scale = draw(st.sampled_from(["std", "std", "rms", "l2"]))
    weight, bias = draw(st.sampled_from(places)), draw(st.sampled_from(places))
    stored = draw(st.booleans())
    spec = NormSpec(
        f"{left} -> {' '.join(right)}",
        sizes=given,
        sample_axis="" if "b" not in flat else None,
        weight=weight,
        bias=bias,
        center=draw(st.booleans()),
        scale=scale,
        correction=draw(st.sampled_from([0, 0, 1, 0.5])) if scale == "std" else 0,
        eps=draw(st.sampled_from([0.1, 0.5, 1.5])),
        eps_at=draw(st.sampled_from(["variance", "std", "max", "max_variance"])),
        weight_offset=draw(st.sampled_from([0.0, 1.0])) if weight is not None else 0.0,
        gain=draw(st.sampled_from([1.0, 0.7])),
        running=Running(correction=0, momentum=draw(st.sampled_from([0.1, None]))) if stored else None,
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = tuple(int(np.prod([sizes[name] for name in group])) for group in groups)
    bound = spec.bind(shape)
    thin = [n if draw(st.booleans()) else 1 for n in shape]
    return {
        "spec": spec,
        "x": rng.normal(draw(st.sampled_from([0.0, 3.0])), 1.5, shape),
        "weight": None if bound.weight_shape is None else rng.normal(0.5, 1, bound.weight_shape),
        "bias": None if bound.bias_shape is None else rng.normal(0.5, 1, bound.bias_shape),
        "running": state_of(spec, shape, rng),
        "training": draw(st.booleans()),
        "mask": rng.random(thin) < 0.7 if draw(st.booleans()) else None,
    }


@settings(max_examples=150, deadline=None)
@given(problems())
def test_any_specification(p: dict[str, Any]) -> None:
    agree(**p, tolerance=TOLERANCE)


# Derivatives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_second_derivatives(name: str) -> None:
    spec, x, weight, bias, _ = problem(name)
    if spec.running is not None and spec.running.renorm is not None:
        pytest.skip("r and d of renormalization are constants, which differences of values cannot know")
    tensors = [tensor(a).requires_grad_() for a in (x, weight, bias) if a is not None]

    def norm(x: Tensor, *rest: Tensor) -> Tensor:
        given = list(rest)
        w = given.pop(0) if weight is not None else None
        b = given.pop(0) if bias is not None else None
        return composite.normalize(x, spec, w, b)

    assert torch.autograd.gradgradcheck(norm, tensors, fast_mode=True)


def test_whitening_has_derivatives_where_eigenvalues_coincide() -> None:
    spec = NormSpec("n c -> c", scale="zca", whiten="c", eps=0.5)
    x = torch.tensor(
        [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64, requires_grad=True
    )
    assert torch.autograd.gradcheck(lambda x: composite.normalize(x, spec), x)
    assert torch.autograd.gradgradcheck(lambda x: composite.normalize(x, spec), x)
    (g,) = torch.autograd.grad(composite.normalize(x * 0 + 3, spec).square().sum(), x)
    assert torch.equal(g, torch.zeros_like(x))


@pytest.mark.parametrize(
    "name", ["layer_norm", "batch_norm", "group_norm", "ghost_batch_norm, short", "zca", "iternorm"]
)
def test_functorch(name: str) -> None:
    spec, x, _, _, _ = problem(name)
    xs = torch.stack([tensor(x), tensor(x) * 2 + 1])

    def norm(x: Tensor) -> Tensor:
        return composite.normalize(x, spec)

    torch.testing.assert_close(vmap(norm)(xs), torch.stack([norm(x) for x in xs]), rtol=0, atol=1e-11)
    small = xs[0, :5, :6, :2] if name == "ghost_batch_norm, short" else xs[0]
    torch.testing.assert_close(jacrev(norm)(small), jacfwd(norm)(small), rtol=0, atol=1e-10)
    direction = torch.ones_like(small)
    _, moved = jvp(norm, (small,), (direction,))
    # a shift of everything changes no centered norm
    torch.testing.assert_close(moved, torch.zeros_like(moved), rtol=0, atol=1e-11)


@pytest.mark.parametrize("level", [0.0, 3.0])
@pytest.mark.parametrize(
    "spec",
    [
        NormSpec("n c -> n", center=center, scale=scale, eps=1e-3, eps_at=at)
        for center in (True, False)
        for scale in ("std", "rms", "l2")
        for at in ("variance", "std", "max", "max_variance")
    ],
    ids=lambda spec: f"{'centered' if spec.center else 'plain'} {spec.scale} {spec.eps_at}",
)
def test_constant_sets_have_the_gradient_of_the_reference(spec: NormSpec, level: float) -> None:
    x = np.full((2, 5), level)
    agree(spec, x, tolerance=TOLERANCE)
    grad = np.random.default_rng(0).normal(size=x.shape)
    assert np.isfinite(reference.vjp(grad, x, spec)[0]).all()


# Exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", [n for n, (s, _) in FAMILIES.items() if s.center and s.bias and not s.whiten]
)
def test_a_constant_set_gives_exactly_the_bias(name: str, dtype: torch.dtype) -> None:
    spec, x, weight, bias, _ = problem(name)
    if spec.running is not None and spec.running.renorm is not None:
        pytest.skip("renormalization adds the distance from the stored mean")
    for level in (1e6, 123456.7, 3.3) if dtype != torch.float16 else (3e4, 3.3):
        flat = torch.full(x.shape, level).to(dtype)
        b = torch.full_like(tensor(bias), 0.75).to(dtype)
        y = composite.normalize(flat, spec, tensor(weight).to(dtype), b)
        assert torch.equal(y, torch.full_like(flat, 0.75))


def test_a_constant_set_of_any_length_gives_exactly_the_bias() -> None:
    for n in (7, 1000, 99991):
        y = composite.normalize(torch.full((2, n), 123456.78), families.layer_norm(bias=False))
        assert y.count_nonzero() == 0


@pytest.mark.parametrize(
    "spec", [families.batch_norm(), families.layer_norm(), families.group_norm(2)], ids=str
)
def test_a_mean_of_10000_deviations_costs_no_digits(spec: NormSpec) -> None:
    x = torch.randn(16, 8, 500, generator=torch.Generator().manual_seed(1)) + 1e4
    y = composite.normalize(x, spec).double().numpy()
    truth = reference.forward(x.numpy(), spec)
    # x is float32 already, so that only the centered elements and y are rounded: to 2^-24 of their size, twice each
    assert np.abs(y - truth).max() <= 4 * 2.0**-24 * np.abs(truth).max()


def test_huge_and_tiny_elements_neither_overflow_nor_vanish() -> None:
    spec = NormSpec("n d -> n", eps=0.0)
    x = torch.tensor([[1.0, 2.0, 4.0]]) * torch.tensor([[1e30], [1.0], [1e-30]])
    y = composite.normalize(x, spec)
    torch.testing.assert_close(y, y[1:2].expand(3, 3), rtol=1e-6, atol=0)


def test_half_types_are_computed_in_float32_and_rounded_once() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        half = x.to(dtype)
        y = composite.normalize(half, families.layer_norm())
        assert y.dtype == dtype
        assert torch.equal(y, composite.normalize(half.float(), families.layer_norm()).to(dtype))


def test_casts() -> None:
    x, w = torch.randn(8, 64).bfloat16(), torch.randn(64)
    before, after = families.rms_norm(eps=1e-6), families.llama_rms_norm()
    plain = composite.normalize(x.float(), families.rms_norm(eps=1e-6))
    assert torch.equal(composite.normalize(x, before, w), (plain * w).bfloat16())
    assert torch.equal(composite.normalize(x, after, w), (plain.bfloat16().float() * w).bfloat16())
    wide = before.replace(cast=Cast(compute="float64"))
    y = composite.normalize(x.float(), wide, w)
    assert torch.equal(y, composite.normalize(x.double(), before, w.double()).float())


def test_no_eps_is_the_machine_epsilon_of_the_arithmetic() -> None:
    for dtype, eps in ((torch.float64, 2.0**-52), (torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-23)):
        x = torch.full((1, 4), 2.0**-14, dtype=dtype)
        spec = families.rms_norm(eps=None)
        assert torch.equal(composite.normalize(x, spec), composite.normalize(x, spec.replace(eps=eps)))


# Masks and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_masked_reaches_nothing(value: float) -> None:
    spec = families.batch_norm()
    x, mask = torch.randn(6, 3, 4), torch.rand(6, 1, 4) < 0.6
    dirty = x.masked_fill(~mask, value).requires_grad_()
    w = torch.randn(3, requires_grad=True)
    clean, state, other = (
        x.clone().requires_grad_(),
        *(RunningState(torch.zeros(3), torch.ones(3)) for _ in range(2)),
    )
    y = composite.normalize(dirty, spec, w, running=state, mask=mask)
    z = composite.normalize(clean, spec, w, running=other, mask=mask)
    assert torch.equal(y, z)
    for a, b in zip(
        torch.autograd.grad(y.square().sum(), (dirty, w)),
        torch.autograd.grad(z.square().sum(), (clean, w)),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert y[~mask.expand(y.shape)].count_nonzero() == 0
    assert torch.equal(state.mean, other.mean)


def test_nan_spoils_its_own_set_and_no_other() -> None:
    for spec in (families.layer_norm(), families.batch_whitening(2, running=False)):
        x = torch.randn(5, 4) if not spec.whiten else torch.randn(9, 4, 3)
        x[0, 0] = torch.nan
        y = composite.normalize(x, spec)
        bad = y.isnan()
        assert bad.any()
        assert not bad.all()


def test_state_keeps_its_dtype_and_moves_in_place() -> None:
    mean, var = torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
    state = RunningState(mean, var)
    composite.normalize(torch.randn(6, 3, requires_grad=True), families.batch_norm(), running=state)
    assert state.mean is mean
    assert mean.dtype == torch.bfloat16
    assert mean.count_nonzero() == 3
    assert state.batches == 1
    composite.normalize(torch.randn(0, 3), families.batch_norm(), running=state)
    assert state.batches == 1


def test_fixed_is_training_false() -> None:
    for name in ("batch_norm", "instance_norm", "zca", "td_batch_norm"):
        spec, x, weight, bias, running = problem(name)
        state = copied(running)
        y = composite.fixed(tensor(x), spec, state.mean, state.var, tensor(weight), tensor(bias))
        assert torch.equal(
            y,
            composite.normalize(tensor(x), spec, tensor(weight), tensor(bias), running=state, training=False),
        )


def test_strides_are_those_of_the_input() -> None:
    x = torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last)
    for spec in (families.batch_norm(), families.group_norm(2), families.instance_norm()):
        assert composite.normalize(x, spec).is_contiguous(memory_format=torch.channels_last)


# Errors ---------------------------------------------------------------------------------------------------------

X = torch.arange(12.0).reshape(3, 4)
STORED = NormSpec("b c -> c", running=Running())
ERRORS = {
    "integers": (
        lambda: composite.normalize(X.long(), STORED),
        "a normalization takes floating point inputs; got torch.int64. Convert with x.float()",
    ),
    "weight where there is none": (
        lambda: composite.normalize(X, STORED, torch.ones(4)),
        "a spec without weight takes none; got one of shape (4,). Name the axes it lives on in spec.weight",
    ),
    "weight of another shape": (
        lambda: composite.normalize(X, families.batch_norm(), torch.ones(3)),
        "the weight on 'c' of an input of shape (3, 4) has shape (4,); got (3,)",
    ),
    "bias of another shape": (
        lambda: composite.normalize(X, families.batch_norm(), None, torch.ones(3, 4)),
        "the bias on 'c' of an input of shape (3, 4) has shape (4,); got (3, 4)",
    ),
    "mask of numbers": (
        lambda: composite.normalize(X, STORED, mask=torch.ones(3, 4)),
        "a mask is boolean, True where an element counts; got torch.float32. Compare first: lengths > position",
    ),
    "mask of another shape": (
        lambda: composite.normalize(X, STORED, mask=torch.ones(3, dtype=torch.bool)),
        "a mask broadcasts to the input's shape (3, 4); got (3,). Add axes of size 1 on the right",
    ),
    "no state": (
        lambda: composite.normalize(X, STORED, training=False),
        "normalizing by stored statistics needs them; got none. Pass running=RunningState(mean, var), with a mean of "
        "shape (4,)",
    ),
    "state of another shape": (
        lambda: composite.normalize(X, STORED, running=RunningState(torch.ones(4), torch.ones(3))),
        "running.var has shape (4,) under 'b c -> c' on an input of shape (3, 4); got (3,)",
    ),
    "state of lists": (
        lambda: composite.normalize(X, STORED, running=RunningState([0.0] * 4, [1.0] * 4)),
        "running.mean is a tensor here; got list. Convert with torch.as_tensor",
    ),
    "too few for a stored variance": (
        lambda: composite.normalize(X[:1], STORED, running=RunningState(torch.zeros(4), torch.ones(4))),
        "a stored variance divides by M - 1, so every set needs M > 1 elements; got M = 1 under 'b c -> c' in an "
        "input of shape (1, 4). Take larger batches, or Running(correction=0)",
    ),
    "mask that differs along whitened channels": (
        lambda: composite.normalize(X, NormSpec("b c -> c", whiten="c", scale="zca"), mask=X > 1),
        "a mask holds for all channels that are whitened together; got one that differs along 'c'",
    ),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_errors(case: Any) -> None:
    call, told = case
    with pytest.raises(BadInput) as error:
        call()
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (families.batch_norm(), (4,)),
        (families.group_norm(4), (2, 6, 3)),
        (NormSpec("b (g c) -> b g", sizes={"g": 2, "c": 3}), (2, 7)),
        (families.ghost_batch_norm(size=4), (6, 3)),
        (families.instance_norm(), (3, 4)),
    ],
    ids=str,
)
def test_a_shape_that_does_not_fit_is_refused_as_bind_does(spec: NormSpec, shape: tuple[int, ...]) -> None:
    with pytest.raises(PatternError) as expected:
        spec.bind(shape)
    with pytest.raises(PatternError) as found:
        composite.normalize(torch.ones(shape), spec)
    assert str(found.value) == str(expected.value)


# Compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dynamic"), [("group_norm", True), ("ghost_batch_norm, short", False)])
def test_compiles_whole(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    spec, x, weight, bias, _ = problem(name)
    w, b = tensor(weight), tensor(bias)
    compiled = torch.compile(
        lambda x: composite.normalize(x, spec, w, b), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for whole in (tensor(x), tensor(x)[:3]) if dynamic else (tensor(x),):
        found, expected = whole.clone().requires_grad_(), whole.clone().requires_grad_()
        y, z = compiled(found), composite.normalize(expected, spec, w, b)
        torch.testing.assert_close(y, z, rtol=0, atol=1e-13)
        y.square().sum().backward()
        z.square().sum().backward()
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-11)
