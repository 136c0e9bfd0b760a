"""bfloat16 and float16: where one function of real numbers rounds on its way is found, how sums are ordered is not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope import families

SHAPE = (4, 6, 16)


class Norm(nn.Module):
    """Layer norm, with the four steps that may each round: mean, variance, difference, affine map."""

    def __init__(self, **rounds: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        self.rounds = rounds

    def step(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.to(dtype).float() if self.rounds.get(name) else value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = self.step("mean", wide.mean(-1, keepdim=True), x.dtype)
        off = self.step("difference", wide - mean, x.dtype)
        variance = self.step("variance", wide.var(-1, keepdim=True, unbiased=False), x.dtype)
        normal = self.step("affine", off * torch.rsqrt(variance + 1e-5), x.dtype)
        return (normal * self.weight.float() + self.bias.float()).to(x.dtype)


class OtherOrder(Norm):
    """The same float32 arithmetic with sums, root and product in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = wide.flip(-1).cumsum(-1)[..., -1:] / wide.shape[-1]
        variance = (wide * wide).sum(-1, keepdim=True) / wide.shape[-1] - mean * mean
        scale = self.weight.float() / torch.sqrt(variance + 1e-5)
        return (wide * scale + (self.bias.float() - mean * scale)).to(x.dtype)


