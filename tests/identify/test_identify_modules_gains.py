"""Gains and biases of modules that are no plain parameters: 1 - w, w + v, (x + b) w, numbers written in the code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope import reference
from normscope.identify import Identification
from normscope.identify.decimals import apart, shortest
from normscope.identify.modules import identify_module

SHAPE = (4, 6, 10)
RANDOM = torch.Generator().manual_seed(4)
W, V, B = torch.randn(3, 10, generator=RANDOM)


def hat(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Made(nn.Module):
    """The normalized input put together with parameters w, v and b by one of `FORMS`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        for name, value in (("w", W), ("v", V), ("b", B)):
            if name in form:
                setattr(self, name, nn.Parameter(value.clone()))

    def forward(self, x: Tensor) -> Tensor:
        return FORMS[self.form](hat(x), self)


FORMS: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "(1 - w)": lambda x, m: (1 - m.w) * x,
    "(w - 1) + b": lambda x, m: (m.w - 1) * x + m.b,
    "(1 - w) v": lambda x, m: (1 - m.w) * m.v * x,
    "w + 0.5 written": lambda x, m: m.w * x + 0.5,
    "(w + v)": lambda x, m: (m.w + m.v) * x,
    "(w + v) + b": lambda x, m: (m.w + m.v) * x + m.b,
    "(w - v)": lambda x, m: (m.w - m.v) * x,
    "(x + b) w": lambda x, m: (x + m.b) * m.w,
    "w x - b": lambda x, m: m.w * x - m.b,
    "w x + w": lambda x, m: m.w * x + m.w,
    "w x times 1 to 10": lambda x, m: m.w * x * torch.arange(1, 11, dtype=x.dtype),
}
BY_TENSORS = ("(1 - w)", "(w - 1) + b", "(1 - w) v", "w + 0.5 written")


def computed(found: Identification, x: np.ndarray) -> np.ndarray:
    assert found.spec is not None, str(found)
    return reference.forward(x, found.spec, found.weight, found.bias)


@pytest.mark.parametrize("form", FORMS)
def test_values_of_the_effective_gain_and_bias(form: str) -> None:
    module = Made(form)
    found = identify_module(module, SHAPE)
    x = np.random.default_rng(0).standard_normal(SHAPE)
    expected = module.double()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(computed(found, x), expected, rtol=0, atol=1e-13)
    assert found.spec is not None
    assert (found.spec.stats, found.spec.scale, found.spec.eps) == ("... d -> ...", "rms", 1e-6)
    names = [name for name in ("w", "v", "b") if name in form]
    tensors = f"several tensors: {', '.join(names)}" if len(names) > 1 else f"one tensor, {names[0]}"
    said = f"its gain and bias are made of {tensors}"
    assert (said in found.notes) is (form not in BY_TENSORS)


def test_conventions_of_a_gain() -> None:
    minus = identify_module(Made("(1 - w)"), SHAPE).spec
    assert minus is not None
    assert (minus.weight_offset, minus.gain) == (-1.0, -1.0)
    beside = identify_module(Made("w + 0.5 written"), SHAPE)
    assert beside.spec is not None
    assert (beside.spec.weight, beside.spec.bias, beside.bias) == ("d", "", pytest.approx(0.5, rel=1e-14))


class Stored(nn.Module):
    """A batch norm and what comes behind it."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, affine=not adds)
        self.g = nn.Parameter(torch.ones(6, 1))
        self.h = nn.Parameter(torch.ones(6, 1)) if adds else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x * (1 - self.g) if self.h is None else x * (self.g + self.h)


@pytest.mark.parametrize(
    ("adds", "reason"),
    [
        (False, "norm.bias is added before the gain, which multiplies it; it is near to b c ... -> c; "),
        (
            True,
            "g is a gain, but the factor is a constant + g where the constant follows h (others at 0.7, constant 0.7, "
            "others at 1.6, constant 1.6)",
        ),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_with_stored_statistics_they_are_refused(adds: bool, reason: str, training: bool) -> None:
    found = identify_module(Stored(adds=adds), SHAPE, training=training)
    assert found.spec is None
    assert found.reason is not None
    assert found.reason.startswith(reason)


class Halved(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_a_bias_that_is_added_half() -> None:
    reason = identify_module(Halved(6), SHAPE).reason
    assert reason is not None
    assert reason.startswith(
        "bias is added 0.5 times, where a bias is added once; it is near to b c ... -> c; "
    )


class Negative(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def test_a_negative_gain_over_stored_statistics() -> None:
    for training in (True, False):
        spec = identify_module(Negative(6, affine=False, momentum=1 / 3), SHAPE, training=training).spec
        assert spec is not None
        assert (spec.gain, spec.eps) == (-1.0, 1e-5)
        assert spec.running is not None
        assert spec.running.momentum == pytest.approx(1 / 3, rel=1e-13)


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (10,)) * 0.3


def test_equivalents_of_a_fixed_gain_are_the_same_function() -> None:
    """Over the unbiased standard deviation, or the sum of squares, the gain is another number."""
    found = identify_module(Fixed(), SHAPE)
    assert found.spec is not None
    assert found.spec.gain == 0.3
    assert {(one.scale, one.correction) for one in found.equivalent} == {("std", 1), ("l2", 0)}
    x = np.random.default_rng(1).standard_normal(SHAPE)
    for other in found.equivalent:
        np.testing.assert_allclose(reference.forward(x, other), computed(found, x), rtol=0, atol=1e-12)


class OtherEps(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        self.eps = 1e-5 if self.training else 1.00002e-5
        return super().forward(x)


def test_two_modes_that_differ_in_the_sixth_digit() -> None:
    reason = identify_module(OtherEps(6), SHAPE).reason
    assert reason == (
        "no single specification says both modes: training divides with eps 1e-05 inside the root and gain 1, "
        "evaluation with eps 1.00002e-05 inside the root and gain 1"
    )


def test_numbers_in_few_digits() -> None:
    assert [shortest(x, 1e-13) for x in (0.5000000000000001, 0.1 + 0.2, -0.0, 1.25e-6)] == [
        0.5,
        0.3,
        0,
        1.25e-6,
    ]
    assert shortest(1.0000001, 1e-8) == 1.0000001
    assert apart(1e-5, 1.0000002e-5) == ("1e-05", "1.0000002e-05")
    assert apart(0.1, 0.1) == ("0.1", "0.1")
    assert apart(1.0, 1 + 2.0**-52) == ("1", "1.0000000000000002")
