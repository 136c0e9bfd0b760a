"""The loss along the gradient, and how far gradients move when lower layers do, with and without batch norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from math import isfinite, log10
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope.studies import Decision, Measure, Study, Table, Verdict, above, all_of, below, within
from normscope.studies.lab import figures
from normscope.studies.lab.data import Images, load
from normscope.studies.lab.figures import Figure, number
from normscope.studies.lab.intervals import interval
from normscope.studies.lab.networks import Norm, weights
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.training import Plan, evaluate, stream, train

NONE, BATCHED, SHIFTED = "none", "batch", "batch, shift injected"
NORMS = (NONE, BATCHED, SHIFTED)
DEPTH, WIDTH, BATCH = 6, 64, 128
RATES = {"full": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), "quick": (0.01, 0.1, 1.0), "smoke": (0.1, 1.0)}
SCALES = (1 / 3, 1.0, 3.0)
"""of the initial weights, in those of He et al."""
RATE, LARGE = 0.1, 1.0
"""where arms are compared"""
ALONG = (0.03, 0.1, 0.3)
"""steps along the gradient at which loss and gradient are looked at"""
OFFSET, STRETCH, SPREAD = 0.5, 0.25, 0.1
CEILING = 1e6
"""of what figures show: behind it trainings without a norm have diverged"""
STEPS = {"full": 300, "quick": 100, "smoke": 3}
LOOKS = {"full": 10, "quick": 5, "smoke": 1}
SAMPLES = {"full": (6000, 2000), "quick": (3000, 1000), "smoke": (300, 100)}


def cells(scale: Scale) -> Iterator[Cell]:
    for init in SCALES[1:] if scale == "smoke" else SCALES:
        for rate in RATES[scale]:
            for norm in NORMS:
                yield {"init": round(init, 3), "rate": rate, "norm": norm}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    few, some = SAMPLES[scale]
    images = load("fashion-mnist", train=few, test=some).standardized()
    small = [functional.avg_pool2d(part, 2) for part in (images.train, images.test)]
    images = replace(images, train=small[0], test=small[1])
    model, rate, steps = network(cell, images, seed), float(cell["rate"] or 0), STEPS[scale]
    generator = stream(seed, "shift")
    looks: list[dict[str, Any]] = []

    def before(step: int, x: Tensor, y: Tensor) -> None:
        redraw(model, len(x), generator)
        if step % (steps // LOOKS[scale]) == 0:
            looks.append({"step": step, **look(deepcopy(model), x, y, rate, stream(seed, f"shift {step}"))})

    trained = train(model, images, Plan(steps, BATCH, rate, momentum=0.0), seed, before=before)
    yield from looks
    _, accuracy = evaluate(model, images.test, images.test_labels, batch_statistics=True)
    last = trained.last()
    yield {
        "diverged": int(trained.diverged),
        "test accuracy": accuracy,
        "final loss": last if isfinite(last) else None,
    }


# The network -------------------------------------------------------------------------------------------


class Shifting(nn.Module):
    """Batch norm, and behind it a shift and a stretch that are other ones at every step, in training."""

    factor: Tensor
    offset: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)
        self.register_buffer("factor", torch.ones(1, channels), persistent=False)
        self.register_buffer("offset", torch.zeros(1, channels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y * self.factor + self.offset if self.training else y

    def redraw(self, count: int, generator: torch.Generator) -> None:
        """For each channel a mean shift and a mean stretch; samples vary around them."""

        def drawn(*shape: int) -> Tensor:
            return 2 * torch.rand(*shape, generator=generator) - 1

        channels = self.norm.num_features
        noise = torch.randn(count, channels, generator=generator)
        self.offset = OFFSET * drawn(1, channels) + SPREAD * drawn(count, channels)
        self.factor = 1 + STRETCH * drawn(1, channels).abs() + SPREAD * noise


def redraw(model: nn.Module, count: int, generator: torch.Generator) -> None:
    for module in model.modules():
        if isinstance(module, Shifting):
            module.redraw(count, generator)


def network(cell: Cell, images: Images, seed: int) -> nn.Sequential:
    """Blocks of a linear layer, a norm and a ReLU, and a linear layer; biases start at 0."""
    makers: dict[str, Norm] = {NONE: lambda c: nn.Identity(), BATCHED: nn.BatchNorm1d, SHIFTED: Shifting}
    with weights(seed):
        inputs, blocks = images.train[0].numel(), list[nn.Module]()
        for _ in range(DEPTH):
            blocks.append(
                nn.Sequential(nn.Linear(inputs, WIDTH), makers[str(cell["norm"])](WIDTH), nn.ReLU())
            )
            inputs = WIDTH
        model = nn.Sequential(nn.Flatten(), *blocks, nn.Linear(inputs, images.classes))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)
                with torch.no_grad():
                    module.weight.mul_(float(cell["init"] or 0))
    return model


# What is measured --------------------------------------------------------------------------------------


def look(
    model: nn.Sequential, x: Tensor, y: Tensor, rate: float, generator: torch.Generator
) -> dict[str, float | None]:
    """At one step, for its batch, on a copy of the model."""
    parameters = list(model.parameters())
    loss, gradient = loss_and_gradient(model, x, y, parameters)
    here = [p.detach().clone() for p in parameters]
    losses, moves, slopes = [loss], list[float](), list[float]()
    for t in ALONG:
        put(parameters, [p - t * g for p, g in zip(here, gradient, strict=True)])
        there, other = loss_and_gradient(model, x, y, parameters)
        losses.append(there)
        moves.append(distance(other, gradient))
        slopes.append(moves[-1] / max(t * size(gradient), 1e-30))
    put(parameters, here)
    found = {
        "loss range": max(losses) - min(losses),
        "gradient change": max(moves),
        "smoothness": max(slopes),
        "smoothness without scale": max(slopes) * size(linear_weights(model)) ** 2,
        **shifts(model, x, y, rate, generator),
    }
    return {name: value if isfinite(value) else None for name, value in found.items()}


def shifts(
    model: nn.Sequential, x: Tensor, y: Tensor, rate: float, generator: torch.Generator
) -> dict[str, float]:
    """For each layer: its gradient before and after the layers below have made their step, and a new shift is drawn
    where one is injected; and how far the inputs of the ReLUs move by the whole step."""
    parts, own, parameters = list(model), linear_weights(model), list(model.parameters())
    before = entering(model, x)
    _, gradient = loss_and_gradient(model, x, y, parameters)
    step = {id(p): g for p, g in zip(parameters, gradient, strict=True)}
    redraw(model, len(x), generator)
    changes, cosines = list[float](), list[float]()
    for part, following in zip(parts[1:], own[1:], strict=False):  # the first part makes vectors of images
        with torch.no_grad():
            for p in part.parameters():
                p.sub_(rate * step[id(p)])
        _, (new,) = loss_and_gradient(model, x, y, [following])
        a, b = step[id(following)].flatten(), new.flatten()
        changes.append(float((b - a).norm() / a.norm().clamp_min(1e-30)))
        cosines.append(float(functional.cosine_similarity(a, b, dim=0, eps=1e-30)))
    moved = [
        float(((b.mean(0) - a.mean(0)).abs() / a.std(0).clamp_min(1e-6)).mean())
        for a, b in zip(before, entering(model, x), strict=True)
    ]
    return {
        "gradient shift": sum(changes) / len(changes),
        "gradient cosine": sum(cosines) / len(cosines),
        "activation shift": sum(moved) / len(moved),
    }


def linear_weights(model: nn.Module) -> list[Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


@torch.no_grad()
def entering(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """What goes into the ReLUs."""
    found = []
    for part in model:
        if isinstance(part, nn.Sequential):
            found.append(part[:-1](x))
            x = part[-1](found[-1])
        else:
            x = part(x)
    return found


def loss_and_gradient(
    model: nn.Module, x: Tensor, y: Tensor, parameters: Sequence[Tensor]
) -> tuple[float, Sequence[Tensor]]:
    loss = functional.cross_entropy(model(x), y)
    return loss.item(), torch.autograd.grad(loss, list(parameters))


@torch.no_grad()
def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)


def size(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([t.detach().flatten() for t in tensors]).norm())


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return size([a - b for a, b in zip(one, other, strict=True)])


# What is decided ----------------------------------------------------------------------------------------


def usual(table: Table) -> Table:
    return table.where(init=1.0, rate=RATE)


def decades(table: Table, name: str) -> Table:
    """With the logarithm of a measure beside it, so that no single look outweighs the others."""
    return Table(
        [
            {**row, "decades": None if not row.get(name) else log10(max(row[name], 1e-12))}
            for row in table.rows
        ]
    )


def lower(table: Table, name: str, one: str = BATCHED) -> Verdict:
    return below(decades(table, name).difference("decades", {"norm": one}, {"norm": NONE}))


def loss_is_smoother(table: Table) -> Verdict:
    return lower(usual(table), "loss range")


def gradient_is_smoother(table: Table) -> Verdict:
    return all_of(change=lower(usual(table), "gradient change"), smoothness=lower(usual(table), "smoothness"))


def smoother_at_any_scale(table: Table) -> Verdict:
    found = table.where(rate=RATE)
    return all_of(
        **{
            f"{name}, init {init:g}": lower(found.where(init=init), name)
            for name in ("loss range", "smoothness")
            for init in found.distinct("init")
        }
    )


def smoother_at_any_rate(table: Table) -> Verdict:
    found = table.where(init=1.0)
    return all_of(
        **{
            f"{name}, rate {rate:g}": lower(found.where(rate=rate), name)
            for name in ("loss range", "smoothness")
            for rate in found.distinct("rate")
        }
    )


def smoother_without_scale(table: Table) -> Verdict:
    return lower(usual(table), "smoothness without scale")


def less_gradient_shift(table: Table) -> Verdict:
    found = usual(table)
    return all_of(
        change=lower(found, "gradient shift"),
        cosine=above(found.difference("gradient cosine", {"norm": BATCHED}, {"norm": NONE})),
    )


def less_activation_shift(table: Table) -> Verdict:
    return lower(usual(table), "activation shift")


def shift_is_there(table: Table) -> Verdict:
    found = usual(table)
    return all_of(
        of_activations=above(found.difference("activation shift", {"norm": SHIFTED}, {"norm": NONE})),
        of_gradients=above(found.difference("gradient shift", {"norm": SHIFTED}, {"norm": NONE})),
    )


def trains_despite_shift(table: Table) -> Verdict:
    return above(usual(table).difference("test accuracy", {"norm": SHIFTED}, {"norm": NONE}))


def shift_costs_nothing(table: Table) -> Verdict:
    return within(usual(table).difference("test accuracy", {"norm": SHIFTED}, {"norm": BATCHED}), 0.03)


def larger_rates(table: Table) -> Verdict:
    found = table.where(init=1.0)
    return all_of(
        at_a_large_rate=above(
            found.where(rate=LARGE).difference("test accuracy", {"norm": BATCHED}, {"norm": NONE})
        ),
        best_rate=above(
            interval([log10(batch / none) for batch, none in zip(*best_rates(found), strict=True)])
        ),
    )


def best_rates(table: Table) -> Iterator[list[float]]:
    """Of batch norm, and of no norm: for each seed the rate of the highest accuracy."""
    for norm in (BATCHED, NONE):
        by_rate = {
            rate: table.by_seed("test accuracy", norm=norm, rate=rate) for rate in table.distinct("rate")
        }
        yield [max(by_rate, key=lambda rate: by_rate[rate][seed]) for seed in table.distinct("seed")]


def less_sensitive(table: Table) -> Verdict:
    """The best less the worst accuracy over the scales of initial weights, with batch norm against without."""
    found = table.where(rate=RATE)
    spreads = {}
    for norm in (BATCHED, NONE):
        by_scale = [found.by_seed("test accuracy", norm=norm, init=init) for init in found.distinct("init")]
        spreads[norm] = {
            seed: max(s[seed] for s in by_scale) - min(s[seed] for s in by_scale) for seed in by_scale[0]
        }
    return below(interval([spreads[BATCHED][seed] - spreads[NONE][seed] for seed in spreads[NONE]]))


def remarks(table: Table) -> Iterator[str]:
    for fixed, part in table.groups("norm"):
        diverged = part.values("diverged")
        yield f"{fixed['norm']}: {sum(diverged)} of {len(diverged)} trainings diverged."
    for name, what in (
        ("gradient cosine", "cosine of gradients before and after the step of the lower layers"),
        ("smoothness", "effective smoothness"),
        ("test accuracy", "test accuracy"),
    ):
        for fixed, part in having(table.where(rate=RATE), name).groups("init"):
            told = (f"{norm} {number(part.interval(name, norm=norm).mean)}" for norm in NORMS)
            yield f"Rate {RATE}, initial weights x {fixed['init']:.2g}, {what}: {', '.join(told)}."


# What is drawn ------------------------------------------------------------------------------------------


def named(table: Table) -> Table:
    return Table([{**row, "picture": f"initial weights x {row['init']:.2g}"} for row in table.rows])


def having(table: Table, column: str) -> Table:
    return Table([row for row in table.rows if row.get(column) is not None])


def draw_looks(table: Table, key: str, title: str, caption: str, measure: str, *, log: bool = True) -> Figure:
    found = having(named(table.where(rate=RATE)), measure)
    shown = [row for row in found.rows if row[measure] <= CEILING]
    return figures.lines(
        Table(shown),
        key,
        title,
        f"{caption} Rate {RATE}, along the training.{left_out(found, shown)}",
        x="step",
        y=measure,
        by="norm",
        panel="picture",
        log_y=log,
    )


def left_out(found: Table, shown: Sequence[Any]) -> str:
    missing = len(found.rows) - len(shown)
    return (
        f" {missing} of {len(found.rows)} looks have values above {CEILING:g} and are left out."
        if missing
        else ""
    )


def draw_range(table: Table) -> Figure:
    told = f"Largest less smallest loss at steps of 0 to {max(ALONG)} times the gradient, on the batch of the step."
    return draw_looks(table, "loss-range", "The loss along the gradient", told, "loss range")


def draw_change(table: Table) -> Figure:
    told = (
        "Largest distance between the gradient and that at these steps along it: smaller is more predictive."
    )
    return draw_looks(table, "gradient-change", "How far the gradient predicts", told, "gradient change")


def draw_smoothness(table: Table) -> Figure:
    told = "The same distance by the length of the step, the largest: a local Lipschitz constant of the gradient."
    return draw_looks(table, "smoothness", "Effective smoothness", told, "smoothness")


def draw_without_scale(table: Table) -> Figure:
    told = "Effective smoothness times the squared length of all weights, which does not change with their scale."
    return draw_looks(
        table, "without-scale", "Effective smoothness without scale", told, "smoothness without scale"
    )


def draw_shift(table: Table) -> Figure:
    told = (
        "Cosine between the gradient of a layer before and after the layers below have made their step, mean over "
        "layers: 1 is no internal covariate shift. Where shift is injected, the second has a new one."
    )
    return draw_looks(
        table, "gradient-cosine", "Gradients under lower layers", told, "gradient cosine", log=False
    )


def draw_activations(table: Table) -> Figure:
    told = "How far the mean input of a ReLU moves in one step, in its deviations over the batch, mean over units."
    return draw_looks(table, "activation-shift", "Activations from step to step", told, "activation shift")


def draw_rates(table: Table) -> Figure:
    found = having(named(table), "smoothness")
    shown = [row for row in found.rows if row["smoothness"] <= CEILING]
    return figures.lines(
        Table(shown),
        "smoothness-by-rate",
        "Effective smoothness by rate and initial weights",
        f"Mean over the looks of a training.{left_out(found, shown)}",
        x="rate",
        y="smoothness",
        by="norm",
        panel="picture",
        log_x=True,
        log_y=True,
    )


def draw_accuracy(table: Table) -> Figure:
    found = having(named(table), "test accuracy")
    return figures.lines(
        found,
        "accuracy",
        "Rates and initial weights",
        "Test accuracy (statistics of the test batch) behind the last step; trainings that diverged count as they "
        "stand.",
        x="rate",
        y="test accuracy",
        by="norm",
        panel="picture",
        log_x=True,
    )


STUDY = Study(
    name="landscape",
    title="Smooth landscapes and covariate shift",
    question="Does batch norm make the loss and its gradient smoother, does it reduce internal covariate shift, and "
    "which of the two goes with better training?",
    intervention="no norm, batch norm, or batch norm with shift injected behind it; by learning rate and by the scale "
    "of the initial weights",
    held_fixed="data, order of batches, initial directions of weights, number of steps; SGD without momentum",
    method=(
        f"Fashion-MNIST at half size, {DEPTH} hidden layers of {WIDTH} units with ReLU, batches of {BATCH}, initial "
        "weights of He et al. times a scale. At looks along the training, on the batch of the step: the range of the "
        "loss over steps along the gradient, the largest change of the gradient there, and that by the length of the "
        "step. Internal covariate shift of a layer is the change of its gradient when the layers below have made "
        "their step. The injected shift moves each channel behind batch norm by up to "
        f"{OFFSET} and stretches it by up to {1 + STRETCH}, with a spread of {SPREAD} over samples, anew at every step."
    ),
    measures=(
        Measure("loss range", better="lower", meaning="along the gradient: the loss is Lipschitz"),
        Measure("gradient change", better="lower", meaning="largest, along the gradient: predictiveness"),
        Measure(
            "smoothness", better="lower", meaning="gradient change by distance: the gradient is Lipschitz"
        ),
        Measure(
            "smoothness without scale", better="lower", meaning="times the squared length of the weights"
        ),
        Measure("gradient shift", "lengths of the gradient", "lower", "mean over layers"),
        Measure("gradient cosine", better="higher", meaning="before and after the lower layers' step"),
        Measure("activation shift", "deviations", "lower", "of the mean input of a ReLU in one step"),
        Measure("test accuracy", better="higher"),
        Measure("final loss", better="lower", meaning="of training, last 20 steps"),
    ),
    cells=cells,
    measure=measure,
    seeds={"full": 8, "quick": 3, "smoke": 2},
    data=("fashion-mnist",),
    decisions=(
        Decision(
            "lipschitz-loss",
            f"Batch norm makes the range of the loss along the gradient smaller (rate {RATE}, usual weights).",
            loss_is_smoother,
            (22,),
        ),
        Decision(
            "lipschitz-gradient",
            "It makes the change of the gradient and the effective smoothness smaller there.",
            gradient_is_smoother,
            (22,),
        ),
        Decision(
            "any-scale",
            "Loss range and effective smoothness are smaller with it at each scale of initial weights.",
            smoother_at_any_scale,
            (22,),
        ),
        Decision(
            "any-rate",
            "With usual weights they are smaller at each rate.",
            smoother_at_any_rate,
            (22,),
        ),
        Decision(
            "without-scale",
            "Effective smoothness is smaller with it also when the scale of weights is taken out.",
            smoother_without_scale,
            (22,),
        ),
        Decision(
            "covariate-shift",
            "Batch norm reduces internal covariate shift: a step of the lower layers changes gradients less.",
            less_gradient_shift,
            (21,),
        ),
        Decision(
            "activation-shift",
            "It reduces how far the mean inputs of ReLUs move in a step.",
            less_activation_shift,
            (21,),
        ),
        Decision(
            "shift-is-there",
            "Batch norm with injected shift has more shift of activations and gradients than no norm.",
            shift_is_there,
            (21,),
        ),
        Decision(
            "trains-despite-shift",
            "With injected shift it is still more accurate than no norm.",
            trains_despite_shift,
            (21,),
        ),
        Decision(
            "shift-costs-nothing",
            "Injected shift changes the accuracy of batch norm by less than 0.03.",
            shift_costs_nothing,
            (21,),
        ),
        Decision(
            "larger-rates",
            f"Batch norm allows larger rates: more accurate at rate {LARGE:g}, and its best rate is larger.",
            larger_rates,
            (23,),
        ),
        Decision(
            "initialization",
            "Accuracy depends less on the scale of initial weights with batch norm.",
            less_sensitive,
            (23,),
        ),
    ),
    remarks=remarks,
    figures=(
        draw_range,
        draw_change,
        draw_smoothness,
        draw_without_scale,
        draw_shift,
        draw_activations,
        draw_rates,
        draw_accuracy,
    ),
    change="RATES and SCALES hold the grid, ALONG the steps along the gradient, OFFSET, STRETCH and SPREAD the shift.",
    limits=(
        "A fully connected network without residual connections, few steps, plain SGD. Steps along the gradient are "
        "the same numbers for all arms, not the same distances; where weights have no scale, distances in them mean "
        "little, and the measure without scale is only one way to take it out. Of a training that diverges only the "
        "looks before that count. Smaller ranges beside better training do not show that one causes the other."
    ),
    sources=(
        "Ioffe and Szegedy 2015, Batch Normalization, https://arxiv.org/abs/1502.03167",
        "Santurkar, Tsipras, Ilyas and Madry 2018, How Does Batch Normalization Help Optimization?, "
        "https://arxiv.org/abs/1805.11604 (the measures, and shift injected behind batch norm)",
    ),
)
