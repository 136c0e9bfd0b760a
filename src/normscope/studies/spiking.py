"""A deep spiking network with every norm: firing rates by layer, potentials over the threshold, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from normscope import nn as own
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
    within,
)
from normscope.studies.lab import data, figures
from normscope.studies.lab.networks import weights
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.training import Plan, stream, train

TAU, LAYERS, BATCH, RATE = 2.0, 6, 64, 3e-3
WIDTH = {"full": 100, "quick": 64, "smoke": 16}
STEPS = {"full": 300, "quick": 80, "smoke": 3}
TEST = {"full": 1000, "quick": 400, "smoke": 50}
TRAIN = {"full": 10000, "quick": 4000, "smoke": 200}
THRESHOLDS, TIMES = (0.5, 1.0, 2.0), (2, 4, 8)
THRESHOLD, TIME = 1.0, 4
"""of the cells where the other one varies"""
SILENT, SATURATED = 0.01, 0.9
"""a neuron that fires in fewer, or in more, of all steps of all test images"""
RANKS = 20
"""into so many equal parts a layer's neurons are divided, ranked by firing rate"""
BEFORE, AFTER = "before training", "after training"
NORMS: dict[str, Callable[[int, float, int], nn.Module]] = {
    "none": lambda width, threshold, steps: nn.Identity(),
    "tdBN": lambda width, threshold, steps: own.ThresholdBatchNorm1d(width, threshold),
    "tdLN, each step": lambda width, threshold, steps: own.ThresholdLayerNorm(width, threshold),
    "tdLN, all steps": lambda width, threshold, steps: own.ThresholdLayerNorm(
        width, threshold, per_step=False
    ),
    "BNTT": lambda width, threshold, steps: own.BatchNormThroughTime1d(steps, width),
    "batch norm": lambda width, threshold, steps: own.ThresholdBatchNorm1d(width, 1.0),
}
"""batch norm over steps and samples is tdBN with the gain 1"""


def cells(scale: Scale) -> Iterator[Cell]:
    for threshold in THRESHOLDS:
        for steps in TIMES:
            if steps == TIME or (threshold == THRESHOLD and scale != "smoke"):
                for norm in NORMS:
                    yield {"norm": norm, "threshold": threshold, "steps": steps}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    images = data.load("fashion-mnist", train=TRAIN[scale], test=TEST[scale])
    with weights(seed):
        model = Network(cell, images, WIDTH[scale], seed)
    yield from observed(deepcopy(model), images.test, BEFORE)
    plan = Plan(STEPS[scale], BATCH, RATE, optimizer="adamw", decay=True)
    loss = train(model, images, plan, seed).last()
    yield from observed(model.eval(), images.test, AFTER)
    with torch.no_grad():
        right = model(images.test).argmax(1) == images.test_labels
    yield {"loss": loss, "accuracy": float(right.float().mean())}


