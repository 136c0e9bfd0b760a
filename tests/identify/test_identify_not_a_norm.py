"""What is no normalization of the family is told so, with what contradicted it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normscope.errors import BadInput, ModelError
from normscope.identify.identification import identify

ROWS = (4, 6, 5)
MIXED = torch.tensor(np.random.default_rng(0).normal(size=(5, 5)))
POINTWISE = (
    "every output follows its own input alone, and no straight line: an activation, or a norm whose statistic sets "
    "have one element each (then pass an example with longer axes)"
)
LINEAR = (
    "it is a linear map that mixes elements: twice the input gives twice the output, while a normalization's output "
    "stops growing"
)
CONSTANT = (
    "the output does not depend on the input: it is a constant, a gain of 0, one that is lost in the rounding of "
    "the bias, or a centered norm whose statistic sets have one element each (then pass an example with longer axes)"
)


def drift() -> Callable[[torch.Tensor], torch.Tensor]:
    """Divides by a running mean of what it has seen."""
    memory = [1.0]

    def call(x: torch.Tensor) -> torch.Tensor:
        memory[0] = 0.5 * memory[0] + 0.5 * float(x.square().mean())
        return x / memory[0]

    return call


def remembered() -> Callable[[torch.Tensor], torch.Tensor]:
    """Adds the first element of the last input that was another one."""
    seen = [0.0, 0.0]

    def call(x: torch.Tensor) -> torch.Tensor:
        now = float(x.flatten()[0])
        if now != seen[1]:
            seen[:] = [seen[1], now]
        return x + seen[0]

    return call


NOT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "softmax": (
        lambda x: x.softmax(-1),
        "f(x) + f(-x) is twice the bias for every normalization; here it changes",
    ),
    "dropout": (F.dropout, "it is random: equal inputs give outputs that differ by up to"),
    "linear": (lambda x: x @ MIXED.to(x), LINEAR),
    "cumsum": (lambda x: x.cumsum(-1), LINEAR),
    "convolution": (
        lambda x: F.conv1d(x, MIXED[:1, None].to(x).expand(6, 1, 5), padding=2, groups=6),
        LINEAR,
    ),
    "centering": (
        lambda x: x - x.mean(-1, keepdim=True),
        "it subtracts the mean of each set and divides by nothing: twice the input gives twice the output",
    ),
    "residual block": (lambda x: x + F.layer_norm(x, (5,)), "the output grows without bound: "),
    "norm, then a linear layer": (
        lambda x: F.layer_norm(x, (5,)) @ MIXED.to(x),
        "within one set the outputs are no common multiple of x - mean (off by ",
    ),
    "norm, then an activation": (
        lambda x: F.gelu(F.layer_norm(x, (5,))),
        "f(x) + f(-x) is twice the bias for every normalization; here it changes",
    ),
    "norm, then tanh": (
        lambda x: F.layer_norm(x, (5,)).tanh(),
        "within one set the outputs are no common multiple of x - mean (off by ",
    ),
    "scaling by the largest": (
        lambda x: x / x.abs().amax(-1, keepdim=True),
        "x is divided by one number for each set, but by none that the family knows: ",
    ),
    "norm of power 1": (
        lambda x: F.normalize(x, p=1.0, dim=-1),
        "x is divided by one number for each set, but by none that the family knows: ",
    ),
    "mean of x under a root of its square": (
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
        "x - mean is divided by one number for each set, but by none that the family knows: ",
    ),
    "local response": (
        lambda x: F.local_response_norm(x, 3),
        "inputs do not fall into sets that share statistics: the one at (0, 0, 0) moves 2, ",
    ),
    "gelu": (F.gelu, POINTWISE),
    "dynamic tanh": (lambda x: torch.tanh(0.5 * x), POINTWISE),
    "softsign": (F.softsign, POINTWISE),
    "steps": (lambda x: (x * 8).round() / 8, POINTWISE),
    "constant": (lambda x: torch.ones_like(x), CONSTANT),
    "NaN": (lambda x: x.log(), "ordinary inputs give "),
    "pooling": (
        lambda x: x.mean(-1),
        "an input of shape (4, 6, 5) gives an output of shape (4, 6); a normalization keeps",
    ),
    # float32 cannot see the far rows move, so what contradicts depends on the dtype
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), ""),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(NOT))
def test_not_a_norm(name: str, dtype: torch.dtype) -> None:
    function, reason = NOT[name]
    found = identify(function, torch.zeros(ROWS, dtype=dtype))
    assert found.spec is None
    assert found.fixed is None
    assert not found
    assert found.reason is not None
    assert found.reason.startswith(reason), found.reason
    assert f"not a normalization of this family: {found.reason}" in str(found)


def test_what_the_denominator_follows_is_named() -> None:
    for function, name in (
        (NOT["scaling by the largest"][0], "it follows the largest magnitude of x"),
        (NOT["norm of power 1"][0], "it follows the mean magnitude of x"),
        (NOT["mean of x under a root of its square"][0], "it follows the root mean square of x"),
    ):
        reason = identify(function, torch.zeros(ROWS, dtype=torch.float64)).reason
        assert reason is not None
        assert reason.endswith(name)


def test_chance_and_memory_are_told_apart() -> None:
    def own_generator() -> Callable[[Any], Any]:
        rng = np.random.default_rng(0)
        return lambda x: x * rng.normal()

    assert (identify(F.dropout, torch.zeros(ROWS)).reason or "").endswith(
        "and the same ones once the global random generators are seeded"
    )
    assert (identify(own_generator(), ROWS).reason or "").endswith(
        "with seeded generators too: it has state, or a random generator of its own"
    )
    assert (identify(drift(), torch.zeros(ROWS)).reason or "").startswith(
        "it has state that every call moves, less each time (by "
    )
    assert (identify(remembered(), torch.zeros(ROWS)).reason or "").startswith(
        "it has state that other inputs change: one input gives the same twice in a row, and something else after "
    )


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(3)
    before, state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    identify(F.dropout, torch.zeros(ROWS))
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_fixed_affine(dtype: torch.dtype) -> None:
    """Batch norm in evaluation is two numbers a channel, whatever stands behind them."""
    mean, var = (
        torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 3.0], dtype=dtype),
        torch.linspace(0.5, 2, 6, dtype=dtype),
    )
    weight, bias = torch.linspace(-1, 1, 6, dtype=dtype), torch.linspace(1, 2, 6, dtype=dtype)
    found = identify(lambda x: F.batch_norm(x, mean, var, weight, bias), torch.zeros(ROWS, dtype=dtype))
    assert found.spec is None
    assert found.reason is None
    assert found.fixed is not None
    assert found.fixed.axes == "l"
    a = weight.double() / (var.double() + 1e-5).sqrt()
    # some roundings of the affine map and of the slope
    few = 16 * torch.finfo(dtype).eps
    np.testing.assert_allclose(found.fixed.a, a.numpy(), rtol=few, atol=few)
    np.testing.assert_allclose(
        found.fixed.b, (bias.double() - a * mean.double()).numpy(), rtol=few, atol=8 * few
    )
    assert (
        "a fixed affine map, possibly a norm with stored statistics: y = a * x + b, on l; a of shape (6,)"
        in str(found)
    )
    named = identify(
        lambda x: F.batch_norm(x, mean, var, weight, bias), torch.zeros(ROWS, dtype=dtype), layout="b c l"
    )
    assert named.fixed is not None
    assert named.fixed.axes == "c"


def test_identity_is_an_affine_map() -> None:
    found = identify(lambda x: x, ROWS)
    assert found.fixed is not None
    assert (float(found.fixed.a), float(found.fixed.b), found.fixed.axes) == (1.0, 0.0, "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(BadInput) as error:
        identify(F.relu, torch.zeros(ROWS, dtype=dtype))
    assert str(error.value) == (
        f"identification needs an example of float32 or float64; got {name}. In half precision the rounding of one "
        "element hides what tells normalizations apart. Pass the example in float32, and the callable in float32 too."
    )

    def inside(x: torch.Tensor) -> torch.Tensor:
        y = x.to(dtype)
        return (y / y.square().mean(-1, keepdim=True).sqrt()).to(x)

    assert identify(inside, torch.zeros(ROWS)).reason == (
        f"it rounds its input to {name}: an input and its {name} roundings give the same to the bit. In half precision "
        "normalizations cannot be told apart; pass it in float32"
    )


def test_errors() -> None:
    with pytest.raises(BadInput) as error:
        identify(F.relu, torch.zeros(ROWS, dtype=torch.int64))
    assert str(error.value) == (
        "identification needs an example of float32 or float64; got int64. Pass the example in float32, and the "
        "callable in float32 too."
    )
    with pytest.raises(BadInput) as error:
        identify(3, ROWS)
    assert str(error.value) == ("a callable is identified; got a int. Pass a function, a layer or a session.")
    with pytest.raises(BadInput) as error:
        identify(np.tanh, "x")
    assert str(error.value) == (
        "an example is a NumPy array, a tensor or a shape; got a str. Pass one input of the kind that the "
        "callable takes."
    )
    with pytest.raises(BadInput) as error:
        identify(np.tanh, (4, 0))
    assert str(error.value) == (
        "an example has at least one axis and no axis of size 0; got shape (4, 0). Pass one ordinary input."
    )
    with pytest.raises(BadInput) as error:
        identify(np.tanh, (4, 6), layout="b c h")
    assert str(error.value) == (
        "a layout names every axis once; got 'b c h' for an input of shape (4, 6). Name 2 axes, such as 'b c h w'."
    )
    with pytest.raises(BadInput) as error:
        identify(np.tanh, (4, 6), training=True)
    assert str(error.value) == (
        "training is for torch modules, which have two modes; got training=True for a ufunc. Identify the function of "
        "each mode."
    )
    with pytest.raises(BadInput) as error:
        identify(lambda x: (x, x), np.zeros((4, 6)))
    assert str(error.value) == (
        "a callable to identify returns one array of real numbers; function <lambda>, on NumPy float64 returned a "
        "tuple. Wrap it in a function that picks the array out."
    )

    def fails(x: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(ModelError) as raised:
        identify(fails, np.zeros((4, 6)))
    assert str(raised.value) == (
        "function fails, on NumPy float64 raised on an input of shape (4, 6) (RuntimeError: no). Pass an example of a "
        "shape and dtype that it takes."
    )


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def test_what_changes_after_some_calls_is_not_what_it_was_at_last() -> None:
    calls = iter(range(10**6))
    found = identify(lambda x: layer_norm(x) * (1.0 if next(calls) < 5 else 2.0), torch.zeros(4, 5, 6))
    assert found.reason is not None
    assert found.reason.startswith(
        "it has state that calls move: one input gave another output at first than after"
    )


@pytest.mark.parametrize("row", [False, True])
def test_a_branch_at_zeros_is_tried(row: bool) -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        zero = (x == 0).all(-1, keepdim=True) if row else (x == 0).all()
        return torch.where(zero, torch.tensor(7.0, dtype=x.dtype), layer_norm(x))

    found = identify(branching, torch.zeros(4, 5, 6))
    assert found.reason is not None
    assert "(zeros) it is off by 7 of the largest output" in found.reason


def test_the_size_of_an_input_that_is_not_taken_and_a_message_that_steers_a_terminal() -> None:
    def narrow(x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1e6:
            raise ValueError("too \x1b[31mlarge")
        return layer_norm(x)

    with pytest.raises(ModelError) as caught:
        identify(narrow, torch.zeros(4, 5, 6))
    said = str(caught.value)
    assert said.startswith(
        "function narrow, on torch float32 raised on an input of shape (4, 5, 6) with numbers up to "
    )
    assert said.endswith(
        "(ValueError: too \\x1b[31mlarge). Identification calls it with small and with large inputs: pass a callable "
        "that takes them."
    )


def test_a_bias_that_hides_a_norm_is_not_called_a_linear_map() -> None:
    found = identify(lambda x: layer_norm(x) + 1e15, torch.zeros(4, 5, 6, dtype=torch.float64))
    assert found.reason is not None
    assert found.reason.startswith("the bias hides the rest: outputs of the size ")
