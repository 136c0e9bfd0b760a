"""A batch-normalized network under shift: what new statistics mend, and what new weights and gains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.studies import Decision, Measure, Study, Table, Verdict, above, all_of, below, within
from normscope.studies.lab import data, figures
from normscope.studies.lab.data import Images
from normscope.studies.lab.figures import Figure, number
from normscope.studies.lab.networks import conv_net, norm, weights
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.styled import halved
from normscope.studies.lab.training import Plan, evaluate, stream, train
from normscope.transforms import recalibrate

NONE, INVERTED, SCALED, NOISY, SUBSET = "none", "inverted", "scaled", "noisy", "class subset"
SHIFTS = (NONE, INVERTED, SCALED, NOISY, SUBSET)
CONTRAST, NOISE, CLASSES = 0.3, 0.3, 5
AS_IS, RECALIBRATED = "as it is", "recalibrated"
FROZEN, LIVE, RECALIBRATED_FROZEN = "all, frozen", "all, live", "all, recalibrated and frozen"
GAINS_FROZEN, GAINS_LIVE = "gains, frozen", "gains, live"
ARMS = (AS_IS, RECALIBRATED, FROZEN, LIVE, RECALIBRATED_FROZEN, GAINS_FROZEN, GAINS_LIVE)
WIDTHS, BATCH = (16, 32, 32), 64
SAMPLES = {"full": (6000, 2000), "quick": (2000, 1000), "smoke": (128, 80)}
TARGET = {"full": 512, "quick": 256, "smoke": 64}
"""images of the shifted kind that there are to adapt with"""
STEPS = {"full": (500, 100), "quick": (120, 40), "smoke": (2, 1)}
"""on the source, on the target"""


def cells(scale: Scale) -> Iterator[Cell]:
    for shift in SHIFTS:
        yield {"shift": shift}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterable[dict[str, Any]]:
    count, test = SAMPLES[scale]
    images = data.load("fashion-mnist", train=count + TARGET[scale], test=test)
    images = replace(images, train=halved(images.train), test=halved(images.test))
    source = replace(images, train=images.train[:count], train_labels=images.train_labels[:count])
    scaling = source.train.mean(), source.train.std()
    rest = replace(images, train=images.train[count:], train_labels=images.train_labels[count:])
    model = trained(scaled(source, *scaling), seed, scale)
    target = scaled(shifted(rest, str(cell["shift"]), seed), *scaling)
    clean = scaled(rest, *scaling) if cell["shift"] != SUBSET else target
    unshifted = 1 - accuracy(model, clean)
    for arm in ARMS:
        found = adapted(model, arm, target, seed, scale)
        error = 1 - accuracy(found, target)
        yield {"arm": arm, "accuracy": 1 - error, "error": error, "error by shift": error - unshifted}
        if arm in (RECALIBRATED, LIVE, GAINS_LIVE):
            yield from ({"arm": arm, **row} for row in moved(model, found))


def shifted(images: Images, shift: str, seed: int) -> Images:
    if shift == SUBSET:
        kept, kept_test = images.train_labels < CLASSES, images.test_labels < CLASSES
        return replace(
            images,
            train=images.train[kept],
            train_labels=images.train_labels[kept],
            test=images.test[kept_test],
            test_labels=images.test_labels[kept_test],
        )
    noise = stream(seed, "shift")

    def of(x: Tensor) -> Tensor:
        if shift == NOISY:
            return x + NOISE * torch.randn(x.shape, generator=noise)
        return {NONE: x, INVERTED: 1 - x, SCALED: CONTRAST * x}[shift]

    return replace(images, train=of(images.train), test=of(images.test))


def scaled(images: Images, mean: Tensor, deviation: Tensor) -> Images:
    """By the numbers of the source, as a deployed pipeline does."""
    return replace(images, train=(images.train - mean) / deviation, test=(images.test - mean) / deviation)


def trained(source: Images, seed: int, scale: Scale) -> nn.Sequential:
    with weights(seed):
        model = conv_net(source.shape, WIDTHS, 10, norm("batch"))
    train(model, source, Plan(steps=STEPS[scale][0], batch=BATCH, rate=0.05, decay=True), seed)
    return model.eval()


def accuracy(model: nn.Module, images: Images) -> float:
    return evaluate(model, images.test, images.test_labels)[1]


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def adapted(source: nn.Sequential, arm: str, target: Images, seed: int, scale: Scale) -> nn.Module:
    model: nn.Module = deepcopy(source)
    if arm in (RECALIBRATED, RECALIBRATED_FROZEN):
        model, _ = recalibrate(model, list(torch.split(target.train, BATCH)))
    if arm in (AS_IS, RECALIBRATED):
        return model
    if arm in (GAINS_FROZEN, GAINS_LIVE):
        model.requires_grad_(False)
        for layer in norms(model):
            layer.requires_grad_(True)
    frozen = arm not in (LIVE, GAINS_LIVE)

    def before(step: int, x: Tensor, y: Tensor) -> None:
        for layer in norms(model):
            layer.train(not frozen)

    plan = Plan(steps=STEPS[scale][1], batch=BATCH, rate=0.01, decay=True)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=plan.rate, momentum=plan.momentum
    )
    train(model, target, plan, seed, optimizer=optimizer, before=before)
    return model.eval()


def moved(source: nn.Module, model: nn.Module) -> Iterator[dict[str, float]]:
    """How far the statistics of each norm moved, on the average over channels."""
    for i, (a, b) in enumerate(zip(norms(source), norms(model), strict=True), 1):
        assert a.running_mean is not None
        assert a.running_var is not None
        assert b.running_mean is not None
        assert b.running_var is not None
        mean = (b.running_mean - a.running_mean).abs() / (a.running_var + a.eps).sqrt()
        var = ((b.running_var + b.eps) / (a.running_var + a.eps)).log2().abs()
        yield {"layer": i, "mean moved": float(mean.mean()), "variance moved": float(var.mean())}


# What is decided ----------------------------------------------------------------------------------------


def most_by_statistics(table: Table) -> Verdict:
    """Removed, less half of the whole: above 0 where more than half goes."""
    parts = {}
    for shift in (INVERTED, SCALED, NOISY):
        part = table.where(shift=shift)
        before = part.by_seed("error by shift", arm=AS_IS)
        after = part.by_seed("error by shift", arm=RECALIBRATED)
        rows = [{"seed": s, "x": before[s] / 2 - after[s]} for s in before]
        parts[shift] = above(Table(rows).interval("x"))
    return all_of(**parts)


def compared(table: Table, shift: str, one: str, other: str) -> Any:
    return table.where(shift=shift).difference("accuracy", {"arm": one}, {"arm": other})


def live_under_shift(table: Table) -> Verdict:
    return all_of(
        **{shift: above(compared(table, shift, LIVE, FROZEN)) for shift in (INVERTED, SCALED, NOISY)}
    )


def frozen_when_alike(table: Table) -> Verdict:
    return above(compared(table, NONE, FROZEN, LIVE))


def gains_are_enough(table: Table) -> Verdict:
    return all_of(
        **{
            shift.replace(" ", "_"): within(compared(table, shift, GAINS_LIVE, LIVE), 0.02)
            for shift in SHIFTS
            if shift != NONE
        }
    )


def statistics_may_not_fit(table: Table) -> Verdict:
    return below(compared(table, SUBSET, RECALIBRATED, AS_IS))


def remarks(table: Table) -> Iterator[str]:
    """The share of the error by the shift that new statistics remove: of means over seeds."""
    for shift in (INVERTED, SCALED, NOISY):
        before, after = (
            table.where(shift=shift).interval("error by shift", arm=arm).mean for arm in (AS_IS, RECALIBRATED)
        )
        if before > 0:
            yield (
                f"Images {shift}: new statistics remove {number(1 - after / before)} of the error that the shift "
                f"brings ({number(before)} before, {number(after)} behind)."
            )


# What is drawn ------------------------------------------------------------------------------------------


def draw_accuracy(table: Table) -> Figure:
    part = table.where(shift=INVERTED)
    told = {arm: number(part.interval("accuracy", arm=arm).mean) for arm in (AS_IS, RECALIBRATED, LIVE)}
    return figures.points(
        table,
        "accuracy",
        "State against weights",
        "Accuracy on shifted test images. As it is and recalibrated: no weight moved. All: every weight trained on a "
        "few shifted images, gains: only those of the norms with their biases; with statistics frozen or live. "
        f"Inverted images: {told[AS_IS]} as it is, {told[RECALIBRATED]} recalibrated, {told[LIVE]} with all live.",
        x="accuracy",
        rows="arm",
        panel="shift",
    )


def by_layer(table: Table) -> Table:
    return Table([row for row in table.where(arm=RECALIBRATED).rows if row.get("layer") is not None])


def draw_moved(table: Table) -> Figure:
    return figures.lines(
        by_layer(table),
        "moved",
        "Which statistics moved",
        "Distance between the stored means before and after recalibration, in stored standard deviations, averaged "
        "over channels, for each norm from the input.",
        x="layer",
        y="mean moved",
        by="shift",
        x_title="norm, from the input",
        y_title="move of the mean",
    )


def draw_variances(table: Table) -> Figure:
    return figures.lines(
        by_layer(table),
        "variances",
        "Which variances moved",
        "Size of log2 of the stored variance after recalibration over that before, averaged over channels: 1 is a "
        "factor of two.",
        x="layer",
        y="variance moved",
        by="shift",
        x_title="norm, from the input",
        y_title="move of the variance, powers of two",
    )


STUDY = Study(
    name="fine-tuning",
    title="Statistics or weights",
    question="When the images change, how much of the error do new statistics remove, and what do new weights add?",
    intervention="what adapts to the shifted images: nothing, statistics, gains, weights; statistics frozen or live",
    held_fixed="for a seed: the trained source network, the shifted images, their order, steps and learning rate; "
    "the scaling of the input, that of the source",
    method=(
        "A convolutional network with batch norm is trained on Fashion-MNIST at 14 x 14 and adapted with a few images "
        f"that it has not seen: inverted, of {CONTRAST:g} times the contrast, with noise of deviation {NOISE:g} of the "
        f"range, or of the first {CLASSES} classes alone. The error by the shift is what comes on top of that of the "
        "source network on the same images without it (for the class subset, on themselves)."
    ),
    measures=(
        Measure("accuracy", better="higher", meaning="on shifted test images"),
        Measure("error by shift", better="lower", meaning="on top of the error without the shift"),
        Measure("mean moved", "stored standard deviations", meaning="between source and adapted"),
        Measure("variance moved", "powers of two", meaning="between source and adapted"),
    ),
    cells=cells,
    measure=measure,
    seeds={"full": 8, "quick": 3, "smoke": 2},
    data=("fashion-mnist",),
    decisions=(
        Decision(
            "statistics",
            "New statistics with the weights fixed remove more than half of the error that a shift brings.",
            most_by_statistics,
            (39,),
        ),
        Decision(
            "live",
            "Under shift, fine-tuning with live statistics beats frozen ones.",
            live_under_shift,
            (38,),
        ),
        Decision(
            "frozen",
            "Where data are alike, fine-tuning with frozen statistics beats live ones.",
            frozen_when_alike,
            (38,),
        ),
        Decision(
            "gains",
            "Adapting gains and biases alone is within 0.02 of adapting all, statistics live.",
            gains_are_enough,
            (38,),
        ),
        Decision(
            "misfit",
            "New statistics do not fit fixed weights where only the classes changed: accuracy falls.",
            statistics_may_not_fit,
            (38,),
        ),
    ),
    remarks=remarks,
    figures=(draw_accuracy, draw_moved, draw_variances),
    change="SHIFTS and `shifted` hold the shifts, ARMS and `adapted` what adapts, TARGET how many images there are.",
    limits=(
        "One small network, one source, shifts made by hand; one learning rate and number of steps for every arm: "
        "another choice for each arm may change their order."
    ),
)
