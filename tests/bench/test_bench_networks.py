"""Whole models: the network written here is the one it is named after; what is missing is said."""

import torch
from torch import nn

from normscope.bench import models
from normscope.bench.networks import Model, ResNet18, compare
from normscope.bench.timing import ROUNDS


def test_resnet18_is_resnet18():
    model = ResNet18()
    # He et al. 2016, counted from table 1 with the batch norms: 11,689,512 parameters, 20 batch norms.
    assert sum(p.numel() for p in model.parameters()) == 11_689_512
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 20
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)


def small(needs=None):
    network = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    return Model("small", lambda: (network, torch.randn(4, 8)), True, needs)


def test_before_and_after():
    row = compare(small(), seconds=1e-6)
    assert row.note == ""
    assert row.swapped == 1
    assert set(row.timing.seconds) == {"before", "after", "copy"}
    assert row.timing.rounds >= ROUNDS
    # Sets of 8 elements in float32: a few roundings of 2^-24 of each side.
    assert row.difference < 16 * 2**-24


def test_missing_package_is_named_with_the_way_to_get_it():
    row = compare(small(("no_such_package", "pip install it")), seconds=1)
    assert row.note == "needs no_such_package: pip install it"
    assert row.timing is None


def test_failure_is_a_note():
    def build():
        raise RuntimeError("does not fit")

    assert compare(Model("broken", build, False), seconds=1).note == "RuntimeError: does not fit"


def test_names_are_different():
    names = [model.name for model in models()]
    assert len(set(names)) == len(names) == 7
