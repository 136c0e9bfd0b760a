"""The five functions that PyTorch has too: irregular calls end as PyTorch's do, word for word.

Then what they add to PyTorch's: ``out=``, sums, and names that it lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from normscope import functional, reference
from normscope.errors import BadInput
from normscope.spec import families

X = torch.linspace(-2, 3, 48).reshape(2, 6, 4)
ONE, ZERO = torch.ones(6), torch.zeros(6)


def ends(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """How a call ends: type and text of its error, or dtype, shape and values."""
    try:
        y = function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return y.dtype, y.shape, y.tolist()


IRREGULAR: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "layer: no axes": ("layer_norm", (X, ()), {}),
    "layer: an integer": ("layer_norm", (X, 4), {}),
    "layer: another size": ("layer_norm", (X, (5,)), {}),
    "layer: more axes than there are": ("layer_norm", (X, (2, 6, 4, 1)), {}),
    "layer: wrong weight": ("layer_norm", (X, (4,), ONE), {}),
    "layer: wrong bias": ("layer_norm", (X, (4,), None, ONE), {}),
    "layer: weight of another dtype": ("layer_norm", (X, (4,), torch.ones(4).double()), {}),
    "layer: half beside float": ("layer_norm", (X.half(), (4,), torch.ones(4), torch.ones(4).half()), {}),
    "layer: integers": ("layer_norm", (X.long(), (4,)), {}),
    "layer: eps None": ("layer_norm", (X, (4,)), {"eps": None}),
    "layer: nothing in it": ("layer_norm", (X[:0], (4,)), {}),
    "layer: empty sets": ("layer_norm", (torch.ones(3, 0), (0,)), {}),
    "layer: no tensor": ("layer_norm", ([1.0, 2.0], (2,)), {}),
    "rms: another size": ("rms_norm", (X, (5,)), {}),
    "rms: wrong weight": ("rms_norm", (X, (4,), ONE), {}),
    "rms: integers": ("rms_norm", (X.long(), (4,)), {}),
    "group: vector": ("group_norm", (X[0, 0], 2), {}),
    "group: not a divisor": ("group_norm", (X, 4), {}),
    "group: no group": ("group_norm", (X, 0), {}),
    "group: one element": ("group_norm", (torch.ones(1, 6), 6), {}),
    "group: wrong weight": ("group_norm", (X, 2, torch.ones(5)), {}),
    "group: wrong bias": ("group_norm", (X, 2, None, torch.ones(6, 1)), {}),
    "group: nothing in it": ("group_norm", (X[:0], 2), {}),
    "batch: eps 0": ("batch_norm", (X, None, None), {"training": True, "eps": 0.0}),
    "batch: eps below 0": ("batch_norm", (X, ZERO, ONE), {"eps": -0.1}),
    "batch: one value a channel": ("batch_norm", (X[:1, :, :1], ZERO, ONE), {"training": True}),
    "batch: no state": ("batch_norm", (X, None, None), {}),
    "batch: half a state": ("batch_norm", (X, ZERO, None), {"training": True}),
    "batch: state of another size": ("batch_norm", (X, torch.zeros(5), torch.ones(5)), {}),
    "batch: variance of another size": ("batch_norm", (X, ZERO, torch.ones(5)), {}),
    "batch: wrong weight": ("batch_norm", (X, ZERO, ONE, torch.ones(5)), {}),
    "batch: state of another dtype": ("batch_norm", (X, ZERO.double(), ONE.double()), {"training": True}),
    "batch: momentum None": ("batch_norm", (X, ZERO, ONE), {"training": True, "momentum": None}),
    "batch: vector": ("batch_norm", (X[0, 0], ZERO, ONE), {}),
    "batch: integers": ("batch_norm", (X.long(), ZERO, ONE), {}),
    "batch: nothing in it": ("batch_norm", (X[:0], ZERO.clone(), ONE.clone()), {"training": True}),
    "batch: a state that wants gradients": (
        "batch_norm",
        (X, torch.zeros(6, requires_grad=True), ONE.clone()),
        {"training": True},
    ),
    "instance: one position": ("instance_norm", (X[:, :, :1],), {}),
    "instance: matrix": ("instance_norm", (X[0],), {}),
    "instance: no state": ("instance_norm", (X,), {"use_input_stats": False}),
    "instance: half a state": ("instance_norm", (X, None, ONE), {}),
    "instance: wrong weight": ("instance_norm", (X, None, None, torch.ones(5)), {}),
}


@pytest.mark.parametrize("case", IRREGULAR.values(), ids=IRREGULAR)
def test_an_irregular_call_ends_as_in_torch(case: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, args, kwargs = case
    assert ends(getattr(functional, name), *args, **kwargs) == ends(getattr(F, name), *args, **kwargs)


@pytest.mark.parametrize("name", ["batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"])
def test_signatures_are_torchs(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (functional, F))
    assert [(p.name, p.default) for p in ours.values() if p.kind is not p.KEYWORD_ONLY] == [
        (p.name, p.default) for p in theirs.values()
    ]
    assert [p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY] == (
        ["out"] if name in ("layer_norm", "group_norm", "rms_norm") else []
    )


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_follow_as_in_torch(training: bool) -> None:
    for name in ("batch_norm", "instance_norm"):
        state, theirs = (ZERO.double(), ONE.double() * 2), (ZERO.double(), ONE.double() * 2)
        flag = {"training" if name == "batch_norm" else "use_input_stats": training}
        for scale in (1.0, 3.0):
            x = (X.double() * scale).requires_grad_()
            y = getattr(functional, name)(x, *state, momentum=0.3, **flag)
            torch.testing.assert_close(
                y, getattr(F, name)(x, *theirs, momentum=0.3, **flag), rtol=1e-13, atol=1e-13
            )
            assert not state[0].requires_grad  # or the graph of every step were kept
        torch.testing.assert_close(state, theirs, rtol=1e-14, atol=1e-14)
        assert (state[0].count_nonzero() > 0) == training


def test_constant_channels_give_the_bias() -> None:
    x, w, b = torch.full((4, 6, 33), 1e6), torch.randn(6), torch.linspace(-1, 1, 6)
    expected = b[:, None].expand(x.shape)
    for y in (
        functional.batch_norm(x, None, None, w, b, True),
        functional.instance_norm(x, None, None, w, b),
        functional.group_norm(x, 3, w, b),
    ):
        assert torch.equal(y, expected)
    assert torch.equal(functional.layer_norm(x, (33,), None, torch.ones(33)), torch.ones_like(x))


OUT: dict[str, Callable[..., Tensor]] = {
    "layer": lambda x, w, b, **k: functional.layer_norm(x, (6,), w, b, **k),
    "rms": lambda x, w, b, **k: functional.rms_norm(x, (6,), w, **k),
    "group": lambda x, w, b, **k: functional.group_norm(x, 2, w, b, **k),
}


@pytest.mark.parametrize("norm", OUT.values(), ids=OUT)
def test_out(norm: Callable[..., Tensor]) -> None:
    x, w, b = torch.randn(5, 6), torch.randn(6), torch.randn(6)
    out = torch.full_like(x, torch.nan)
    assert norm(x, w, b, out=out) is out
    assert torch.equal(out, norm(x, w, b))
    empty = torch.empty(0, 6)
    assert norm(empty, w, b, out=empty) is empty  # by way of PyTorch's function
    with pytest.raises(BadInput) as wrong:
        norm(x, w, b, out=torch.empty(6, 5, dtype=torch.float64))
    assert str(wrong.value) == (
        "out has the shape, dtype and device of the input: (5, 6), torch.float32, cpu; got (6, 5), torch.float64, cpu. "
        "Allocate it with torch.empty_like(input)"
    )
    with pytest.raises(BadInput) as graded:
        norm(x, w.requires_grad_(), b, out=out)
    assert str(graded.value) == (
        "out= is for inference, and a tensor of this call requires a gradient. Call under torch.no_grad(), or leave "
        "out= away"
    )
    with torch.no_grad():
        assert norm(x, w, b, out=out) is out


class Recording(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "normalize": lambda x: functional.normalize(x, families.layer_norm()),
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "rms_norm": lambda x: functional.rms_norm(x, (4,)),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: functional.instance_norm(x),
    "add_layer_norm": lambda x: functional.add_layer_norm(x, x, (4,)),
    "add_rms_norm": lambda x: functional.add_rms_norm(x, x, (4,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_modes_see_the_function(name: str) -> None:
    expected = CALLS[name](X)
    with Recording() as mode:
        found = CALLS[name](X)
    assert mode.seen[0] is getattr(functional, name)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Tagged(Tensor):
    """A subclass without a __torch_function__ of its own."""


@pytest.mark.parametrize("name", CALLS)
def test_subclasses_stay_what_they_are(name: str) -> None:
    found = CALLS[name](X.as_subclass(Tagged))
    for y in found if isinstance(found, tuple) else (found,):
        assert type(y) is Tagged


@pytest.mark.parametrize("eps", [None, 1e-3])
def test_sums_are_returned_beside_the_norm(eps: float | None) -> None:
    x, r, w, b = torch.randn(7, 4), torch.randn(7, 4), torch.randn(4), torch.randn(4)
    y, total = functional.add_rms_norm(x, r, (4,), w, eps)
    assert torch.equal(total, x + r)
    torch.testing.assert_close(y, functional.rms_norm(x + r, (4,), w, eps), rtol=2e-7, atol=1e-7)
    y, total = functional.add_layer_norm(x, r, (4,), w, b, eps or 1e-5)
    assert torch.equal(total, x + r)
    torch.testing.assert_close(y, functional.layer_norm(x + r, (4,), w, b, eps or 1e-5), rtol=2e-7, atol=5e-7)


def test_gradients_reach_both_summands_and_the_sum() -> None:
    tensors = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for add in (
        lambda x, r, w: functional.add_rms_norm(x, r, (4,), w, 1e-3),
        lambda x, r, w: functional.add_layer_norm(x, r, (4,), w, None, 1e-3),
    ):
        assert torch.autograd.gradcheck(add, (*tensors, w))
        assert torch.autograd.gradgradcheck(add, (*tensors, w))


@pytest.mark.parametrize(
    ("residual", "came"),
    [
        (torch.ones(4), "(4,), torch.float32, cpu"),
        (torch.ones(2, 6, 4).double(), "(2, 6, 4), torch.float64, cpu"),
    ],
)
def test_a_residual_is_as_the_input(residual: Tensor, came: str) -> None:
    with pytest.raises(BadInput) as wrong:
        functional.add_rms_norm(X, residual, (4,))
    assert str(wrong.value) == (
        "a residual has the shape, dtype and device of the input: (2, 6, 4), torch.float32, cpu; "
        f"got {came}. Expand or convert it first"
    )


def test_irregular_sums_end_as_in_torch() -> None:
    for ours, theirs in (
        (functional.add_layer_norm, F.layer_norm),
        (functional.add_rms_norm, F.rms_norm),
    ):
        with pytest.raises(RuntimeError) as found:
            ours(X, X, (5,))
        with pytest.raises(RuntimeError) as expected:
            theirs(X, (5,))
        assert str(found.value) == str(expected.value)
        y, total = ours(X[:0], X[:0], (4,))
        assert y.shape == total.shape == (0, 6, 4)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_l2_norm_is_torchs_normalize(dim: int) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(functional.l2_norm(x, dim), F.normalize(x, dim=dim), rtol=1e-14, atol=0)
    assert functional.l2_norm(torch.zeros(3, 4, 5), dim).count_nonzero() == 0


def test_l2_norm_names_the_axes() -> None:
    with pytest.raises(BadInput) as wrong:
        functional.l2_norm(X, 3)
    assert str(wrong.value) == "dim is an axis of the input, which has 3; got 3. The last is -1"


def test_scale_and_pixel_norm() -> None:
    x, g = torch.randn(3, 4, 5, dtype=torch.float64), torch.tensor(1.7, dtype=torch.float64)
    for found, spec, rest in (
        (functional.scale_norm(x, g), families.scale_norm(), (g.numpy(),)),
        (functional.pixel_norm(x), families.pixel_norm(), ()),
    ):
        np.testing.assert_allclose(found.numpy(), reference.forward(x.numpy(), spec, *rest), rtol=1e-14)


def test_rms_norm_without_eps_takes_that_of_float32_for_half_types() -> None:
    x = torch.full((1, 64), 2.0**-12)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = functional.rms_norm(x.to(dtype), (64,)).double()
        truth = 2.0**-12 / (2.0**-24 + 2.0**-23) ** 0.5
        assert abs(y - truth).max() <= torch.finfo(dtype).eps * truth


COMPILED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "layer": (lambda x: functional.layer_norm(x, (4,)), False),
    "layer, open sizes": (lambda x: functional.layer_norm(x, (4,)), True),
    "batch, open sizes": (
        lambda x: functional.batch_norm(x, x.new_zeros(6), x.new_ones(6), training=True),
        True,
    ),
    "pixel, open sizes": (lambda x: functional.pixel_norm(x), True),
}


@pytest.mark.parametrize(("norm", "dynamic"), COMPILED.values(), ids=COMPILED)
def test_compiles_whole(norm: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for samples in (2, 3):
        x = torch.randn(samples, 6, 4, requires_grad=True)
        y, expected = compiled(x), norm(x)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
        dy = torch.randn_like(y)
        (dx,), (want,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
        torch.testing.assert_close(dx, want, rtol=0, atol=1e-5)


def test_nested_tensors_go_to_pytorch():
    rows = [torch.randn(5, 16), torch.randn(3, 16)]
    w, b = torch.randn(16), torch.randn(16)
    nested = torch.nested.nested_tensor(rows)
    found = functional.layer_norm(nested, (16,), w, b)
    for got, row in zip(found.unbind(), rows, strict=True):
        # one rounding of the last step, PyTorch's kernel for nested tensors being another
        assert torch.allclose(got, F.layer_norm(row, (16,), w, b), atol=1e-6)
    with pytest.raises(
        BadInput,
        match=r"^normalize takes dense tensors, got a nested one\. Pad it, and pass mask=, True where it is valid$",
    ):
        functional.normalize(nested, families.layer_norm())


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda f, x: f.group_norm(x.numpy(), 2), "group_norm takes a tensor for input, got ndarray"),
        (
            lambda f, x: f.batch_norm(x.numpy(), None, None),
            "batch_norm takes a tensor for input, got ndarray",
        ),
        (lambda f, x: f.instance_norm(None), "instance_norm takes a tensor for input, got NoneType"),
        (
            lambda f, x: f.add_layer_norm(x, None, (4,)),
            "add_layer_norm takes a tensor for residual, got NoneType",
        ),
        (lambda f, x: f.add_rms_norm(x, x, (4,), [1.0]), "add_rms_norm takes a tensor for weight, got list"),
        (lambda f, x: f.l2_norm(x.numpy()), "l2_norm takes a tensor for input, got ndarray"),
        (lambda f, x: f.pixel_norm(2.0), "pixel_norm takes a tensor for input, got float"),
        (lambda f, x: f.scale_norm(x, 2.0), "scale_norm takes a tensor for weight, got float"),
        (
            lambda f, x: f.normalize(x, families.layer_norm(), mask=[1]),
            "normalize takes a tensor for mask, got list",
        ),
    ],
)
def test_what_is_no_tensor_is_named(call, told):
    x = torch.randn(3, 4)
    for _ in range(2):  # the second call finds what the first one remembered
        with pytest.raises(TypeError, match=rf"^{told}\. Convert it: torch\.as_tensor"):
            call(functional, x)


def test_out_in_programs_and_under_vmap():
    x = torch.randn(3, 16)
    want = functional.layer_norm(x, (16,))
    apart = torch.empty_like(x)
    torch.compile(lambda z, into: functional.layer_norm(z, (16,), out=into), fullgraph=True, backend="eager")(
        x, apart
    )
    assert torch.equal(apart, want)
    # function transforms compute in plain PyTorch: a few roundings of the last digit
    found = torch.vmap(lambda z: functional.layer_norm(z, (16,), out=torch.empty_like(z)))(x)
    assert torch.allclose(found, want, atol=1e-6)
    with pytest.raises(TypeError, match=r"^out is a tensor to write into, got str: torch\.empty_like"):
        functional.layer_norm(x, (16,), out="a")
