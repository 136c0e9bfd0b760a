"""What layer norm and batch norm do to space, drawn from the isolated map."""

from __future__ import annotations

from collections.abc import Iterator
from math import cos, radians, sin

import torch
from torch import Tensor, nn

from normscope.render.charts.figure import Figure, number
from normscope.studies import Decision, Measure, Study, Table, Verdict, all_of, at_least, at_most
from normscope.studies.lab import figures
from normscope.studies.lab.study import Cell, Scale

D, STEP = 8, 1e-4
EPS = (0.0, 1e-5, 1e-1)
"""of layer norm"""
EPS_OF_BATCHES = (1e-5, 1e-2)
COMPANIONS = (-1.0, -0.5, -0.2, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0)
COPIES = (1, 3, 7)
"""of the companion in a batch"""
PER_DECADE = {"full": 4, "quick": 2, "smoke": 1}
"""scales"""


def cells(scale: Scale) -> Iterator[Cell]:
    yield {"part": "projection"}
    for part, found in (("scale", EPS), ("companion", EPS_OF_BATCHES)):
        for eps in found:
            yield {"part": part, "eps": eps}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterator[dict[str, float]]:
    x = torch.randn(D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    eps = float(cell.get("eps") or 0)
    if cell["part"] == "projection":
        yield from ({"angle": angle, **projected(x, angle)} for angle in range(0, 91, 10))
    elif cell["part"] == "scale":
        for k in range(-4 * PER_DECADE[scale], 2 * PER_DECADE[scale] + 1):
            t = float(f"{10 ** (k / PER_DECADE[scale]):.4g}")
            yield {"scale": t, **scaled(x, t, eps)}
    else:
        for copies in COPIES:
            for b in COMPANIONS:
                yield {"companion": b, "copies": copies, **beside(float(x[0]), b, copies, eps)}


def projected(x: Tensor, degrees: float) -> dict[str, float]:
    """How much of a step centering sees, by the angle between the step and the all-ones direction."""
    ones = torch.ones(D, dtype=torch.float64) / D**0.5
    across = x - x.mean()
    across = across / across.norm()
    angle = radians(degrees)
    step = cos(angle) * ones + sin(angle) * across
    seen = float((step - step.mean()).norm())
    return {"length kept": seen, "formula": sin(angle), "error": abs(seen - sin(angle))}


def scaled(x: Tensor, t: float, eps: float) -> dict[str, float]:
    """The length of the output for a deviation t, and the Jacobian along three directions by central differences."""
    x = t * (x - x.mean()) / x.std(correction=0) + 1.0
    layer = nn.LayerNorm(D, eps=eps, elementwise_affine=False)
    centered, s = x - x.mean(), (t**2 + eps) ** 0.5
    other = torch.roll(centered, 1)
    other = other - centered * (other @ centered) / (centered @ centered)
    found = {"output length": float(layer(x).norm()), "length by formula": D**0.5 * t / s}
    errors = [abs(found["output length"] / found["length by formula"] - 1)]
    directions = {
        "along ones": (torch.ones_like(x), 0.0),
        "along x": (centered, eps / s**3),
        "across": (other, 1 / s),
    }
    for name, (direction, formula) in directions.items():
        u, h = direction / direction.norm(), STEP * s
        moved = (layer(x + h * u) - layer(x - h * u)) / (2 * h)
        found |= {f"gain {name}": float(moved @ u), f"formula {name}": formula}
        errors.append(float((moved - formula * u).norm()) * s)  # in units of 1/s, the largest eigenvalue
    return {**found, "sign error": float((layer(-x) + layer(x)).abs().max()), "error": max(errors)}


def beside(sample: float, b: float, copies: int, eps: float) -> dict[str, float]:
    """Batch norm of the batch {0, b, ..., b}: what the sample 0 becomes. A shift of all changes nothing."""
    layer = nn.BatchNorm1d(1, eps=eps, affine=False, track_running_stats=False)
    batch = torch.tensor([[sample], *[[sample + b]] * copies], dtype=torch.float64)
    first = float(layer(batch)[0, 0])
    formula = -copies * b / (copies * b**2 + (copies + 1) ** 2 * eps) ** 0.5
    return {"first output": first, "formula": formula, "error": abs(first - formula)}


# What is decided ----------------------------------------------------------------------------------------


def one_direction(table: Table) -> Verdict:
    found = table.where(part="projection")
    return all_of(
        formula=at_most(found.values("error"), 1e-12),
        along_ones=at_most(found.where(angle=0).values("length kept"), 1e-12),
    )


def jacobian(table: Table) -> Verdict:
    """Central differences: the step squared is 1e-8, and rounding at the smallest scale 2e-16 / 1e-8."""
    return at_most(table.where(part="scale").values("error"), 1e-6)


def variance_is_below_one(table: Table) -> Verdict:
    small = table.where(part="scale", eps=1e-5, scale=1e-4)
    return at_most([length**2 / D for length in small.values("output length")], 0.01)


def scale_invariance(table: Table) -> Verdict:
    part = table.where(part="scale")
    lengths = {eps: part.where(eps=eps).values("output length") for eps in (0.0, 1e-1)}
    return all_of(
        spread_at_eps_0=at_most([max(lengths[0.0]) / min(lengths[0.0]) - 1], 1e-9),
        spread_above_0=at_least([max(lengths[1e-1]) / min(lengths[1e-1]) - 1], 1.0),
        negative_flips=at_most(part.values("sign error"), 1e-9),
    )


def radial(table: Table) -> Verdict:
    part = table.where(part="scale")
    return all_of(
        lost_at_eps_0=at_most(
            [abs(gain) for gain in part.where(eps=0.0, scale=1.0).values("gain along x")], 1e-6
        ),
        seen_above_0=at_least(part.where(eps=1e-1, scale=0.1).values("gain along x"), 1.0),
        faint_where_large=at_most(part.where(eps=1e-1, scale=100.0).values("gain along x"), 1e-6),
    )


def flips(table: Table) -> Verdict:
    part = table.where(part="companion", eps=1e-5)
    return all_of(
        formula=at_most(table.where(part="companion").values("error"), 1e-9),
        to_the_right=at_most(part.where(companion=1.0, copies=1).values("first output"), -0.99),
        to_the_left=at_least(part.where(companion=-1.0, copies=1).values("first output"), 0.99),
        seven_copies_push_further=at_most(part.where(companion=1.0, copies=7).values("first output"), -2.6),
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
    return figures.lines(
        table.where(part="scale"),
        "output-length",
        "eps decides which scales are seen",
        f"Length of the output of layer norm for inputs of {D} numbers with this standard deviation, by eps: points "
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
    part = table.where(part="scale", eps=EPS[2])
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
        f"Gain of a small step at eps {EPS[2]:g} by its direction: points central differences, lines the formulas. "
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
        "Batch norm of the batch {0, b, ..., b} with so many copies of b: the output of the sample 0, for two eps. "
        "Points measured, lines -n b / sqrt(n b^2 + (n + 1)^2 eps). Largest distance "
        f"{number(max(found.values('error')))}.",
        x="companion",
        y="first output",
        by="copies",
        panel="eps",
        formula="formula",
        x_title="companion b",
        y_title="output of the sample 0",
    )


STUDY = Study(
    name="geometry",
    title="The geometry of normalization",
    question="What does normalization do to a vector and to small changes of it?",
    intervention="the direction of a step, the scale of the input, and a sample's companion, each by itself",
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
            "The output's variance is below 0.01 for inputs of deviation 1e-4 at eps 1e-5.",
            variance_is_below_one,
            (2, 5),
        ),
        Decision(
            "scale",
            "At eps 0 the output's length is the same at any scale, above 0 not; a negative scale flips the sign.",
            scale_invariance,
            (5,),
        ),
        Decision(
            "radial",
            "The radial direction is lost at eps 0; above 0 it is seen, and faint where the scale is large.",
            radial,
            (6,),
        ),
        Decision(
            "flips",
            "A companion's sign flips the output of a sample, and copies of it push the output further.",
            flips,
            (7,),
        ),
    ),
    figures=(draw_projection, draw_length, draw_jacobian, draw_companion),
    change="EPS holds the eps, COMPANIONS and COPIES the batches, D is the size of a vector.",
    limits="The isolated map, not a network: what a network does with a direction that one layer cannot see is another "
    "question.",
)
