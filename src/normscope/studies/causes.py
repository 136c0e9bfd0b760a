"""From batch norm to layer norm one property at a time, and interventions that take the explanations apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from math import log10
from typing import Any

import torch
from torch import Tensor, nn

from normscope.spec import NormSpec, Running
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
    within,
)
from normscope.studies.lab import data, figures
from normscope.studies.lab.data import Images
from normscope.studies.lab.figures import Figure, number
from normscope.studies.lab.networks import conv_net, weights
from normscope.studies.lab.probes import explained
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.styled import halved
from normscope.studies.lab.training import Plan, batches, evaluate, stream, train


@dataclass(frozen=True)
class Arm:
    """Batch norm, but for what is given."""

    channels: bool = False
    """joined in one set"""
    samples: bool = True
    """joined in one set"""
    stored: bool = True
    """evaluates by running averages"""
    element: bool = False
    """a gain and bias for each element, not each channel"""
    eps: float = 1e-5
    gradient: bool = True
    """flows through the statistics"""
    before: bool = False
    """normalizes by the statistics of the batch before"""
    frozen: bool = False
    """the statistics, after a quarter of the steps"""
    level: bool = False
    """the mean of the sample goes by, with a learned gain a channel"""
    noise: bool = False
    """a draw a channel and batch, as large as batch norm's"""
    rate: bool = False
    """each update as large as batch norm's, relative to the weight"""
    norm: bool = True

    def spec(self) -> NormSpec:
        kept = ("" if self.samples else "b ") + ("" if self.channels else "c")
        affine = "c h w" if self.element else "c"
        running = (
            Running(over=None if self.samples else kept.replace("b", "").strip()) if self.stored else None
        )
        return NormSpec(
            f"b c h w -> {kept.strip()}", weight=affine, bias=affine, eps=self.eps, running=running
        )


LAYER = Arm(channels=True, samples=False, stored=False, element=True, eps=1e-6)
BATCH = "batch norm"
SINGLE = {
    "axes: channels joined": Arm(channels=True),
    "coupling: samples apart": Arm(samples=False),
    "state: none stored": Arm(stored=False),
    "affine: for each element": Arm(element=True),
    "eps: 1e-6": Arm(eps=1e-6),
}
"""each of the five by itself; eps as Flax has it by default in batch norm (1e-5) and in layer norm (1e-6)"""
FROZEN, WITHOUT, BEFORE = (
    "frozen statistics",
    "no gradient through statistics",
    "statistics of the batch before",
)
NOISY, RATED, LEVEL = (
    "layer norm with noise",
    "layer norm at batch norm's rate",
    "layer norm, level on a bypass",
)
NONE, NONE_RATED = "no norm", "no norm at batch norm's rate"
ARMS = {
    BATCH: Arm(),
    **SINGLE,
    "instance norm": Arm(samples=False, stored=False),
    "layer norm": LAYER,
    FROZEN: Arm(frozen=True),
    WITHOUT: Arm(gradient=False),
    BEFORE: Arm(before=True),
    NOISY: replace(LAYER, noise=True),
    RATED: replace(LAYER, rate=True),
    LEVEL: replace(LAYER, level=True),
    NONE: Arm(norm=False),
    NONE_RATED: Arm(norm=False, rate=True),
}
EPS = (1e-8, 1e-5, 1e-2, 0.1, 1.0, 100.0)
WIDTHS, BATCH_SIZE = (12, 24, 24), 64
FIXED = {"full": 32, "quick": 16, "smoke": 2}
"""samples among companions"""
SAMPLES = {"full": (6000, 2000), "quick": (1500, 500), "smoke": (64, 40)}
STEPS = {"full": 400, "quick": 100, "smoke": 2}


