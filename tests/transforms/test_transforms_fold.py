"""A fold leaves the function as it is, up to the border of the image, whatever the layer, padding, dtype and layout."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from normscope.transforms import FoldReport, fold

torch.set_num_threads(1)

CONVS: list[Any] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED: list[Any] = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
NORMS: list[Any] = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
CHANNELS = 4


@dataclass(frozen=True)
class Case:
    layer: nn.Module
    norm: nn.Module
    x: Tensor
    fills: bool
    """the layer fills in zeros"""
    terms: int
    """products in one sum of the layer"""

    def model(self, where: str) -> nn.Sequential:
        parts = (self.layer, self.norm) if where == "before" else (self.norm, self.layer)
        return nn.Sequential(*parts, nn.Tanh()).eval()


def filled(module: nn.Module, seed: int) -> Any:
    """Parameters and statistics that hide nothing: gains of both signs, means away from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
                if name == "running_var":
                    tensor.abs_().add_(0.1)
    return module


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["conv", "transposed", "linear"]))
    bias, seed = draw(st.booleans()), draw(st.integers(0, 2**31))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    dims = 0 if kind == "linear" else draw(st.integers(1, 3))
    fills, terms, sizes = False, CHANNELS, [5] * dims
    layer: nn.Module
    if kind == "linear":
        layer = nn.Linear(CHANNELS, CHANNELS, bias=bias)  # square: rows and columns must not be mixed up
    else:
        groups = draw(st.sampled_from([1, 2, CHANNELS]))
        kernel, stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
        padding = draw(st.integers(0, 2))
        mode = (
            draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
            if kind == "conv"
            else "zeros"
        )
        padding = min(padding, kernel - 1) if kind == "transposed" else padding
        make = (CONVS if kind == "conv" else TRANSPOSED)[dims - 1]
        settings_: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding}
        layer = make(CHANNELS, CHANNELS, kernel, groups=groups, bias=bias, padding_mode=mode, **settings_)
        fills = kind == "transposed" or (padding > 0 and mode == "zeros")
        terms = CHANNELS // groups * kernel**dims
    affine = draw(st.booleans())
    norm = NORMS[max(dims, 1) - 1](CHANNELS, affine=affine, eps=draw(st.sampled_from([1e-5, 1e-3, 0.5])))
    x = torch.randn((3, CHANNELS, *sizes), generator=torch.Generator().manual_seed(seed))
    x = x.to(dtype)
    if dims > 1 and draw(st.booleans()):
        x = x.to(memory_format=FORMATS[x.dim()])
        layer = layer.to(memory_format=FORMATS[x.dim()])
    return Case(filled(layer, seed).to(dtype), filled(norm, seed + 1).to(dtype), x, fills, terms)


def bound(model: nn.Module, case: Case) -> Tensor:
    """How far a folded output may be from float64: each product is rounded with its weight, the bias and the result are
    rounded, sums are accumulated in float32 or better; all relative to the sum of the absolute values."""
    absolute = copy.deepcopy(model).double()
    del absolute[2]  # tanh moves nothing further apart
    with torch.no_grad():
        for name, tensor in [*absolute.named_parameters(), *absolute.named_buffers()]:
            if tensor.is_floating_point() and "running_var" not in name:
                tensor.copy_(-tensor.abs() if "running_mean" in name else tensor.abs())
        sizes: Tensor = absolute(case.x.double().abs())
    own = torch.finfo(case.x.dtype).eps
    # tanh itself is right to a few units of an output of at most 1
    return (8 * own + case.terms * min(own, torch.finfo(torch.float32).eps)) * sizes + 4 * own


def same(model: nn.Module, folded: nn.Module, case: Case) -> None:
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(case.x.double())
        off = (folded(case.x).double() - truth).abs()
    assert bool((off <= bound(model, case)).all()), float((off / bound(model, case)).max())


