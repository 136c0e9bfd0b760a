"""What a large mean does to normalization: errors over seven decades of kappa, by implementation, layout and type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import normscope
from normscope import reference
from normscope.studies import Decision, Measure, Study, Table, Verdict, above, all_of, at_least, at_most
from normscope.studies.lab import figures
from normscope.studies.lab.figures import Figure, number
from normscope.studies.lab.study import Cell, Scale

EPS, DEVIATION = 1e-5, 1 / 32
"""the deviation is small, so that a mean of a million deviations still fits float16"""
GROUPS = 4
KAPPAS = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IMAGES = {"full": (8, 32, 16, 16), "quick": (8, 16, 12, 12), "smoke": (4, 8, 6, 6)}
TOKENS = {"full": (64, 768), "quick": (32, 256), "smoke": (8, 64)}
LAYOUTS = {
    "batch": ("contiguous", "channels last"),
    "instance": ("contiguous", "channels last"),
    "group": ("contiguous", "channels last"),
    "layer": ("contiguous", "transposed"),
    "rms": ("contiguous", "transposed"),
}
SPECS = {
    "batch": nn.BatchNorm2d(1, eps=EPS, affine=False, track_running_stats=False),
    "instance": nn.InstanceNorm2d(1, eps=EPS),
    "group": nn.GroupNorm(GROUPS, GROUPS, eps=EPS, affine=False),
    "layer": nn.LayerNorm(1, eps=EPS, elementwise_affine=False),
    "rms": nn.RMSNorm(1, eps=EPS, elementwise_affine=False),
}
PYTORCH, OURS, ONE_PASS, TWO_PASS, STORING = (
    "PyTorch",
    "Normscope",
    "one pass",
    "two passes",
    "storing the input",
)


def cells(scale: Scale) -> Iterator[Cell]:
    for norm, layouts in LAYOUTS.items():
        for layout in layouts:
            for dtype in DTYPES:
                yield {"norm": norm, "layout": layout, "dtype": dtype}


def measure(cell: Cell, seed: int, scale: Scale) -> Iterator[dict[str, Any]]:
    norm, layout, dtype = (str(cell[key]) for key in ("norm", "layout", "dtype"))
    shape = TOKENS[scale] if norm in ("layer", "rms") else IMAGES[scale]
    noise = np.random.default_rng(seed).standard_normal(shape)
    for kappa in KAPPAS:
        exact = DEVIATION * (kappa + noise)
        x = placed(torch.from_numpy(exact).to(DTYPES[dtype]), layout)
        right = reference.forward(x.double().numpy(), normscope.spec_of(SPECS[norm]))
        outputs = {
            PYTORCH: getattr(functional, f"{norm}_norm")(x, **arguments(norm, x)),
            OURS: getattr(normscope.functional, f"{norm}_norm")(x, **arguments(norm, x)),
            ONE_PASS: textbook(x, norm, passes=1),
            TWO_PASS: textbook(x, norm, passes=2),
            STORING: torch.from_numpy(right).to(DTYPES[dtype]),
        }
        for name, output in outputs.items():
            truth = reference.forward(exact, normscope.spec_of(SPECS[norm])) if name == STORING else right
            yield {"kappa": kappa, "implementation": name, **errors(output, truth)}


def errors(output: Tensor, truth: Any) -> dict[str, float]:
    """The largest error, as it is (the output has a deviation of about 1), and in roundings of the output's type."""
    apart = np.abs(output.double().numpy() - truth)
    rounding = torch.finfo(output.dtype).eps / 2 * np.maximum(np.abs(truth), 1)
    return {"error": float(np.max(apart)), "roundings": float(np.max(apart / rounding))}


def placed(x: Tensor, layout: str) -> Tensor:
    """The same values in another order in memory."""
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    return x.T.contiguous().T if layout == "transposed" else x


def arguments(norm: str, x: Tensor) -> dict[str, Any]:
    """Of torch.nn.functional's norms, and of ours."""
    if norm == "batch":
        return {"running_mean": None, "running_var": None, "training": True, "eps": EPS}
    if norm == "group":
        return {"num_groups": GROUPS, "eps": EPS}
    return {"eps": EPS} if norm == "instance" else {"normalized_shape": x.shape[-1:], "eps": EPS}


