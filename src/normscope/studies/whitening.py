"""What is left of correlations behind batch norm and behind whitening, and what that does to training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope.nn import BatchWhitening, IterNorm
from normscope.studies import (
    Decision,
    Measure,
    Study,
    Table,
    Verdict,
    all_of,
    at_least,
    at_most,
    below,
    within,
)
from normscope.studies.lab import figures
from normscope.studies.lab.data import Images, load
from normscope.studies.lab.figures import Figure, number
from normscope.studies.lab.networks import weights
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.training import Plan, evaluate, stream, train

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda c: nn.Identity(),
    "batch": lambda c: nn.BatchNorm1d(c),
    "zca": lambda c: BatchWhitening(c, c, method="zca"),
    "cholesky": lambda c: BatchWhitening(c, c, method="cholesky"),
    "iternorm": lambda c: IterNorm(c, c, iterations=5),
    "iternorm, 20 steps": lambda c: IterNorm(c, c, iterations=20),
}
"""all channels together, eps 1e-5 each"""
TRAINED = ("none", "batch", "zca", "cholesky", "iternorm")
WHITENING = ("zca", "cholesky", "iternorm")
NATURAL, WHITE, HARD = "as it is", "condition 1", "condition 10000"
CONDITIONS = {NATURAL: 0.0, WHITE: 1.0, "condition 100": 1e2, HARD: 1e4}
"""of the covariance of the input; 0 leaves it"""
MODELS, WIDTH = ("linear", "one hidden layer"), 64
SIDE, BATCH = 7, 256
RATES = {"full": (0.01, 0.03, 0.1, 0.3, 1.0), "quick": (0.03, 0.1, 0.3), "smoke": (0.1,)}
STEPS = {"full": 200, "quick": 80, "smoke": 4}
SAMPLES = {"full": (5000, 1000), "quick": (2000, 500), "smoke": (600, 100)}
GAINS, WINDOW, TARGET = 20, 10, 0.8


def cells(scale: Scale) -> Iterator[Cell]:
    inputs = [name for name in CONDITIONS if scale == "full" or name != "condition 100"]
    for name in inputs:
        for norm in NORMS:
            yield {"part": "covariance", "input": name, "norm": norm}
    for name in inputs:
        for norm in TRAINED:
            for model in MODELS:
                yield {"part": "training", "input": name, "norm": norm, "model": model}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    few, some = SAMPLES[scale]
    images = correlated(load("fashion-mnist", train=few, test=some), CONDITIONS[str(cell["input"])], seed)
    if cell["part"] == "covariance":
        chosen = torch.randperm(len(images.train), generator=stream(seed, "samples"))[:1000]
        yield covariances(images.train[chosen].double(), str(cell["norm"]), seed)
    else:
        yield from trainings(cell, images, seed, scale)


def correlated(images: Images, condition: float, seed: int) -> Images:
    """Features: means of 7 x 7 pieces. Made white by the training images, turned at random, stretched to the
    condition, turned again; the mean variance is 1."""
    train, test = (
        functional.adaptive_avg_pool2d(part, SIDE).flatten(1).double() for part in (images.train, images.test)
    )
    mean, d = train.mean(0), train.shape[1]
    if condition == 0:
        turn = torch.eye(d, dtype=torch.float64)
    else:
        values, vectors = torch.linalg.eigh(torch.cov(train.T, correction=0))
        lengths = torch.logspace(0, -1, d, base=condition**0.5, dtype=torch.float64)
        one, other = (rotation(d, seed, name) for name in ("before", "behind"))
        turn = (vectors / values.clamp_min(1e-9).sqrt()) @ one @ torch.diag(lengths) @ other
    size = ((train - mean) @ turn).var(0).mean().sqrt()
    found = [((part - mean) @ turn / size).float() for part in (train, test)]
    return replace(images, train=found[0], test=found[1])


def rotation(d: int, seed: int, what: str) -> Tensor:
    drawn = torch.randn(d, d, dtype=torch.float64, generator=stream(seed, what))
    turn: Tensor = torch.linalg.qr(drawn)[0]
    return turn


def covariances(x: Tensor, norm: str, seed: int) -> dict[str, float]:
    """Of the output for one batch, and behind any gain."""
    d, generator = x.shape[1], stream(seed, "gains")
    y = NORMS[norm](d).double()(x).detach()
    covariance = torch.cov(y.T, correction=0)
    values = torch.linalg.eigvalsh(covariance)
    before = correlations(y)
    changes = []
    for _ in range(GAINS):
        gain = torch.pow(10.0, 4 * torch.rand(d, dtype=torch.float64, generator=generator) - 2)
        sign = torch.randint(0, 2, (d,), generator=generator) * 2 - 1
        bias = torch.randn(d, dtype=torch.float64, generator=generator)
        changes.append(float((correlations(y * gain * sign + bias) - before).abs().max()))
    off = before[~torch.eye(d, dtype=torch.bool)]
    own = torch.corrcoef(torch.cat([x.T, y.T]))[:d, d:].diagonal()
    return {
        "correlation": float(off.mean()),
        "largest correlation": float(off.max()),
        "from identity": float((covariance - torch.eye(d)).norm()) / d**0.5,
        "condition number": float(values[-1] / values[0]),
        "smallest variance": float(values[0]),
        "own": float(own.mean()),
        "change by gains": max(changes),
        "correlation of input": float(correlations(x)[~torch.eye(d, dtype=torch.bool)].mean()),
    }


def correlations(y: Tensor) -> Tensor:
    """Without their signs, which a negative gain turns."""
    return torch.corrcoef(y.T).abs()


def trainings(cell: Cell, images: Images, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    """With each rate; the best has the lowest mean loss over the run."""
    found = []
    for rate in RATES[scale]:
        model = network(cell, images, seed)
        trained = train(model, images, Plan(STEPS[scale], BATCH, rate), seed)
        if not trained.diverged:
            found.append((sum(trained.losses) / len(trained.losses), rate, model, trained.losses))
    best = min(found, key=lambda one: one[0])[1] if found else None
    for loss, rate, model, losses in found:
        _, accuracy = evaluate(model, images.test, images.test_labels)
        means = [
            sum(losses[i : i + WINDOW]) / len(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)
        ]
        under = [i for i, mean in enumerate(means) if mean <= TARGET]
        yield {
            "rate": rate,
            "best": rate == best,
            "loss": loss,
            "final loss": means[-1],
            "steps": under[0] * WINDOW if under else len(losses),
            "test accuracy": accuracy,
        }
        if rate == best:
            yield from ({"step": i * WINDOW, "loss at step": mean} for i, mean in enumerate(means))


def network(cell: Cell, images: Images, seed: int) -> nn.Sequential:
    d, classes = images.train.shape[1], images.classes
    with weights(seed):
        layers: list[nn.Module] = [NORMS[str(cell["norm"])](d)]
        if cell["model"] == "linear":
            return nn.Sequential(*layers, nn.Linear(d, classes))
        return nn.Sequential(*layers, nn.Linear(d, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes))


# What is decided ----------------------------------------------------------------------------------------


def diagonal_only(table: Table) -> Verdict:
    found = table.where(part="covariance", norm="batch")
    pairs = zip(found.values("correlation"), found.values("correlation of input"), strict=True)
    return at_most([abs(behind - before) for behind, before in pairs], 1e-9)


def gains_keep(table: Table) -> Verdict:
    return at_most(table.where(part="covariance").values("change by gains"), 1e-9)


def batch_is_not_white(table: Table) -> Verdict:
    found = table.where(part="covariance", norm="batch")
    return all_of(
        natural=at_least(found.where(input=NATURAL).values("condition number"), 10),
        hard=at_least(found.where(input=HARD).values("condition number"), 10),
    )


def whitens(table: Table) -> Verdict:
    found = table.where(part="covariance")
    return all_of(
        **{name: at_most(found.where(norm=name).values("correlation"), 0.01) for name in ("zca", "cholesky")}
    )


def five_steps(table: Table) -> Verdict:
    found = table.where(part="covariance", input=HARD)
    return all_of(
        less_than_batch=below(found.difference("correlation", {"norm": "iternorm"}, {"norm": "batch"})),
        small_stay_small=at_most(found.where(norm="iternorm").values("smallest variance"), 0.5),
        twenty_steps=at_least(found.where(norm="iternorm, 20 steps").values("smallest variance"), 0.9),
    )


def turns_least(table: Table) -> Verdict:
    found = table.where(part="covariance", input=NATURAL)
    return below(found.difference("own", {"norm": "cholesky"}, {"norm": "zca"}))


def best(table: Table, **fixed: Any) -> Table:
    return table.where(part="training", best=True, **fixed)


def faster(table: Table, name: str) -> Verdict:
    """Each whitening than batch norm, in each model."""
    return all_of(
        **{
            f"{norm}, {model}": below(
                best(table, input=name, model=model).difference("loss", {"norm": norm}, {"norm": "batch"})
            )
            for norm in WHITENING
            for model in MODELS
        }
    )


def faster_where_correlated(table: Table) -> Verdict:
    return faster(table, HARD)


def faster_on_images(table: Table) -> Verdict:
    return faster(table, NATURAL)


def alike_where_white(table: Table) -> Verdict:
    return all_of(
        **{
            model: within(
                best(table, input=WHITE, model=model).difference("loss", {"norm": "zca"}, {"norm": "batch"}),
                0.05,
            )
            for model in MODELS
        }
    )


def batch_is_no_help(table: Table) -> Verdict:
    return all_of(
        **{
            model: within(
                best(table, input=HARD, model=model).difference("loss", {"norm": "batch"}, {"norm": "none"}),
                0.05,
            )
            for model in MODELS
        }
    )


def better(table: Table) -> Verdict:
    return all_of(
        **{
            f"{name}, {model}": below(
                best(table, input=name, model=model).difference(
                    "test accuracy", {"norm": "batch"}, {"norm": "zca"}
                )
            )
            for name in (NATURAL, HARD)
            for model in MODELS
        }
    )


def remarks(table: Table) -> Iterator[str]:
    for fixed, part in best(table).groups("input", "model"):
        arms = {norm: part.where(norm=norm) for norm in TRAINED}
        told = ", ".join(
            f"{norm} {arm.interval('steps').mean:.0f} steps, {arm.interval('test accuracy').mean:.1%}"
            for norm, arm in arms.items()
        )
        yield f"Input {fixed['input']}, {fixed['model']}: steps to a loss of {TARGET} (or all), test accuracy: {told}."


# What is drawn ------------------------------------------------------------------------------------------


def draw_correlation(table: Table) -> Figure:
    found = table.where(part="covariance")
    return figures.points(
        found,
        "correlation",
        "Correlations behind a norm",
        "Mean size of the correlation between two channels, for one batch; behind any of "
        f"{GAINS} random gains and biases it is the same (largest change of one correlation "
        f"{number(max(found.values('change by gains')))}).",
        x="correlation",
        rows="norm",
        panel="input",
        x_title="mean |correlation|",
        zero=True,
    )


def draw_condition(table: Table) -> Figure:
    return figures.points(
        table.where(part="covariance"),
        "condition",
        "Condition of the covariance behind a norm",
        "Largest by smallest variance of all directions of the output.",
        x="condition number",
        rows="norm",
        by="input",
        log_x=True,
    )


def draw_own(table: Table) -> Figure:
    return figures.points(
        table.where(part="covariance"),
        "own",
        "What is left of each channel",
        "Correlation of a channel of the output with the same channel of the input. Cholesky mixes the "
        "channels that come earlier into those that come later.",
        x="own",
        rows="norm",
        by="input",
        x_title="mean correlation with the input",
    )


def draw_training(table: Table) -> Figure:
    rows = [
        {**row, "picture": f"{row['input']}, {row['model']}"}
        for row in table.where(part="training").rows
        if row.get("step") is not None and row["input"] in (NATURAL, HARD)
    ]
    return figures.lines(
        Table(rows),
        "training",
        "Training behind a norm of the input",
        f"Training loss, means over {WINDOW} steps, each arm with its best rate.",
        x="step",
        y="loss at step",
        by="norm",
        panel="picture",
        log_y=True,
        y_title="training loss",
    )


def draw_loss(table: Table) -> Figure:
    return figures.points(
        best(table),
        "loss",
        "Speed by the condition of the input",
        "Mean training loss over the run, each arm with its best rate: lower is faster.",
        x="loss",
        rows="input",
        by="norm",
        panel="model",
        x_title="mean training loss",
    )


STUDY = Study(
    name="whitening",
    title="Correlations, batch norm and whitening",
    question="Which correlations are left behind batch norm and whitening, and does training get faster without them?",
    intervention="the norm of the input: none, batch norm, ZCA, Cholesky, IterNorm with 5 and 20 steps; by the "
    "condition of the input's covariance",
    held_fixed="what the input says (it is turned and stretched, and can be turned back), data, order of batches, "
    "initial weights behind the norm, eps 1e-5, gain and bias in every norm; each arm has the best of the same rates",
    method=(
        f"Fashion-MNIST as means of {SIDE} x {SIDE} pieces, {SIDE * SIDE} channels: as they are, or made white, turned "
        "at random, stretched to a condition and turned again, a new turn for each seed. Covariances: one batch of up "
        "to 1000 samples in float64, and the same behind random gains of either sign over four decades, and biases. "
        f"Training: SGD with momentum 0.9, batches of {BATCH}; the rate of an arm is the one with the lowest mean loss."
    ),
    measures=(
        Measure("correlation", better="lower", meaning="mean size over pairs of channels"),
        Measure("condition number", better="lower", meaning="of the covariance"),
        Measure("from identity", better="lower", meaning="distance of the covariance, a channel"),
        Measure("smallest variance", meaning="over all directions"),
        Measure("own", meaning="correlation of a channel with itself before the norm"),
        Measure("change by gains", better="lower", meaning="largest of any correlation"),
        Measure("loss", better="lower", meaning="of training, mean over all steps"),
        Measure(
            "steps",
            better="lower",
            meaning=f"to a training loss of {TARGET}; all of them where it is not reached",
        ),
        Measure("test accuracy", better="higher", meaning="with stored statistics"),
    ),
    cells=cells,
    measure=measure,
    seeds={"full": 5, "quick": 3, "smoke": 2},
    data=("fashion-mnist",),
    decisions=(
        Decision("diagonal", "Batch norm leaves every correlation as it was.", diagonal_only, (12,)),
        Decision(
            "gains", "No gain and bias of a channel changes the size of a correlation.", gains_keep, (12,)
        ),
        Decision(
            "not-white",
            "Behind batch norm the covariance has a condition of 10 or more, for images as they are and at condition "
            "10,000.",
            batch_is_not_white,
            (12,),
        ),
        Decision("whitens", "ZCA and Cholesky leave mean correlations of 0.01 or less.", whitens),
        Decision(
            "five-steps",
            "At condition 10,000 IterNorm with 5 steps leaves smaller correlations than batch norm, and directions "
            "with less than half of the variance; with 20 steps none has less than 0.9.",
            five_steps,
        ),
        Decision(
            "turns-least",
            "On images, channels behind ZCA are nearer to their inputs than behind Cholesky.",
            turns_least,
        ),
        Decision(
            "faster",
            "At condition 10,000 each whitening trains faster than batch norm.",
            faster_where_correlated,
            (12,),
        ),
        Decision(
            "faster-on-images",
            "On images as they are each whitening trains faster than batch norm.",
            faster_on_images,
        ),
        Decision(
            "alike",
            "On white input ZCA and batch norm train alike, within 0.05 of the loss.",
            alike_where_white,
        ),
        Decision(
            "batch-no-help",
            "At condition 10,000 batch norm trains as without a norm, within 0.05 of the loss.",
            batch_is_no_help,
            (12,),
        ),
        Decision(
            "better",
            "Where it is correlated, ZCA of the input gives a higher test accuracy than batch norm.",
            better,
        ),
    ),
    remarks=remarks,
    figures=(draw_correlation, draw_condition, draw_own, draw_training, draw_loss),
    change="NORMS holds the norms, CONDITIONS the inputs, MODELS and RATES what is trained.",
    limits=(
        "Norms of the input alone, with large batches: whitening of few samples is noisy, and what it does between "
        "layers is another question. Steps are counted, not time: whitening costs several times what batch norm costs. "
        "A turned and stretched image is correlated as few data are."
    ),
    sources=(
        "Huang, Yang, Lang and Deng 2018, Decorrelated Batch Normalization, https://arxiv.org/abs/1804.08450",
        "Siarohin, Sangineto and Sebe 2019, Whitening and Coloring Batch Transform for GANs, "
        "https://arxiv.org/abs/1806.00420",
        "Huang, Zhou, Zhu, Liu and Shao 2019, Iterative Normalization, https://arxiv.org/abs/1904.03441",
    ),
)
