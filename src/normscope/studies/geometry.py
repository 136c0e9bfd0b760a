"""What layer norm and batch norm do to space, drawn from the isolated map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.render.charts.figure import Figure, number
from normscope.studies import Decision, Measure, Study, Table, above, all_of, at_most
from normscope.studies.lab import figures
from normscope.studies.lab.study import Cell, Scale

D, STEP = 8, 1e-4
EPS = (1e-5, 1e-1)
ANGLES = tuple(range(0, 91, 10))
BETWEEN = {"full": 4, "quick": 2, "smoke": 1}
"""points a decade of scale"""


def cells(scale: Scale) -> Iterator[Cell]:
    for angle in ANGLES:
        yield {"part": "projection", "angle": angle}
    for eps in EPS:
        for k in range(-4 * BETWEEN[scale], 2 * BETWEEN[scale] + 1):
            yield {"part": "scale", "eps": eps, "scale": float(f"{10 ** (k / BETWEEN[scale]):.4g}")}
    for eps in (1e-5, 1e-2):
        for b in (-1.0, -0.5, -0.2, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0):
            yield {"part": "companion", "eps": eps, "companion": b}


def measure(cell: Cell, seed: int, scale: Scale) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return PARTS[str(cell["part"])](cell, torch.randn(D, dtype=torch.float64, generator=generator))


def projection(cell: Cell, x: Tensor) -> dict[str, float]:
    """How much of a step centering sees, by the angle between the step and the all-ones direction."""
    ones = torch.ones(D, dtype=torch.float64) / D**0.5
    across = x - x.mean()
    across = across / across.norm()
    angle = np.deg2rad(float(cell["angle"] or 0))
    step = np.cos(angle) * ones + np.sin(angle) * across
    seen = float((step - step.mean()).norm())
    return {"length kept": seen, "formula": float(np.sin(angle)), "error": abs(seen - float(np.sin(angle)))}


def by_scale(cell: Cell, x: Tensor) -> dict[str, float]:
    """The length of the output, and the Jacobian along three directions by central differences."""
    eps, scale = float(cell["eps"] or 0), float(cell["scale"] or 0)
    x = scale * (x - x.mean()) / x.std(correction=0) + 1.0
    layer = nn.LayerNorm(D, eps=eps, elementwise_affine=False)
    centered = x - x.mean()
    s = float(torch.sqrt(scale**2 + torch.tensor(eps, dtype=torch.float64)))
    ones = torch.ones(D, dtype=torch.float64)
    other = torch.roll(centered, 1)
    other = other - other.mean() - centered * (other @ centered) / (centered @ centered)
    found = {"output length": float(layer(x).norm()), "length by formula": D**0.5 * scale / s}
    relative = [abs(found["output length"] / found["length by formula"] - 1)]
    expected = {"along ones": 0.0, "along x": eps / s**3, "across": 1 / s}
    for (name, value), direction in zip(expected.items(), (ones, centered, other), strict=True):
        u, h = direction / direction.norm(), STEP * s
        moved = (layer(x + h * u) - layer(x - h * u)) / (2 * h)
        found[f"gain {name}"] = float(moved @ u)
        found[f"formula {name}"] = value
        # In units of 1/s, the largest eigenvalue: central differences cannot resolve less.
        relative.append(float((moved - value * u).norm()) * s)
    return {**found, "error": max(relative)}


def companion(cell: Cell, x: Tensor) -> dict[str, float]:
    """Batch norm of the batch {0, b}: what the sample 0 becomes."""
    b, eps = float(cell["companion"] or 0), float(cell["eps"] or 0)
    shift = float(x[0])  # a common shift changes nothing, so every seed has its own
    layer = nn.BatchNorm1d(1, eps=eps, affine=False, track_running_stats=False)
    first = float(layer(torch.tensor([[shift], [shift + b]], dtype=torch.float64))[0, 0])
    formula = -b / (b**2 + 4 * eps) ** 0.5
    return {"first output": first, "formula": formula, "error": abs(first - formula)}


PARTS: dict[str, Callable[[Cell, Tensor], dict[str, float]]] = {
    "projection": projection,
    "scale": by_scale,
    "companion": companion,
}


# What is decided ----------------------------------------------------------------------------------------


def one_direction(table: Table) -> Any:
    found = table.where(part="projection")
    return all_of(
        formula=at_most(found.values("error"), 1e-12),
        along_ones=at_most(found.where(angle=0).values("length kept"), 1e-12),
    )


def jacobian(table: Table) -> Any:
    return at_most(table.where(part="scale").values("error"), 1e-6)


def variance_is_below_one(table: Table) -> Any:
    """By how much the squared length misses d, at the smallest scale and the smallest eps."""
    low = table.where(part="scale", eps=EPS[0], scale=1e-4)
    rows = [{**row, "missing": 1 - row["output length"] ** 2 / D} for row in low.rows]
    return above(Table(rows).interval("missing"), 0.5)


def radial(table: Table) -> Any:
    """At eps above 0 the gain along x is above 0, and falls far below the others where the scale is large."""
    part = table.where(part="scale", eps=EPS[1])
    return all_of(
        seen=above(part.interval("gain along x", scale=0.1), 1e-3),
        faint=at_most(part.where(scale=100.0).values("gain along x"), 1e-4),
    )


def flips(table: Table) -> Any:
    part = table.where(part="companion", eps=1e-5)
    return all_of(
        formula=at_most(table.where(part="companion").values("error"), 1e-9),
        to_the_right=at_most(part.where(companion=1.0).values("first output"), -0.9),
        to_the_left=above(part.interval("first output", companion=-1.0), 0.9),
    )


# What is drawn ------------------------------------------------------------------------------------------


def draw_projection(table: Table) -> Figure:
    found = table.where(part="projection")
    return figures.lines(
        found,
        "projection",
        "Centering removes one direction",
        "Length that a step of length 1 keeps behind the centering, by its angle to the all-ones direction: points "
        f"measured, line sin(angle). Largest distance {number(max(found.values('error')))}.",
        x="angle",
        y="length kept",
        formula="formula",
        x_title="angle to the all-ones direction, degrees",
    )


def draw_length(table: Table) -> Figure:
    found = table.where(part="scale")
    return figures.lines(
        found,
        "output-length",
        "eps decides which scales are seen",
        f"Length of the output of layer norm for inputs of {D} numbers with this standard deviation, two eps: points "
        f"measured, lines sqrt(d) t / sqrt(t^2 + eps). The sphere has the radius sqrt({D}) = {number(D**0.5)}.",
        x="scale",
        y="output length",
        by="eps",
        formula="length by formula",
        log_x=True,
        log_y=True,
        x_title="standard deviation t of the input",
    )


def draw_jacobian(table: Table) -> Figure:
    part = table.where(part="scale", eps=EPS[1])
    names = {"along x": "along x: eps/s^3", "across": "across: 1/s"}
    rows = [
        {
            "scale": row["scale"],
            "seed": row["seed"],
            "direction": told,
            "gain": row[f"gain {name}"],
            "formula": row[f"formula {name}"],
        }
        for row in part.rows
        for name, told in names.items()
    ]
    ones = max(map(abs, part.values("gain along ones")))
    return figures.lines(
        Table(rows),
        "jacobian",
        "What a small step becomes",
        f"Gain of a small step at eps {EPS[1]:g} by its direction: points central differences, lines the formulas. "
        f"Along the all-ones direction it is 0 (largest measured: {number(ones)}) and has no place on these axes.",
        x="scale",
        y="gain",
        by="direction",
        formula="formula",
        log_x=True,
        log_y=True,
        x_title="standard deviation of the input",
        y_title="gain",
    )


def draw_companion(table: Table) -> Figure:
    found = table.where(part="companion")
    return figures.lines(
        found,
        "companion",
        "A companion flips the sign",
        "Batch norm of the batch {0, b}: the output of the sample 0, for two eps. Points measured, lines "
        f"-b / sqrt(b^2 + 4 eps). Largest distance {number(max(found.values('error')))}.",
        x="companion",
        y="first output",
        by="eps",
        formula="formula",
        x_title="companion b",
        y_title="output of the sample 0",
    )


STUDY = Study(
    name="geometry",
    title="The geometry of normalization",
    question="What does normalization do to a vector and to small changes of it?",
    intervention="the direction of a step, the scale of the input, and the companion in a batch of two, each by itself",
    held_fixed="the map: torch.nn.LayerNorm and BatchNorm1d in float64, without gain and bias; for a seed, the "
    "direction of x",
    method="Random vectors of 8 numbers, a new one for each seed. Gains are central differences through PyTorch's "
    "layers.",
    measures=(
        Measure("length kept", meaning="of a step of length 1, behind the centering"),
        Measure("output length"),
        Measure("first output", meaning="of the sample 0 in the batch {0, b}"),
        Measure("error", better="lower", meaning="distance from the formula"),
    ),
    cells=cells,
    measure=measure,
    decisions=(
        Decision(
            "one-direction",
            "Centering removes the all-ones direction and no other: it keeps sin(angle).",
            one_direction,
            (4,),
        ),
        Decision("jacobian", "The Jacobian has the gains 0, eps/s^3 and 1/s.", jacobian, (5, 6)),
        Decision(
            "variance",
            "The output's variance is not 1 where the input is small beside eps.",
            variance_is_below_one,
            (2, 5),
        ),
        Decision(
            "radial",
            "At eps above 0 the radial direction is seen, and faint where the scale is large.",
            radial,
            (6,),
        ),
        Decision("flips", "A companion's sign flips the output of a sample.", flips, (7,)),
    ),
    figures=(draw_projection, draw_length, draw_jacobian, draw_companion),
    change="EPS holds the two eps, cells the scales and angles, D the size of a vector.",
    limits="The isolated map, not a network: what a network does with a direction that one layer cannot see is another "
    "question.",
)
