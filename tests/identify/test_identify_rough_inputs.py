"""Shapes, layouts and outputs at the edge: an answer or a refusal in words, never an error from inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from normscope.errors import BadInput, ModelError
from normscope.identify.compare import compare
from normscope.identify.identification import identify

X = torch.zeros(4, 6, 10, dtype=torch.float64)


def norm(x: torch.Tensor, *axes: int) -> torch.Tensor:
    about = x - x.mean(axes, keepdim=True)
    return about / (about.square().mean(axes, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("shape", [(1, 8), (1, 6, 5)])
def test_batch_statistics_of_an_example_of_one_sample(shape: tuple[int, ...]) -> None:
    found = identify(lambda x: norm(x, 0), shape)
    assert found.spec is not None
    assert found.spec.properties((3, *shape[1:])).couples_samples
    assert found.max_error is not None
    assert found.max_error < 1e-12


@pytest.mark.parametrize(
    ("axis", "cut", "runs"), [(0, 1, "1 and 3 along axis 0"), (1, 2, "2 and 4 along axis 1")]
)
def test_runs_of_different_lengths_that_no_specification_says(axis: int, cut: int, runs: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        sizes = [cut, x.shape[axis] - cut]
        return torch.cat([norm(part, axis, 2) for part in x.split(sizes, axis)], axis)

    found = identify(function, X)
    assert found.spec is None
    assert found.reason == (
        f"its sets are runs of {runs}; a specification has runs of different lengths only along the samples, b, and "
        "there all but the last of one length, or by one apart"
    )


@pytest.mark.parametrize(
    ("layout", "axis", "cut", "stats"),
    [
        ("b v l", 0, 3, "(b0 b) v l -> b0 v"),
        ("c b l", 1, 4, "c (v b) l -> c v"),
        ("b c g", 1, 3, "b (g c) ... -> b g"),
    ],
)
def test_factors_have_names_that_no_axis_of_the_layout_has(
    layout: str, axis: int, cut: int, stats: str
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([norm(part, axis, 2) for part in x.split(cut, axis)], axis)

    found = identify(function, X, layout=layout)
    assert found.spec is not None
    assert found.spec.stats == stats


@pytest.mark.parametrize("factor", [1e-200, 1e250])
def test_outputs_whose_squares_are_no_numbers(factor: float) -> None:
    found = identify(lambda x: factor * norm(x, -1), X)
    assert found.reason is not None
    assert found.reason.startswith("its outputs reach 2.")
    assert found.reason.endswith(
        "squares of such numbers leave the range of float64, so that no fit tells what they are. Scale the output in a "
        "function around it"
    )


LAYOUT = "a layout names the axes of the input in one string, such as 'b c h w'; got a int."


@pytest.mark.parametrize(
    ("fn", "example", "layout", "said"),
    [
        (
            norm,
            (4, -6, 10),
            None,
            "an example has at least one axis and no axis of size 0; got shape (4, -6, 10). Pass one ordinary input.",
        ),
        (
            nn.LayerNorm(10),
            (4, -6, 10),
            None,
            "a shape has no negative sizes; got (4, -6, 10). Pass the sizes of one input",
        ),
        (norm, X, 3, LAYOUT),
        (nn.LayerNorm(10), X, 3, LAYOUT),
        (
            nn.LayerNorm(6),
            np.zeros((4, 6), dtype=object),
            None,
            "an example is an array of numbers; got one of object. Pass it as float32 or float64",
        ),
    ],
)
def test_what_cannot_be_an_example_or_a_layout(fn: Any, example: Any, layout: Any, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        identify(fn, example, layout=layout)
    assert str(caught.value) == said


class Exits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)


def exits(x: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


def test_a_callable_that_ends_the_program_has_raised() -> None:
    with pytest.raises(ModelError) as caught:
        identify(exits, X)
    assert str(caught.value) == (
        "function exits, on torch float64 raised on an input of shape (4, 6, 10) (SystemExit: 3). Pass an example of a "
        "shape and dtype that it takes."
    )
    with pytest.raises(ModelError) as caught:
        identify(Exits(), X)
    assert str(caught.value) == (
        "module Exits raised on a torch.float64 input of shape (4, 6, 10) (SystemExit: 3). Pass an example of a shape "
        "that it takes"
    )


@pytest.mark.parametrize("kind", ["a function", "a module"])
def test_an_interrupt_leaves_generators_and_grad_mode(kind: str) -> None:
    def interrupted(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        np.random.rand()  # noqa: NPY002
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return interrupted(x)

    chance, state = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    with torch.enable_grad():
        with pytest.raises(KeyboardInterrupt):
            identify(interrupted if kind == "a function" else Interrupted(), X)
        assert torch.is_grad_enabled()
        with pytest.raises(KeyboardInterrupt):
            compare(nn.LayerNorm(10), interrupted if kind == "a function" else Interrupted(), X)
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), chance)
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002


@pytest.mark.filterwarnings("error")
def test_a_gain_of_infinity_is_told_without_a_warning() -> None:
    module = nn.LayerNorm(10)
    module.weight.data[3] = float("inf")
    found = identify(module, X)
    assert found.spec is not None
    assert found.weight is not None
    assert found.weight[3] == np.inf
