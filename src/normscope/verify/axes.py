"""Which elements share statistics: each layer against the reference of its specification, and where two are one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from normscope import reference
from normscope.reading import read
from normscope.verify.evidence import Evidence
from normscope.verify.float64 import ULP, convention, gap, normal, numpy

TOPIC = "axes and special cases"
SHAPE = (4, 6, 3, 5)
INPUT = f"shape {SHAPE}, 3 + 2 * standard normal, seed 0"
BECAUSE = "sums of at most 360 terms: 360 ulp at worst, times an output below 4"
TOLERANCE = 360 * 4 * ULP


def _x() -> torch.Tensor:
    return 3 + 2 * normal(*SHAPE, seed=0)


def _layers() -> tuple[nn.Module, ...]:
    like: dict[str, Any] = {"dtype": torch.float64}
    return (
        nn.BatchNorm2d(6, **like),
        nn.LayerNorm(5, **like),
        nn.LayerNorm((3, 5), eps=1e-3, **like),
        nn.LayerNorm((6, 3, 5), **like),
        nn.GroupNorm(3, 6, **like),
        nn.InstanceNorm2d(6, affine=True, **like),
        nn.RMSNorm(5, eps=1e-6, **like),
    )


def _evidence(claim: str, layer: nn.Module, **rest: Any) -> Evidence:
    rest = {"input": INPUT, "tolerance": TOLERANCE, "because": BECAUSE, **rest}
    reading = read(layer)
    return Evidence(topic=TOPIC, claim=claim, convention=convention(layer), eps=reading.spec.eps, **rest)


def against_the_reference() -> Iterator[Evidence]:
    for index, layer in enumerate(_layers()):
        for number, parameter in enumerate(layer.parameters()):
            with torch.no_grad():
                parameter.copy_(normal(*parameter.shape, seed=10 * index + number))
        reading = read(layer)
        tensors = {name: numpy(value) for name, value in reading.tensors.items()}
        expected = reference.forward(numpy(_x()), reading.spec, tensors["weight"], tensors.get("bias"))
        bound = reading.spec.bind(SHAPE)
        yield _evidence(
            f"{type(layer).__name__} has {bound.sets} statistic sets of {bound.set_size} elements",
            layer,
            measured=gap(layer(_x()), expected),
            result={"kept": list(bound.kept), "erased": list(bound.erased)},
            tolerance=3 * TOLERANCE,
            because=f"{BECAUSE} and a random gain below 3",
        )


def one_group_is_layer_norm() -> Iterator[Evidence]:
    group = nn.GroupNorm(1, 6, affine=False, dtype=torch.float64)
    layer = nn.LayerNorm(SHAPE[1:], elementwise_affine=False, dtype=torch.float64)
    yield _evidence(
        "group norm with G = 1 is layer norm over (C, H, W)", group, measured=gap(group(_x()), layer(_x()))
    )


def one_channel_a_group_is_instance_norm() -> Iterator[Evidence]:
    group = nn.GroupNorm(6, 6, affine=False, dtype=torch.float64)
    instance = nn.InstanceNorm2d(6, dtype=torch.float64)
    yield _evidence(
        "group norm with G = C is instance norm", group, measured=gap(group(_x()), instance(_x()))
    )


def one_image_is_instance_norm() -> Iterator[Evidence]:
    batch = nn.BatchNorm2d(6, affine=False, track_running_stats=False, dtype=torch.float64)
    instance = nn.InstanceNorm2d(6, dtype=torch.float64)
    yield _evidence(
        "batch norm of a batch of one image is instance norm",
        batch,
        input=f"the first image of: {INPUT}",
        measured=gap(batch(_x()[:1]), instance(_x()[:1])),
    )


def transposed_is_batch_norm() -> Iterator[Evidence]:
    x = _x().reshape(12, 30)
    layer = nn.LayerNorm(30, elementwise_affine=False, dtype=torch.float64)
    batch = nn.BatchNorm1d(12, affine=False, track_running_stats=False, dtype=torch.float64)
    yield _evidence(
        "on a matrix, layer norm is batch norm of the transpose",
        layer,
        input=f"as a matrix (12, 30): {INPUT}",
        measured=gap(layer(x), batch(x.T).T),
    )


def one_element_is_the_bias() -> Iterator[Evidence]:
    layer = nn.LayerNorm(1, dtype=torch.float64)
    with torch.no_grad():
        layer.bias.fill_(0.25)
    yield _evidence(
        "a statistic set of one element gives exactly the bias, whatever comes in",
        layer,
        input=[[-3.0], [0.1], [1e6]],
        measured=gap(layer(torch.tensor([[-3.0], [0.1], [1e6]], dtype=torch.float64)), 0.25),
        tolerance=0.0,
        because="x - mean is exactly 0",
    )


CHECKS: tuple[Callable[[], Iterator[Evidence]], ...] = (
    against_the_reference,
    one_group_is_layer_norm,
    one_channel_a_group_is_instance_norm,
    one_image_is_instance_norm,
    transposed_is_batch_norm,
    one_element_is_the_bias,
)
