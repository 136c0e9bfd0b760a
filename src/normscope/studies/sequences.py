"""Sequences of varying length: batch norm over steps and of each step, with a mask and without, layer and RMS norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope import nn as own
from normscope.bench.timing import alternate
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
from normscope.studies.lab import figures, sequences
from normscope.studies.lab.networks import weights
from normscope.studies.lab.sequences import Sequences
from normscope.studies.lab.study import Cell, Scale
from normscope.studies.lab.training import batches, stream

EPS, RATE, WIDTH, HEADS, BATCH = 1e-5, 3e-3, 32, 2, 16
STEPS = {
    "vowels": {"full": 300, "quick": 80, "smoke": 3},
    "text": {"full": 600, "quick": 120, "smoke": 3},
}
LONGEST = {"full": 40, "quick": 24, "smoke": 12}
"""characters of a line"""
TEST, WRITTEN = {"full": 500, "quick": 200, "smoke": 48}, {"full": 200, "quick": 64, "smoke": 8}
"""lines to test on, and lines that the network writes"""
OVER, OVER_ALL = "batch, all steps, masked", "batch, all steps, not masked"
EACH, EACH_ALL = "batch, each step, masked", "batch, each step, not masked"
RECURRENT, TRANSFORMER = "recurrent", "Transformer"
SHAPE = (1024, 512)
"""of what layer and RMS norm are timed on"""


class Norm(nn.Module):
    """One of the arms, for inputs (N, T, C); remembers what came in."""

    def __init__(self, name: str, steps: int) -> None:
        super().__init__()
        self.masked, self.each = name in (OVER, EACH), name in (EACH, EACH_ALL)
        make: dict[str, Callable[[], nn.Module]] = {
            "none": nn.Identity,
            "layer": lambda: nn.LayerNorm(WIDTH, EPS),
            "rms": lambda: nn.RMSNorm(WIDTH, EPS),
            **dict.fromkeys((OVER, OVER_ALL), lambda: own.BatchNorm1d(WIDTH, EPS)),
            **dict.fromkeys(
                (EACH, EACH_ALL),
                lambda: own.BatchNormThroughTime1d(steps, WIDTH, EPS, layout="b t c ...", bias=True),
            ),
        }
        self.layer, self.seen = make[name](), torch.empty(0)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.seen = x.detach()
        counts = {"lengths": lengths} if self.masked else {}
        turned = isinstance(self.layer, own.BatchNorm1d)
        y: Tensor = self.layer(x.transpose(1, 2) if turned else x, **counts)
        return y.transpose(1, 2) if turned else y


NORMS = ("none", "layer", "rms", OVER, OVER_ALL, EACH, EACH_ALL)


class Recurrent(nn.Module):
    """Two GRUs, a norm in front of each and behind the second."""

    def __init__(self, inputs: int, outputs: int, steps: int, norm: str) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.norms = nn.ModuleList(Norm(norm, steps) for _ in range(3))
        self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.readout = nn.Linear(WIDTH, outputs)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        x = self.first(frames)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x, _ = layer(norm(x, lengths))
        found: Tensor = self.readout(self.norms[2](x, lengths))
        return found


class Transformer(nn.Module):
    """Two causal blocks with the norm in front of each part, and one behind them."""

    def __init__(self, inputs: int, outputs: int, steps: int, norm: str) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(inputs, WIDTH), nn.Parameter(torch.randn(steps, WIDTH) / 10)
        self.norms = nn.ModuleList(Norm(norm, steps) for _ in range(5))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.readout = nn.Linear(WIDTH, outputs)
        self.register_buffer("later", torch.ones(steps, steps, dtype=torch.bool).triu(1))

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        x = self.first(frames) + self.places
        for k, (attention, inner) in enumerate(zip(self.attention, self.inner, strict=True)):
            y = self.norms[2 * k](x, lengths)
            x = x + attention(y, y, y, attn_mask=self.later, need_weights=False)[0]
            x = x + inner(self.norms[2 * k + 1](x, lengths))
        found: Tensor = self.readout(self.norms[4](x, lengths))
        return found


MODELS: dict[str, Callable[[int, int, int, str], nn.Module]] = {
    RECURRENT: Recurrent,
    TRANSFORMER: Transformer,
}


def cells(scale: Scale) -> Iterator[Cell]:
    for task in STEPS:
        for model in (RECURRENT,) if scale == "smoke" else MODELS:
            for norm in NORMS:
                yield {"task": task, "model": model, "norm": norm}


def measure(cell: Cell, seed: int, scale: Scale) -> dict[str, float]:
    task = str(cell["task"])
    if task == "vowels":
        train, test = sequences.vowels()
        outputs = int(train.labels.max()) + 1
    else:
        train, test, alphabet = sequences.characters(LONGEST[scale])
        test, outputs = test[torch.arange(min(TEST[scale], len(test)))], len(alphabet)
    steps = train.frames.shape[1]
    with weights(seed):
        model = MODELS[str(cell["model"])](train.frames.shape[2], outputs, steps, str(cell["norm"]))
    losses = fit(model, train, STEPS[task][scale], seed)
    model.eval()
    row = {
        "training loss": sum(losses[-20:]) / len(losses[-20:]),
        **tested(model, test),
        **effects(model, test),
    }
    return row if task == "vowels" else {**row, **written(model, train, test, WRITTEN[scale], seed)}


def fit(model: nn.Module, train: Sequences, steps: int, seed: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    model.train()
    losses = []
    for _, chosen in zip(range(steps), batches(len(train), BATCH, seed), strict=False):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, in_company(train[chosen]))
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return losses


def in_company(some: Sequences) -> Sequences:
    """The longest sequence cut to the second longest, for all arms: a step of one sequence has no variance."""
    second = int(some.lengths.sort().values[-2])
    return Sequences(some.frames, some.lengths.clamp(max=second), some.labels)


def known(some: Sequences) -> Tensor:
    """(N, T), True where a sequence has a frame."""
    return torch.arange(some.frames.shape[1]) < some.lengths[:, None]


def scores(model: nn.Module, some: Sequences) -> tuple[Tensor, Tensor]:
    """Scores and labels: of each frame, or the mean over a sequence's frames where it has one label."""
    found, there = model(some.frames, some.lengths), known(some)
    if some.labels.ndim == 2:
        return found[there], some.labels[there]
    return (found * there[..., None]).sum(1) / some.lengths[:, None], some.labels


