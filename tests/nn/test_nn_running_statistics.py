"""Batch and instance norm with their statistics: every combination of flags, as torch has it; and why float32."""

from __future__ import annotations

import itertools

import pytest
import torch

import normscope.nn as own

FLAGS = list(itertools.product([0.1, None, 0.0, 1.0], [True, False], [True, False]))


def both(name, *args, **kwargs):
    return getattr(own, name)(*args, **kwargs), getattr(torch.nn, name)(*args, **kwargs)


def same(ours, torchs, x):
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-5, atol=1e-5)
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    for name, tensor in torchs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["BatchNorm1d", "InstanceNorm1d"])
@pytest.mark.parametrize(("momentum", "tracks", "training"), FLAGS)
def test_every_combination(name, momentum, tracks, training):
    ours, torchs = both(name, 3, momentum=momentum, track_running_stats=tracks)
    for layer in (ours, torchs):
        layer.train(training)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        same(ours, torchs, torch.randn(4, 3, 5, generator=generator) + 2)


@pytest.mark.parametrize("name", ["BatchNorm1d", "InstanceNorm1d"])
@pytest.mark.parametrize("training", [True, False])
def test_flag_set_to_false_later(name, training):
    """Batch norm then leaves its buffers alone in training and reads them in evaluation; instance norm moves them."""
    ours, torchs = both(name, 3, track_running_stats=True)
    for layer in (ours, torchs):
        layer.track_running_stats = False
        layer.train(training)
        layer.running_mean.fill_(0.5)
    same(ours, torchs, torch.randn(4, 3, 5))


@pytest.mark.parametrize("training", [True, False])
def test_buffers_taken_away(training):
    ours, torchs = both("BatchNorm1d", 3)
    for layer in (ours, torchs):
        layer.running_mean = layer.running_var = None
        layer.train(training)
    same(ours, torchs, torch.randn(4, 3, 5))


def test_counter_taken_away():
    """Without a counter, momentum=None moves nothing."""
    ours, torchs = both("BatchNorm1d", 3, momentum=None)
    for layer in (ours, torchs):
        layer.num_batches_tracked = None
    same(ours, torchs, torch.randn(4, 3, 5) + 1)
    assert ours.spec.running.momentum == 0.0


def test_old_state_dicts_without_counter_load():
    ours = own.BatchNorm1d(3)
    state = torch.nn.BatchNorm1d(3).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    ours.load_state_dict(state, strict=True)
    assert ours.num_batches_tracked == 0


def test_bfloat16_training_finds_the_mean():
    """With momentum 0.01 an average in bfloat16 stops halfway: its last steps are below half a unit of rounding."""
    x = torch.full((4, 1), 1.0, dtype=torch.bfloat16)
    x[::2] += 0.5
    means = []
    for kept in (True, False):
        norm = own.BatchNorm1d(1, momentum=0.01, float32_statistics=kept).bfloat16()
        for _ in range(1000):
            norm(x)
        means.append(float(norm.running_mean))
    assert abs(means[0] - 1.25) < 1e-3
    assert abs(means[1] - 1.25) > 0.1


def test_moved_and_cast_in_one_call():
    norm = own.BatchNorm1d(3).to(device="meta", dtype=torch.float16)
    assert (norm.running_var.device.type, norm.running_var.dtype) == ("meta", torch.float32)
    assert norm.weight.dtype == torch.float16