def undone(case: Case, report: FoldReport) -> bool:
    """In a half type a bias that nearly cancels may not survive its rounding; the algebra was right before."""
    half = case.x.dtype in (torch.float16, torch.bfloat16)
    return half and any(
        one.reason.startswith("undone, the function would change: in eval") for one in report.left
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_norm_folds_into_the_layer_that_feeds_it(case: Case) -> None:
    model = case.model("before")
    folded, report = fold(model, case.x)
    if not undone(case, report):
        assert type(folded[1]) is nn.Identity, report
        assert report.folds[0].where == "before"
    same(model, folded, case)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_norm_folds_into_the_layer_that_reads_it_unless_that_fills_in_zeros(case: Case) -> None:
    model = case.model("after")
    folded, report = fold(model, case.x)
    if case.fills:
        assert type(folded[0]) is type(case.norm)
        assert "fills in zeros" in report.left[0].reason
        assert "where the norm's shift of up to" in report.left[0].reason
    elif not undone(case, report):
        assert type(folded[0]) is nn.Identity, report
        assert report.folds[0].where == "after"
    same(model, folded, case)


def test_a_shift_that_is_0_now_does_not_fold_past_zeros_either() -> None:
    """A fresh model has the keys that it has when it is trained."""
    _, report = fold(
        nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)).eval(), torch.randn(2, 4, 5, 5)
    )
    assert report.left[0].reason == (
        "not backwards: its input comes from the model's input; not forwards: 1 (conv2d) fills in zeros at the border, "
        "where the norm's shift (0 with these values) would be missing, and no bias makes up for that"
    )


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_border_is_what_a_fold_past_zero_padding_would_break(dims: int) -> None:
    """The fold that is refused, done by hand: right inside, wrong at the border."""
    norm, conv = filled(NORMS[dims - 1](4), 1), CONVS[dims - 1](4, 4, 3, padding=1)
    model = nn.Sequential(norm, conv).eval()
    x = torch.randn(2, 4, *[6] * dims)
    a = norm.weight / (norm.running_var + norm.eps).sqrt()
    b = norm.bias - a * norm.running_mean
    by_hand = copy.deepcopy(conv)
    with torch.no_grad():
        by_hand.weight.mul_(a.view(1, -1, *[1] * dims))
        by_hand.bias += (conv.weight.flatten(2).sum(2) * b).sum(1)
        off = (by_hand(x) - model(x)).abs().amax((0, 1))
    inside = (slice(1, -1),) * dims
    assert float(off[inside].max()) < 1e-4 < 1e-2 < float(off.max())
    _, report = fold(model, x)
    shift = float(b.detach().abs().max())
    assert report.left[0].reason == (
        f"not backwards: its input comes from the model's input; not forwards: 1 (conv{dims}d) fills in zeros at the "
        f"border, where the norm's shift of up to {shift:.3g} would be missing, and no bias makes up for that"
    )


def test_several_norms_fold_into_one_layer() -> None:
    """The layer is scaled on both sides, and its weight is rounded once."""
    parts = filled(nn.BatchNorm2d(4), 1), nn.Conv2d(4, 4, 3), filled(nn.BatchNorm2d(4), 2)
    model = nn.Sequential(*parts).eval()
    x = torch.randn(2, 4, 6, 6)
    folded, report = fold(model, x)
    assert [(one.site, one.into, one.where) for one in report.folds] == [
        ("0", ("1",), "after"),
        ("2", ("1",), "before"),
    ]
    first, conv, last = copy.deepcopy(model).double()

    def affine(norm: Any) -> tuple[Tensor, Tensor]:
        a = norm.weight / (norm.running_var + norm.eps).sqrt()
        return a, norm.bias - a * norm.running_mean

    (a, b), (c, d) = affine(first), affine(last)
    weight = (conv.weight * a.view(1, -1, 1, 1) * c.view(-1, 1, 1, 1)).float()
    # a product of three float64 numbers may be rounded in another order: float32 then differs in the last bit, rarely
    assert torch.allclose(folded[1].weight, weight, rtol=torch.finfo(torch.float32).eps, atol=0)
    bias = c * (conv.bias + (conv.weight.sum((2, 3)) * b).sum(1)) + d
    assert torch.allclose(folded[1].bias.double(), bias, rtol=1e-6)


def test_dead_channels_are_told_by_how_far_they_stand_out() -> None:
    conv, norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, eps=1e-5)
    norm.running_var[5] = 0
    model = nn.Sequential(conv, norm).eval()
    _, report = fold(model, torch.randn(2, 3, 6, 6))
    (one,) = report.folds
    # median 1 / sqrt(1 + eps), the dead one 1 / sqrt(eps)
    assert math.isclose(one.growth, math.sqrt((1 + 1e-5) / 1e-5), rel_tol=1e-6)
    assert (one.channel, one.zero_variance) == (5, 1)
    assert (
        "scales within 1 layer spread by more than 10 times the median, the most by 316 (channel 5 of 1); 1 channel of "
        "stored variance 0 take the largest scale that eps allows. Quantized per tensor, such a weight loses up to 8.3 "
        "bits in its other channels: quantize per channel, or prune the dead channels first"
    ) in str(report)
