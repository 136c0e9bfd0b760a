"""Filter response norm with a learned eps, the thresholded linear unit, and Dynamic Tanh: formulas, masks, errors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import normscope.nn as own
from normscope.errors import BadInput


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_a_learned_eps_adds_its_size_to_the_fixed_one():
    """eps + |learned|, either sign: the layer of a fixed eps of that sum, and its gradient in the learned one."""
    x = 0.01 * draw(2, 3, 4, 5)
    fixed = own.FilterResponseNorm2d(3, eps=1e-6 + 3e-4, dtype=torch.float64)
    learned = own.FilterResponseNorm2d(3, learned_eps=1e-4, dtype=torch.float64)
    assert learned.learned_eps.item() == 1e-4
    for sign in (1, -1):
        with torch.no_grad():
            learned.learned_eps.fill_(sign * 3e-4)
            for name in ("weight", "bias"):
                getattr(learned, name).copy_(draw(3, seed=1))
                getattr(fixed, name).copy_(draw(3, seed=1))
        torch.testing.assert_close(learned(x), fixed(x), rtol=0, atol=64 * 2.0**-52)

    def of(x, weight, bias, learned_eps):
        given = {"weight": weight, "bias": bias, "learned_eps": learned_eps}
        return torch.func.functional_call(learned, given, (x,))

    parameters = (learned.weight, learned.bias, learned.learned_eps)
    assert torch.autograd.gradcheck(of, (x[:1].requires_grad_(), *parameters))


@pytest.mark.parametrize("learned", [None, 1e-4])
def test_padding_reaches_nothing(learned):
    norm, x = own.FilterResponseNorm1d(3, learned_eps=learned, dtype=torch.float64), draw(2, 3, 5)
    alone = norm(x[1:, :, :3])
    x[1, :, 3:] = float("nan")
    x.requires_grad_()
    with torch.no_grad():
        norm.bias.fill_(2.0)
    y = norm(x, lengths=[5, 3])
    torch.testing.assert_close(y[1:, :, :3], alone + 2, rtol=0, atol=64 * 2.0**-52)
    assert not y[1, :, 3:].any()
    assert norm(x, lengths=[5, 3], fill="bias")[1, :, 3:].eq(2).all()
    y.sin().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert not x.grad[1, :, 3:].any()


def test_thresholded_linear_unit():
    """max(x, tau): the gradient goes to the larger."""
    unit = own.TLU(2)
    with torch.no_grad():
        unit.tau.copy_(torch.tensor([-1.0, 0.5]))
    x = torch.tensor([[[-2.0, -0.5], [0.0, 1.0]]], requires_grad=True)
    y = unit(x)
    assert y.tolist() == [[[-1.0, -0.5], [0.5, 1.0]]]
    y.sum().backward()
    assert x.grad.tolist() == [[[0.0, 1.0], [0.0, 1.0]]]
    assert unit.tau.grad.tolist() == [1.0, 1.0]


def test_limits_of_the_papers():
    """Centered, FRN is instance norm; of one position, a sign. TLU goes from the identity to ReLU, Dynamic Tanh from a
    slope to a step.
    """
    x = draw(2, 3, 4, 5)
    x = x - x.mean((2, 3), keepdim=True)
    frn = own.FilterResponseNorm2d(3, eps=1e-5, dtype=torch.float64)
    torch.testing.assert_close(frn(x), F.instance_norm(x), rtol=0, atol=64 * 2.0**-52)
    frn.eps = 1e-30
    one = x[:, :, :1, :1]
    torch.testing.assert_close(frn(one), one.sign(), rtol=0, atol=8 * 2.0**-52)

    unit = own.TLU(3, dtype=torch.float64)
    assert torch.equal(unit(x), x.relu())
    with torch.no_grad():
        unit.tau.fill_(-torch.inf)
    assert torch.equal(unit(x), x)

    small, large = (own.DynamicTanh(3, False, alpha, dtype=torch.float64) for alpha in (1e-6, 1e6))
    far = x[x.abs() > 1e-3]  # tanh(z) = z (1 - z^2 / 3 + ...), and 1 to the last bit above 20
    torch.testing.assert_close(small(x), 1e-6 * x, rtol=1e-11, atol=0)
    assert torch.equal(large(x)[x.abs() > 1e-3], far.sign())


@pytest.mark.parametrize("last", [True, False])
def test_dynamic_tanh_is_the_papers_formula(last):
    x = draw(2, 4, 3, 4)
    layer = own.DynamicTanh(4, last, 0.7, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(draw(4, seed=1))
        layer.bias.copy_(draw(4, seed=2))
    weight, bias = (t if last else t[:, None, None] for t in (layer.weight, layer.bias))
    wanted = weight * torch.tanh(0.7 * x) + bias
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=4 * 2.0**-52)
    y = layer(x.bfloat16())
    assert torch.equal(y, layer.float()(x.bfloat16().float()).bfloat16())  # rounded once
    assert torch.equal(layer(x[:1]), layer(x)[:1])  # no companion is seen


WRONG = {
    "axes": (
        lambda: own.FilterResponseNorm2d(3)(torch.zeros(2, 3, 4)),
        "FilterResponseNorm2d was made for inputs (N, 3, H, W); got an input of shape (2, 3, 4). Move the channels to "
        "axis 1 (x.movedim), or make the layer for x.shape[1].",
    ),
    "learned eps": (
        lambda: own.FilterResponseNorm1d(3, learned_eps=0.0),
        "FilterResponseNorm1d needs an eps above 0, without which a set of zeros divides 0 by 0; got 0.0. Use 1e-6, or "
        "leave it out for the default.",
    ),
    "channels of TLU": (
        lambda: own.TLU(3)(torch.zeros(2, 4)),
        "TLU was made for inputs (N, 3, ...); got an input of shape (2, 4). Move the channels to axis 1 (x.movedim), "
        "or make the layer for x.shape[1].",
    ),
    "features": (
        lambda: own.DynamicTanh(3)(torch.zeros(2, 4)),
        "DynamicTanh was made for an input whose last axis has size 3; got an input of shape (2, 4). Move the features "
        "to the end (x.movedim), or make the layer for x.shape[-1].",
    ),
    "channels": (
        lambda: own.DynamicTanh(3, False)(torch.zeros(2, 4, 3)),
        "DynamicTanh was made for inputs (N, 3, ...); got an input of shape (2, 4, 3). Move the channels to axis 1 "
        "(x.movedim), or make the layer for x.shape[1].",
    ),
    "axes of channels": (
        lambda: own.DynamicTanh((3, 4), False),
        "DynamicTanh has one axis of features where channels_last=False; got normalized_shape=(3, 4). Give the size of "
        "axis 1.",
    ),
    "alpha": (
        lambda: own.DynamicTanh(3, alpha_init_value=float("inf")),
        "DynamicTanh needs a finite alpha_init_value; got inf. The paper's is 0.5.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_say_what_is_wanted_what_came_and_the_fix(name):
    call, text = WRONG[name]
    with pytest.raises(BadInput) as caught:
        call()
    assert str(caught.value) == text
