"""What each norm removes from images, and what it keeps: level, contrast, style, and differences between samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

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
from normscope.studies.lab.data import Images
from normscope.studies.lab.figures import Figure, number
from normscope.studies.lab.networks import conv_net, mlp, norm, weights
from normscope.studies.lab.probes import read
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.styled import FACTORS, Styled, halved, styled
from normscope.studies.lab.training import Plan, evaluate, stream, train

CONTENT = "content"
TASKS = ("level", "contrast", CONTENT)
ALONE, BYPASS, INSIDE = "at the input", "at the input, with a bypass", "inside"
NORMS = {
    "task": ("none", "batch", "layer", "rms", "instance"),
    "probe": ("none", "batch", "layer", "layer-channels", "rms", "instance"),
    "undo": ("batch", "layer", "layer-channels", "rms", "instance"),
    "spread": ("batch", "layer", "layer-channels", "rms", "group", "instance"),
}
WIDTHS, HIDDEN, GROUPS = (8, 16), 64, 4
EXACT, NOISY = "exact", "with noise 0.01"
SAMPLES = {"full": (4000, 1000), "quick": (1200, 500), "smoke": (120, 60)}
"""training and test"""
STEPS = {"full": 400, "quick": 120, "smoke": 2}


def cells(scale: Scale) -> Iterator[Cell]:
    for name in NORMS["task"]:
        for place in (ALONE, BYPASS, INSIDE):
            if name != "none" or place == ALONE:
                yield from ({"part": "task", "norm": name, "place": place, "label": task} for task in TASKS)
    for part in ("probe", "undo"):
        yield from ({"part": part, "norm": name} for name in NORMS[part])
    for trained in ("first weights", "trained"):
        yield {"part": "spread", "weights": trained}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterable[dict[str, Any]]:
    if cell["part"] == "spread":
        return spread(str(cell["weights"]), seed, scale)
    name = str(cell["norm"])
    if cell["part"] == "undo":
        x = dyed(CONTENT, seed, scale).train[:256]
        return [{"left": left(x, layer_of(name)(x))}]
    if cell["part"] == "task":
        return [{"skill": learned(name, str(cell["place"]), str(cell["label"]), seed, scale)}]
    return probed(name, seed, scale)


def dyed(label: str, seed: int, scale: Scale) -> Images:
    """Styled images with one of the factors, or what they show, as the label."""
    images, parts = dressed(seed, scale)
    labels = [images.train_labels, images.test_labels]
    if label != CONTENT:
        labels = [part.label(label) for part in parts]
    return Images(images.source, parts[0].images, labels[0], parts[1].images, labels[1])


def dressed(seed: int, scale: Scale) -> tuple[Images, list[Styled]]:
    """The images as they come, and both parts with styles."""
    train, test = SAMPLES[scale]
    images, generator = data.load("fashion-mnist", train=train, test=test), stream(seed, "style")
    return images, [styled(halved(part), generator) for part in (images.train, images.test)]


def plan(scale: Scale) -> Plan:
    return Plan(steps=STEPS[scale], batch=64, rate=0.01, optimizer="adamw", decay=True)


def skill(accuracy: float, classes: int) -> float:
    """0 for guessing, 1 for knowing."""
    return (accuracy - 1 / classes) / (1 - 1 / classes)


# A network with the norm ---------------------------------------------------------------------------------


class Beside(nn.Module):
    """The norm of the input, with the input itself beside it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x), x], 1)


def learned(name: str, place: str, label: str, seed: int, scale: Scale) -> float:
    """The skill on the test part of a small network."""
    images = dyed(label, seed, scale)
    classes, (c, h, w) = images.classes, images.shape
    with weights(seed):
        if place == INSIDE:
            model = conv_net((c, h, w), WIDTHS, classes, norm(name, groups=GROUPS))
        else:
            first = norm(name)(c)
            wide = 2 * c if place == BYPASS else c
            body = conv_net((wide, h, w), WIDTHS, classes, norm("none"))
            model = nn.Sequential(Beside(first) if place == BYPASS else first, body)
    train(model, images, plan(scale), seed)
    return skill(evaluate(model, images.test, images.test_labels)[1], classes)


# The isolated norm ---------------------------------------------------------------------------------------


def layer_of(name: str, *, dims: int = 2) -> Any:
    """Without gain and bias, by the statistics of what it gets."""
    return lambda x: norm(name, dims=dims, groups=GROUPS, affine=False)(x.shape[1])(x)


