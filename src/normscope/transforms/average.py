"""Averages of models (EMA, SWA) whose norms are right: weights are averaged, statistics taken anew, counters copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from normscope.doctor import arguments
from normscope.doctor.refusals import refuse_unmaterialized, unwrap
from normscope.doctor.wording import clean_path
from normscope.errors import BadInput
from normscope.transforms.chosen import Model, chosen, copied
from normscope.transforms.recalibrate import RecalibrationReport, recalibrate
from normscope.transforms.report import SiteChange, TransformReport

TODO = "take statistics of the averaged model: transforms.recalibrate"
ENOUGH = 4
"""statistics a model, from which on weights that explain them all are no accident"""
SHARE = 1e-3
"""weights below are none: the statistics were copied"""
Table = dict[str, Tensor]
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
        Refused: parameters that have no values yet, lazy ones for example.

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
    for model in found:
        refuse_unmaterialized(_inside(model))
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
    of the models, which are statistics of none of them, the average included: plain ones, and weighted ones (EMA) where
    one set of weights explains all statistics and these are many more than the models.

    Args:
        averaged: a model, or torch's `torch.optim.swa_utils.AveragedModel` around one.
        models: all that it was made of.

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
    said: list[str] = []
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
                said.append(f"{name}: is the mean of the models' own; {TODO}")
    if not any(TODO in line for line in said):
        said += _weighted(own, others)
    return tuple(said)


def _weighted(own: Table, others: list[Table]) -> list[str]:
    """Statistics of an average with unequal weights, which least squares find."""
    names = [name for name in own if name.endswith(("running_mean", "running_var"))]
    if not names:
        return []
    # each statistic in units of its largest, so that no norm outvotes the others
    units = torch.cat([torch.stack([t[n].double().abs() for t in others]).amax(0).flatten() for n in names])
    columns, target = (
        [
            torch.cat([table[n].double().flatten() for n in names]) / units.clamp(min=1e-300)
            for table in tables
        ]
        for tables in (others, [own])
    )
    table, wanted = torch.stack(columns, 1), target[0]
    if len(wanted) < ENOUGH * len(others) or not bool(table.isfinite().all() & wanted.isfinite().all()):
        return []
    # the average was rounded once or, step by step, a few dozen times; in a half type that says nothing
    allowed = 64 * max(torch.finfo(own[name].dtype).eps for name in names)
    if allowed > SHARE:
        return []
    found = torch.linalg.lstsq(table, wanted[:, None], rcond=SHARE, driver="gelsd")
    if int(found.rank) < len(others):  # models whose statistics are nearly the same say nothing about weights
        return []
    weights = found.solution[:, 0]
    off = float((table @ weights - wanted).abs().max())
    shared = int((weights.abs() > SHARE).sum()) > 1
    if off > allowed or not shared or abs(float(weights.sum()) - 1) > SHARE:
        return []
    told = ", ".join(f"{float(w):.2g}" for w in weights[:6])
    return [f"running statistics: are a weighted mean of the models' own (weights {told}); {TODO}"]


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


def _parameters(model: nn.Module) -> Table:
    return {clean_path(name): tensor for name, tensor in _inside(model).named_parameters()}


def _buffers(model: nn.Module) -> Table:
    return {clean_path(name): tensor for name, tensor in _inside(model).named_buffers()}


def _inside(model: nn.Module) -> nn.Module:
    inner = unwrap(model)
    while isinstance(inner, AveragedModel):
        inner = unwrap(inner.module)
    return inner


def _alike(tables: list[Table]) -> None:
    shapes = [{name: tuple(t.shape) for name, t in table.items()} for table in tables]
    for number, other in enumerate(shapes[1:], start=2):
        differing = sorted(name for name in {*shapes[0], *other} if shapes[0].get(name) != other.get(name))
        if differing:
            name = differing[0]
            raise BadInput(
                f"model {number} is of another architecture than model 1: {name} has shape {other.get(name, 'none')} "
                f"and {shapes[0].get(name, 'none')}"
            )
