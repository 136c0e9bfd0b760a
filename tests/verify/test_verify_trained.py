"""PyTorch's layers as training leaves them, with random sizes, gains, biases and states: none may be called wrong."""

import random
import warnings

import pytest
import torch
from torch import nn

from normscope import verify

torch.set_num_threads(1)

SIZES = (1, 2, 3, 5, 8, 16, 32, 49, 64, 100, 128, 255, 256, 512)
EPS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 0.1, 3.0)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


def layer(seed):
    """One layer, its tensors at sizes from 0.01 to 100."""
    choose = random.Random(seed)
    size, eps = choose.choice(SIZES), choose.choice(EPS)
    groups = choose.choice([g for g in range(1, size + 1) if size % g == 0])
    kinds = (
        lambda: nn.BatchNorm1d(size, eps=eps, momentum=choose.choice([None, 0.1, 0.9])),
        lambda: nn.BatchNorm2d(size, eps=eps),
        lambda: nn.LayerNorm(size, eps=eps),
        lambda: nn.GroupNorm(groups, size, eps=eps),
        lambda: nn.RMSNorm(size, eps=choose.choice([None, eps])),
        lambda: nn.InstanceNorm1d(size, eps=eps, affine=True),
        lambda: nn.InstanceNorm2d(size, eps=eps, affine=True, track_running_stats=True),
    )
    return trained(kinds[seed % len(kinds)](), choose).to(choose.choice(DTYPES))


def trained(module, choose):
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name == "num_batches_tracked":
                tensor.fill_(choose.choice([0, 1, 1000]))
                continue
            values = torch.randn(tensor.shape, generator=generator) * 10 ** choose.uniform(-2, 2)
            tensor.copy_(values.abs() + 1e-4 if name == "running_var" else values)
    return module


def passes(module):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = verify.run_layer(module)
    assert report.passed, "\n".join(str(item) for item in report.failed)


@pytest.mark.parametrize("seed", range(63))
def test_random_trained_layers_pass(seed):
    passes(layer(seed))


def filled(module, **values):
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).fill_(value)
    return module


NAMED = {
    "sets of three elements, one nearly constant": lambda: nn.GroupNorm(32, 32),
    "a thousand such sets": lambda: nn.GroupNorm(1024, 1024),
    "instance norm of a thousand channels": lambda: nn.InstanceNorm1d(1024, affine=True),
    "0 / 0 of a zero without eps": lambda: nn.RMSNorm(1, eps=0.0),
    "two elements and a gain": lambda: filled(nn.LayerNorm(2), weight=10.0),
    "one element and next to no eps": lambda: nn.LayerNorm(1, eps=1e-12),
    "one element under a root mean square": lambda: filled(nn.RMSNorm(1), weight=-7.3),
    "a level of 100 in the state": lambda: filled(
        nn.InstanceNorm2d(8, track_running_stats=True), running_mean=100.0
    ),
    "a tiny stored variance": lambda: filled(nn.BatchNorm1d(3), running_mean=100.0, running_var=1e-8),
    "an eps above all": lambda: nn.BatchNorm2d(3, eps=1e6),
    "a gain that leaves half precision": lambda: filled(nn.BatchNorm1d(4), weight=6e4, bias=6e4).half(),
}


@pytest.mark.parametrize("name", NAMED)
def test_layers_at_the_edge_pass(name):
    passes(NAMED[name]())


@pytest.mark.parametrize("seed", range(0, 63, 5))
def test_a_part_in_a_thousand_million_is_seen_on_them(seed):
    module = layer(seed)
    module.register_forward_hook(lambda m, args, y: y * (1 + 1e-9))
    claims = [item.claim for item in verify.run_layer(module).failed]
    assert any("computes its specification" in claim for claim in claims)


@pytest.mark.parametrize("name", NAMED)
def test_at_the_edge_a_part_in_a_million_is_still_seen(name):
    module = NAMED[name]()
    module.register_forward_hook(lambda m, args, y: y + 1e-6 * args[0])
    report = verify.run_layer(module)
    assert not report.passed