@torch.no_grad()
def probed(name: str, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    """What a linear classifier reads from the output: factors from the style statistics, content from the pixels."""
    (images, parts), layer = dressed(seed, scale), layer_of(name)
    x, y = (layer(part.images) for part in parts)
    found = read(x.flatten(1), images.train_labels, y.flatten(1), images.test_labels)
    yield {"factor": CONTENT, "reading": EXACT, "skill": skill(found, images.classes)}
    styles, generator = [style(x), style(y)], stream(seed, "reading")
    for reading, size in ((EXACT, 0.0), (NOISY, 0.01)):
        a, b = (s + size * torch.randn(s.shape, generator=generator, dtype=s.dtype) for s in styles)
        for factor in FACTORS:
            found = read(a, parts[0].label(factor), b, parts[1].label(factor))
            yield {"factor": factor, "reading": reading, "skill": skill(found, 2)}


def style(x: Tensor) -> Tensor:
    """Mean and logarithm of the deviation, of the image and of each channel; correlations of the channels."""
    flat, whole = x.flatten(2).double(), x.flatten(1).double()
    mean, deviation = flat.mean(2), flat.std(2, correction=0).clamp_min(1e-12)
    z = (flat - mean[..., None]) / deviation[..., None]
    gram = z @ z.mT / flat.shape[2]
    i, j = torch.triu_indices(len(gram[0]), len(gram[0]), 1)
    overall = torch.stack([whole.mean(1), whole.std(1, correction=0).log()], 1)
    return torch.cat([overall, mean, deviation.log(), gram[:, i, j]], 1)


def left(x: Tensor, y: Tensor) -> float:
    """The share of the variance of ``x`` that the best gain and bias a channel do not give back from ``y``."""
    x, y = (t.double().movedim(1, 0).flatten(1) for t in (x, y))
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    explained = (x * y).sum(1) ** 2 / (y * y).sum(1)
    return float(1 - explained.sum() / (x * x).sum())


@torch.no_grad()
def spread(trained: str, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    """Variances between the samples of a class and between the channels of a sample, as shares of all, by norm."""
    count, test = SAMPLES[scale]
    whole = data.load("fashion-mnist", train=count, test=test)
    images = replace(whole, train=halved(whole.train), test=halved(whole.test))
    c, h, w = images.shape
    with weights(seed):
        maps = conv_net((c, h, w), (16, 16), images.classes, norm("none"))
        vectors = mlp(c * h * w, [HIDDEN], images.classes, norm("none", dims=0))
    for kind, model, first, dims in (("maps", maps, 1, 2), ("vectors", vectors, 2, 0)):
        if trained == "trained":
            with torch.enable_grad():
                train(model, images, plan(scale), seed)
        x = model[:first](images.test)
        before = shares(x, images.test_labels)
        for name in NORMS["spread"]:
            if kind == "maps" or name not in ("instance", "layer-channels"):
                after = shares(layer_of(name, dims=dims)(x), images.test_labels)
                for between, share in after.items():
                    yield {
                        "norm": name,
                        "features": kind,
                        "between": between,
                        "before": before[between],
                        "after": share,
                        "kept": share / before[between],
                    }


SAMPLE, CHANNEL = "samples of a class", "channels of a sample"
LEVELS_OF_SAMPLES, LEVELS_OF_CHANNELS = "levels of samples of a class", "levels of channels"


def shares(x: Tensor, labels: Tensor) -> dict[str, float]:
    """Of all variance; levels are the mean of a whole sample, and of a channel over all samples."""
    x = x.double()
    everything = x.var(correction=0)

    def within(some: Tensor) -> Tensor:
        apart = [some[labels == k] for k in set(labels.tolist())]
        spreads = [len(one) * one.var(0, correction=0).mean() for one in apart]
        return torch.stack(spreads).sum() / len(some)

    found = {
        SAMPLE: within(x),
        CHANNEL: x.var(1, correction=0).mean(),
        LEVELS_OF_SAMPLES: within(x.flatten(1).mean(1)),
        LEVELS_OF_CHANNELS: x.movedim(1, 0).flatten(1).mean(1).var(correction=0),
    }
    return {name: float(value / everything) for name, value in found.items()}


# What is decided -----------------------------------------------------------------------------------------


def trained(table: Table, label: str, name: str, place: str) -> Any:
    return table.interval("skill", part="task", label=label, norm=name, place=place)


def seen(table: Table, factor: str, name: str, reading: str = NOISY) -> Any:
    return table.interval("skill", part="probe", factor=factor, norm=name, reading=reading)


def removed(label: str, place: str) -> Any:
    def decide(table: Table) -> Verdict:
        return all_of(
            **{name: below(trained(table, label, name, place), 0.1) for name in ("layer", "instance")},
            batch_keeps_it=above(trained(table, label, "batch", place), 0.5),
        )

    return decide


def content_stays(table: Table) -> Verdict:
    part = table.where(part="task", label=CONTENT)
    plain = {"norm": "none", "place": ALONE}
    return all_of(
        **{
            name: above(part.difference("skill", {"norm": name, "place": ALONE}, plain), -0.05)
            for name in NORMS["task"][1:]
        }
    )


def bypass_gives_back(table: Table) -> Verdict:
    return all_of(
        **{
            f"{name} {label}": above(trained(table, label, name, BYPASS), 0.5)
            for name in ("layer", "instance")
            for label in ("level", "contrast")
        }
    )


def gone(*factors: str) -> Any:
    return lambda table: all_of(**{factor: below(seen(table, factor, "instance"), 0.1) for factor in factors})


def relations_kept(table: Table) -> Verdict:
    return all_of(
        contrast_goes=below(seen(table, "contrast", "instance"), 0.1),
        correlation_stays=above(seen(table, "channel correlation", "instance"), 0.9),
    )


def residue(table: Table) -> Verdict:
    return all_of(
        exact=above(seen(table, "contrast", "layer", EXACT), 0.5),
        noisy=below(seen(table, "contrast", "layer"), 0.1),
    )


def undone(table: Table) -> Verdict:
    part = table.where(part="undo")
    return all_of(
        batch=at_most(part.where(norm="batch").values("left"), 1e-6),
        layer=at_least(part.where(norm="layer").values("left"), 0.05),
        instance=at_least(part.where(norm="instance").values("left"), 0.05),
    )


def spread_of(erased: str, kept: str, name: str) -> Any:
    def decide(table: Table) -> Verdict:
        part = table.where(part="spread", norm=name)
        return all_of(
            **{
                f"{what}, {where}, {fixed['features']}, {fixed['weights']}": rule(
                    some.interval("kept", between=where), margin
                )
                for fixed, some in part.groups("features", "weights")
                for what, where, rule, margin in (
                    ("erased", erased, below, 0.5),
                    ("kept", kept, above, 0.9),
                )
            }
        )

    return decide


def levels(table: Table) -> Verdict:
    pairs = {
        "layer": (LEVELS_OF_SAMPLES, LEVELS_OF_CHANNELS),
        "batch": (LEVELS_OF_CHANNELS, LEVELS_OF_SAMPLES),
    }
    part = table.where(part="spread")
    return all_of(
        **{
            f"{name}, {what}": rule(part.where(norm=name, between=which).values("kept"), bound)
            for name, (erased, kept) in pairs.items()
            for what, which, rule, bound in (("erased", erased, at_most, 0.01), ("kept", kept, at_least, 0.5))
        }
    )


def remarks(table: Table) -> Iterator[str]:
    for fixed, part in table.where(part="undo").groups("norm"):
        yield (
            f"{fixed['norm']}: the best gain and bias a channel leave {number(part.interval('left').mean)} of the "
            "variance of the input unexplained."
        )
    for name in NORMS["task"][1:]:
        found = trained(table, "level", name, INSIDE)
        yield f"{name} inside the network, behind convolutions: skill {found} on the level."


# What is drawn -------------------------------------------------------------------------------------------


def draw_tasks(table: Table) -> Figure:
    level = {place: number(trained(table, "level", "layer", place).mean) for place in (ALONE, BYPASS, INSIDE)}
    return figures.points(
        table.where(part="task"),
        "tasks",
        "What a network learns behind a norm",
        "Skill on test images (0 guessing, 1 knowing) when the label is the level, the contrast, or what the image "
        f"shows. Layer norm, level: {level[ALONE]} at the input, {level[BYPASS]} with the input on a bypass, "
        f"{level[INSIDE]} with the norm behind each convolution.",
        x="skill",
        rows="norm",
        by="place",
        panel="label",
        zero=True,
    )


def draw_probes(table: Table) -> Figure:
    return figures.points(
        table.where(part="probe"),
        "probes",
        "What a linear reader finds behind a norm",
        "Skill of logistic regression, factors from means, deviations and correlations of channels, content from "
        "pixels. A reader with noise of 0.01 sees no contrast behind layer norm "
        f"({number(seen(table, 'contrast', 'layer').mean)}), an exact one reads it from what eps leaves "
        f"({number(seen(table, 'contrast', 'layer', EXACT).mean)}).",
        x="skill",
        rows="factor",
        by="reading",
        panel="norm",
        zero=True,
    )


def draw_spread(table: Table) -> Figure:
    rows = [
        {**row, "place": f"{row['features']}, {row['weights']}"} for row in table.where(part="spread").rows
    ]
    return figures.points(
        Table(rows),
        "spread",
        "Which differences are left",
        "Variance between samples of a class, and between channels of a sample, each as a share of all variance: the "
        "share behind the norm over the share before it. 1 keeps it, 0 erases it.",
        x="kept",
        rows="norm",
        by="between",
        panel="place",
        x_title="share behind the norm / share before it",
        zero=True,
    )


STUDY = Study(
    name="removed-information",
    title="What each norm removes",
    question="Which of an image's properties can still be learned or read behind a norm?",
    intervention="the norm, where it stands, and a bypass around it",
    held_fixed="images, styles, first weights and the order of batches of a seed; the network; its training",
    method=(
        "Fashion-MNIST at half its size. Each image becomes three channels, image and slopes, made uncorrelated; then "
        "what is called style (opposite means and deviations of two channels, and their correlation), the contrast, "
        "which is the scale of all of it, and the level are drawn independently of what it shows and of each other. "
        "Small convolutional networks learn the level, the contrast or the class. Logistic regression reads all "
        "factors behind the isolated norm. A last part takes the images as they are, and the first layer of a network "
        "without norms: variance between samples of a class and between channels of a sample, as shares of all "
        "variance, before and after each norm."
    ),
    measures=(
        Measure("skill", "(accuracy - chance) / (1 - chance)", "higher", "on test images"),
        Measure("left", "share of variance", "", "not given back by the best gain and bias a channel"),
        Measure("before", "share of variance"),
        Measure("after", "share of variance"),
        Measure("kept", "after / before"),
    ),
    cells=cells,
    measure=measure,
    data=("fashion-mnist",),
    seeds={"full": 5, "quick": 3, "smoke": 1},
    decisions=(
        Decision(
            "level",
            "Behind layer or instance norm at the input the level cannot be learned (skill below 0.1), behind batch "
            "norm it can (above 0.5).",
            removed("level", ALONE),
            (4,),
        ),
        Decision(
            "contrast",
            "Behind layer or instance norm at the input the contrast cannot be learned, behind batch norm it can.",
            removed("contrast", ALONE),
            (5, 41),
        ),
        Decision(
            "content",
            "What the image shows is learned as well behind any norm, to 0.05 of skill.",
            content_stays,
        ),
        Decision(
            "bypass",
            "With the input on a bypass, level and contrast are learned again (skill above 0.5).",
            bypass_gives_back,
            (4,),
        ),
        Decision(
            "inside",
            "Behind convolutions, inside a network, layer and instance norm remove the level as well.",
            removed("level", INSIDE),
            (4,),
        ),
        Decision(
            "undo",
            "Gain and bias can undo batch norm on its batch (1e-6 of the variance is left), layer and instance norm "
            "not (0.05 or more).",
            undone,
            (4,),
        ),
        Decision(
            "residue",
            "Above eps 0 the contrast is still there behind layer norm: an exact reader finds it, one with noise of "
            "0.01 does not.",
            residue,
            (5, 6),
        ),
        Decision(
            "style-moments",
            "Instance norm removes the means and deviations of the channels.",
            gone("channel mean", "channel deviation"),
            (11,),
        ),
        Decision(
            "style",
            "Instance norm removes the style: means, deviations and correlations of the channels.",
            gone("channel mean", "channel deviation", "channel correlation"),
            (11,),
        ),
        Decision(
            "relations",
            "Instance norm erases contrast and keeps the relations of channels (their correlation, skill above 0.9).",
            relations_kept,
            (41,),
        ),
        Decision(
            "layer-spread",
            "Layer norm erases differences between samples of a class (to under half their share) and keeps those "
            "between channels of a sample (0.9 or more).",
            spread_of(SAMPLE, CHANNEL, "layer"),
            (41,),
        ),
        Decision(
            "batch-spread",
            "Batch norm the reverse: it erases differences between channels of a sample and keeps those between "
            "samples of a class.",
            spread_of(CHANNEL, SAMPLE, "batch"),
            (41,),
        ),
        Decision(
            "levels",
            "Of levels alone: layer norm erases those of samples and keeps those of channels, batch norm the reverse "
            "(0.01 of the share at most, 0.5 at least).",
            levels,
            (4, 41),
        ),
    ),
    remarks=remarks,
    figures=(draw_tasks, draw_probes, draw_spread),
    change="NORMS holds the norms of each part, styled.py of the lab the styles and how strong they are.",
    limits=(
        "Made styles on small images of one data set, and small networks trained for a few hundred steps: a network "
        "that learns nothing does not show that nothing is there, and a linear reader finds only what stands in its "
        "statistics. Shares of variance say how much is left, not whether it matters for the class."
    ),
)
