"""The noise of batch statistics: its parts, how it fades with the batch, and what it does to training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from math import log2
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import normscope.nn as own
from normscope.studies import (
    Decision,
    Interval,
    Measure,
    Study,
    Table,
    Verdict,
    above,
    all_of,
    at_most,
    below,
)
from normscope.studies.lab import data, figures
from normscope.studies.lab.data import Images
from normscope.studies.lab.figures import Figure, number
from normscope.studies.lab.intervals import interval
from normscope.studies.lab.networks import Norm, conv_net, norm, weights
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.styled import halved
from normscope.studies.lab.training import Plan, evaluate, stream, train

BATCH = 128
SETS = (4, 8, 16, 32, 64, 128)
"""samples whose statistics normalize together; training takes its steps on batches of 128 in any case"""
SMALL, WHOLE = 8, 128
COMPANIONS = (2, 4, 8, 16, 32, 64, 128, 256)
"""batch sizes, the fixed sample among them"""
DROPOUT = (0.0, 0.5)
LAYER = "layer norm"
WIDTHS = (12, 24, 24)
RANDOM, WORST = 0.2, 0.05
"""lengths of the steps away from the minimum, relative to each weight's"""
SAMPLES = {"full": (1024, 3000), "quick": (512, 1000), "smoke": (128, 60)}
STEPS = {"full": 400, "quick": 120, "smoke": 2}
DRAWS = {"full": 100, "quick": 40, "smoke": 3}
"""of companions for a fixed sample"""


def cells(scale: Scale) -> Iterator[Cell]:
    yield {"part": "parts"}
    for dropout in DROPOUT:
        for size in SETS:
            yield {"part": "training", "norm": "batch norm", "set": size, "dropout": dropout}
        yield {"part": "training", "norm": LAYER, "dropout": dropout}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterable[dict[str, Any]]:
    train_count, test_count = SAMPLES[scale]
    images = data.load("fashion-mnist", train=train_count, test=test_count).standardized()
    images = replace(images, train=halved(images.train), test=halved(images.test))
    if cell["part"] == "parts":
        return parts(images, seed, scale)
    size = cell.get("set")
    model = trained(
        layers(None if size is None else int(size)), float(cell["dropout"] or 0), images, seed, scale
    )
    (loss, accuracy), (loss_there, there) = (
        evaluate(model, x, y)
        for x, y in ((images.test, images.test_labels), (images.train, images.train_labels))
    )
    return [
        {
            "accuracy": accuracy,
            "training accuracy": there,
            "gap": there - accuracy,
            "loss gap": loss - loss_there,
            **flatness(model, images, loss_there, seed),
        }
    ]


def layers(size: int | None) -> Norm:
    """Batch norm by sets of this size, or layer norm."""
    if size is None:
        return norm("layer")
    return lambda c: own.GhostBatchNorm2d(c, size=size, updates="once")


def trained(layer: Norm, dropout: float, images: Images, seed: int, scale: Scale) -> nn.Sequential:
    with weights(seed):
        model = conv_net(images.shape, WIDTHS, images.classes, layer, dropout=dropout)
    train(model, images, Plan(steps=STEPS[scale], batch=BATCH, rate=0.05, decay=True), seed)
    return model


# The parts of the noise ------------------------------------------------------------------------------------