def loss_of(model: nn.Module, some: Sequences) -> Tensor:
    return functional.cross_entropy(*scores(model, some))


@torch.no_grad()
def tested(model: nn.Module, test: Sequences) -> dict[str, float]:
    """On the test sequences by stored statistics; the gap is against the same batches, as in training."""
    found, labels = scores(model, test)
    live = deepcopy(model).train()
    gaps = []
    for chosen in torch.arange(len(test) // BATCH * BATCH).reshape(-1, BATCH):
        some = in_company(test[chosen])
        gaps.append(float(loss_of(model, some) - loss_of(live, some)))
    return {
        "loss": float(functional.cross_entropy(found, labels)),
        "accuracy": float((found.argmax(1) == labels).float().mean()),
        "gap": sum(gaps) / len(gaps),
    }


@torch.no_grad()
def effects(model: nn.Module, test: Sequences) -> dict[str, float]:
    """In training mode: how far outputs move with what stands in the padding, and with what comes later.

    As a share of the outputs' root mean square.
    """
    some = in_company(test[torch.arange(BATCH)])
    there, half = known(some), int(some.lengths.min()) // 2

    def output(frames: Tensor) -> Tensor:
        found: Tensor = deepcopy(model).train()(frames, some.lengths)
        return found

    def share(moved: Tensor, still: Tensor) -> float:
        return float(((moved - still).square().mean() / still.square().mean()).sqrt())

    still = output(some.frames)
    filled = output(torch.where(there[..., None], some.frames, torch.ones(())))
    later = output(torch.cat([some.frames[:, :half], some.frames[:, half:].roll(1, 0)], 1))
    return {
        "padding effect": share(filled[there], still[there]),
        "future effect": share(later[:, :half], still[:, :half]),
    }


@torch.no_grad()
def written(model: nn.Module, train: Sequences, test: Sequences, lines: int, seed: int) -> dict[str, float]:
    """Characters drawn by the network: each behind a true beginning, and each behind its own; and what norms see."""
    text = test[test.lengths == test.frames.shape[1]]
    text = text[torch.arange(min(lines, len(text)))]
    usual = threes(train)
    noise = stream(seed, "text")
    taught = draw(model(text.frames, text.lengths), noise)
    before = [norm.seen for norm in model.modules() if isinstance(norm, Norm)]
    behind = [
        (a, b, new) in usual
        for line, drawn in zip(text.frames.argmax(2).tolist(), taught.tolist(), strict=True)
        for a, b, new in zip(line, line[1:], drawn[1:], strict=False)
    ]

    frames = torch.zeros_like(text.frames)
    frames[:, 0] = text.frames[:, 0]
    for t in range(frames.shape[1] - 1):
        drawn = draw(model(frames, text.lengths)[:, t : t + 1], noise)[:, 0]
        frames[:, t + 1] = functional.one_hot(drawn, frames.shape[2]).float()
    model(frames, text.lengths)
    after = [norm.seen for norm in model.modules() if isinstance(norm, Norm)]
    free = [gram in usual for line in frames.argmax(2).tolist() for gram in grams(line)]
    shifts = [
        ((b.mean((0, 1)) - a.mean((0, 1))).abs() / a.std((0, 1)).clamp_min(1e-12)).mean()
        for a, b in zip(before, after, strict=True)
    ]
    return {
        "known, taught": sum(behind) / len(behind),
        "known, free": sum(free) / len(free),
        "shift": float(torch.stack(shifts).mean()),
    }


@lru_cache
def threes(train: Sequences) -> set[tuple[int, ...]]:
    """What occurs in the training text."""
    found = set[tuple[int, ...]]()
    for line, length in zip(train.frames.argmax(2).tolist(), train.lengths.tolist(), strict=True):
        found.update(grams(line[:length]))
    return found


def grams(line: list[int]) -> Iterator[tuple[int, ...]]:
    return zip(line, line[1:], line[2:], strict=False)


def draw(scores: Tensor, noise: torch.Generator) -> Tensor:
    chances = functional.softmax(scores, -1)
    return torch.multinomial(chances.flatten(0, 1), 1, generator=noise).reshape(scores.shape[:2])


# What is decided ----------------------------------------------------------------------------------------


def differ(table: Table, measure: str, task: str, model: str, one: str, other: str) -> Any:
    fixed = {"task": task, "model": model}
    return table.difference(measure, {**fixed, "norm": one}, {**fixed, "norm": other})


def in_each(task: str, decide: Callable[[str], Verdict]) -> Verdict:
    return all_of(**{f"{task}_{model}": decide(model) for model in MODELS})


def varying(table: Table) -> Verdict:
    return in_each("vowels", lambda m: below(differ(table, "accuracy", "vowels", m, OVER, "layer"), -0.05))


def single_steps(table: Table) -> Verdict:
    return all_of(
        vowels=in_each("vowels", lambda m: below(differ(table, "accuracy", "vowels", m, EACH, OVER), -0.02)),
        text=in_each("text", lambda m: above(differ(table, "loss", "text", m, EACH, OVER), 0.02)),
    )


def masks_help(table: Table) -> Verdict:
    return in_each("vowels", lambda m: below(differ(table, "accuracy", "vowels", m, OVER_ALL, OVER), -0.02))


def padding(table: Table) -> Verdict:
    some = table.where(task="vowels")
    return all_of(
        masked=at_most([v for n in (OVER, EACH) for v in some.where(norm=n).values("padding effect")], 1e-5),
        not_masked=at_least(
            [v for n in (OVER_ALL, EACH_ALL) for v in some.where(norm=n).values("padding effect")], 0.01
        ),
    )


def future(table: Table) -> Verdict:
    def found(*norms: str) -> list[float]:
        return [v for n in norms for v in table.where(norm=n).values("future effect")]

    return all_of(over_steps=at_least(found(OVER), 0.01), others=at_most(found(EACH, "layer", "rms"), 1e-5))


def generation(table: Table) -> Verdict:
    def fewer(norm: str) -> Verdict:
        return in_each("text", lambda m: below(differ(table, "known, free", "text", m, norm, "layer"), -0.05))

    return all_of(all_steps=fewer(OVER), each_step=fewer(EACH))


def drift(table: Table) -> Verdict:
    def lost(model: str, norm: str) -> Any:
        rows = table.where(task="text", model=model, norm=norm)
        return [row["known, taught"] - row["known, free"] for row in rows.rows]

    return at_least([v for model in MODELS for norm in (OVER, EACH) for v in lost(model, norm)], 0.05)


def gaps(table: Table) -> Verdict:
    return in_each("text", lambda m: above(differ(table, "gap", "text", m, OVER, "layer"), 0.02))


def fails_to_converge(table: Table) -> Verdict:
    return all_of(
        **{
            name: above(differ(table, "training loss", "text", TRANSFORMER, norm, "layer"), 0.1)
            for name, norm in (("all_steps", OVER), ("each_step", EACH))
        }
    )


def rms_is_as_good(table: Table) -> Verdict:
    return all_of(
        vowels=in_each(
            "vowels", lambda m: within(differ(table, "accuracy", "vowels", m, "rms", "layer"), 0.02)
        ),
        text=in_each("text", lambda m: within(differ(table, "loss", "text", m, "rms", "layer"), 0.05)),
    )


@lru_cache
def timed() -> dict[str, float]:
    """Microseconds forward and backward of a layer, one thread: measured when the results are told."""
    x = torch.randn(SHAPE, requires_grad=True)
    layers = {"layer": nn.LayerNorm(SHAPE[1], EPS), "rms": nn.RMSNorm(SHAPE[1], EPS)}
    ours = {"our layer": own.LayerNorm(SHAPE[1], EPS), "our rms": own.RMSNorm(SHAPE[1], EPS)}

    def both(layer: nn.Module) -> Callable[[], object]:
        return lambda: layer(x).sum().backward()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        contenders = {name: both(layer) for name, layer in {**layers, **ours}.items()}
        found = alternate({"copy": lambda: x.detach().clone(), **contenders}, seconds=0.5).seconds
    finally:
        torch.set_num_threads(threads)
    return {name: 1e6 * seconds for name, seconds in found.items()}


def remarks(table: Table) -> Iterator[str]:
    found = timed()
    yield (
        f"Time of one layer, forward and backward, {SHAPE[0]} vectors of {SHAPE[1]}, one thread, where these results "
        "were put together (not in the table, for it differs every time), in microseconds: "
        f"PyTorch's layer norm {number(found['layer'])} and "
        f"RMS norm {number(found['rms'])}, ours {number(found['our layer'])} and "
        f"{number(found['our rms'])}."
    )


# What is drawn ------------------------------------------------------------------------------------------


def draw_vowels(table: Table) -> Figure:
    return figures.points(
        table.where(task="vowels"),
        "vowels",
        "Sequences of varying length",
        "Accuracy on test vowels, by stored statistics.",
        x="accuracy",
        rows="norm",
        panel="model",
    )


def draw_text(table: Table) -> Figure:
    return figures.points(
        table.where(task="text"),
        "text",
        "Characters of a text",
        "Loss for the next character on test lines behind true beginnings, by stored statistics, in nats.",
        x="loss",
        rows="norm",
        panel="model",
    )


def draw_free(table: Table) -> Figure:
    rows = [
        {**row, "known": row[f"known, {how}"], "how": told}
        for row in table.where(task="text").rows
        for how, told in (("taught", "behind a true beginning"), ("free", "behind its own text"))
    ]
    return figures.points(
        Table(rows),
        "free-running",
        "Teacher-forced and free-running",
        "Share of three characters in a row, the last drawn by the network, that occur in the training text.",
        x="known",
        rows="norm",
        by="how",
        panel="model",
        x_title="share of known threes",
    )


def draw_effects(table: Table) -> Figure:
    rows = [
        {**row, "effect": row[name], "of": told}
        for row in table.where(task="vowels").rows
        for name, told in (("padding effect", "of padding"), ("future effect", "of later frames"))
    ]
    return figures.points(
        Table(rows),
        "effects",
        "What reaches outputs in training mode",
        "How far outputs move when the padding holds something else, and when later frames do, as a share of their "
        "root mean square.",
        x="effect",
        rows="norm",
        by="of",
        panel="model",
        zero=True,
    )


def draw_gap(table: Table) -> Figure:
    return figures.points(
        table,
        "gap",
        "Training mode against evaluation",
        "Test loss by stored statistics less that by the statistics of the batch, on the same sequences.",
        x="gap",
        rows="norm",
        by="model",
        panel="task",
        zero=True,
    )


STUDY = Study(
    name="sequences",
    title="Sequences of varying length",
    question="Which norm works on padded sequences of varying length, step by step, and in free running?",
    intervention="the norm: batch norm over all steps or of each step, each with a mask and without, layer norm, RMS "
    "norm, none",
    held_fixed=f"data, order, first weights, Adam with rate {RATE:g}, steps, {WIDTH} channels, eps {EPS:g}; the "
    "longest sequence of a training batch is cut to the second longest, for a step of one sequence has no variance",
    method=(
        "Japanese vowels of nine speakers, 7 to 29 frames, told apart by the mean score over frames; and lines of "
        "Python's own documentation, whose next character is to be told. Two GRUs with a norm in front of each and "
        "behind, and a Transformer of two causal blocks with the norm in front of each part. Free running: the network "
        "reads what it drew itself; known threes are three characters in a row that occur in the training text."
    ),
    measures=(
        Measure("accuracy", better="higher", meaning="on test sequences, by stored statistics"),
        Measure("loss", "nats", "lower", "the same"),
        Measure("training loss", "nats", "lower", "mean over the last 20 steps"),
        Measure("gap", "nats", "lower", "loss by stored statistics less that by those of the batch"),
        Measure(
            "padding effect",
            better="lower",
            meaning="share of the outputs that padding moves, in training mode",
        ),
        Measure("future effect", better="lower", meaning="the same of later frames"),
        Measure("known, taught", better="higher", meaning="share of known threes, behind a true beginning"),
        Measure("known, free", better="higher", meaning="share of known threes, behind its own text"),
        Measure(
            "shift",
            "deviations",
            meaning="mean change of a channel's mean in front of norms, in free running",
        ),
    ),
    cells=cells,
    measure=measure,
    seeds={"full": 5, "quick": 3, "smoke": 1},
    data=("japanese-vowels", "python-topics"),
    decisions=(
        Decision(
            "varying",
            "On vowels of varying length masked batch norm over all steps loses more than 0.05 to layer norm.",
            varying,
            (34,),
        ),
        Decision(
            "single-steps",
            "Statistics of each step are worse than those of all steps: 0.02 in accuracy, 0.02 nats on text.",
            single_steps,
            (34,),
        ),
        Decision(
            "mask",
            "Without the mask batch norm over all steps loses more than 0.02 on vowels.",
            masks_help,
            (34,),
        ),
        Decision(
            "padding",
            "Under a mask padding moves no output of batch norm, without one by a hundredth or more.",
            padding,
            (34,),
        ),
        Decision(
            "future",
            "In training batch norm over all steps lets later frames move earlier outputs by a hundredth or more; of "
            "each step, layer and RMS norm do not.",
            future,
            (34,),
        ),
        Decision(
            "generation",
            "In free running batch norm writes fewer known threes than layer norm, by more than 0.05.",
            generation,
            (34,),
        ),
        Decision(
            "free-running",
            "With batch norm the share of known threes falls by 0.05 or more from taught to free running.",
            drift,
            (34,),
        ),
        Decision(
            "gap",
            "On text the gap of batch norm over all steps is above that of layer norm, by more than 0.02 nats.",
            gaps,
            (34,),
        ),
        Decision(
            "transformer",
            "In a Transformer the training loss with batch norm is above that with layer norm, by more than 0.1 nats.",
            fails_to_converge,
            (34,),
        ),
        Decision(
            "rms",
            "RMS norm is as good as layer norm: within 0.02 in accuracy, and 0.05 nats on text.",
            rms_is_as_good,
            (35,),
        ),
    ),
    remarks=remarks,
    figures=(draw_vowels, draw_text, draw_free, draw_effects, draw_gap),
    change="NORMS and Norm hold the arms, MODELS the networks, STEPS and LONGEST how long they train, and on what.",
    limits=(
        "Small networks, short training, a few hundred test sequences. In the recurrent network norms stand between "
        "layers, not inside the recurrence. Test lines of the text may share phrases with training lines. A "
        "generated line is as long as the longest training line: what statistics of each step would do beyond it is "
        "not asked."
    ),
    sources=(
        "Laurent et al. 2016, Batch Normalized Recurrent Neural Networks, https://arxiv.org/abs/1510.01378",
        "Ba, Kiros and Hinton 2016, Layer Normalization, https://arxiv.org/abs/1607.06450",
        "Shen et al. 2020, PowerNorm: Rethinking Batch Normalization in Transformers, https://arxiv.org/abs/2003.07845",
        "Zhang and Sennrich 2019, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467",
    ),
)
