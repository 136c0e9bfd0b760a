"""What can be compared with what, what stays undecided and says why, and that nothing handed in is changed."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import normscope as ns
from normscope import families
from normscope.errors import BadInput
from normscope.identify.compare_result import Counterexample
from normscope.identify.compare_search import shrunk
from normscope.identify.compare_shapes import shapes
from normscope.identify.compare_values import carried, free_values


def layer_norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def one_pass(x: np.ndarray) -> np.ndarray:
    """The same by E[x^2] - E[x]^2, which loses digits far from 0 and is no other function for that."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt((x * x).mean(-1, keepdims=True) - mean * mean + 1e-5)


class Textbook(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


def test_a_function_beside_a_specification_a_module_and_a_function() -> None:
    plain = families.layer_norm(weight=False, bias=False)
    assert ns.compare(layer_norm, plain, (4, 8)).same is True
    assert ns.compare(layer_norm, one_pass, (4, 8)).same is True
    c = ns.compare(layer_norm, nn.LayerNorm(8), (4, 8))
    assert c.same is True
    assert c.notes == ("one takes no other parameters: they are compared with the values that they hold",)
    other = ns.compare(layer_norm, plain.replace(correction=1), (4, 8))
    assert other.same is False
    assert [d.field for d in other.differences] == ["correction"]
    shown = other.counterexample
    assert shown is not None
    assert np.array_equal(shown.y_a, layer_norm(shown.x))


def test_a_module_written_by_hand_with_names_of_its_own() -> None:
    """Its parameters are found by what they do, so it is compared with other values too."""
    a, b = Textbook(8), nn.LayerNorm(8)
    c = ns.compare(a, b, (4, 3, 8))
    assert c.same is False
    assert {d.field for d in c.differences} == {"eps_at", "correction", "eps"}
    same = ns.compare(a, families.layer_norm().replace(correction=1, eps=1e-6, eps_at="std"), (4, 8))
    assert same.modes == {"train": True, "eval": True, "bfloat16": False, "float16": False}
    assert {(d.field, d.a) for d in same.differences} == {("dtype of the output", "float32")}, (
        "nobody casts back"
    )


class Doubled(nn.Module):
    """Its gain is made of a tensor, and is none."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.norm(x)


def test_a_tensor_that_the_gain_is_made_of_was_taken_for_the_gain() -> None:
    double = Doubled(6)
    itself = ns.compare(double, double, torch.zeros(4, 6))
    assert set(itself.modes.values()) == {True}, "in half precision too"
    assert ns.compare(double, families.layer_norm(), torch.zeros(4, 6)).same is True
    apart = ns.compare(double, double.norm, torch.zeros(4, 6))
    assert [(d.field, d.a, d.b) for d in apart.differences] == [("weight values", "2", "1")]


def test_float32_functions_are_compared_to_what_their_precision_shows() -> None:
    def single(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (8,))

    x = torch.randn(4, 8)
    assert ns.compare(single, families.layer_norm(weight=False, bias=False), x).same is True
    assert ns.compare(single, families.layer_norm(weight=False, bias=False, eps=1e-6), x).same is False


def test_two_unknown_functions_that_agree_stay_undecided() -> None:
    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    c = ns.compare(softmax, lambda x: softmax(x), (4, 8))
    assert c.same is None
    assert c.notes[0].startswith("function softmax, on NumPy float64 is not known as a normalization: ")
    assert c.notes[-1].endswith("evaluations, which proves nothing about other inputs")
    assert str(c).startswith(
        "function softmax, on NumPy float64 and function <lambda>, on NumPy float64: undecided\n"
    )
    assert ns.compare(softmax, layer_norm, (4, 8)).same is False


def test_a_side_that_raises_in_a_mode_leaves_it_undecided() -> None:
    class OnlyEval(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise RuntimeError("not in training")
            return super().forward(x)

    c = ns.compare(OnlyEval(8), nn.LayerNorm(8), (4, 8))
    assert c.same is None
    assert c.modes["train"] is None
    assert c.modes["eval"] is True
    assert "the output in training was not compared: one of them raises, or is random" in c.notes


def test_a_fixed_map_is_compared_in_evaluation_alone() -> None:
    stored = nn.BatchNorm1d(4).eval()
    nn.init.uniform_(stored.running_mean)

    def deployed(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, stored.running_mean, stored.running_var)

    c = ns.compare(deployed, stored, torch.randn(5, 4))
    assert c.modes == {"eval": True, "bfloat16": True, "float16": True}
    assert "one is a fixed map, as a norm in evaluation is: only evaluation is compared" in c.notes


def test_a_result_for_one_shape_says_so() -> None:
    c = ns.compare(
        families.layer_norm(weight=False, bias=False),
        families.layer_norm("l d", weight=False, bias=False),
        (4, 1, 6),
    )
    assert c.same is True
    assert c.notes[0].startswith("on inputs of shape (4, 1, 6); for others ")


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm2d(6),
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        lambda: Textbook(5),
    ],
)
def test_nothing_handed_in_is_changed(make: Any) -> None:
    a, b = make().train(), nn.GroupNorm(2, 6).eval()
    for module in (a, b):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
    before = [copy.deepcopy(m.state_dict()) for m in (a, b)]
    grads = [[p.grad.clone() for p in m.parameters()] for m in (a, b)]
    seen: list[Any] = []
    a.register_forward_hook(lambda *_: seen.append(1))
    torch.manual_seed(3)
    random.seed(3)
    state, own_state = torch.get_rng_state(), random.getstate()
    x = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    ns.compare(a, b, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == own_state
    assert torch.equal(x, kept)
    assert (a.training, b.training, seen) == (True, False, [])
    for module, values, gradient in zip((a, b), before, grads, strict=True):
        assert all(torch.equal(t, values[n]) for n, t in module.state_dict().items())
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradient, strict=True))


def test_a_comparison_gives_the_same_answer_twice() -> None:
    answers = [ns.compare(nn.LayerNorm(6), nn.RMSNorm(6)).to_json() for _ in range(2)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (layer_norm, families.layer_norm()),
            "the first cannot be read without running it (builtins.function is not a normalization that can be read.",
        ),
        (
            (nn.LayerNorm(8), 3, (4, 8)),
            "compare takes specifications, modules and callables; the second is a int. Pass the layer itself, or what "
            "it computes as a NormSpec.",
        ),
        (
            (nn.LayerNorm(8), nn.LayerNorm(8), (4, 7)),
            "an example is an input of both; LayerNorm does not take shape (4, 7): ",
        ),
        (
            (nn.LayerNorm(8), nn.LayerNorm(8), "4x8"),
            "an example is an array, a tensor or the sizes of one; got a str. Wrap a layer that takes more than one "
            "argument in a function of one.",
        ),
        (
            (nn.LayerNorm(8), nn.LayerNorm(7)),
            "no shape was found that both take. Pass an example: compare(a, b, example).",
        ),
    ],
)
def test_errors_say_what_came_and_what_to_do(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        ns.compare(*arguments)
    assert str(caught.value).startswith(said)


def test_an_example_without_numbers() -> None:
    with pytest.raises(BadInput) as caught:
        ns.compare(nn.LayerNorm(8), nn.LayerNorm(8), torch.empty(4, 8, device="meta"))
    assert str(caught.value) == (
        "an example holds numbers; got a tensor of shape (4, 8) on the meta device. Pass the sizes, (4, 8), or a "
        "tensor on the CPU."
    )


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            "b c h w -> b h w",
            "a layout names the same axes on both sides of the arrow, each once; got 'b c h w -> b h w'. Write "
            "'b c h w -> b h w c' where the second takes channels last.",
        ),
        ("b c", "the layout 'b c' names 2 axes, the example has 3. Name each axis once."),
        (
            3,
            "a layout is a text that names the axes; got a int. Write 'b c h w', or 'b c h w -> b h w c' where the "
            "second takes channels last.",
        ),
    ],
)
def test_layouts_that_do_not_fit(layout: Any, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        ns.compare(families.layer_norm(), families.layer_norm(), (2, 3, 4), layout=layout)
    assert str(caught.value) == said


# The parts ------------------------------------------------------------------------------------------------------------


def test_shapes_are_those_of_what_is_held() -> None:
    norm = nn.LayerNorm((6, 5))
    held = {name: tuple(p.shape) for name, p in norm.named_parameters()}
    assert list(shapes((ns.spec_of(norm), held, norm)))[:2] == [(4, 6, 6, 5), (4, 6, 5)]
    group = nn.GroupNorm(3, 12, affine=False)
    assert next(shapes((ns.spec_of(group), {}, group))) == (4, 12, 5, 3)
    both = [(families.group_norm(32), {}, None), (families.batch_norm(), {"weight": (48,)}, None)]
    assert list(shapes(*both)) == [], "48 channels make no 32 groups"


def test_values_are_carried_over_conventions() -> None:
    plain, offset = families.rms_norm(), families.gemma_rms_norm()
    values = free_values(plain, (2, 4))
    assert np.allclose(carried(values, plain, offset, (2, 4))["weight"], values["weight"] - 1)
    unbiased = families.layer_norm().replace(correction=1)
    w = carried({"weight": np.ones(4), "bias": np.zeros(4)}, families.layer_norm(), unbiased, (2, 4))[
        "weight"
    ]
    assert np.allclose(w, np.sqrt(4 / 3))


def test_a_smaller_input_keeps_what_is_asked_of_it() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 5))
    small = shrunk(x, lambda y: y.ndim >= 2 and y.shape[-1] >= 3 and float(np.abs(y).max(initial=0)) > 0.9)
    assert small.shape == (1, 3)
    assert np.count_nonzero(small) == 1
    assert float(np.abs(small).max()) in (1.0, 2.0)


def test_a_printed_counterexample_shows_the_numbers_around_the_largest_difference() -> None:
    """Beyond the first elements, which are often all 0."""
    a, b = np.zeros((3, 40)), np.zeros((3, 40))
    b[1, 20] = 0.5
    shown = Counterexample(
        np.arange(120.0).reshape(3, 40), a, b, "eval", values_a={"weight": np.linspace(0.5, 2, 40)}
    )
    assert shown.place == (1, 20)
    assert str(shown).splitlines() == [
        "x of shape (3, 40), [1, 17:23]: 57, 58, 59, 60, 61, 62",
        "a of shape (3, 40), [1, 17:23]: 0, 0, 0, 0, 0, 0",
        "b of shape (3, 40), [1, 17:23]: 0, 0, 0, 0.5, 0, 0",
        "with weight of shape (40,): 0.5 to 2 in a",
    ]


@pytest.mark.parametrize("correction", [0, 1])
def test_the_largest_difference_is_none_below_that_of_the_counterexample(correction: int) -> None:
    """The small input often shows more than those it was made of."""
    spec = families.layer_norm().replace(correction=correction, eps=1e-3, eps_at="std")
    c = ns.compare(spec, nn.LayerNorm(8, eps=1e-6), (4, 8))
    shown = c.counterexample
    assert shown is not None
    assert c.largest[shown.mode] >= shown.difference
    lines = str(c).splitlines()
    head = (
        "  by field, each alone and with parameters put in for it (together they may change less, or more):"
    )
    assert lines[lines.index(head) + 1].startswith("  - ")
    (said,) = [line for line in lines if line.startswith("  counterexample")]
    assert said.endswith(f"off by {shown.difference:.3g} at [{', '.join(map(str, shown.place or ()))}])")


def test_a_function_called_with_tensors_is_said_to_be() -> None:
    """``.var`` of a tensor is unbiased, that of an array is not: one text, two functions."""

    def standard(x: Any) -> Any:
        return (x - x.mean(-1)[..., None]) / (x.var(-1)[..., None] + 1e-5) ** 0.5

    plain = families.layer_norm(weight=False, bias=False)
    tensor = torch.zeros(4, 8, dtype=torch.float64)
    said = (
        "it was called with tensors, as the example is one, and does otherwise with arrays (Tensor.var and Tensor.std "
        "are unbiased, those of NumPy are not). An array as the example calls it with arrays"
    )
    with_tensors, with_arrays = (
        ns.compare(standard, plain, tensor),
        ns.compare(standard, plain, tensor.numpy()),
    )
    assert (with_tensors.same, with_arrays.same) == (False, True)
    assert f"function standard, on torch float64: {said}" in with_tensors.notes
    assert ns.identify(standard, tensor).notes[-1] == said
    silent = (
        ns.identify(standard, (4, 8)),
        with_arrays,
        ns.identify(nn.LayerNorm(8), tensor),
        ns.identify(lambda x: nn.functional.layer_norm(x, (8,)), tensor),  # takes no arrays
        ns.identify(
            lambda x: x / ((x * x).mean(-1)[..., None] + 1e-5) ** 0.5, tensor
        ),  # is the same with arrays
    )
    for other in silent:
        assert not [note for note in other.notes if "tensors" in note]


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_scripted_module_is_compared_with_the_values_that_it_holds() -> None:
    """No copy of it takes others."""
    plain, other = nn.LayerNorm(8), nn.LayerNorm(8)
    with torch.no_grad():
        other.weight.copy_(torch.linspace(0.5, 2, 8))
    scripted, held = torch.jit.script(plain), torch.jit.script(other)
    c = ns.compare(scripted, plain, (4, 8))
    assert (c.same, c.differences) == (True, ())
    assert c.notes == ("one takes no other parameters: they are compared with the values that they hold",)
    assert ns.compare(held, other, (4, 8)).same is True
    c = ns.compare(held, plain, (4, 8))
    assert [(d.field, d.a, d.b) for d in c.differences] == [("weight values", "0.5 to 2", "1")]