def textbook(x: Tensor, norm: str, *, passes: int) -> Tensor:
    """In float32: v = E[x^2] - E[x]^2, not below 0, in one pass; or E[(x - E[x])^2] in two."""
    y = x.float()
    if norm == "group":
        y = y.reshape(len(x), GROUPS, -1, *x.shape[2:])
    dims = {"batch": (0, 2, 3), "instance": (2, 3), "group": (2, 3, 4)}.get(norm, (-1,))
    mean = torch.zeros(()) if norm == "rms" else y.mean(dims, keepdim=True)
    if passes == 1:
        v = ((y * y).mean(dims, keepdim=True) - mean * mean).clamp_min(0)
    else:
        v = ((y - mean) ** 2).mean(dims, keepdim=True)
    return ((y - mean) * torch.rsqrt(v + EPS)).reshape(x.shape).to(x.dtype)


# What is decided ----------------------------------------------------------------------------------------


CENTERED = ("batch", "instance", "group", "layer")


def of(table: Table, implementation: str, measure: str, norms: Iterable[str], **fixed: Any) -> list[float]:
    """What was measured, of these norms."""
    part = table.where(implementation=implementation, **fixed)
    return [row[measure] for row in part.rows if row["norm"] in norms]


def one_pass_fails(table: Table) -> Verdict:
    return at_least(of(table, ONE_PASS, "error", CENTERED, dtype="float32", kappa=1e4), 0.1)


def two_passes_hold(table: Table) -> Verdict:
    return at_most(of(table, TWO_PASS, "error", CENTERED, dtype="float32", kappa=1e4), 0.01)


def no_harm_in_pytorch(table: Table) -> Verdict:
    return all_of(
        **{norm: at_most(of(table, PYTORCH, "error", [norm], dtype="float32"), 0.01) for norm in CENTERED}
    )


def ours_rounds(table: Table) -> Verdict:
    return all_of(
        **{dtype: at_most(of(table, OURS, "roundings", LAYOUTS, dtype=dtype), 4) for dtype in DTYPES}
    )


def layout_matters(table: Table) -> Verdict:
    part = table.where(implementation=PYTORCH, norm="group", dtype="float32", kappa=1e3)
    return above(part.difference("error", {"layout": "channels last"}, {"layout": "contiguous"}), 0.01)


def storing_loses(table: Table) -> Verdict:
    return all_of(
        **{
            dtype: at_least(of(table, STORING, "error", CENTERED, dtype=dtype, kappa=1e4), 0.5)
            for dtype in ("bfloat16", "float16")
        }
    )


def rms_is_spared(table: Table) -> Verdict:
    return all_of(
        **{
            name: at_most(of(table, name, "roundings", ["rms"]), 8)
            for name in (PYTORCH, OURS, ONE_PASS, TWO_PASS)
        }
    )


def remarks(table: Table) -> Iterator[str]:
    """Up to which kappa PyTorch keeps an error of a hundredth of a deviation."""
    for fixed, part in table.where(implementation=PYTORCH, dtype="float32").groups("norm", "layout"):
        good = [k for k in part.distinct("kappa") if max(part.where(kappa=k).values("error")) <= 0.01]
        yield (
            f"PyTorch's {fixed['norm']} norm, {fixed['layout']}, float32: the largest error is at most 0.01 standard "
            f"deviations up to kappa {max(good):,.0f}."
            if good
            else f"PyTorch's {fixed['norm']} norm, {fixed['layout']}, float32: the error is above 0.01 at any kappa."
        )


# What is drawn ------------------------------------------------------------------------------------------


def draw_implementations(table: Table) -> Figure:
    part = table.where(dtype="float32", layout="contiguous")
    part = Table([row for row in part.rows if row["implementation"] != STORING])
    return figures.lines(
        part,
        "implementations",
        "Errors in float32",
        "Largest error of the output, in standard deviations, against the float64 reference on the same input. At "
        f"kappa 10,000 the one-pass formula misses batch norm by {largest(part, ONE_PASS, 'batch')}, PyTorch by "
        f"{largest(part, PYTORCH, 'batch')}, Normscope by {largest(part, OURS, 'batch')}.",
        x="kappa",
        y="error",
        by="implementation",
        panel="norm",
        log_x=True,
        log_y=True,
        x_title="kappa = |mean| / standard deviation",
        y_title="largest error",
    )


