"""Modules that write while they run: what moves which tensor, when, and that the owner's are never written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import normscope as ns
from normscope.errors import BadInput, ModelError
from normscope.identify.identification import identify
from normscope.identify.modules import identify_module

SHAPE = (5, 6, 4)


class Moving(nn.BatchNorm1d):
    """A batch norm whose running statistics move as ``rule`` says."""

    def __init__(self, rule: str) -> None:
        super().__init__(6)
        self.rule = rule
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = x.mean((0, 2)), x.var((0, 2))
        y = self.normalized(x, mean, x.var((0, 2), unbiased=False))
        if self.rule == "evaluation moves too" or (self.rule == "after its use" and self.training):
            stored = self.normalized(x, self.running_mean, self.running_var)
            self.move(mean, var, 0.1)
            return y if self.training and self.rule != "after its use" else stored
        if not self.training:
            return self.normalized(x, self.running_mean, self.running_var)
        self.calls += 1
        self.num_batches_tracked.add_(self.rule != "a count of its own")
        count = float(self.num_batches_tracked if self.rule != "a count of its own" else self.calls)
        self.move(mean, var, max(0.1, 1 / count) if self.rule == "warm-up" else 1 / count)
        return y

    def normalized(self, x: torch.Tensor, mean: Any, var: Any) -> torch.Tensor:
        scaled = (x - mean[:, None]) / (var[:, None] + self.eps).sqrt()
        return scaled * self.weight[:, None] + self.bias[:, None]

    def move(self, mean: torch.Tensor, var: torch.Tensor, momentum: float) -> None:
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(var, momentum)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("rule", "word"), [("after its use", "training"), ("evaluation moves too", "evaluation")]
)
def test_stored_statistics_that_move_where_they_normalize_are_not_frozen(
    rule: str, word: str, training: bool
) -> None:
    found = identify_module(Moving(rule), SHAPE, training=training)
    assert found.spec is None
    assert found.reason == (
        f"{word} normalizes by stored statistics and moves running_mean and running_var too: no specification says that"
    )


def test_a_warm_up_of_the_momentum_is_not_a_plain_mean() -> None:
    found = identify_module(Moving("warm-up"), SHAPE, training=True)
    assert found.spec is None
    assert found.reason == (
        "training moves running_mean and running_var by no known rule: neither an exponential nor a plain average of "
        "the batches' statistics"
    )


def test_a_plain_mean_is_told_by_its_counter() -> None:
    found = identify_module(Moving("plain"), SHAPE, training=True)
    assert found.spec is not None
    assert found.spec.running is not None
    assert found.spec.running.momentum is None
    assert found.notes == ()


def test_a_plain_mean_without_a_counter_to_move_says_how_long_it_was_watched() -> None:
    found = identify_module(Moving("a count of its own"), SHAPE, training=True)
    assert found.spec is not None
    assert found.notes == ("that it stays the plain mean was watched for 3 calls only",)


class Shrinking(nn.LayerNorm):
    """Writes its weight in every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


def test_every_call_starts_from_the_same_parameters() -> None:
    module = Shrinking(10)
    found = identify_module(module, (4, 6, 10))
    assert found.spec is None
    assert found.reason is not None
    assert found.reason.startswith("its output depends on weight, which the call itself moves")
    assert torch.equal(module.weight, torch.ones(10))


def closed_over(module: nn.Module) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return type(module).forward(module, x)

    return forward


def by_default(module: nn.Module) -> Callable[..., Any]:
    def forward(x: torch.Tensor, inner: Any = module) -> torch.Tensor:
        return type(inner).forward(inner, x)

    return forward


def wrapped(module: nn.Module) -> Callable[..., Any]:
    inner = module.forward

    @wraps(inner)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    return forward


@pytest.mark.parametrize("patch", [closed_over, by_default, wrapped])
def test_a_forward_that_holds_its_module_is_refused_and_nothing_written(
    patch: Callable[[nn.Module], Callable[..., Any]],
) -> None:
    inner = Shrinking(10)
    inner.forward = patch(inner)  # type: ignore[method-assign]
    for module, name in ((inner, "Shrinking"), (nn.Sequential(inner), "0")):
        with pytest.raises(BadInput) as caught:
            identify_module(module, (4, 6, 10))
        assert str(caught.value) == (
            f"a module is identified on a copy, and the forward that was put on {name} holds the module itself, so "
            "that a copy would run and write the original. Define forward in a subclass, or put it on as a method: "
            "types.MethodType(forward, module)"
        )
    assert torch.equal(inner.weight, torch.ones(10))


def test_a_method_put_on_a_module_is_copied_with_it() -> None:
    module = nn.LayerNorm(10, bias=False)
    module.forward = MethodType(lambda self, x: 2 * nn.LayerNorm.forward(self, x), module)  # type: ignore[method-assign]
    found = identify_module(module, (4, 6, 10))
    assert found.spec is not None
    assert found.spec.gain == 2


class Complex(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(super().forward(x), x)


def test_a_complex_output_is_not_cut_to_its_real_part() -> None:
    with pytest.raises(ModelError) as caught:
        identify_module(Complex(10), (4, 6, 10))
    assert str(caught.value) == (
        "module Complex returned a tensor of torch.complex128; identification reads real numbers. Wrap it in a module "
        "that returns the real part, or the two parts stacked"
    )
    with pytest.raises(BadInput) as refused:
        identify(lambda x: torch.complex(x, x), torch.zeros(4, 6, dtype=torch.float64))
    assert str(refused.value) == (
        "a callable to identify returns one array of real numbers; function <lambda>, on torch float64 returned an "
        "array of complex128. Wrap it in a function that picks the array out."
    )


class StoresOfAll(ns.nn.GhostBatchNorm1d):
    """Normalizes by virtual batches, and stores the statistics of the whole batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.training:
            self.running_mean.lerp_(x.mean((0, 2)), 0.1)
            self.running_var.lerp_(x.var((0, 2)), 0.1)
            mean, var = self.running_mean.clone(), self.running_var.clone()
        y = super().forward(x)
        if self.training:
            self.running_mean.copy_(mean)
            self.running_var.copy_(var)
        return y


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("updates", ["each", "once"])
def test_virtual_batches_that_update_in_turn_or_at_once(updates: str, momentum: float | None) -> None:
    layer = ns.nn.GhostBatchNorm1d(6, size=2, updates=updates, momentum=momentum)
    found = identify_module(layer, (8, 6, 4))
    assert found.spec is not None
    assert found.spec.stats == layer.spec.stats
    assert found.spec.sizes == layer.spec.sizes
    assert found.spec.running == layer.spec.running


def test_virtual_batches_beside_statistics_of_the_whole_are_no_known_rule() -> None:
    found = identify_module(StoresOfAll(6, size=2), (8, 6, 4))
    assert found.reason == (
        "training moves running_mean and running_var by no known rule: neither an exponential nor a plain average of "
        "the batches' statistics"
    )