def cells(scale: Scale) -> Iterator[Cell]:
    for name in ARMS:
        yield {"part": "arm", "arm": name}
    for name in (BATCH, "layer norm"):
        for eps in EPS:
            yield {"part": "eps", "arm": name, "eps": eps}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterable[dict[str, Any]]:
    train_count, test_count = SAMPLES[scale]
    images = data.load("fashion-mnist", train=train_count, test=test_count).standardized()
    images = replace(images, train=halved(images.train), test=halved(images.test))
    arm = ARMS[str(cell["arm"])]
    if cell["part"] == "eps":
        arm = replace(arm, eps=float(cell["eps"] or 0))
    model, found = trained(arm, images, seed, scale)
    yield found | information(model, images, seed)
    if cell["part"] == "arm":
        yield from companions(model, images, seed, FIXED[scale])
        if arm.norm:
            yield from invariances(arm, seed)


# The layer -------------------------------------------------------------------------------------------------


class Varied(nn.Module):
    """(x - mean) / sqrt(var + eps) of inputs (N, C, H, W), as an arm says."""

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, arm: Arm, c: int, size: int) -> None:
        super().__init__()
        self.arm = arm
        shape = (c, size, size) if arm.element else (c, 1, 1)
        self.weight, self.bias = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        if arm.stored:
            stored = (1, 1 if arm.channels else c, 1, 1)
            self.register_buffer("running_mean", torch.zeros(stored))
            self.register_buffer("running_var", torch.ones(stored))
        if arm.level:
            self.through = nn.Parameter(torch.ones(c, 1, 1))
        self.frozen = False
        self.last: tuple[Tensor, Tensor] | None = None
        self.sizes: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.statistics(x)
        y = (x - mean) * torch.rsqrt(var + self.arm.eps)
        if self.sizes is not None and self.training:
            added, factor = (size * torch.randn_like(size) for size in self.sizes)
            y = y * (1 + factor) + added
        y = y * self.weight + self.bias
        return y + self.through * x.mean((1, 2, 3), keepdim=True) if self.arm.level else y

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        arm = self.arm
        if arm.stored and (self.frozen or not self.training):
            return self.running_mean, self.running_var
        dims = [0] * arm.samples + [1] * arm.channels + [2, 3]
        mean, var = x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)
        if arm.stored and self.training:
            with torch.no_grad():
                self.running_mean.lerp_(mean.mean(0, keepdim=True), 0.1)
                several = x.numel() / mean.numel()
                self.running_var.lerp_(var.mean(0, keepdim=True) * several / (several - 1), 0.1)
        if arm.before:
            own = mean.detach(), var.detach()
            mean, var = self.last or own
            self.last = own
        return (mean, var) if arm.gradient else (mean.detach(), var.detach())


