"""Small networks with any norm, and layers by name, so that arms of a study differ in the norm alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

import normscope.nn as own
from normscope.errors import BadInput

Norm = Callable[[int], nn.Module]
"""channels -> a layer"""


@contextmanager
def weights(seed: int) -> Iterator[None]:
    """Initial weights drawn inside come from ``seed`` alone; the random state around stays as it is.

    >>> with weights(3):
    ...     one = nn.Linear(2, 2)
    >>> with weights(3):
    ...     other = nn.Linear(2, 2)
    >>> torch.equal(one.weight, other.weight)
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def norm(name: str, *, dims: int = 2, groups: int = 8, eps: float = 1e-5, affine: bool = True) -> Norm:
    """A factory of norms over channels: for inputs (N, C) with ``dims=0``, (N, C, L) with 1, (N, C, H, W) with 2.

    Names: ``none``, ``batch``, ``layer`` (one set a sample, over all its elements, with a gain and bias a channel),
    ``layer-channels`` (over the channels at each place), ``rms`` (the same without the mean), ``group``, ``instance``.

    >>> norm("group", groups=2)(8)
    GroupNorm(2, 8, eps=1e-05, affine=True...)

    Raises BadInput for an unknown name, and for instance norm of vectors, whose sets would have one element.
    """
    if name == "instance" and dims == 0:
        raise BadInput("instance norm needs places to normalize over: a vector has one element a channel")
    batch = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims]
    instance = {0: nn.InstanceNorm1d, 1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d}[dims]
    makers: dict[str, Norm] = {
        "none": lambda c: nn.Identity(),
        "batch": lambda c: batch(c, eps=eps, affine=affine),
        "layer": lambda c: nn.GroupNorm(1, c, eps=eps, affine=affine),
        "layer-channels": lambda c: own.ChannelsFirstLayerNorm(c, eps=eps, elementwise_affine=affine),
        "rms": lambda c: _ChannelsLast(nn.RMSNorm(c, eps=eps, elementwise_affine=affine)),
        "group": lambda c: nn.GroupNorm(min(groups, c), c, eps=eps, affine=affine),
        "instance": lambda c: instance(c, eps=eps, affine=affine),
    }
    if name not in makers:
        raise BadInput(f"there is no norm {name!r}; there are {', '.join(makers)}")
    return makers[name]


class _ChannelsLast(nn.Module):
    """A layer of the last axis, on the channels."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x.movedim(1, -1)).movedim(-1, 1)
        return y


def mlp(
    inputs: int,
    widths: Sequence[int],
    classes: int,
    norm: Norm,
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    after: bool = False,
) -> nn.Sequential:
    """Linear, norm, activation for each width (norm behind the activation with ``after``), then a linear layer.

    >>> len(mlp(4, [8, 8], 2, norm("layer", dims=0)))
    8
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for width in widths:
        layers += [nn.Linear(inputs, width), *_pair(norm(width), activation(), after)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def conv_net(
    shape: tuple[int, int, int],
    widths: Sequence[int],
    classes: int,
    norm: Norm,
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    after: bool = False,
    dropout: float = 0.0,
) -> nn.Sequential:
    """3 x 3 convolutions with norm and activation, all but the first of stride 2; a mean over places; a linear layer.

    Convolutions have no bias where a norm follows them, so that no arm has a parameter that its norm removes.

    >>> conv_net((1, 8, 8), [4, 8], 10, norm("batch"))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    channels, layers = shape[0], list[nn.Module]()
    for i, width in enumerate(widths):
        layer = norm(width)
        bias = after or isinstance(layer, nn.Identity)
        layers.append(nn.Conv2d(channels, width, 3, stride=1 if i == 0 else 2, padding=1, bias=bias))
        layers += _pair(layer, activation(), after)
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(channels, classes))


def _pair(layer: nn.Module, activation: nn.Module, after: bool) -> list[nn.Module]:
    return [activation, layer] if after else [layer, activation]
