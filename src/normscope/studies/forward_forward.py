"""Forward-only learning with every norm: what normalization does to goodness, and what companions do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope import nn as own
from normscope.errors import BadInput
from normscope.render.charts.figure import Figure, number
from normscope.studies import (
    Decision,
    Measure,
    Study,
    Table,
    Verdict,
    above,
    all_of,
    at_least,
    at_most,
    below,
)
from normscope.studies.lab import data, figures
from normscope.studies.lab.networks import weights
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.training import stream

EPS, TINY, RATE = 1e-5, 1e-12, 3e-3
CLASSES, EACH = 8, 8
"""a step takes 8 samples of each of 8 classes, whatever batch norm takes together"""
WIDTH = {"full": 200, "quick": 100, "smoke": 20}
"""a multiple of the number of classes"""
STEPS = {"full": 1000, "quick": 300, "smoke": 5}
TEST = {"full": 1000, "quick": 500, "smoke": 100}
LAYERS, COMPANIONS, FIXED = 3, 8, 8
"""of the last two: sets of companions, and samples whose goodness is watched among them"""
TOGETHER, APART, CHANNELS = "pairs in one batch", "pairs apart", "channel-wise"
MIXED, SCATTERED, ALIKE, ALONE = "64, mixed", "8, one of a class", "8, all of a class", "1"
START, END = "before training", "after training"
BETWEEN, MEASURED, NO_EPS = "between layers", "on the measured vector", "on it, eps 1e-12"
SETS = {MIXED: CLASSES * EACH, SCATTERED: CLASSES, ALIKE: EACH, ALONE: 1}
"""from how many samples batch norm takes its statistics"""
NORMS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "none": lambda width, size, eps: nn.Identity(),
    "length": lambda width, size, eps: nn.RMSNorm(width, eps=eps, elementwise_affine=False),
    "layer": lambda width, size, eps: nn.LayerNorm(width, eps=eps, elementwise_affine=False),
    "batch": lambda width, size, eps: own.GhostBatchNorm1d(
        width, eps, affine=False, size=size, updates="once"
    ),
}
PER_SAMPLE = ("length", "layer")


def cells(scale: Scale) -> Iterator[Cell]:
    for rule in (TOGETHER, CHANNELS) if scale == "smoke" else (TOGETHER, APART, CHANNELS):
        for norm in NORMS:
            places = [BETWEEN] if norm == "none" else [BETWEEN, MEASURED]
            for place in places + [NO_EPS] * (rule == TOGETHER and norm in PER_SAMPLE):
                yield {"rule": rule, "norm": norm, "place": place, "sets": MIXED}
        for sets in (SCATTERED, ALIKE, ALONE):
            yield {"rule": rule, "norm": "batch", "place": BETWEEN, "sets": sets}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    images = data.load("mnist-5k", test=TEST[scale])
    experiment = Experiment(cell, images, seed, WIDTH[scale])
    start = list(experiment.layers(START))
    try:
        experiment.train(STEPS[scale])
    except BadInput:  # a set of one value has no variance
        yield {"refused": 1.0}
        return
    yield {
        "refused": 0.0,
        "accuracy": experiment.accuracy(),
        **experiment.gap(),
        "companion effect": experiment.companion_effect(),
    }
    yield from start
    yield from experiment.layers(END)


class Stack(nn.Module):
    """Layers that learn alone: no gradient passes from one to the next."""

    def __init__(self, inputs: int, width: int, norm: Callable[[], nn.Module], measured: bool) -> None:
        super().__init__()
        sizes = [inputs] + [width] * (LAYERS - 1)
        self.linears = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.norms = nn.ModuleList(norm() for _ in range(LAYERS))
        self.measured = measured

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each layer: its activations, the vector whose goodness is measured, and what the next layer gets."""
        found = []
        for linear, norm in zip(self.linears, self.norms, strict=True):
            h = functional.relu(linear(x))
            passed = norm(h if self.measured else h.detach())
            found.append((h, passed if self.measured else h, passed))
            x = passed.detach()
        return found