class Network(nn.Module):
    """Linear, norm, spiking neurons, layer by layer; then a linear layer, and the mean of its output over steps."""

    def __init__(self, cell: Cell, images: data.Images, width: int, seed: int) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron, surrogate

        self.threshold, self.steps = float(cell["threshold"] or 0), int(cell["steps"] or 0)
        self.noise = stream(seed, "spikes")
        self.linears, self.norms = nn.ModuleList(), nn.ModuleList()
        self.neurons: Any = nn.ModuleList()
        size = images.train[0].numel()
        for _ in range(LAYERS):
            self.linears.append(nn.Linear(size, width))
            self.norms.append(NORMS[str(cell["norm"])](width, self.threshold, self.steps))
            self.neurons.append(
                neuron.LIFNode(
                    TAU,
                    v_threshold=self.threshold,
                    surrogate_function=surrogate.ATan(),
                    detach_reset=True,
                    step_mode="m",
                    store_v_seq=True,
                )
            )
            size = width
        self.readout = nn.Linear(width, images.classes)

    def forward(self, images: Tensor) -> Tensor:
        spikes = [spikes for spikes, _ in self.layers(images)][-1]
        found: Tensor = self.readout(spikes.mean(0))
        return found

    def layers(self, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each layer its spikes and its potentials (T, N, C), these before the reset and over the threshold."""
        x = images.flatten(1).expand(self.steps, -1, -1)
        spikes = (torch.rand(x.shape, generator=self.noise) < x).float()  # as often as a pixel is bright
        for linear, norm, neurons in zip(self.linears, self.norms, self.neurons, strict=True):
            current = norm(linear(spikes))
            neurons.reset()
            spikes = neurons(current)
            before = torch.cat([torch.zeros_like(neurons.v_seq[:1]), neurons.v_seq[:-1]])
            yield spikes, (before + (current - before) / TAU) / self.threshold


@torch.no_grad()
def observed(model: Network, images: Tensor, when: str) -> Iterator[dict[str, Any]]:
    """Each layer on the test images: what its neurons do, and how their firing rates are distributed."""
    rates = []
    for layer, (spikes, potentials) in enumerate(model.layers(images)):
        rates.append(spikes.mean((0, 1)))
        yield {
            "when": when,
            "layer": layer + 1,
            "rate": float(rates[-1].mean()),
            "silent": float((rates[-1] < SILENT).float().mean()),
            "saturated": float((rates[-1] > SATURATED).float().mean()),
            "potential": float(potentials.square().mean().sqrt()),
        }
        ranks = torch.linspace(0, 1, RANKS + 1)
        for rank, found in zip(ranks.tolist(), rates[-1].quantile(ranks).tolist(), strict=True):
            yield {"when": when, "layer": layer + 1, "neurons": round(rank, 4), "firing rate": found}
    # The distance of two distributions of equally many values: between the values of the same rank.
    ranked = [some.sort().values for some in rates]
    apart = [float((a - b).abs().mean()) for a, b in combinations(ranked, 2)]
    yield {"when": when, "layers apart": sum(apart) / len(apart)}


# What is decided ----------------------------------------------------------------------------------------


TD_LAYER = ("tdLN, each step", "tdLN, all steps")


def kept(table: Table) -> Verdict:
    found = table.where(norm="tdBN", when=AFTER).values("potential")
    return all_of(not_below=at_least(found, 0.25), not_above=at_most(found, 2))


def neither(table: Table) -> Verdict:
    part = table.where(norm="tdBN", when=AFTER)
    return all_of(**{share: at_most(part.values(share), 0.1) for share in ("silent", "saturated")})


def without(table: Table) -> Verdict:
    last = {"layer": LAYERS, "when": AFTER}
    return above(table.difference("silent", {"norm": "none", **last}, {"norm": "tdBN", **last}), 0.1)


def alike(table: Table, when: str) -> Verdict:
    return all_of(
        **{
            norm.replace(", ", "_").replace(" ", "_"): below(
                table.difference("layers apart", {"norm": norm, "when": when}, {"norm": "none", "when": when})
            )
            for norm in (*TD_LAYER, "tdBN")
        }
    )


def learns(table: Table) -> Verdict:
    return all_of(
        **{
            f"threshold_{threshold:g}": above(
                table.difference(
                    "accuracy",
                    {"norm": "tdBN", "threshold": threshold},
                    {"norm": "none", "threshold": threshold},
                ),
                0.05,
            )
            for threshold in THRESHOLDS
        }
    )


def gain_matters(table: Table) -> Verdict:
    return all_of(
        **{
            f"threshold_{threshold:g}": above(
                table.difference(
                    "accuracy",
                    {"norm": "tdBN", "threshold": threshold},
                    {"norm": "batch norm", "threshold": threshold},
                ),
                0.01,
            )
            for threshold in THRESHOLDS
            if threshold != 1
        }
    )


def same_at_any_threshold(table: Table) -> Verdict:
    """Before training the potential over the threshold is the same number, up to rounding and eps."""
    part = table.where(steps=TIME, when=BEFORE)
    low, high = ({"threshold": edge} for edge in (min(THRESHOLDS), max(THRESHOLDS)))
    return all_of(
        tdBN=within(part.difference("rate", {"norm": "tdBN", **low}, {"norm": "tdBN", **high}), 0.01),
        batch_norm=above(
            part.difference("rate", {"norm": "batch norm", **low}, {"norm": "batch norm", **high}), 0.05
        ),
    )


def causal_suffices(table: Table) -> Verdict:
    return all_of(
        **{
            f"{steps}_steps": below(
                table.difference(
                    "accuracy", *({"norm": norm, "steps": steps} for norm in reversed(TD_LAYER))
                ),
                0.02,
            )
            for steps in TIMES
        }
    )


def time_helps(table: Table) -> Verdict:
    few, many = ({"norm": "tdBN", "threshold": THRESHOLD, "steps": steps} for steps in (TIMES[0], TIMES[-1]))
    return above(table.difference("accuracy", many, few))


# What is drawn ------------------------------------------------------------------------------------------


def usual(table: Table) -> Table:
    return table.where(threshold=THRESHOLD, steps=TIME)


def lettered(table: Table) -> Table:
    """The norms as panels: (a) without, (b) and on with."""
    letters = dict(zip(NORMS, "abcdef", strict=True))
    return Table([{**row, "norm": f"({letters[row['norm']]}) {row['norm']}"} for row in table.rows])


def draw_rates(table: Table) -> Figure:
    part = usual(table).where(when=AFTER)
    apart = "; ".join(f"{norm} {number(part.interval('layers apart', norm=norm).mean)}" for norm in NORMS)
    return figures.lines(
        lettered(Table([row for row in part.rows if row.get("firing rate") is not None])),
        "rates",
        "Firing rates by layer, after training",
        f"A layer's neurons ranked by firing rate, at threshold {THRESHOLD:g} and {TIME} steps: a share of them fires "
        f"no more often than this. Mean distance between two layers: {apart}.",
        x="neurons",
        y="firing rate",
        by="layer",
        panel="norm",
        x_title="share of neurons",
    )


def draw_depth(table: Table, measure: str, when: str, key: str, title: str, caption: str) -> Figure:
    part = table.where(steps=TIME, when=when)
    return figures.lines(
        Table([row for row in part.rows if row.get("layer") is not None]),
        key,
        title,
        caption,
        x="layer",
        y=measure,
        by="norm",
        panel="threshold",
        y_title=measure,
    )


def draw_potential(table: Table) -> Figure:
    return draw_depth(
        table,
        "potential",
        BEFORE,
        "potential",
        "Potentials over the threshold, before training",
        f"Root mean square of the membrane potential before the reset, over the threshold, at {TIME} steps.",
    )


def draw_potential_after(table: Table) -> Figure:
    return draw_depth(
        table,
        "potential",
        AFTER,
        "potential-after",
        "Potentials over the threshold, after training",
        f"The same after training. With tdBN it is between {number(min(tdbn(table)))} and {number(max(tdbn(table)))}.",
    )


def tdbn(table: Table) -> list[float]:
    return table.where(norm="tdBN", when=AFTER, steps=TIME).values("potential")


def draw_silent(table: Table) -> Figure:
    return draw_depth(
        table,
        "silent",
        AFTER,
        "silent",
        "Silent neurons, after training",
        f"Share of neurons that fire in fewer than {SILENT:.0%} of all steps of all test images, at {TIME} steps. The "
        f"largest share of saturated ones (above {SATURATED:.0%}) in any layer of any norm is "
        f"{number(max(table.where(steps=TIME, when=AFTER).values('saturated')))}.",
    )


def draw_thresholds(table: Table) -> Figure:
    return figures.lines(
        table.where(steps=TIME),
        "thresholds",
        "Accuracy by threshold",
        f"Test accuracy at {TIME} steps. All train equally long, at the same rate.",
        x="threshold",
        y="accuracy",
        by="norm",
        log_x=True,
    )


def draw_steps(table: Table) -> Figure:
    return figures.lines(
        table.where(threshold=THRESHOLD),
        "steps",
        "Accuracy by time steps",
        f"Test accuracy at threshold {THRESHOLD:g}.",
        x="steps",
        y="accuracy",
        by="norm",
        log_x=True,
    )


STUDY = Study(
    name="spiking",
    title="Norms of spiking networks",
    question="Which norm keeps the neurons of a deep spiking network between silence and saturation?",
    intervention="the norm, the firing threshold, and the number of time steps",
    held_fixed=f"data, input spikes, first weights, {LAYERS} layers, leaky integrate-and-fire neurons (tau {TAU:g}, "
    f"hard reset, arctangent surrogate gradient), AdamW with rate {RATE:g} falling to 0, steps of training",
    method=(
        "Fashion-MNIST, each pixel a spike in a step with the probability of its brightness. Linear layer, norm, "
        "SpikingJelly's neurons, layer by layer; a linear layer reads the mean of the last spikes. tdBN: batch norm "
        "over steps and samples, times the threshold. tdLN: layer norm of a sample, times the threshold, of each step "
        "or of all together. BNTT: batch norm with statistics and gain of each step. Batch norm: over steps and "
        "samples, gain 1. Before training norms of batches use the statistics of the test images, after it their "
        "stored ones."
    ),
    measures=(
        Measure("accuracy", better="higher", meaning="on test images"),
        Measure("loss", better="lower", meaning="mean training loss over the last 20 steps"),
        Measure("rate", meaning="spikes a step, mean over the neurons of a layer"),
        Measure("silent", better="lower", meaning=f"share of neurons with a rate below {SILENT}"),
        Measure("saturated", better="lower", meaning=f"share of neurons with a rate above {SATURATED}"),
        Measure("potential", "thresholds", meaning="root mean square, before the reset"),
        Measure(
            "layers apart", better="lower", meaning="mean Wasserstein distance of two layers' firing rates"
        ),
        Measure(
            "firing rate", meaning="that a share of a layer's neurons, the column neurons, does not exceed"
        ),
    ),
    cells=cells,
    measure=measure,
    seeds={"full": 5, "quick": 3, "smoke": 1},
    data=("fashion-mnist",),
    requires=(("spikingjelly", "spiking"),),
    decisions=(
        Decision(
            "potentials",
            "tdBN keeps the root mean square potential of every layer between a quarter of the threshold and twice it, "
            "at every threshold and number of steps.",
            kept,
            (42,),
        ),
        Decision(
            "neither",
            "With tdBN at most a tenth of any layer's neurons are silent, and at most a tenth saturated.",
            neither,
            (42,),
        ),
        Decision(
            "without",
            "Without a norm more of the last layer's neurons are silent than with tdBN, by more than a tenth of them.",
            without,
            (42, 24),
        ),
        Decision(
            "alike",
            "After training the firing-rate distributions of layers are more alike with either tdLN, and with tdBN, "
            "than without a norm.",
            lambda table: alike(table, AFTER),
            (43,),
        ),
        Decision("alike-before", "And before training.", lambda table: alike(table, BEFORE), (43,)),
        Decision(
            "learns",
            "tdBN is more accurate than no norm at every threshold, by more than 0.05.",
            learns,
            (42,),
        ),
        Decision(
            "any-threshold",
            "Before training tdBN gives the same firing rates at threshold 0.5 and 2, batch norm with gain 1 does not.",
            same_at_any_threshold,
            (42,),
        ),
        Decision(
            "gain",
            "Where the threshold is not 1, tdBN is more accurate than batch norm with gain 1, by more than 0.01.",
            gain_matters,
            (42,),
        ),
        Decision(
            "causal",
            "tdLN of each step, which is causal, loses less than 0.02 to tdLN of all steps.",
            causal_suffices,
            (34,),
        ),
        Decision("time", "With tdBN eight steps are more accurate than two.", time_helps),
    ),
    figures=(
        draw_rates,
        draw_potential,
        draw_potential_after,
        draw_silent,
        draw_thresholds,
        draw_steps,
    ),
    contrary=(
        "Layers whose neurons are all silent are alike too: a small distance between layers says nothing by itself, "
        "and stands beside the share of silent neurons."
    ),
    change="NORMS holds the norms, THRESHOLDS and TIMES the grid, Network the layers and neurons.",
    limits=(
        "Linear layers, spikes of still images, short training; no residual branches, for which tdBN has its alpha. "
        "First weights are PyTorch's and the same for all: without a norm larger ones would wake deep layers. tdLN is "
        "defined by analogy with tdBN, no paper gives it."
    ),
    sources=(
        "Zheng et al. 2021, Going Deeper With Directly-Trained Larger Spiking Neural Networks, "
        "https://arxiv.org/abs/2011.05280",
        "Kim and Panda 2021, Revisiting Batch Normalization for Training Low-latency Deep Spiking Neural Networks from "
        "Scratch, https://arxiv.org/abs/2010.01729",
    ),
)