class Throughout(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        off = x - x.mean(-1, keepdim=True)
        return off * torch.rsqrt((off * off).mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias


def as_function(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A plain function of tensors, with parameters of 1 and 0 that it does not show."""
    return lambda x: module(x)


def in_half(module: Any, shown: Any) -> np.ndarray:
    """The output of a module on a counterexample, by nothing of the comparison."""
    dtype = getattr(torch, shown.mode.partition(" ")[0])
    copy = type(module)(**module.rounds).to(dtype)
    with torch.no_grad():
        for name, value in shown.values_a.items():
            getattr(copy, name).copy_(torch.tensor(value))
        return np.asarray(copy(torch.tensor(shown.x).to(dtype)).double().numpy())


@pytest.mark.parametrize("step", ["mean", "variance", "difference", "affine"])
def test_each_step_that_rounds_is_found_with_an_input_that_shows_it(step: str) -> None:
    a, b = Norm(**{step: True}), Norm()
    c = ns.compare(a, b, SHAPE)
    assert c.same is False
    assert c.dtypes["float64"] is True
    assert c.dtypes["bfloat16"] is False
    assert str(c).startswith(
        "Norm and Norm: the same function of real numbers, rounded differently in bfloat16"
    )
    shown = c.counterexample
    assert shown is not None
    assert shown.mode == "bfloat16"
    y_a, y_b = in_half(a, shown), in_half(b, shown)
    assert np.array_equal(y_a, shown.y_a)
    assert np.array_equal(y_b, shown.y_b)
    assert float(np.abs(y_a - y_b).max()) == shown.difference > 0


def test_the_difference_is_named_with_its_size() -> None:
    c = ns.compare(Norm(variance=True), nn.LayerNorm(16), SHAPE)
    (found,) = (d for d in c.differences if d.mode == "bfloat16")
    assert found.field == "arithmetic in half precision"
    assert re.fullmatch(r"\d+ % of the outputs off, by up to [12] units of the last place", found.a), found.a
    assert found.b == "rounded once"
    # outputs up to 4: rounding a factor near 1 to 8 bits, and the result again, moves by two last places of 2^-6
    assert 2.0**-8 <= found.size <= 2.0**-4
    assert c.notes[-1] == (
        "Norm in half precision: bfloat16 parameters: its mean and denominator are rounded, the rest is float32 and "
        "rounded once"
    )


def test_identification_carries_what_bfloat16_showed() -> None:
    conclusions = [
        ns.identify(norm, SHAPE).half.conclusion for norm in (Norm(), Norm(mean=True), Throughout())
    ]
    assert conclusions == [
        "bfloat16 parameters: it computes in float32 and rounds once, after the weight",
        "bfloat16 parameters: its mean and denominator are rounded, the rest is float32 and rounded once",
        "bfloat16 parameters: it rounds to 8 bits on the way to its output, in no order that is known",
    ]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Norm(), OtherOrder()),
        (OtherOrder(), nn.LayerNorm(16)),
        (Norm(mean=True, variance=True), Norm(mean=True, variance=True)),
        (Throughout(), Throughout()),
        (nn.LayerNorm(16), ns.nn.LayerNorm(16)),
        (Norm(), families.layer_norm()),
        (as_function(Norm()), as_function(OtherOrder())),
        (as_function(nn.LayerNorm(16)), families.layer_norm(weight=False, bias=False)),
    ],
)
def test_one_arithmetic_in_two_spellings_is_the_same(a: Any, b: Any) -> None:
    c = ns.compare(a, b, torch.zeros(SHAPE))
    assert c.same is True, str(c)
    assert c.dtypes["bfloat16"] is c.dtypes["float16"] is True


@pytest.mark.parametrize("example", [torch.zeros(SHAPE), torch.zeros(SHAPE, dtype=torch.float64)])
def test_functions_of_tensors_are_asked_too(example: torch.Tensor) -> None:
    wide, half = as_function(Norm()), as_function(Throughout())
    for other in (wide, families.layer_norm(weight=False, bias=False)):
        c = ns.compare(half, other, example)
        assert (c.same, c.dtypes["bfloat16"]) == (False, False)
        assert c.counterexample is not None
        x = torch.tensor(c.counterexample.x).bfloat16()
        off = half(x).double() - Norm()(x).double()
        assert float(off.detach().abs().max()) == c.counterexample.difference


def test_what_does_not_take_half_precision_is_compared_without_and_says_so() -> None:
    def only_float32(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return nn.functional.layer_norm(x, (16,))

    c = ns.compare(only_float32, nn.LayerNorm(16, elementwise_affine=False), torch.zeros(SHAPE))
    assert (c.same, c.dtypes) == (True, {"float32": True})
    name = "function only_float32, on torch float32"
    assert f"not compared in bfloat16, where {name} raises TypeError: float32 only" in c.notes


def test_arrays_and_specifications_alone_have_no_half_precision() -> None:
    def arrays(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    spec = families.layer_norm(weight=False, bias=False)
    for pair in ((arrays, spec), (spec, spec), (arrays, nn.LayerNorm(16, elementwise_affine=False))):
        assert ns.compare(*pair, SHAPE).dtypes == {"float64": True}


def test_a_kernel_that_rounds_what_its_definition_does_not_is_told_and_no_difference() -> None:
    """Of PyTorch on the CPU; on other devices its instance and batch norms do not."""
    c = ns.compare(nn.GroupNorm(6, 6), nn.InstanceNorm2d(6, affine=True))
    assert (c.same, c.dtypes["bfloat16"]) == (True, True)
    assert [note.partition(", which")[0] for note in c.notes if "bfloat16" in note] == [
        "the output in bfloat16 is the same by their definitions; here the CPU kernel of InstanceNorm2d rounds its "
        "statistics to bfloat16"
    ]


def test_a_batch_norm_that_rounds_in_training_alone() -> None:
    class Rounded(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                return super().forward(x)
            wide = x.float()
            mean, var = wide.mean(0), wide.var(0, unbiased=False)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), 0.1)
                self.running_var.lerp_(wide.var(0).to(self.running_var.dtype), 0.1)
            y = (wide - mean.to(x.dtype).float()) * torch.rsqrt(var + self.eps)
            return (y * self.weight.float() + self.bias.float()).to(x.dtype)

    c = ns.compare(Rounded(5), ns.nn.BatchNorm1d(5), (24, 5))
    assert {mode: same for mode, same in c.modes.items() if not same} == {"bfloat16 in training": False}
    assert c.counterexample is not None
    assert c.counterexample.mode == "bfloat16 in training"
    assert math.isfinite(c.counterexample.difference)


def test_numbers_are_told_in_as_many_digits_as_they_need() -> None:
    close, other = families.layer_norm(eps=1e-5), families.layer_norm(eps=1.0000001e-5)
    c = ns.compare(close, other, (4, 8))
    assert [(d.a, d.b) for d in c.differences if d.field == "eps"] == [("1e-05", "1.0000001e-05")]
    c = ns.compare(nn.BatchNorm1d(4, momentum=0.1), nn.BatchNorm1d(4, momentum=0.1 + 1e-8))
    assert [(d.a, d.b) for d in c.differences] == [("0.1", "0.10000001")]
    a, b = nn.LayerNorm(8), nn.LayerNorm(8)
    with torch.no_grad():
        a.weight.copy_(torch.linspace(0.5, 2, 8))
        b.weight.copy_(a.weight)
        b.weight[3] += 0.25
    c = ns.compare(a, b)
    assert [(d.field, d.a, d.b) for d in c.differences] == [
        ("weight values", "1.14286 at [3]", "1.39286 at [3]")
    ]


class Uncast(nn.Module):
    """An RMS norm in float32 whose output nobody casts back; in full precision it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()


def test_a_forgotten_cast_back_is_told_by_the_dtype_of_the_output() -> None:
    right = nn.RMSNorm(16, eps=1e-6)
    c = ns.compare(Uncast(), right, SHAPE)
    assert (c.same, c.dtypes) == (False, {"float64": True, "bfloat16": False, "float16": False})
    assert {(d.field, d.a, d.b, d.mode) for d in c.differences} == {
        ("dtype of the output", "float32", "bfloat16", "bfloat16"),
        ("dtype of the output", "float32", "float16", "float16"),
    }
    assert str(c).startswith(
        "Uncast and RMSNorm: the same function of real numbers, with outputs of two dtypes in bfloat16 and float16"
    )
    assert c.counterexample is not None
    assert c.counterexample.difference > 0, "numbers that the half type does not have"
    assert ns.compare(Uncast(), Uncast(), SHAPE).same is True


def test_a_weight_of_float32_promotes_the_output() -> None:
    weight = torch.ones(16)
    c = ns.compare(
        lambda x: nn.functional.rms_norm(x, (16,), eps=1e-6) * weight, nn.RMSNorm(16, eps=1e-6), weight[None]
    )
    assert c.same is False
    assert ("dtype of the output", "float32", "bfloat16") in {(d.field, d.a, d.b) for d in c.differences}