class Experiment:
    """One arm: its stack, its rule, and how its batches are put together."""

    def __init__(self, cell: Cell, images: data.Images, seed: int, width: int) -> None:
        self.images, self.seed, self.width = images, seed, width
        self.pairs, self.apart = cell["rule"] != CHANNELS, cell["rule"] == APART
        self.sets = str(cell["sets"])
        size = SETS[self.sets] * (2 if cell["rule"] == TOGETHER else 1)
        inputs = images.train[0].numel() + (images.classes if self.pairs else 0)
        eps = TINY if cell["place"] == NO_EPS else EPS
        with weights(seed):
            self.stack = Stack(
                inputs, width, lambda: NORMS[str(cell["norm"])](width, size, eps), cell["place"] != BETWEEN
            )

    # Inputs and goodness

    def told(self, x: Tensor, labels: Tensor) -> Tensor:
        """Vectors of the length sqrt(size), for every arm; with a rule of pairs the label stands beside the pixels."""
        x = x.flatten(1)
        if self.pairs:
            x = torch.cat([functional.one_hot(labels, self.images.classes).to(x), x], 1)
        size: int = x.shape[1]
        scaled: Tensor = functional.normalize(x) * size**0.5
        return scaled

    def goodness(self, vector: Tensor) -> Tensor:
        """(N, 1), the sum of squares; or (N, classes), the mean of squares of the units of each class."""
        squares = vector.square()
        if self.pairs:
            return squares.sum(1, keepdim=True)
        return squares.reshape(len(vector), self.images.classes, -1).mean(2)

    def total(self, x: Tensor, labels: Tensor) -> Tensor:
        """(N, 1) or (N, classes), over all layers but the first, which no norm between layers touches."""
        layers = self.stack(self.told(x, labels))
        found: Tensor = torch.stack([self.goodness(measured) for _, measured, _ in layers[1:]]).sum(0)
        return found

    # Training

    def train(self, steps: int) -> None:
        optimizer = torch.optim.Adam(self.stack.parameters(), lr=RATE, fused=True)
        others = stream(self.seed, "negatives")
        self.stack.train()
        order = self.batches(self.images.train_labels, "order")
        for _, chosen in zip(range(steps), order, strict=False):
            x, y = self.images.train[chosen], self.images.train_labels[chosen]
            optimizer.zero_grad(set_to_none=True)
            self.loss(x, y, self.wrong(y, others)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def batches(self, labels: Tensor, what: str) -> Iterator[Tensor]:
        """Indices without end: the same samples for every arm, in the order in which batch norm groups them."""
        generator = stream(self.seed, what)
        members = [torch.nonzero(labels == c)[:, 0] for c in range(self.images.classes)]
        while True:
            classes = torch.randperm(len(members), generator=generator)[:CLASSES]
            rows = [
                members[c][torch.randint(len(members[c]), (EACH,), generator=generator)]
                for c in classes.tolist()
            ]
            chosen = torch.stack(rows)
            yield (chosen.T if self.sets == SCATTERED else chosen).flatten()

    def wrong(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        classes = self.images.classes
        return (labels + torch.randint(1, classes, labels.shape, generator=generator)) % classes

    def both(self, x: Tensor, right: Tensor, wrong: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each layer the goodness of positives and of negatives, from one batch or from two."""
        if self.apart:
            parts = [
                [self.goodness(m)[:, 0] for _, m, _ in self.stack(self.told(x, y))] for y in (right, wrong)
            ]
            yield from zip(*parts, strict=True)
            return
        size = SETS[self.sets]  # each set holds its samples' positives, then their negatives
        inputs = torch.stack([self.told(x, y).reshape(len(x) // size, size, -1) for y in (right, wrong)], 1)
        for _, measured, _ in self.stack(inputs.flatten(0, 2)):
            found = self.goodness(measured).reshape(-1, 2, size)
            yield found[:, 0].flatten(), found[:, 1].flatten()

    def loss(self, x: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
        """Summed over layers, each of which has a part of its own in it."""
        if self.pairs:
            threshold = self.width  # a mean square of 1
            apart = (torch.cat([threshold - p, n - threshold]) for p, n in self.both(x, right, wrong))
            parts = [2 * functional.softplus(distance).mean() for distance in apart]
        else:
            layers = self.stack(self.told(x, right))
            parts = [functional.cross_entropy(self.goodness(measured), right) for _, measured, _ in layers]
        return torch.stack(parts).sum()

    # What is measured, without a change to the stack

    @torch.no_grad()
    def accuracy(self) -> float:
        """Of the label with the most goodness, by stored statistics, on the test images."""
        self.stack.eval()
        x, y = self.images.test, self.images.test_labels
        if self.pairs:
            classes = range(self.images.classes)
            scores = torch.cat([self.total(x, torch.full_like(y, c)) for c in classes], 1)
        else:
            scores = self.total(x, y)
        # With equal scores the first label would win: that is no answer.
        best = scores == scores.max(1, keepdim=True).values
        return float((best.gather(1, y[:, None])[:, 0] / best.sum(1)).mean())

    @torch.no_grad()
    def gap(self) -> dict[str, float]:
        """How often the right label has more goodness, in training mode and in evaluation, on the same batches."""
        rates = {}
        for mode in ("training", "evaluation"):
            stack, self.stack = self.stack, deepcopy(self.stack).train(mode == "training")
            others, right = stream(self.seed, "test negatives"), list[Tensor]()
            for _, chosen in zip(range(8), self.batches(self.images.test_labels, "test order"), strict=False):
                x, y = self.images.test[chosen], self.images.test_labels[chosen]
                if self.pairs:
                    found = list(self.both(x, y, self.wrong(y, others)))[1:]
                    right.append((torch.stack([p - n for p, n in found]).sum(0) > 0).float())
                else:
                    right.append((self.total(x, y).argmax(1) == y).float())
            rates[mode] = float(torch.cat(right).mean())
            self.stack = stack
        gap = rates["training"] - rates["evaluation"]
        return {"right in training": rates["training"], "gap": gap, "gap size": abs(gap)}

    @torch.no_grad()
    def companion_effect(self) -> float:
        """The deviation of a sample's goodness over sets of companions, by that over samples."""
        stack, self.stack = self.stack, deepcopy(self.stack).train()
        order = self.batches(self.images.train_labels, "companions")
        others = stream(self.seed, "companion negatives")
        found = torch.zeros(COMPANIONS, FIXED)
        for k, chosen in zip(range(COMPANIONS), order, strict=False):
            x, y = self.images.train[chosen], self.images.train_labels[chosen]
            wrong = self.wrong(y, others)
            for i in range(FIXED):  # it takes the first place in the first set
                x[0], y[0] = self.images.test[i], self.images.test_labels[i]
                wrong[0] = (y[0] + 1) % self.images.classes
                if self.pairs:
                    layers = list(self.both(x, y, wrong))
                    found[k, i] = sum(float(positive[0]) for positive, _ in layers[1:])
                else:
                    found[k, i] = self.total(x, y)[0, y[0]]
        self.stack = stack
        return float(found.std(0).mean() / found.mean(0).std())

    @torch.no_grad()
    def layers(self, when: str) -> Iterator[dict[str, Any]]:
        """Of each layer, on the test images with their labels: its goodness, and the spread within classes."""
        x, y = self.told(self.images.test, self.images.test_labels), self.images.test_labels
        of_batch = deepcopy(self.stack).train()
        for norm in of_batch.norms:
            if isinstance(norm, own.GhostBatchNorm1d):
                norm.size = len(x)
        batch = of_batch(x)
        for layer, (h, measured, passed) in enumerate(self.stack.eval()(x)):
            total = measured.square().sum(1)
            row: dict[str, Any] = {
                "layer": layer + 1,
                "when": when,
                "goodness spread": float(total.std() / total.mean().clamp_min(1e-30)),
                "mean square": float(h.square().mean()),
                "spread before": within(h, y),
                "spread behind": within(passed, y),
            }
            v = batch[layer][0].var(0, correction=0)
            share = batch[layer][2].square().sum(1).mean() / (v / (v + EPS)).sum()
            yield {
                **row,
                "spread kept": row["spread behind"] / row["spread before"],
                "batch goodness": float(share),
            }


def within(h: Tensor, labels: Tensor) -> float:
    """The share of the variance that lies within classes."""
    present = torch.bincount(labels).nonzero()[:, 0]
    centers = torch.stack([h[labels == c].mean(0) for c in present])
    apart = h - centers[torch.searchsorted(present, labels)]
    return float(apart.square().sum() / (h - h.mean(0)).square().sum())


# What is decided ----------------------------------------------------------------------------------------


def arm(rule: str, norm: str, place: str = BETWEEN, sets: str = MIXED) -> dict[str, Any]:
    return {"rule": rule, "norm": norm, "place": place, "sets": sets}


def constant(table: Table, when: str) -> Verdict:
    """Where the mean of squares is 0.01 or more, eps takes a thousandth of it at most."""
    part = table.where(place=MEASURED, when=when)
    return all_of(
        **{norm: at_most(part.where(norm=norm).values("goodness spread"), 1e-3) for norm in PER_SAMPLE}
    )


def nothing_learned(table: Table) -> Verdict:
    return all_of(
        **{
            norm: at_most(table.where(**arm(TOGETHER, norm, MEASURED)).values("accuracy"), 0.2)
            for norm in PER_SAMPLE
        }
    )


def by_eps(table: Table) -> Verdict:
    return all_of(
        **{
            norm: above(
                table.difference("accuracy", arm(TOGETHER, norm, MEASURED), arm(TOGETHER, norm, NO_EPS)), 0.1
            )
            for norm in PER_SAMPLE
        }
    )


def of_the_batch(table: Table) -> Verdict:
    part = table.where(norm="batch", place=MEASURED, when=END)
    return all_of(
        of_the_batch=at_most([abs(share - 1) for share in part.values("batch goodness")], 1e-3),
        of_a_sample=at_least(part.values("goodness spread"), 0.05),
    )


def needs(table: Table) -> Verdict:
    return all_of(
        **{
            other: above(table.difference("accuracy", arm(TOGETHER, "length"), arm(TOGETHER, other)), 0.05)
            for other in ("none", "batch")
        }
    )


def companions(table: Table) -> Verdict:
    part = table.where(place=BETWEEN, sets=MIXED)
    others = [row for row in part.rows if row["norm"] != "batch"]
    return all_of(
        batch=at_least(part.where(norm="batch").values("companion effect"), 0.05),
        others=at_most(Table(others).values("companion effect"), 1e-3),
    )


def together(table: Table) -> Verdict:
    return below(table.difference("accuracy", arm(APART, "batch"), arm(TOGETHER, "batch")), -0.02)


def alike(table: Table) -> Verdict:
    """At the first norm, in front of which all arms are the same."""
    first = {"layer": 1, "when": END, "rule": CHANNELS, "place": BETWEEN, "sets": MIXED}
    return below(
        table.difference("spread kept", {**first, "norm": "layer"}, {**first, "norm": "batch"}), -0.02
    )


def batch_is_better(table: Table) -> Verdict:
    return above(table.difference("accuracy", arm(CHANNELS, "batch"), arm(CHANNELS, "layer")), 0.01)


def needs_company(table: Table) -> Verdict:
    return all_of(
        **{
            name: below(
                table.difference("accuracy", arm(CHANNELS, "batch", sets=sets), arm(CHANNELS, "batch")), -0.01
            )
            for name, sets in (("one_of_a_class", SCATTERED), ("all_of_a_class", ALIKE))
        }
    )


def alone(table: Table) -> Verdict:
    part = table.where(norm="batch", place=BETWEEN, sets=ALONE)
    refused = [row["refused"] for row in part.rows if row["rule"] != TOGETHER]
    pairs = table.difference("accuracy", arm(TOGETHER, "batch", sets=ALONE), arm(TOGETHER, "batch"))
    return all_of(refused=at_least(refused, 1), a_pair=below(pairs, -0.05))


def gap_grows(table: Table) -> Verdict:
    return all_of(
        **{
            name: above(
                table.difference("gap size", arm(rule, "batch", sets=ALIKE), arm(rule, "batch")), 0.02
            )
            for name, rule in (("pairs", TOGETHER), ("channel_wise", CHANNELS))
        }
    )


def none_is_best(table: Table) -> Verdict:
    def length_over_batch(rule: str) -> Any:
        return table.difference("accuracy", arm(rule, "length"), arm(rule, "batch"))

    return all_of(pairs=above(length_over_batch(TOGETHER)), channel_wise=below(length_over_batch(CHANNELS)))


# What is drawn ------------------------------------------------------------------------------------------


def having(table: Table, measure: str) -> Table:
    """The rows in which this was measured."""
    return Table([row for row in table.rows if row.get(measure) is not None])


def draw_accuracy(table: Table) -> Figure:
    part = table.where(sets=MIXED)
    best = {
        rule: max(NORMS, key=lambda norm: part.interval("accuracy", rule=rule, norm=norm, place=BETWEEN).mean)
        for rule in (TOGETHER, CHANNELS)
    }
    return figures.points(
        part,
        "accuracy",
        "Which norm serves which rule",
        "Test accuracy by stored statistics, batch norm over all 64 samples of a step. Between layers the best norm is "
        f"{best[TOGETHER]} for pairs in one batch and {best[CHANNELS]} for the channel-wise rule.",
        x="accuracy",
        rows="norm",
        by="place",
        panel="rule",
    )


def draw_goodness(table: Table) -> Figure:
    part = table.where(rule=TOGETHER, sets=MIXED)
    part = having(
        Table([row for row in part.rows if row["place"] == MEASURED or row["norm"] == "none"]), "layer"
    )
    first, last = (
        max(
            value
            for norm in PER_SAMPLE
            for value in part.where(norm=norm, when=when).values("goodness spread")
        )
        for when in (START, END)
    )
    return figures.lines(
        part,
        "goodness",
        "Goodness of a normalized vector",
        "Pairs in one batch, the norm on the vector that is measured: deviation of the sum of squares over test "
        f"samples, by its mean. Behind a per-sample norm it is {number(first)} at most before training, and "
        f"{number(last)} after it. The mean square of activations in front of length norm goes from "
        f"{number(square(part, START))} to {number(square(part, END))} in the layer where it is smallest.",
        x="layer",
        y="goodness spread",
        by="norm",
        panel="when",
        log_y=True,
        y_title="relative spread of goodness",
    )


def square(table: Table, when: str) -> float:
    least: float = min(table.where(norm="length", when=when).values("mean square"))
    return least


def draw_companions(table: Table) -> Figure:
    return figures.points(
        table.where(sets=MIXED, place=BETWEEN),
        "companions",
        "What companions do to goodness",
        "A fixed sample among other companions: the deviation of its goodness in training mode, by the deviation "
        "between samples. At 1 companions matter as much as the sample.",
        x="companion effect",
        rows="norm",
        panel="rule",
        zero=True,
    )


def draw_sets(table: Table) -> Figure:
    refused = len(table.where(refused=1.0).distinct("rule"))
    return figures.points(
        having(table.where(norm="batch", place=BETWEEN), "accuracy"),
        "sets",
        "From which samples batch norm takes its statistics",
        "Test accuracy, by stored statistics; every step trains on the same 64 samples, only the sets of batch norm "
        f"differ. Without a point: a set of one vector has no variance, and {refused} of 3 rules cannot run.",
        x="accuracy",
        rows="sets",
        panel="rule",
    )


def draw_gap(table: Table) -> Figure:
    return figures.points(
        having(table.where(norm="batch", place=BETWEEN), "gap"),
        "gap",
        "Training mode against evaluation",
        "Share of test samples whose right label has more goodness (than one wrong label with pairs, than all with the "
        "channel-wise rule): in training mode less in evaluation, on the same batches, put together as in training.",
        x="gap",
        rows="sets",
        panel="rule",
        zero=True,
    )


def draw_spread(table: Table) -> Figure:
    return figures.points(
        table.where(sets=MIXED, place=BETWEEN, when=END, layer=1),
        "spread",
        "Spread within classes",
        "Share of the variance that lies within classes behind the first norm, by that before it: above 1 samples of a "
        "class become less alike. All arms of a rule have the same layer before it.",
        x="spread kept",
        rows="norm",
        panel="rule",
    )


STUDY = Study(
    name="forward-forward",
    title="Forward-only learning",
    question="Which norm does learning without a backward pass need, and what does batch norm do to goodness?",
    intervention="the norm, whether it stands between layers or on the vector whose goodness is measured, whether "
    "positives and negatives share a batch, and from which samples batch norm takes its statistics",
    held_fixed=f"data, order, first weights, {LAYERS} layers, Adam with rate {RATE:g}, steps; every step sees the same "
    f"{CLASSES * EACH} samples, {EACH} of each of {CLASSES} classes; no gain and bias",
    method=(
        "MNIST-5k, linear layers with ReLU that each learn alone. Pairs: Hinton's rule, the label beside the pixels, a "
        "right one in positives and a random wrong one in negatives; goodness is the sum of squares of a sample, its "
        "threshold the number of units, the loss softplus of the distance to it. Channel-wise: goodness of a class is "
        "the mean of squares of its own tenth of the units, the loss the cross-entropy of these (Papachristodoulou et "
        "al., here on linear layers). The answer is the label with the most goodness in all layers but the first. "
        "Length: divided by the root of the mean square, Hinton's norm; layer: also centered; batch: ghost batch norm "
        "over sets of a step's samples."
    ),
    measures=(
        Measure("accuracy", better="higher", meaning="on test images, by stored statistics"),
        Measure("goodness spread", meaning="deviation of the sum of squares over samples, by its mean"),
        Measure("mean square", meaning="of the activations, before the norm"),
        Measure(
            "batch goodness",
            meaning="mean sum of squares behind the norm, by the sum of v / (v + eps)",
        ),
        Measure(
            "companion effect",
            better="lower",
            meaning="deviation of goodness over companions, by that over samples",
        ),
        Measure(
            "right in training",
            better="higher",
            meaning="how often the right label has more, in training mode",
        ),
        Measure("gap", meaning="the same, less how often in evaluation mode"),
        Measure("gap size", better="lower", meaning="without its sign"),
        Measure("spread before", meaning="share of the variance within classes, before the norm"),
        Measure("spread kept", meaning="that share behind the norm, by that before it"),
        Measure("refused", meaning="1 where the norm cannot train with such sets"),
    ),
    cells=cells,
    measure=measure,
    seeds={"full": 5, "quick": 3, "smoke": 1},
    data=("mnist-5k",),
    decisions=(
        Decision(
            "constant",
            "Behind a per-sample norm of the very vector that is measured, goodness is the same for every sample to a "
            "thousandth: before training.",
            lambda table: constant(table, START),
            (44,),
        ),
        Decision("stays-constant", "And after training.", lambda table: constant(table, END), (44,)),
        Decision(
            "nothing-learned",
            "Pairs learn nothing then: accuracy 0.2 at most.",
            nothing_learned,
            (44,),
        ),
        Decision(
            "by-eps",
            "What they learn there comes from eps: with eps 1e-12 accuracy is lower by more than 0.1.",
            by_eps,
            (44, 6),
        ),
        Decision(
            "of-the-batch",
            "Batch norm of that vector fixes the mean goodness of a batch, to a thousandth, and not that of a sample.",
            of_the_batch,
            (44,),
        ),
        Decision(
            "needs",
            "Pairs need a per-sample norm: dividing by the length is more accurate than batch norm and none, by 0.05.",
            needs,
            (45,),
        ),
        Decision(
            "companions",
            "With batch norm companions move a sample's goodness by a twentieth of the deviation between samples or "
            "more, with the others by a thousandth at most.",
            companions,
            (45, 7),
        ),
        Decision(
            "together",
            "Batch norm loses more than 0.02 where positives and negatives are normalized apart.",
            together,
            (45,),
        ),
        Decision(
            "alike",
            "In the channel-wise rule layer norm leaves less of the spread within classes than batch norm does.",
            alike,
            (46, 41),
        ),
        Decision(
            "batch-is-better",
            "In the channel-wise rule batch norm is more accurate than layer norm, by more than 0.01.",
            batch_is_better,
            (46,),
        ),
        Decision(
            "needs-company",
            "It loses more than 0.01 with sets of 8, one of a class, and with sets of 8, all of a class.",
            needs_company,
            (46, 28),
        ),
        Decision(
            "alone",
            "With a batch of one, batch norm refuses, and where a positive and its negative make a set it loses 0.05.",
            alone,
            (28, 9),
        ),
        Decision(
            "gap",
            "Sets of one class widen the gap between training and evaluation by more than 0.02.",
            gap_grows,
            (28,),
        ),
        Decision(
            "none-is-best",
            "No norm is best for both rules: length beats batch norm with pairs, batch norm beats it channel-wise.",
            none_is_best,
            (47,),
        ),
    ),
    figures=(draw_accuracy, draw_goodness, draw_companions, draw_sets, draw_gap, draw_spread),
    change="NORMS holds the norms, SETS the sets of batch norm, Experiment.goodness and Experiment.loss the rules.",
    limits=(
        "Small stacks of linear layers, short training on 4,000 digits, and no rate chosen for each norm: the one rate "
        "was chosen with pairs and the length norm. The channel-wise rule is published for convolutions with a block "
        "of its own; here a unit stands for a channel. Random wrong labels; better negatives may need another norm. "
        "Adam makes steps of one size from small gradients; plain SGD would learn less from what eps lets through."
    ),
    sources=(
        "Hinton 2022, The Forward-Forward Algorithm: Some Preliminary Investigations, section 2, "
        "https://arxiv.org/abs/2212.13345",
        "Papachristodoulou, Kyrkou, Timotheou and Theocharides 2024, Convolutional Channel-wise Competitive Learning "
        "for the Forward-Forward Algorithm, https://arxiv.org/abs/2312.12668",
    ),
)
