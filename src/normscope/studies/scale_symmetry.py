"""Weights in front of a normalization have no scale: what follows for gradients, rates, weight decay and distances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import e
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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
from normscope.studies.lab import figures
from normscope.studies.lab.data import Images, load
from normscope.studies.lab.figures import Figure, number
from normscope.studies.lab.networks import weights
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.training import Plan, evaluate, stream, train

NORMS = ("batch", "layer")
PLAIN, EPS, NO_AFFINE, BYPASS = "eps 0", "eps 1e-5", "no gain and bias", "bypass"
SMOOTH = "eps 1e-5, GELU"
KINDS = {
    PLAIN: (0.0, True, False),
    EPS: (1e-5, True, False),
    SMOOTH: (1e-5, True, False),
    NO_AFFINE: (0.0, False, False),
    BYPASS: (0.0, True, True),
}
"""eps, gain and bias, bypass: each differs from the first in one thing; one also in the activation"""
WIDTHS, BATCH = (32, 32), 64
RATES = {"sgd": 0.1, "adamw": 0.003}
SCALES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3)
LENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0)
"""of a change, in lengths of the weights"""
TRAINED_SCALES = (0.1, 10.0)
STEPS = {"full": 300, "quick": 120, "smoke": 3}
SAMPLES = {"full": (4000, 1000), "quick": (2000, 500), "smoke": (128, 100)}
LOOKS = 10
"""at a training"""
ARMS = ("decay", "schedule", "none")
"""decay first: the functions of the others are told by their distance from its own"""


def cells(scale: Scale) -> Iterator[Cell]:
    for part, column, found in (
        ("function", "norm", NORMS),
        ("rate", "optimizer", RATES),
        ("decay", "optimizer", RATES),
    ):
        for arm in found:
            for kind in KINDS:
                yield {"part": part, column: arm, "kind": kind}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    few, some = SAMPLES[scale]
    images = load("fashion-mnist", train=few, test=some).standardized()
    small = [functional.avg_pool2d(part, 2).double() for part in (images.train, images.test)]
    images = replace(images, train=small[0], test=small[1])
    part = {"function": functions, "rate": scaled_trainings, "decay": decayed_trainings}[str(cell["part"])]
    yield from part(cell, images, seed, STEPS[scale])


# The network -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """y = norm(W x), or W x + norm(W x) with a bypass; batch norm takes its statistics from the batch, always."""

    def __init__(self, inputs: int, width: int, norm: str, eps: float, affine: bool, bypass: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width, bias=False)
        self.norm, self.eps, self.bypass = norm, eps, bypass
        self.gain = nn.Parameter(torch.randn(width).mul(0.5).exp()) if affine else None
        self.bias = nn.Parameter(torch.randn(width).mul(0.1)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        # PyTorch's batch norm refuses eps 0, its layer norm takes it.
        over = h.T if self.norm == "batch" else h
        y = functional.layer_norm(over, over.shape[1:], eps=self.eps)
        y = y.T if self.norm == "batch" else y
        if self.gain is not None and self.bias is not None:
            y = y * self.gain + self.bias
        return h + y if self.bypass else y


def network(cell: Cell, images: Images, seed: int, alpha: float = 1.0) -> nn.Sequential:
    """In float64, where what is exact can be told from what is near; weights in front of norms times ``alpha``."""
    with weights(seed):
        layers: list[nn.Module] = [nn.Flatten()]
        inputs = images.train[0].numel()
        for width in WIDTHS:
            block = Block(inputs, width, str(cell.get("norm", "batch")), *KINDS[str(cell["kind"])])
            layers += [block, nn.GELU() if cell["kind"] == SMOOTH else nn.ReLU()]
            inputs = width
        model = nn.Sequential(*layers, nn.Linear(inputs, images.classes)).double()
    with torch.no_grad():
        for w in upstream(model):
            w.mul_(alpha)
    return model


def upstream(model: nn.Sequential) -> list[Tensor]:
    return [module.linear.weight for module in model if isinstance(module, Block)]


def length(found: list[Tensor]) -> float:
    return float(torch.cat([w.detach().flatten() for w in found]).norm())


@torch.no_grad()
def outputs(model: nn.Module, images: Images) -> Tensor:
    found: Tensor = model(images.test)
    return found


def apart(one: Tensor, other: Tensor) -> float:
    """Of two functions: the root mean square of the difference, in deviations of the second over the samples."""
    return float(((one - other).square().mean() / other.var(0).mean()).sqrt())


# What is measured --------------------------------------------------------------------------------------


def functions(cell: Cell, images: Images, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Weights along themselves and along a random direction: how far parameters move, and how far the function."""
    first = network(cell, images, seed)
    here, gradient = outputs(first, images), gradients(first, images)
    for alpha in SCALES:
        model = network(cell, images, seed, alpha)
        off = [alpha * g - f for g, f in zip(gradients(model, images), gradient, strict=True)]
        yield {
            "alpha": alpha,
            "function distance": apart(outputs(model, images), here),
            "gradient": length(gradients(model, images)) / length(gradient),
            "gradient by formula": 1 / alpha,
            "gradient error": length(off) / length(gradient),
        }
    for direction in ("longer", "random"):
        for t in LENGTHS:
            model = network(cell, images, seed)
            generator = stream(seed, "noise")
            with torch.no_grad():
                for w in upstream(model):
                    step = torch.randn(w.shape, dtype=w.dtype, generator=generator)
                    w.add_(t * w if direction == "longer" else t * w.norm() * step / step.norm())
            yield {
                "direction": direction,
                "parameter distance": t,
                "moved": apart(outputs(model, images), here),
            }


