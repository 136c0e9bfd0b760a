"""The parts that module identification is made of, each by its law."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from normscope.identify.cast_order import rounded
from normscope.identify.float64_copy import Float32AsFloat64
from normscope.identify.gains import law_of_gain
from normscope.identify.module_box import box_of_module, call_of
from normscope.identify.parameter_axes import place
from normscope.identify.tensor_roles import Role, roles
from normscope.identify.variance_law import Law, law_of_variance
from normscope.spec import families


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: torch.mean(x, dtype=torch.float32),
        lambda x: torch.zeros(3, dtype=torch.float32),
    ],
)
def test_casts_to_float32_give_float64(cast: object) -> None:
    x = torch.ones(3, dtype=torch.float64)
    assert callable(cast)
    assert cast(x).dtype is torch.float32
    with Float32AsFloat64():
        assert cast(x).dtype is torch.float64
        assert x.to(torch.bfloat16).dtype is torch.bfloat16


def inputs(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal(shape), random.standard_normal(shape)


@pytest.mark.parametrize(
    ("module", "shape", "axis"),
    [(nn.GroupNorm(2, 6), (4, 6, 3), 1), (nn.LayerNorm(5), (4, 3, 5), 2), (nn.BatchNorm1d(7), (4, 7, 3), 1)],
)
def test_an_element_uses_the_number_of_its_channel(
    module: nn.Module, shape: tuple[int, ...], axis: int
) -> None:
    box = box_of_module(module.train(), call_of(torch.zeros(shape)))
    found = roles(box, inputs(*shape))
    place = np.arange(shape[axis]).reshape([-1 if dim == axis else 1 for dim in range(len(shape))])
    for name, kind in (("weight", "gain"), ("bias", "bias")):
        assert found[name].kind == kind
        np.testing.assert_array_equal(found[name].entries, np.broadcast_to(place, shape))


def test_stored_statistics_act_in_eval_only() -> None:
    box = box_of_module(nn.BatchNorm1d(6), call_of(torch.zeros(8, 6)))
    kinds = {
        training: {n: r.kind for n, r in roles(box.in_mode(training), inputs(8, 6)).items()}
        for training in (True, False)
    }
    assert kinds[True] == {"weight": "gain", "bias": "bias", "running_mean": "none", "running_var": "none"}
    assert kinds[False] == {
        "weight": "gain",
        "bias": "bias",
        "running_mean": "mean",
        "running_var": "nonlinear",
    }


class Stored(nn.Module):
    """x over a function of a stored number."""

    def __init__(self, denominator: str) -> None:
        super().__init__()
        self.denominator = denominator
        self.register_buffer("v", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.v
        return (
            x
            / {
                "variance": (v + 1e-5).sqrt(),
                "std": v.sqrt() + 1e-3,
                "max": v.sqrt().clamp(min=0.02),
                "max_variance": v.clamp(min=1e-5).sqrt(),
                "exact": v.sqrt(),
                "deviation": v + 1e-3,
                "logarithm": (2 * v).exp(),
            }[self.denominator]
        )


@pytest.mark.parametrize(
    ("denominator", "eps", "eps_at"),
    [
        ("variance", 1e-5, "variance"),
        ("std", 1e-3, "std"),
        ("max", 0.02, "max"),
        ("max_variance", 1e-5, "max_variance"),
        ("exact", 0.0, "variance"),
    ],
)
def test_laws_of_a_stored_variance(denominator: str, eps: float, eps_at: str) -> None:
    box = box_of_module(Stored(denominator), call_of(torch.zeros(4, 6)))
    law = law_of_variance(box, "v", (6,), inputs(4, 6))
    assert isinstance(law, Law)
    assert (law.gain, law.eps, law.eps_at) == (1.0, eps, eps_at)


@pytest.mark.parametrize(
    ("denominator", "reason"),
    [
        (
            "deviation",
            "v is a stored standard deviation: 1/a is a line in it, a the slope of the map, where a specification "
            "stores the variance",
        ),
        (
            "logarithm",
            "v enters by no known law: with a the slope of the map, neither 1/a^2 nor 1/a is a line in it or its root",
        ),
    ],
)
def test_what_is_no_stored_variance(denominator: str, reason: str) -> None:
    box = box_of_module(Stored(denominator), call_of(torch.zeros(4, 6)))
    assert law_of_variance(box, "v", (6,), inputs(4, 6)) == reason


class Gained(nn.Module):
    def __init__(self, law: str) -> None:
        super().__init__()
        self.law, self.w = law, nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.w
        return x * {"w": w, "1 + w": 1 + w, "|w|": w.abs(), "exp": w.exp(), "-1/2 + w": w - 0.5}[self.law]


@pytest.mark.parametrize(
    ("law", "offset"), [("w", 0.0), ("1 + w", 1.0), ("-1/2 + w", -0.5), ("|w|", None), ("exp", None)]
)
def test_laws_of_a_gain(law: str, offset: float | None) -> None:
    box = box_of_module(Gained(law), call_of(torch.zeros(4, 6)))
    found = law_of_gain(box, Role("w", "gain", (6,)), inputs(4, 6)[0])
    assert found.offset == offset


def test_values_are_written_on_the_axes_that_they_vary_along() -> None:
    spec = families.group_norm(2)
    field = np.broadcast_to(np.arange(6)[:, None], (4, 6, 5))
    placed = place(spec, field)
    assert placed is not None
    assert placed.axes == "(g c)"
    np.testing.assert_array_equal(placed.read(field), np.arange(6))
    alone = place(spec, np.broadcast_to(np.arange(2).repeat(3)[:, None], (4, 6, 5)))
    assert alone is not None
    assert alone.axes == "g"
    constant = place(spec, np.ones((4, 6, 5)))
    assert constant is not None
    assert (constant.axes, constant.places.shape) == ("", ())


def test_rounding_is_torchs_own() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(rounded(x.double().numpy()), x.bfloat16().double().numpy())