def draw_layouts(table: Table) -> Figure:
    part = table.where(implementation=PYTORCH, dtype="float32")
    part = Table([row for row in part.rows if row["norm"] in CENTERED])
    return figures.lines(
        part,
        "layouts",
        "PyTorch, by layout in memory",
        "The same values in two orders in memory, float32: largest error of the output, in standard deviations.",
        x="kappa",
        y="error",
        by="layout",
        panel="norm",
        log_x=True,
        log_y=True,
        x_title="kappa = |mean| / standard deviation",
        y_title="largest error",
    )


def draw_half(table: Table) -> Figure:
    part = table.where(norm="layer", layout="contiguous")
    part = Table([row for row in part.rows if row["dtype"] != "float32"])
    return figures.lines(
        part,
        "half-types",
        "Half types lose it when they store the input",
        "Layer norm: largest error of the output, in standard deviations. Storing the input: the exact formula on the "
        "rounded input, against the same on the input before it was rounded; nothing behind it can mend that.",
        x="kappa",
        y="error",
        by="implementation",
        panel="dtype",
        log_x=True,
        log_y=True,
        x_title="kappa = |mean| / standard deviation",
        y_title="largest error",
    )


def largest(table: Table, implementation: str, norm: str) -> str:
    found = [value for value in of(table, implementation, "error", [norm], kappa=1e4) if isfinite(value)]
    return number(max(found)) if found else "no number"


STUDY = Study(
    name="precision",
    title="A large mean",
    question="How much of the output is left when the mean is many times the standard deviation?",
    intervention="kappa = |mean| / standard deviation, from 1 to 1,000,000, by implementation, layout and type",
    held_fixed=f"standard deviation 1/32, eps {EPS:g}, the noise of a seed, shapes; no gain and bias; one thread",
    method=(
        "Normal noise on a mean. PyTorch's function, Normscope's, and the textbook formula in one pass (E[x^2] - "
        "E[x]^2, not below 0) and in two, both in float32, against the float64 reference on the very input that they "
        "got. How much of that input was lost when it was rounded to its type stands apart, as storing the input."
    ),
    measures=(
        Measure("error", "standard deviations of the output", "lower", "the largest in the output"),
        Measure("roundings", "half spacings of the type", "lower", "the largest, relative to max(|y|, 1)"),
    ),
    cells=cells,
    measure=measure,
    seeds={"full": 5, "quick": 3, "smoke": 2},
    decisions=(
        Decision(
            "one-pass",
            "The one-pass formula misses every centered norm by a tenth of a deviation or more at kappa 10,000.",
            one_pass_fails,
            (20,),
        ),
        Decision(
            "two-passes",
            "Two passes keep the error below a hundredth of a deviation there.",
            two_passes_hold,
            (20,),
        ),
        Decision(
            "no-harm",
            "A large mean does no harm in PyTorch, float32: a hundredth of a deviation at most, up to kappa 1,000,000.",
            no_harm_in_pytorch,
            (20,),
        ),
        Decision(
            "ours",
            "Normscope is within 4 roundings of the output, at any kappa, layout and type.",
            ours_rounds,
        ),
        Decision(
            "layout",
            "PyTorch's group norm is worse in channels-last memory, by over a hundredth of a deviation at kappa 1,000.",
            layout_matters,
            (20,),
        ),
        Decision(
            "storing",
            "In half types the input has lost half a deviation or more at kappa 10,000 before any norm runs.",
            storing_loses,
            (20,),
        ),
        Decision(
            "rms",
            "RMS norm, which subtracts nothing, is within 8 roundings at any kappa.",
            rms_is_spared,
            (35,),
        ),
    ),
    remarks=remarks,
    figures=(draw_implementations, draw_layouts, draw_half),
    change="LAYOUTS holds the norms and their layouts, DTYPES the types, IMAGES and TOKENS the shapes.",
    limits=(
        "This build of PyTorch on CPUs and this version of it: other builds and GPUs sum in another order. Normal "
        "noise; a mean that is the same for every channel. What such an error costs a network is another matter."
    ),
)