def gradients(model: nn.Sequential, images: Images) -> list[Tensor]:
    loss = functional.cross_entropy(model(images.train[:BATCH]), images.train_labels[:BATCH])
    return list(torch.autograd.grad(loss, upstream(model)))


def scaled_trainings(cell: Cell, images: Images, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """From weights times alpha, with the same rate, and with the rate that makes up for it."""
    right, _ = trained(cell, images, seed, steps)
    here = outputs(right, images)
    for alpha in TRAINED_SCALES:
        for rule in ("same rate", "matched rate"):
            factor = 1.0 if rule == "same rate" else alpha ** power(cell)
            model, losses = trained(cell, images, seed, steps, alpha=alpha, factor=factor)
            yield {
                "alpha": alpha,
                "rule": rule,
                "function distance": apart(outputs(model, images), here),
                "training loss": sum(losses) / len(losses),
            }


def decayed_trainings(cell: Cell, images: Images, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Without decay, with it, and without it at the rising rate that is the same for weights without a scale."""
    start = length(upstream(network(cell, images, seed)))
    seen = images.train[: len(images.test)], images.train_labels[: len(images.test)]
    there = None
    for arm in ARMS:
        looks: list[dict[str, Any]] = []
        model, losses = trained(cell, images, seed, steps, arm=arm, looks=looks)
        yield from ({"arm": arm, **look} for look in looks)
        here = outputs(model, images)
        there = here if there is None else there
        loss, accuracy = evaluate(model, images.test, images.test_labels)
        yield {
            "arm": arm,
            "final length": length(upstream(model)) / start,
            "test accuracy": accuracy,
            "gap": loss - evaluate(model, *seen)[0],
            "training loss": sum(losses) / len(losses),
            "distance to decay": apart(here, there),
        }


def power(cell: Cell) -> int:
    """A step of SGD on weights times alpha is 1/alpha as long, for weights alpha times as long; AdamW's is the same."""
    return 2 if cell["optimizer"] == "sgd" else 1


def trained(
    cell: Cell,
    images: Images,
    seed: int,
    steps: int,
    *,
    alpha: float = 1.0,
    factor: float = 1.0,
    arm: str = "none",
    looks: list[dict[str, Any]] | None = None,
) -> tuple[nn.Sequential, list[float]]:
    """The rate of the weights in front of norms times ``factor``; weight decay, on them alone, that would divide them
    by e over the run."""
    model, rate = network(cell, images, seed, alpha), RATES[str(cell["optimizer"])]
    own, start = upstream(model), length(upstream(model))
    rest = [p for p in model.parameters() if all(p is not w for w in own)]
    decay = 1 / (rate * steps)
    groups = [
        {"params": own, "lr": rate * factor, "weight_decay": decay if arm == "decay" else 0.0},
        {"params": rest, "lr": rate, "weight_decay": 0.0},
    ]
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[str(cell["optimizer"])](groups)

    def before(step: int, x: Tensor, y: Tensor) -> None:
        group = optimizer.param_groups[0]
        if arm == "schedule":
            group["lr"] = rate * (1 - rate * decay) ** -(power(cell) * step + 1)
        if looks is not None and (step % max(1, steps // LOOKS) == 0 or step == steps - 1):
            now = length(own)
            looks.append(
                {
                    "step": step,
                    "length": now / start,
                    "effective rate": group["lr"] / rate * (start / now) ** power(cell),
                }
            )

    plan = Plan(steps, BATCH, rate)
    return model, train(model, images, plan, seed, optimizer=optimizer, before=before).losses


# What is decided ----------------------------------------------------------------------------------------

NEAR = {"sgd": 1e-6, "adamw": 0.05}
"""distances of functions; AdamW adds its own eps to gradients, and averages gradients of several steps"""


def same_function(table: Table) -> Verdict:
    found = table.where(part="function")
    return all_of(
        gain=at_most(found.where(kind=PLAIN).values("function distance"), 1e-9),
        no_gain=at_most(found.where(kind=NO_AFFINE).values("function distance"), 1e-9),
    )


def gradient_is_inverse(table: Table) -> Verdict:
    return at_most(table.where(part="function", kind=PLAIN).values("gradient error"), 1e-9)


def eps_sees_small(table: Table) -> Verdict:
    found = table.where(part="function", kind=EPS)
    return all_of(
        a_thousandth=at_least(found.where(alpha=1e-3).values("function distance"), 0.1),
        a_thousand=at_most(found.where(alpha=1e3).values("function distance"), 1e-2),
    )


def bypass_sees_scale(table: Table) -> Verdict:
    found = table.where(part="function", kind=BYPASS)
    return all_of(
        ten_times=at_least(found.where(alpha=10.0).values("function distance"), 0.1),
        a_tenth=at_least(found.where(alpha=0.1).values("function distance"), 0.1),
    )


def distances_differ(table: Table) -> Verdict:
    found = table.where(part="function", kind=PLAIN)
    longer = found.where(direction="longer", **{"parameter distance": 10.0})
    random = found.where(direction="random", **{"parameter distance": 0.1})
    return all_of(
        ten_lengths_longer=at_most(longer.values("moved"), 1e-9),
        a_tenth_elsewhere=at_least(random.values("moved"), 0.01),
    )


def matched_rate(optimizer: str) -> Callable[[Table], Verdict]:
    def decide(table: Table) -> Verdict:
        found = table.where(part="rate", rule="matched rate", kind=PLAIN, optimizer=optimizer)
        return at_most(found.values("function distance"), NEAR[optimizer])

    return decide


def same_rate(table: Table) -> Verdict:
    """Ten times as long: a hundredth of the effective rate of SGD, a tenth of AdamW's."""
    return each_optimizer(
        table.where(part="rate", alpha=10.0, kind=PLAIN),
        lambda found: above(
            found.difference("training loss", {"rule": "same rate"}, {"rule": "matched rate"})
        ),
    )


def schedule(optimizer: str) -> Callable[[Table], Verdict]:
    def decide(table: Table) -> Verdict:
        found = table.where(part="decay", arm="schedule", kind=PLAIN, optimizer=optimizer)
        return at_most(found.values("distance to decay"), NEAR[optimizer])

    return decide


def also_with_eps(table: Table) -> Verdict:
    return each_optimizer(
        table.where(part="decay", arm="schedule", kind=EPS),
        lambda found: at_most(found.values("distance to decay"), 0.05),
    )


def with_eps_where_smooth(table: Table) -> Verdict:
    found = table.where(part="decay", arm="schedule", kind=SMOOTH, optimizer="sgd")
    return at_most(found.values("distance to decay"), 0.01)


def length_says_nothing(table: Table) -> Verdict:
    found = table.where(part="decay", kind=PLAIN, optimizer="sgd")
    long, short = (found.where(arm=arm) for arm in ("schedule", "decay"))
    pairs = [zip(long.values(name), short.values(name), strict=True) for name in ("final length", "gap")]
    return all_of(
        lengths=at_least([one / other for one, other in pairs[0]], 2.0),
        gap=at_most([abs(one - other) for one, other in pairs[1]], 1e-6),
    )


def decay_raises_rate(table: Table) -> Verdict:
    found = table.where(part="decay", kind=PLAIN)
    return each_optimizer(
        found.where(step=max(found.values("step"))),
        lambda last: above(last.difference("effective rate", {"arm": "decay"}, {"arm": "none"})),
    )


def decay_regularizes(table: Table) -> Verdict:
    return each_optimizer(
        table.where(part="decay", kind=PLAIN),
        lambda found: below(found.difference("gap", {"arm": "decay"}, {"arm": "none"})),
    )


def bypass_ends_it(table: Table) -> Verdict:
    return at_least(table.where(part="decay", arm="schedule", kind=BYPASS).values("distance to decay"), 0.05)


def each_optimizer(table: Table, decide: Callable[[Table], Verdict]) -> Verdict:
    return all_of(**{name: decide(table.where(optimizer=name)) for name in RATES})


def remarks(table: Table) -> Iterator[str]:
    for fixed, part in table.where(part="decay", kind=PLAIN).groups("optimizer"):
        told = [f"{arm} {part.interval('test accuracy', arm=arm).mean:.1%}" for arm in ARMS]
        yield f"Test accuracy at eps 0, {fixed['optimizer']}: {', '.join(told)}."
    for kind in (EPS, SMOOTH):
        found = table.where(part="decay", optimizer="sgd", arm="schedule", kind=kind).values(
            "distance to decay"
        )
        yield (
            f"SGD, {kind}: the schedule's function is {number(median(found))} away from that of decay in the median "
            f"over seeds, {number(min(found))} to {number(max(found))}."
        )


# What is drawn ------------------------------------------------------------------------------------------


def having(table: Table, column: str) -> Table:
    return Table([row for row in table.rows if row.get(column) is not None])


def draw_function(table: Table) -> Figure:
    found = having(table.where(part="function"), "alpha")
    exact = found.where(kind=PLAIN).values("function distance")
    return figures.lines(
        Table([row for row in found.rows if row["alpha"] != 1]),
        "function",
        "Which functions see the scale of their weights",
        "Distance between the outputs of a network and of the same with all weights in front of norms times alpha, in "
        "deviations of the output over samples. Without eps and bypass it is rounding in float64 (largest "
        f"{number(max(exact))}).",
        x="alpha",
        y="function distance",
        by="kind",
        panel="norm",
        log_x=True,
        log_y=True,
    )


def draw_gradient(table: Table) -> Figure:
    return figures.lines(
        having(table.where(part="function"), "alpha"),
        "gradient",
        "Gradients of scaled weights",
        "Length of the gradient with respect to the weights in front of norms, against that at alpha 1: points "
        "measured, lines 1/alpha.",
        x="alpha",
        y="gradient",
        by="kind",
        panel="norm",
        formula="gradient by formula",
        log_x=True,
        log_y=True,
        y_title="length of the gradient",
    )


def draw_distance(table: Table) -> Figure:
    rows = [
        {**row, "arm": f"{row['direction']}, {row['kind']}"}
        for row in having(table.where(part="function"), "direction").rows
        if row["kind"] in (PLAIN, BYPASS)
    ]
    return figures.lines(
        Table(rows),
        "distance",
        "Distance of parameters, distance of functions",
        "All weights in front of norms moved by so many of their own lengths, along themselves (longer) or in a random "
        "direction: how far the outputs move, in deviations of the output over samples.",
        x="parameter distance",
        y="moved",
        by="arm",
        panel="norm",
        log_x=True,
        log_y=True,
        x_title="distance in parameters, lengths of the weights",
        y_title="distance of functions",
    )


def draw_rates(table: Table) -> Figure:
    rows = [
        {**row, "row": f"{row['kind']}, {row['rule']}", "arm": f"alpha {row['alpha']:g}"}
        for row in table.where(part="rate").rows
    ]
    return figures.points(
        Table(rows),
        "rates",
        "Training from scaled weights",
        "Distance of the trained function from the one trained from weights that were not scaled: with the same rate, "
        "and with the rate of these weights times alpha^2 (SGD) or alpha (AdamW).",
        x="function distance",
        rows="row",
        by="arm",
        panel="optimizer",
        log_x=True,
        x_title="distance of functions",
    )


def draw_schedule(table: Table) -> Figure:
    found = having(table.where(part="decay"), "distance to decay")
    return figures.points(
        Table([row for row in found.rows if row["arm"] != "decay"]),
        "schedule",
        "Decay, and the schedule in its place",
        "Distance of the trained function from the one that decay trains, in deviations of the output over samples: by "
        "the rising rate without decay (schedule), and by neither (none).",
        x="distance to decay",
        rows="kind",
        by="arm",
        panel="optimizer",
        log_x=True,
        x_title="distance of functions",
    )


def draw_decay(table: Table) -> Figure:
    return figures.lines(
        having(table.where(part="decay", kind=PLAIN), "step"),
        "decay",
        "Weight decay raises the effective rate",
        "Effective rate of the weights in front of norms (rate / length^2 for SGD, rate / length for AdamW) against "
        f"that of the first step, eps 0; decay that would by itself divide the weights by e = {e:.3g} over the run. "
        "The schedule has no decay and a rising rate.",
        x="step",
        y="effective rate",
        by="arm",
        panel="optimizer",
        log_y=True,
        y_title="effective rate, first step = 1",
    )


STUDY = Study(
    name="scale-symmetry",
    title="Weights without a scale",
    question="What does the length of weights mean, and what does weight decay do, where a norm follows them?",
    intervention="the scale alpha of all weights in front of norms; their rate; their weight decay; each by itself, "
    "with and without eps, gain and bias, and a bypass",
    held_fixed="initial directions, data, order of batches, rates of all other parameters; no momentum in SGD; "
    "float64",
    method=(
        f"Fashion-MNIST, two hidden layers of {WIDTHS[0]} units, each a linear map without bias, a norm (with a random "
        "gain and bias, where it has them) and a ReLU; statistics of batch norm always from the batch. Trainings use "
        f"batch norm, at the rates {RATES['sgd']} (SGD) and {RATES['adamw']} (AdamW). Weights c_t = (1 - rate decay)^t "
        "times as long have gradients 1/c_t as long, so that SGD with decay is SGD without it at the rate rate / "
        "(c_t c_{t+1}), and AdamW nearly so at rate / c_{t+1}. Distances of functions are between outputs on test "
        "images, in deviations of the output over samples."
    ),
    measures=(
        Measure("function distance", "deviations of the output"),
        Measure(
            "gradient error", "lengths of the gradient", "lower", "of alpha times the gradient from that at 1"
        ),
        Measure("moved", "deviations of the output", meaning="the function, by a change of the parameters"),
        Measure("training loss", better="lower", meaning="mean over all steps"),
        Measure("effective rate", meaning="against the first step"),
        Measure("final length", meaning="of the weights in front of norms, against the first"),
        Measure(
            "distance to decay", "deviations of the output", meaning="of the function trained with decay"
        ),
        Measure("gap", better="lower", meaning="test loss less training loss"),
        Measure("test accuracy", better="higher"),
    ),
    cells=cells,
    measure=measure,
    seeds={"full": 6, "quick": 3, "smoke": 2},
    data=("fashion-mnist",),
    decisions=(
        Decision(
            "same-function",
            "At eps 0, weights a thousandth to a thousand times as long give the same function.",
            same_function,
            (5,),
        ),
        Decision(
            "gradient",
            "The gradient is then 1/alpha times that at alpha 1, in the same direction.",
            gradient_is_inverse,
        ),
        Decision(
            "eps",
            "At eps 1e-5 a thousandth of the weights gives another function (by 0.1 or more), a thousand times nearly "
            "the same (0.01 or less).",
            eps_sees_small,
            (5,),
        ),
        Decision(
            "bypass",
            "A bypass around each norm lets the function see the scale: a tenth and ten times move it by 0.1 or more.",
            bypass_sees_scale,
            (5,),
        ),
        Decision(
            "distance",
            "Weights longer by ten lengths do not move the function, a tenth of a length in a random direction does.",
            distances_differ,
            (17,),
        ),
        Decision(
            "matched-rate-sgd",
            "From weights a tenth or ten times as long, SGD at the rate times alpha^2 trains the same function, at "
            "most 1e-6 away.",
            matched_rate("sgd"),
        ),
        Decision(
            "matched-rate-adamw",
            "AdamW does at the rate times alpha, at most 0.05 away.",
            matched_rate("adamw"),
        ),
        Decision(
            "same-rate",
            "From weights ten times as long, the same rate trains more slowly than the matched one.",
            same_rate,
        ),
        Decision(
            "schedule-sgd",
            "Weight decay at eps 0 is a rising rate: with SGD the schedule without decay gives the same function, at "
            "most 1e-6 away.",
            schedule("sgd"),
            (17,),
        ),
        Decision("schedule-adamw", "With AdamW it is at most 0.05 away.", schedule("adamw"), (17,)),
        Decision("schedule-eps", "At eps 1e-5 it is at most 0.05 away with both.", also_with_eps, (17,)),
        Decision(
            "schedule-smooth",
            "At eps 1e-5, with GELU in place of ReLU, it is at most 0.01 away with SGD: no unit is switched off or on.",
            with_eps_where_smooth,
            (17,),
        ),
        Decision(
            "length",
            "The two have the same gap between test and training with SGD, and weights that differ in length by a "
            "factor of 2 or more: length measures no complexity.",
            length_says_nothing,
            (17,),
        ),
        Decision(
            "decay-raises-rate",
            "Weight decay raises the effective rate above that of training without it.",
            decay_raises_rate,
            (17,),
        ),
        Decision(
            "decay-regularizes",
            "Weight decay on these weights makes the gap between test and training loss smaller.",
            decay_regularizes,
            (17,),
        ),
        Decision(
            "bypass-ends-it",
            "With a bypass the schedule is no substitute for decay: the functions are 0.05 or more apart.",
            bypass_ends_it,
            (17,),
        ),
    ),
    remarks=remarks,
    figures=(draw_function, draw_gradient, draw_distance, draw_rates, draw_schedule, draw_decay),
    change="SCALES and TRAINED_SCALES hold alpha, RATES the rates, WIDTHS the network; `trained` says what decays.",
    limits=(
        "A small network, few steps and one strength of decay, on the weights in front of norms alone. SGD has no "
        "momentum: with it the schedule that equals decay is another. Running statistics are left out: an average over "
        "steps depends on how the scale of the weights changes between them. In float32 and below, rounding and eps "
        "bound the scales that are alike."
    ),
    sources=(
        "van Laarhoven 2017, L2 Regularization versus Batch and Weight Normalization, https://arxiv.org/abs/1706.05350",
        "Li and Arora 2020, An Exponential Learning Rate Schedule for Deep Learning, https://arxiv.org/abs/1910.07454",
    ),
)