def build(arm: Arm, images: Images, seed: int) -> nn.Sequential:
    side = images.shape[1]
    sizes = iter([side, -(-side // 2), -(-side // 4)])

    def layer(c: int) -> nn.Module:
        return Varied(arm, c, next(sizes)) if arm.norm else nn.Identity()

    with weights(seed):
        return conv_net(images.shape, WIDTHS, images.classes, layer)


def layers_of(model: nn.Module) -> list[Varied]:
    return [module for module in model.modules() if isinstance(module, Varied)]


# Training --------------------------------------------------------------------------------------------------


def trained(arm: Arm, images: Images, seed: int, scale: Scale) -> tuple[nn.Sequential, dict[str, float]]:
    model, rates = build(arm, images, seed), list[list[float]]()
    if arm.noise or arm.rate:
        other = build(Arm(), images, seed)
        rates = Steps(other, []).run(images, seed, scale)
        if arm.noise:
            for layer, sizes in zip(layers_of(model), noise(other, images, seed), strict=True):
                layer.sizes = sizes
    steps = Steps(model, rates if arm.rate else [])
    updates = steps.run(images, seed, scale)
    loss, accuracy = evaluate(model, images.test, images.test_labels)
    loss_there, there = evaluate(
        model, images.train[: len(images.test)], images.train_labels[: len(images.test)]
    )
    return model, {
        "accuracy": accuracy,
        "gap": there - accuracy,
        "loss gap": loss - loss_there,
        "log10 gradient": log10(max(steps.gradients[0], 1e-12)),
        "relative update": sum(map(sum, updates)) / sum(map(len, updates)),
    }


class Steps:
    """The training of a model, with what its convolutions' updates are relative to their weights."""

    def __init__(self, model: nn.Sequential, rates: list[list[float]]) -> None:
        """``rates``: step by step what they shall be; as they come, if empty."""
        self.model, self.rates = model, rates
        self.weights = [module.weight for module in model if isinstance(module, nn.Conv2d)]
        self.gradients: list[float] = []
        self.updates: list[list[float]] = []

    def run(self, images: Images, seed: int, scale: Scale) -> list[list[float]]:
        self.freeze_at = STEPS[scale] // 4
        plan = Plan(steps=STEPS[scale], batch=BATCH_SIZE, rate=0.05, decay=True)
        train(self.model, images, plan, seed, before=self.before, after=self.after)
        return self.updates

    def before(self, step: int, x: Tensor, y: Tensor) -> None:
        self.held = [weight.detach().clone() for weight in self.weights]
        if step == self.freeze_at:
            for layer in layers_of(self.model):
                layer.frozen = layer.arm.frozen

    @torch.no_grad()
    def after(self, step: int) -> None:
        gradient = self.weights[0].grad
        assert gradient is not None
        self.gradients.append(float(gradient.norm()))
        relative = []
        for i, (weight, old) in enumerate(zip(self.weights, self.held, strict=True)):
            size = float((weight - old).norm() / old.norm())
            if self.rates and size > 0:
                weight.copy_(old + (weight - old) * (self.rates[step][i] / size))
                size = self.rates[step][i]
            relative.append(size)
        self.updates.append(relative)


@torch.no_grad()
def noise(model: nn.Sequential, images: Images, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Of each batch norm, by channel: deviations over batches of what is added to a normalized value and of the factor
    on it, against the mean over batches."""
    model, given, seen = deepcopy(model).train(), list[Tensor](), list[list[Tensor]]()
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    for _, chosen in zip(range(20), batches(len(images.train), BATCH_SIZE, seed), strict=False):
        given.clear()
        model(images.train[chosen])
        seen.append([torch.stack([x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)]) for x in given])
    found = []
    for rows in zip(*seen, strict=True):
        mean, var = torch.stack(rows, 1)
        deviation = (var + 1e-5).sqrt()
        added = ((mean.mean(0) - mean) / deviation).std(0, correction=0)
        factor = ((var.mean(0) + 1e-5).sqrt() / deviation).std(0, correction=0)
        found.append((added[:, None, None], factor[:, None, None]))
    return found


# What is measured ------------------------------------------------------------------------------------------


@torch.no_grad()
def information(model: nn.Sequential, images: Images, seed: int) -> dict[str, float]:
    """How much of a level and a contrast, given to the test images, a linear reader of the last features explains."""
    model, generator = deepcopy(model).eval(), stream(seed, "style")
    contrast, level = (
        size * (2 * torch.rand(len(images.test), generator=generator) - 1) for size in (0.7, 1.0)
    )
    x = images.test * contrast.exp()[:, None, None, None] + level[:, None, None, None]
    features = torch.cat([model[:-1](some) for some in torch.split(x, 500)]).nan_to_num()
    half = len(x) // 2
    return {
        f"{name} kept": explained(features[:half], target[:half], features[half:], target[half:])
        for name, target in (("level", level), ("contrast", contrast))
    }


@torch.no_grad()
def companions(model: nn.Sequential, images: Images, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """The share of fixed samples whose class in training mode, among others, is not the one of evaluation."""
    alone, live = deepcopy(model).eval(), deepcopy(model).train()
    fixed, rest, labels = images.test[:count], images.test[count:], images.test_labels[count:]
    generator = stream(seed, "companions")
    said = alone(fixed).argmax(1)
    for kind in ("any", "of one class", "copies of itself"):
        changed = 0
        for i, one in enumerate(fixed):
            pool = rest[labels == labels[i % len(labels)]] if kind == "of one class" else rest
            chosen = torch.randint(0, len(pool), (BATCH_SIZE - 1,), generator=generator)
            others = one.expand(BATCH_SIZE - 1, -1, -1, -1) if kind.startswith("copies") else pool[chosen]
            changed += int(live(torch.cat([one[None], others]))[0].argmax() != said[i])
        yield {"companions": kind, "changed": changed / len(fixed)}


@torch.no_grad()
def invariances(arm: Arm, seed: int) -> Iterator[dict[str, Any]]:
    """What `properties()` says of the arm's layer in training, and what its output does."""
    generator = stream(seed, "invariances")
    x = 100 * torch.randn(8, 4, 5, 5, generator=generator)
    layer = Varied(arm, 4, 5).train()
    layer(x)
    told = arm.spec().properties(tuple(x.shape))
    layer.frozen = arm.frozen
    stored = arm.before or arm.frozen  # what it normalizes by is not of this input
    of_input = not (stored or arm.level)  # nothing may go by
    shift, scale = (axes or () if of_input else () for axes in (told.shift_axes, told.scale_axes))
    each, every = torch.arange(8.0)[:, None, None, None], torch.arange(4.0)[:, None, None]
    other = torch.cat([x[:1], 100 * torch.randn(7, 4, 5, 5, generator=generator)])
    changes = {
        "level of a sample": (x + 100 * each, "b" in shift),
        "level of a channel": (x + 100 * every, "c" in shift),
        "scale of a sample": (x * (1 + each), "b" in scale),
        "scale of a channel": (x * (1 + every), "c" in scale),
        "companions": (other, not told.couples_samples or stored),
    }
    for name, (changed, predicted) in changes.items():
        before = deepcopy(layer)(x)[0 if name == "companions" else slice(None)]
        after = deepcopy(layer)(changed)[0 if name == "companions" else slice(None)]
        # eps is at most 1e-5 and variances are near 1e4, so that what is invariant is so to rounding
        removed = bool((after - before).abs().max() < 1e-3)
        yield {
            "invariant to": name,
            "removed": removed,
            "predicted": predicted,
            "apart": removed != predicted,
        }


# What is decided -------------------------------------------------------------------------------------------


def having(table: Table, measure: str) -> Table:
    """The arms' rows with this measure."""
    return Table([row for row in table.where(part="arm").rows if row.get(measure) is not None])


def less(table: Table, measure: str, one: str, other: str) -> Any:
    part = having(table, measure)
    return part.difference(measure, {"arm": one}, {"arm": other})


def alone(table: Table) -> Verdict:
    return all_of(**{name: within(less(table, "accuracy", name, BATCH), 0.02) for name in SINGLE})


def alone_in_gradient(table: Table) -> Verdict:
    return all_of(**{name: within(less(table, "log10 gradient", name, BATCH), 0.1) for name in SINGLE})


def together(table: Table) -> Verdict:
    return within(less(table, "accuracy", "layer norm", BATCH), 0.02)


def coupled(table: Table) -> Verdict:
    part = having(table, "changed").where(companions="of one class")
    return all_of(
        batch_norm=above(part.interval("changed", arm=BATCH), 0.05),
        layer_norm=at_most(part.where(arm="layer norm").values("changed"), 0.0),
    )


def costs(name: str) -> Any:
    return lambda table: below(less(table, "accuracy", name, BATCH), -0.02)


def frozen_alike(table: Table) -> Verdict:
    return within(less(table, "accuracy", FROZEN, BATCH), 0.02)


def noise_regularizes(table: Table) -> Verdict:
    return below(less(table, "loss gap", NOISY, "layer norm"))


def rate_alone(table: Table) -> Verdict:
    return all_of(
        **{name: within(less(table, "accuracy", name, BATCH), 0.02) for name in (RATED, NONE_RATED)}
    )


def level_by(table: Table) -> Verdict:
    return above(less(table, "level kept", LEVEL, "layer norm"), 0.1)


def level_behind(table: Table) -> Verdict:
    return below(table.interval("level kept", part="arm", arm="layer norm"), 0.1)


def small_eps(table: Table) -> Verdict:
    part = table.where(part="eps")
    return all_of(
        **{
            f"{name} {eps:g}": within(
                part.difference("accuracy", {"arm": name, "eps": eps}, {"arm": name, "eps": 1e-5}), 0.02
            )
            for name in (BATCH, "layer norm")
            for eps in (1e-8, 1e-2)
        }
    )


def large_eps(table: Table) -> Verdict:
    part = table.where(part="eps", arm="layer norm")
    return above(part.difference("contrast kept", {"eps": 100.0}, {"eps": 1e-8}), 0.1)


def agree(table: Table) -> Verdict:
    part = having(table, "apart")
    return all_of(
        apart=at_most([float(value) for value in part.values("apart")], 0.0),
        invariant_at_all=at_least([float(sum(part.values("removed")))], 1.0),
    )


def remarks(table: Table) -> Iterator[str]:
    for fixed, part in having(table, "predicted").groups("arm"):
        gone = [row["invariant to"] for row in part.where(seed=0).rows if row["predicted"]]
        yield (
            f"{fixed['arm']}: by properties(), its output in training is invariant to {', '.join(gone) or 'nothing'}."
        )


# What is drawn ---------------------------------------------------------------------------------------------


def draw_accuracy(table: Table) -> Figure:
    together = less(table, "accuracy", "layer norm", BATCH)
    return figures.points(
        having(table, "accuracy"),
        "accuracy",
        "One property at a time",
        f"Accuracy on test images. Layer norm, with all five changes, less batch norm: {together}.",
        x="accuracy",
        rows="arm",
    )


def draw_gradient(table: Table) -> Figure:
    return figures.points(
        having(table, "log10 gradient"),
        "gradient",
        "The scale of the gradient",
        "Logarithm of the length of the gradient of the first convolution at the first step. Arms that differ only in "
        "training later have batch norm's or layer norm's.",
        x="log10 gradient",
        rows="arm",
    )


def draw_information(table: Table) -> Figure:
    kept = number(table.interval("level kept", part="arm", arm="layer norm").mean)
    rows = [
        {"arm": row["arm"], "seed": row["seed"], "what": name, "kept": row[f"{name} kept"]}
        for row in having(table, "level kept").rows
        for name in ("level", "contrast")
    ]
    return figures.points(
        Table(rows),
        "information",
        "What is left of level and contrast",
        "Share of the variance of a level and of a contrast given to the test images that a linear reader of the last "
        f"features explains. Layer norm's level: {kept}.",
        x="kept",
        rows="arm",
        by="what",
        x_title="share explained",
    )


def draw_companions(table: Table) -> Figure:
    return figures.points(
        having(table, "changed"),
        "companions",
        "A fixed sample among others",
        f"Share of test images whose class, in training mode in a batch of {BATCH_SIZE}, is another than in "
        "evaluation, by what the batch consists of.",
        x="changed",
        rows="arm",
        by="companions",
        zero=True,
    )


def draw_eps(table: Table) -> Figure:
    rows = [
        {"arm": row["arm"], "eps": row["eps"], "seed": row["seed"], "what": name, "value": row[name]}
        for row in table.where(part="eps").rows
        for name in ("accuracy", "level kept", "contrast kept")
    ]
    return figures.lines(
        Table(rows),
        "eps",
        "eps over decades",
        "Accuracy, and the shares of level and contrast that are left in the last features.",
        x="eps",
        y="value",
        by="arm",
        panel="what",
        log_x=True,
    )


def draw_eps_gradient(table: Table) -> Figure:
    return figures.lines(
        table.where(part="eps"),
        "eps-gradient",
        "The first gradient, by eps",
        "Logarithm of the length of the gradient of the first convolution at the first step.",
        x="eps",
        y="log10 gradient",
        by="arm",
        log_x=True,
    )


STUDY = Study(
    name="causes",
    title="From batch norm to layer norm, one change at a time",
    question="Which of the things that differ between batch norm and layer norm makes which difference?",
    intervention="axes, coupling of samples, stored state, sharing of gain and bias, eps: each alone; then statistics, "
    "noise, update size and level by themselves",
    held_fixed="the network, its first weights, images, the order of batches, the optimizer and its rate",
    method=(
        "A small convolutional network on Fashion-MNIST at half its size. One layer with a switch for each property, "
        "so that arms differ in that alone. The noise is one draw a channel and batch, as large as that of the batch "
        "norm trained with the same seed; the matched rate scales each update of a convolution to the relative size "
        "that it had there. Information is what ridge regression explains of a level and a contrast given to test "
        "images. Invariances come from properties() of each arm's specification, and are compared with the layer's "
        "output."
    ),
    measures=(
        Measure("accuracy", better="higher", meaning="on test images, in evaluation"),
        Measure("gap", better="lower", meaning="accuracy on training images less on test images"),
        Measure("loss gap", better="lower", meaning="loss on test images less on training images"),
        Measure("log10 gradient", meaning="length, of the first convolution at the first step"),
        Measure("relative update", meaning="length of an update / length of the weight, mean over training"),
        Measure(
            "level kept", "share of variance", meaning="explained by a linear reader of the last features"
        ),
        Measure("contrast kept", "share of variance", meaning="the same, of the logarithm of the contrast"),
        Measure("changed", "share of samples", meaning="another class in training mode than in evaluation"),
        Measure("apart", meaning="the measured invariance is not the one that properties() has"),
    ),
    cells=cells,
    measure=measure,
    data=("fashion-mnist",),
    seeds={"full": 5, "quick": 3, "smoke": 1},
    decisions=(
        Decision(
            "invariances",
            "Each arm's layer is invariant to just what properties() derives from its specification.",
            agree,
            (4, 5, 7),
        ),
        Decision(
            "alone",
            "Each of the five changes alone leaves the accuracy within 0.02 of batch norm's.",
            alone,
            (18,),
        ),
        Decision(
            "alone-gradient",
            "Each alone leaves the length of the first gradient within a quarter (0.1 of its logarithm).",
            alone_in_gradient,
            (18,),
        ),
        Decision(
            "together",
            "All five together, layer norm, are within 0.02 of batch norm's accuracy.",
            together,
            (18,),
        ),
        Decision(
            "companions",
            "Companions of one class change batch norm's answer for over 5 % of samples, layer norm's for none.",
            coupled,
            (7,),
        ),
        Decision(
            "frozen",
            "Statistics frozen after a quarter of the steps leave the accuracy within 0.02.",
            frozen_alike,
        ),
        Decision(
            "gradient",
            "Without the gradient through its statistics batch norm loses more than 0.02 of accuracy.",
            costs(WITHOUT),
        ),
        Decision(
            "own-statistics",
            "With the statistics of the batch before, batch norm loses more than 0.02 of accuracy.",
            costs(BEFORE),
        ),
        Decision(
            "noise",
            "Noise of batch norm's size makes layer norm's gap in loss between training and test smaller.",
            noise_regularizes,
            (26,),
        ),
        Decision(
            "rate",
            "With updates of batch norm's relative size, layer norm and no norm reach its accuracy, to 0.02: the gains "
            "are those of the effective learning rate.",
            rate_alone,
            (27,),
        ),
        Decision(
            "level-removed",
            "Layer norm inside the network removes the level: less than a tenth of it is explained.",
            level_behind,
            (4,),
        ),
        Decision(
            "level",
            "A bypass of the level keeps more of it, by a tenth of its variance or more.",
            level_by,
            (4,),
        ),
        Decision("eps", "From eps 1e-8 to 1e-2 the accuracy stays within 0.02.", small_eps, (5,)),
        Decision(
            "large-eps",
            "At eps 100 layer norm lets more of the contrast through than at 1e-8, by a tenth of its variance or more.",
            large_eps,
            (5, 6),
        ),
    ),
    remarks=remarks,
    figures=(draw_accuracy, draw_gradient, draw_information, draw_companions, draw_eps, draw_eps_gradient),
    change="ARMS holds the arms, each a few switches of Arm; EPS the decades.",
    limits=(
        "One small network, one data set, one rate, a few hundred steps: another network may need a property that this "
        "one does not. Each change is alone from batch norm's side; what two of them do together is not taken apart. "
        "Matched updates keep their directions, which the arms' losses give. A linear reader of the last features "
        "finds only what stands there openly."
    ),
)
