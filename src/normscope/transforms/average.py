"""Averages of models (EMA, SWA) whose norms are right: weights are averaged, statistics taken anew, counters copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from normscope.doctor import arguments
from normscope.doctor.refusals import unwrap
from normscope.doctor.wording import clean_path
from normscope.errors import BadInput
from normscope.transforms.chosen import Model, chosen, copied
from normscope.transforms.recalibrate import RecalibrationReport, recalibrate
from normscope.transforms.report import SiteChange, TransformReport

WAYS = "data=... takes statistics of the averaged model's own activations"


def average(
    models: Iterable[Model],
    weights: Iterable[float] | None = None,
    *,
    data: Any = None,
    inputs: Callable[[Any], Any] | None = None,
    method: str = "exact",
) -> tuple[Model, TransformReport | RecalibrationReport]:
    """The average of models of one architecture, as a new model.

        parameter = sum_k w_k parameter_k / sum_k w_k        (in float64, then in the dtype of the first)

    Floating point parameters are averaged. Buffers (running statistics, counters, tables) are copied from the last
    model: the mean of two variances is not the variance of a mixture, and half of a counter counts nothing. Running
    statistics of the last model are not those of the average, so give ``data``, from which `recalibrate` takes them.

    Args:
        models: checkpoints of one training, oldest first. They are left as they are.
        weights: of each, by default all alike; for an exponential average with decay d, d ** age.
        data: inputs to recalibrate on; ``inputs`` and ``method`` as in `recalibrate`.

    Returns the average, in the mode of the last model, and a report; without data it says that statistics are stale.

    Raises:
        BadInput: no model, other names or shapes in one of them, or weights that are no numbers above 0 or not as many.

    Izmailov et al. 2018, Averaging Weights Leads to Wider Optima and Better Generalization,
    https://arxiv.org/abs/1803.05407, section 3.2 (statistics are recomputed).

    >>> a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> mean, _ = average([a, b], [3.0, 1.0])
    >>> torch.allclose(mean.weight, 0.75 * a.weight + 0.25 * b.weight)
    True
    """
    found = [arguments.module(model) for model in models]
    if not found:
        raise BadInput("models is empty: give the checkpoints to average, oldest first")
    shares = _shares(weights, len(found))
    tables = [_parameters(model) for model in found]
    _alike(tables)
    result: Any = copied(found[-1], "average")
    with torch.no_grad():
        for name, parameter in _parameters(result).items():
            if parameter.is_floating_point():
                parts = [s * table[name].detach().double() for s, table in zip(shares, tables, strict=True)]
                parameter.copy_(torch.stack(parts).sum(0))
    if data is not None:
        return recalibrate(
            result, data, inputs=inputs, method=method, inplace=True,
            source="the inputs of an average", selection=f"given to average {len(found)} models",
        )  # fmt: skip
    sites = [site for site in chosen(result) if site.reading and "running_mean" in site.reading.tensors]
    changes = tuple(
        SiteChange(
            site.name, site.type_name, "", f"its statistics are the last model's; {WAYS}", site.aliases
        )
        for site in sites
    )
    return result, TransformReport("average", changes, (), (f"{len(found)} models averaged",))


def check_average(averaged: nn.Module, models: Iterable[nn.Module]) -> tuple[str, ...]:
    """What is wrong with the buffers of an existing average of models; nothing is a good sign.

    Found are counters that are no whole number or were averaged, and running statistics that are the average of those
    of the models, which are statistics of none of them, the average included. Plain averages are recognized, not those
    with unequal weights.

    Raises:
        BadInput: fewer than two models, or other names or shapes in one of them.

    >>> a, b = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    >>> _ = b.running_mean.fill_(2.0), b.num_batches_tracked.fill_(10)
    >>> wrong = nn.BatchNorm1d(1)
    >>> _ = wrong.running_mean.fill_(1.0), wrong.num_batches_tracked.fill_(5)
    >>> for line in check_average(wrong, [a, b]):
    ...     print(line)
    running_mean: is the mean of the models' own; take statistics of the averaged model: transforms.recalibrate
    num_batches_tracked: 5 is no count of any model (0, 10): a counter was averaged; copy the last one
    """
    found = [arguments.module(model) for model in models]
    if len(found) < 2:
        raise BadInput(
            f"an average is compared with the models it was made of, at least two; got {len(found)}"
        )
    tables = [_buffers(model) for model in (averaged, *found)]
    _alike(tables)
    own, others = tables[0], tables[1:]
    said = []
    for name, buffer in own.items():
        theirs = [table[name] for table in others]
        last = name.rpartition(".")[2]
        if last == "num_batches_tracked":
            said += _counter(name, buffer, theirs)
        elif last in ("running_mean", "running_var") and not all(torch.equal(t, theirs[0]) for t in theirs):
            mean = torch.stack([t.double() for t in theirs]).mean(0)
            # a mean in float32 is a few roundings away from this one
            unit = 8 * torch.finfo(buffer.dtype).eps * torch.stack([t.double().abs() for t in theirs]).amax(0)
            if bool(((buffer.double() - mean).abs() <= unit).all()):
                said.append(
                    f"{name}: is the mean of the models' own; take statistics of the averaged model: "
                    "transforms.recalibrate"
                )
    return tuple(said)


def _counter(name: str, counter: Tensor, theirs: list[Tensor]) -> list[str]:
    values = [float(t) for t in theirs]
    value = float(counter)
    if counter.is_floating_point() or value != int(value):
        return [
            f"{name}: {value:g} of dtype {str(counter.dtype).removeprefix('torch.')}; a counter is a whole number"
        ]
    mean = sum(values) / len(values)
    if len(set(values)) > 1 and value not in values and abs(value - mean) < 1:
        known = ", ".join(f"{v:g}" for v in values[:6])
        return [
            f"{name}: {value:g} is no count of any model ({known}): a counter was averaged; copy the last one"
        ]
    return []


def _shares(weights: Iterable[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else [float(w) for w in weights]
    if len(given) != count or not all(0 < w < float("inf") for w in given):
        raise BadInput(f"weights are {count} numbers above 0, one for each model; got {given}")
    return [w / sum(given) for w in given]


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {clean_path(name): tensor for name, tensor in unwrap(model).named_parameters()}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {clean_path(name): tensor for name, tensor in unwrap(model).named_buffers()}


def _alike(tables: list[dict[str, Tensor]]) -> None:
    shapes = [{name: tuple(t.shape) for name, t in table.items()} for table in tables]
    for number, other in enumerate(shapes[1:], start=2):
        differing = sorted(name for name in {*shapes[0], *other} if shapes[0].get(name) != other.get(name))
        if differing:
            name = differing[0]
            raise BadInput(
                f"model {number} is of another architecture than model 1: {name} has shape {other.get(name, 'none')} "
                f"and {shapes[0].get(name, 'none')}"
            )