@torch.no_grad()
def parts(images: Images, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    """What companions do to a fixed sample behind each batch norm of a trained network, by the size of the batch.

    Its values with these companions are fitted, in each channel, by its values with all test images: y = a + m y_all.
    The additive part is the deviation of a over draws of companions, the multiplicative that of m, and the rest what
    the line leaves; all in units of the normalized output, root mean squares over channels.
    """
    with torch.enable_grad():
        model = trained(norm("batch", affine=False), 0.0, images, seed, scale)
    generator, fixed, others = stream(seed, "companions"), images.test[:1], images.test[1:]
    alone = normalized(model, images.test)
    for size in COMPANIONS:
        draws = []
        for _ in range(DRAWS[scale]):
            chosen = torch.randint(0, len(others), (size - 1,), generator=generator)
            seen = normalized(model, torch.cat([fixed, others[chosen]]))
            draws.append([line(all_of_them, here) for all_of_them, here in zip(alone, seen, strict=True)])
        for depth, drawn in enumerate(zip(*draws, strict=True), 1):
            added, factor, rest = (torch.stack(values) for values in zip(*drawn, strict=True))
            yield {
                "layer": depth,
                "size": size,
                "additive": root_mean_square(added.std(0)),
                "multiplicative": root_mean_square(factor.std(0)),
                "rest": root_mean_square(rest),
            }


def normalized(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Of the first sample, the output (C, places) of each batch norm in training mode."""
    model, found = deepcopy(model).train(), list[Tensor]()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda _, x, y: found.append(y[0].flatten(1).double()))
    model(x)
    return found


def line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Least squares y = a + m x in each channel: a, m, and the root mean square of what is left.

    >>> x = torch.tensor([[0.0, 1.0, 2.0]])
    >>> [round(float(value), 3) for value in line(x, 1 + 2 * x)]
    [1.0, 2.0, 0.0]
    """
    across = x - x.mean(1, keepdim=True)
    m = (across * y).sum(1) / (across * across).sum(1).clamp_min(1e-12)
    a = y.mean(1) - m * x.mean(1)
    return a, m, (y - a[:, None] - m[:, None] * x).square().mean(1).sqrt()


def root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


# How flat the minimum is -----------------------------------------------------------------------------------


def flatness(model: nn.Sequential, images: Images, loss: float, seed: int) -> dict[str, float]:
    """By how much the training loss, in evaluation mode, rises a step away: in 5 random directions, and along its
    gradient. Each weight of a layer moves by a share of its own length, so that its scale does not count."""
    moved, generator = deepcopy(model).eval(), stream(seed, "directions")
    matrices = [parameter for parameter in moved.parameters() if parameter.ndim > 1]
    minimum = [parameter.detach().clone() for parameter in matrices]

    @torch.no_grad()
    def rise(directions: Sequence[Tensor], length: float) -> float:
        for parameter, at, direction in zip(matrices, minimum, directions, strict=True):
            parameter.copy_(at + direction * (length * at.norm() / direction.norm().clamp_min(1e-12)))
        return evaluate(moved, images.train, images.train_labels)[0] - loss

    functional.cross_entropy(moved(images.train), images.train_labels).backward()  # type: ignore[no-untyped-call]
    gradient = [parameter.grad for parameter in matrices if parameter.grad is not None]
    random = [rise([torch.randn(p.shape, generator=generator) for p in matrices], RANDOM) for _ in range(5)]
    return {"rise in random directions": sum(random) / 5, "rise along the gradient": rise(gradient, WORST)}


# What is decided -------------------------------------------------------------------------------------------


def both_parts(table: Table) -> Verdict:
    part = table.where(part="parts", size=SMALL)
    return all_of(
        **{
            f"{name}, layer {depth}": above(part.interval(name, layer=depth), 0.01)
            for name in ("additive", "multiplicative")
            for depth in (1, 2, 3)
        }
    )


def no_more_parts(table: Table) -> Verdict:
    part = table.where(part="parts")
    return all_of(
        first_layer=at_most(part.where(layer=1).values("rest"), 1e-4),
        **{f"layer_{depth}": at_most(part.where(layer=depth).values("rest"), 1e-4) for depth in (2, 3)},
    )


def halvings(table: Table, measure: str, depth: int) -> Interval:
    """The exponent of the size, from batches of 8 to 128, seed by seed."""
    part = table.where(part="parts", layer=depth)
    small, large = part.by_seed(measure, size=8), part.by_seed(measure, size=128)
    return interval([log2(large[seed] / small[seed]) / 4 for seed in small])


def fades(table: Table) -> Verdict:
    found = {
        f"{name}, layer {depth}": halvings(table, name, depth)
        for name in ("additive", "multiplicative")
        for depth in (1, 2, 3)
    }
    return all_of(
        **{f"{name}, fast enough": below(i, -0.4) for name, i in found.items()},
        **{f"{name}, slow enough": above(i, -0.6) for name, i in found.items()},
    )


def training(table: Table) -> Table:
    return table.where(part="training")


def small_less_whole(measure: str, rule: Callable[[Interval], Verdict]) -> Callable[[Table], Verdict]:
    """Between the noise of few and of all samples of a batch, without dropout."""

    def decide(table: Table) -> Verdict:
        part = training(table).where(dropout=0.0)
        return rule(part.difference(measure, {"set": SMALL}, {"set": WHOLE}))

    return decide


def flatter(table: Table) -> Verdict:
    return all_of(
        **{
            name: small_less_whole(name, below)(table)
            for name in ("rise in random directions", "rise along the gradient")
        }
    )


def gained_by_dropout(table: Table, size: int) -> dict[int, float]:
    part = training(table).where(set=size)
    without, with_it = (part.by_seed("accuracy", dropout=dropout) for dropout in DROPOUT)
    return {seed: with_it[seed] - without[seed] for seed in without}


def less_needed(table: Table) -> Verdict:
    small, whole = gained_by_dropout(table, SMALL), gained_by_dropout(table, WHOLE)
    return below(interval([small[seed] - whole[seed] for seed in small]))


def too_much(table: Table) -> Verdict:
    part = training(table).where(dropout=0.0)
    return below(part.difference("accuracy", {"set": SETS[0]}, {"set": WHOLE}))


def remarks(table: Table) -> Iterator[str]:
    for depth in (1, 2, 3):
        found = {name: halvings(table, name, depth) for name in ("additive", "multiplicative")}
        yield (
            f"Layer {depth}, from batches of 8 to 128: the additive part goes as the size to the power "
            f"{found['additive']}, the multiplicative as {found['multiplicative']}."
        )
    for size in (SMALL, WHOLE):
        gain = interval(list(gained_by_dropout(table, size).values()))
        yield f"Sets of {size}: dropout changes the accuracy by {gain}."
    part = training(table)
    for dropout in DROPOUT:
        yield (
            f"Layer norm, dropout {dropout:g}: accuracy {part.interval('accuracy', norm=LAYER, dropout=dropout)}, gap "
            f"in loss {part.interval('loss gap', norm=LAYER, dropout=dropout)}."
        )


# What is drawn ---------------------------------------------------------------------------------------------


def draw_parts(table: Table) -> Figure:
    rows = [
        {
            "size": row["size"],
            "layer": row["layer"],
            "seed": row["seed"],
            "part of the noise": name,
            "size of it": row[name],
        }
        for row in table.where(part="parts").rows
        for name in ("additive", "multiplicative", "rest")
        if name != "rest" or row["layer"] > 1
    ]
    rest = max(table.where(part="parts", layer=1).values("rest"))
    first = halvings(table, "additive", 1), halvings(table, "multiplicative", 1)
    return figures.lines(
        Table(rows),
        "parts",
        "What companions do to a fixed sample",
        "Deviation over draws of companions of what is added to a fixed sample's normalized values and of the factor "
        "on them, and what no line explains, in each of three batch norms. In the first layer the parts go as the size "
        f"of the batch to the power {number(first[0].mean)} and {number(first[1].mean)}, and nothing else is left "
        f"({number(rest)} at most).",
        x="size",
        y="size of it",
        by="part of the noise",
        panel="layer",
        log_x=True,
        log_y=True,
        x_title="batch size",
        y_title="deviation",
    )


def draw_accuracy(table: Table) -> Figure:
    rows = [
        {**row, "of": told, "share": row[name]}
        for row in training(table).where(norm="batch norm").rows
        for name, told in (("accuracy", "test images"), ("training accuracy", "training images"))
    ]
    return figures.lines(
        Table(rows),
        "accuracy",
        "What the noise does to accuracy",
        "Accuracy in evaluation mode, by how many samples share their statistics; steps are on batches of 128 "
        "throughout.",
        x="set",
        y="share",
        by="dropout",
        panel="of",
        log_x=True,
        x_title="samples that share statistics",
        y_title="accuracy",
    )


def by_set(name: str, key: str, title: str, caption: str) -> Callable[[Table], Figure]:
    return lambda table: figures.lines(
        training(table).where(norm="batch norm"),
        key,
        title,
        caption,
        x="set",
        y=name,
        by="dropout",
        log_x=True,
        x_title="samples that share statistics",
    )


draw_gap = by_set(
    "loss gap",
    "loss-gap",
    "The gap between training and test",
    "Loss on test images less on training images, both in evaluation mode.",
)
draw_random = by_set(
    "rise in random directions",
    "rise-random",
    "How flat the minimum is, in random directions",
    f"Rise of the training loss when each weight tensor moves by {RANDOM:g} of its length. Lower is flatter.",
)
draw_worst = by_set(
    "rise along the gradient",
    "rise-gradient",
    "How flat the minimum is, along the gradient",
    f"Rise of the training loss when each weight tensor moves by {WORST:g} of its length. Lower is flatter.",
)


STUDY = Study(
    name="noise",
    title="The noise of batch statistics",
    question="What do companions add to a sample, and does training gain by it?",
    intervention="how many samples share their statistics; dropout",
    held_fixed="the batch of a step (128), its images, first weights, rate and number of steps; for the parts, the "
    "sample",
    method=(
        "Fashion-MNIST at half its size, few training images, so that there is something to regularize. Parts: in a "
        "network trained with batch norm, a fixed test image among companions drawn anew; behind each norm its values "
        "are fitted by those it has among all test images, a line a channel. Training: ghost batch norm, whose sets "
        "are parts of the batch, so that the noise of the statistics changes and that of the gradient's batch does "
        "not; layer norm for comparison. Losses and accuracies in evaluation mode. Flatness: how much the training "
        "loss rises when every weight tensor moves by a share of its own length."
    ),
    measures=(
        Measure(
            "additive", "of the normalized output", meaning="deviation, over companions, of what is added"
        ),
        Measure("multiplicative", meaning="deviation, over companions, of the factor"),
        Measure("rest", "of the normalized output", meaning="what neither explains"),
        Measure("accuracy", better="higher", meaning="on test images"),
        Measure("training accuracy", better="higher"),
        Measure("gap", better="lower", meaning="accuracy on training images less on test images"),
        Measure("loss gap", better="lower", meaning="loss on test images less on training images"),
        Measure("rise in random directions", "loss", "lower", "mean over 5 directions"),
        Measure("rise along the gradient", "loss", "lower"),
    ),
    cells=cells,
    measure=measure,
    data=("fashion-mnist",),
    seeds={"full": 6, "quick": 3, "smoke": 1},
    decisions=(
        Decision(
            "parts",
            "The noise has an additive and a multiplicative part in every layer, each above 0.01 in batches of 8.",
            both_parts,
            (26,),
        ),
        Decision(
            "no-more",
            "It has no other part: in every layer a fixed sample's values are a line of what they are otherwise, to "
            "1e-4.",
            no_more_parts,
            (26,),
        ),
        Decision(
            "fades",
            "Both fade as one over the square root of the batch size (a power from -0.6 to -0.4).",
            fades,
            (26,),
        ),
        Decision(
            "regularizes",
            "More noise (sets of 8, not of 128) makes the gap in loss between training and test smaller.",
            small_less_whole("loss gap", below),
            (26,),
        ),
        Decision(
            "accuracy",
            "It makes the accuracy on test images higher.",
            small_less_whole("accuracy", above),
            (26,),
        ),
        Decision("too-much", "In sets of 4 the accuracy is below that in sets of 128.", too_much, (26, 28)),
        Decision(
            "dropout",
            "It makes dropout less needed: dropout adds less accuracy in sets of 8 than in sets of 128.",
            less_needed,
            (26,),
        ),
        Decision(
            "flatter",
            "It leads to flatter minima: the training loss rises less a step away, in random directions and along the "
            "gradient.",
            flatter,
            (26,),
        ),
    ),
    remarks=remarks,
    figures=(draw_parts, draw_accuracy, draw_gap, draw_random, draw_worst),
    change="SETS holds the sizes of the sets, COMPANIONS the batches of the parts, RANDOM and WORST the steps.",
    limits=(
        "One small network, one data set, few images, one rate, a fixed number of steps: an arm that is slower to "
        "train also has a smaller gap and another minimum, and training accuracies are shown so that this is "
        "seen. The parts are of one fixed image a seed. Flatness depends on how weights are measured; here relative to "
        "their length."
    ),
)
