"""Batch statistics and running state: which variance normalizes, which one is stored, and when either moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from normscope import reference
from normscope.reading import read, spec_of
from normscope.spec import RunningState
from normscope.verify.evidence import Evidence
from normscope.verify.float64 import ULP, convention, gap, normal, numpy, tensor

TOPIC = "batch statistics and running state"
X = [[1.0, 10.0], [2.0, 20.0], [6.0, 60.0]]
EPS = 1e-3
FEW = "two dozen rounded operations on either side, on numbers below 1024"


def _layer(**kwargs: Any) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(2, eps=EPS, dtype=torch.float64, **kwargs)


def _evidence(claim: str, layer: nn.BatchNorm1d, **rest: Any) -> Evidence:
    rest = {"input": X, "tolerance": 64 * 1024 * ULP, "because": FEW, **rest}
    return Evidence(topic=TOPIC, claim=claim, convention=convention(layer), eps=layer.eps, **rest)


def _stored(layer: nn.BatchNorm1d) -> RunningState:
    tensors = read(layer).tensors
    mean, var = numpy(tensors["running_mean"]).copy(), numpy(tensors["running_var"]).copy()
    return RunningState(mean, var, int(tensors["num_batches_tracked"]))


def forward_is_biased() -> Iterator[Evidence]:
    layer = _layer()
    biased, unbiased = np.var(X, axis=0), np.var(X, axis=0, ddof=1)
    y = numpy(layer(tensor(X)))
    worst = max(
        gap(y, reference.forward(X, spec_of(layer))), gap(y, (X - np.mean(X, 0)) / np.sqrt(biased + EPS))
    )
    yield _evidence(
        "training normalizes by the biased variance of the batch",
        layer,
        measured=worst,
        result={"output": y.tolist(), "biased": biased.tolist(), "unbiased": unbiased.tolist()},
    )


def storage_is_unbiased() -> Iterator[Evidence]:
    layer = _layer(momentum=1.0)
    layer(tensor(X))
    stored = _stored(layer)
    worst = max(gap(stored.mean, [3, 30]), gap(stored.var, [7, 700]))
    yield _evidence(
        "with momentum 1 the state becomes the batch: its mean, and its variance with M / (M - 1)",
        layer,
        measured=worst,
        result={"running_mean": stored.mean.tolist(), "running_var": stored.var.tolist(), "M/(M-1)": 1.5},
    )


def train_and_eval_differ() -> Iterator[Evidence]:
    layer = _layer(momentum=1.0)
    trained = numpy(layer(tensor(X)))
    evaluated = numpy(layer.eval()(tensor(X)))
    by_state = reference.forward(X, spec_of(layer), running=_stored(layer), training=False)
    yield _evidence(
        "evaluation normalizes by the state",
        layer,
        measured=gap(evaluated, by_state),
    )
    yield _evidence(
        "so train and eval differ on the same input, even right after it with momentum 1",
        layer,
        measured=gap(trained, evaluated),
        tolerance=0.2,
        because="the unbiased variance of 3 samples is 1.5 times the biased one, and the largest output 1.39",
        result={"train": trained[2].tolist(), "eval": evaluated[2].tolist()},
        at_least=True,
    )


def exponential_average() -> Iterator[Evidence]:
    for momentum in (0.1, 0.01, None):
        layer = _layer(momentum=momentum)
        expected = _stored(layer)
        for seed in range(3):
            x = normal(5, 2, seed=seed)
            expected = reference.update_running(expected, numpy(x), spec_of(layer))
            layer(x)
        stored = _stored(layer)
        worst = max(gap(stored.mean, expected.mean), gap(stored.var, expected.var), stored.batches - 3)
        rule = (
            "the plain mean of all batches"
            if momentum is None
            else f"run <- {1 - momentum:g} run + {momentum:g} batch"
        )
        yield _evidence(
            f"momentum {momentum}: {rule}",
            layer,
            input="3 batches of shape (5, 2), standard normal, seeds 0 to 2",
            measured=worst,
            tolerance=64 * 4 * ULP,
            because="three updates of two dozen rounded operations, on numbers below 4",
            result={"running_mean": stored.mean.tolist(), "running_var": stored.var.tolist()},
        )


def companions_matter_in_training_only() -> Iterator[Evidence]:
    layer = _layer()
    one, other = tensor(X), tensor([X[0], [5.0, -3.0], [0.0, 7.0]])
    yield _evidence(
        "in training the other samples of the batch change a sample's output",
        layer,
        input=[one.tolist(), other.tolist()],
        measured=gap(layer(one)[0], layer(other)[0]),
        tolerance=0.1,
        because="a change that nobody would call rounding",
        at_least=True,
    )
    layer.eval()
    yield _evidence(
        "in evaluation they do not change one bit",
        layer,
        input=[one.tolist(), other.tolist()],
        measured=gap(layer(one)[0], layer(other)[0]),
        tolerance=0.0,
        because="each output depends on its own input and the state",
    )


def without_state() -> Iterator[Evidence]:
    layer = _layer(track_running_stats=False)
    trained, evaluated = layer(tensor(X)), layer.eval()(tensor(X))
    yield _evidence(
        "without running state evaluation normalizes by the batch, as training does",
        layer,
        measured=gap(trained, evaluated),
        tolerance=0.0,
        because="one and the same computation",
    )


def flag_is_no_freeze() -> Iterator[Evidence]:
    layer = _layer()
    layer.track_running_stats = False
    before = _stored(layer)
    trained, evaluated = layer(tensor(X)), layer.eval()(tensor(X))
    after = _stored(layer)
    moved = max(gap(before.mean, after.mean), gap(before.var, after.var))
    yield _evidence(
        "track_running_stats=False on a live layer stops the state, but training still normalizes by the batch",
        layer,
        measured=gap(trained, evaluated),
        tolerance=1.0,
        because="by the batch the outputs are below 1.5, by the untouched state of mean 0 and variance 1 up to 60",
        result={"state moved by": moved},
        at_least=True,
    )


CHECKS: tuple[Callable[[], Iterator[Evidence]], ...] = (
    forward_is_biased,
    storage_is_unbiased,
    train_and_eval_differ,
    exponential_average,
    companions_matter_in_training_only,
    without_state,
    flag_is_no_freeze,
)
