"""Errors of the layers: the invariant, what came, the likely fix; and torch's own where torch has the layer."""

from __future__ import annotations

import pytest
import torch

import normscope.nn as own
from normscope.errors import BadInput

TEXTS = [
    (
        lambda: own.DynamicTanh(3)(torch.tensor([[1, 2, 3]])),
        "DynamicTanh takes a floating point input; got torch.int64. Use x.float().",
    ),
    (
        lambda: own.TLU(3)(torch.zeros(1, 3, dtype=torch.bool)),
        "TLU takes a floating point input; got torch.bool. Use x.float().",
    ),
    (
        lambda: own.RMSNorm(0),
        "RMSNorm needs every size in normalized_shape to be an integer of 1 or more; got 0. "
        "Give the sizes of the input's last axes, such as x.shape[-1].",
    ),
    (
        lambda: own.RMSNorm([4, -1]),
        "RMSNorm needs every size in normalized_shape to be an integer of 1 or more; got [4, -1]. "
        "Give the sizes of the input's last axes, such as x.shape[-1].",
    ),
    (
        lambda: own.RMSNorm(()),
        "RMSNorm needs every size in normalized_shape to be an integer of 1 or more; got (). "
        "Give the sizes of the input's last axes, such as x.shape[-1].",
    ),
    (
        lambda: own.RMSNorm(4.0),
        "RMSNorm needs every size in normalized_shape to be an integer of 1 or more; got 4.0. "
        "Give the sizes of the input's last axes, such as x.shape[-1].",
    ),
    (
        lambda: own.RMSNorm(4, eps=0.0),
        "RMSNorm needs an eps above 0, without which a set of zeros divides 0 by 0; got 0.0. "
        "Use 1e-6, or leave it out for the default.",
    ),
    (
        lambda: own.RMSNorm(4, eps=-1e-6),
        "RMSNorm needs an eps above 0, without which a set of zeros divides 0 by 0; got -1e-06. "
        "Use 1e-6, or leave it out for the default.",
    ),
    (
        lambda: own.RMSNorm(4, convention="mistral"),
        "RMSNorm knows the conventions torch, llama, t5, gemma; got 'mistral'. "
        "Mistral, Qwen and most others are llama.",
    ),
    (
        lambda: own.RMSNorm(4)(torch.zeros(4, 3)),
        "RMSNorm was made for an input whose last axis has size 4; got an input of shape (4, 3). "
        "Move the features to the end (x.movedim), or make the layer for x.shape[-1].",
    ),
    (
        lambda: own.RMSNorm((2, 4), convention="gemma")(torch.zeros(4)),
        "RMSNorm was made for an input whose last axes have sizes 2, 4; got an input of shape (4,). "
        "Move the features to the end (x.movedim), or make the layer for x.shape[-2:].",
    ),
    (
        lambda: own.ScaleNorm(0),
        "ScaleNorm needs every size in features to be an integer of 1 or more; got 0. "
        "Give the size of the last axis.",
    ),
    (
        lambda: own.ScaleNorm(4)(torch.zeros(3)),
        "ScaleNorm was made for an input whose last axis has size 4; got an input of shape (3,). "
        "Move the features to the end (x.movedim), or make the layer for x.shape[-1].",
    ),
    (
        lambda: own.ChannelsFirstLayerNorm(4)(torch.zeros(2, 3, 3, 4)),
        "ChannelsFirstLayerNorm was made for an input (N, 4, ...); got an input of shape (2, 3, 3, 4). "
        "For channels in the last axis use LayerNorm(4).",
    ),
    (
        lambda: own.ChannelsFirstLayerNorm(0),
        "ChannelsFirstLayerNorm needs every size in num_channels to be an integer of 1 or more; got 0. "
        "Give the size of axis 1.",
    ),
    (
        lambda: own.FrozenBatchNorm(4)(torch.zeros(4, 3)),
        "FrozenBatchNorm was made for an input (N, 4, ...); got an input of shape (4, 3). "
        "For one sample use x.unsqueeze(0).",
    ),
    (
        lambda: own.PixelNorm()(torch.zeros(3)),
        "PixelNorm takes an input (N, C, ...); got an input of shape (3,). For one sample use x.unsqueeze(0).",
    ),
    (
        lambda: own.L2Norm(dim=2)(torch.zeros(4, 3)),
        "L2Norm normalizes along axis 2; got an input of shape (4, 3). The last axis is dim=-1.",
    ),
]


@pytest.mark.parametrize(("act", "text"), TEXTS)
def test_whole_text(act, text):
    with pytest.raises(BadInput) as caught:
        act()
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["ScaleNorm", "ChannelsFirstLayerNorm", "FrozenBatchNorm", "RMSNorm"])
@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan"), float("inf")])
def test_no_layer_of_ours_takes_an_eps_that_is_none(name, eps):
    with pytest.raises(BadInput, match=f"{name} needs an eps above 0"):
        getattr(own, name)(4, eps=eps)


@pytest.mark.parametrize("name", ["PixelNorm", "L2Norm"])
def test_nor_one_without_a_size(name):
    with pytest.raises(BadInput, match=f"{name} needs an eps above 0"):
        getattr(own, name)(eps=0.0)


# (class, arguments, shape of the input, in training)
AS_TORCH = [
    ("LayerNorm", (4,), (4, 3)),
    ("LayerNorm", ((2, 4),), (4,)),
    ("GroupNorm", (2, 4), (2, 3, 5)),
    ("GroupNorm", (2, 4), (4,)),
    ("GroupNorm", (2, 2), (1, 2)),
    ("BatchNorm1d", (4,), (4,)),
    ("BatchNorm1d", (4,), (1, 4)),
    ("BatchNorm1d", (4,), (3, 5)),
    ("BatchNorm2d", (4,), (2, 4, 3)),
    ("BatchNorm2d", (4, 0.0), (2, 4, 3, 3)),
    ("BatchNorm3d", (4,), (2, 4, 3)),
    ("InstanceNorm1d", (4,), (2, 2, 4, 3)),
    ("InstanceNorm1d", (4,), (2, 4, 1)),
    ("InstanceNorm1d", (4, 1e-5, 0.1, True), (2, 3, 5)),
    ("InstanceNorm2d", (4,), (4, 3)),
]


@pytest.mark.parametrize(("name", "args", "shape"), AS_TORCH)
def test_layers_of_torch_raise_as_torch_does(name, args, shape):
    with pytest.raises((ValueError, RuntimeError)) as wanted:
        getattr(torch.nn, name)(*args)(torch.ones(shape))
    with pytest.raises(wanted.type) as caught:
        getattr(own, name)(*args)(torch.ones(shape))
    assert str(caught.value) == str(wanted.value)


def test_groups_that_do_not_divide():
    with pytest.raises(ValueError, match=r"num_channels \(4\) must be divisible by num_groups \(3\)"):
        own.GroupNorm(3, 4)


def test_instance_norm_warns_of_a_number_that_it_does_not_use():
    with pytest.warns(UserWarning, match="does not match num_features"):
        own.InstanceNorm1d(4)(torch.randn(2, 3, 5))
