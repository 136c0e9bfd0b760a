"""Two curves, each as SVG and as CSV, computed by PyTorch's own layers in float64."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from normscope.errors import MissingExtra
from normscope.verify.float64 import tensor

Rows = list[dict[str, float]]
V1 = [-1.0, 1.0]  # mean 0 and variance 1


def output_norm_against_scale() -> Rows:
    """||layer_norm(t x)|| for x of variance 1: sqrt(d) t / sqrt(t^2 + eps)."""
    rows = []
    for eps in (1e-5, 1e-1):
        layer = nn.LayerNorm(2, eps=eps, elementwise_affine=False).double()
        for t in np.logspace(-4, 2, 121).tolist():
            rows.append({"eps": eps, "scale": t, "output norm": float(layer(t * tensor(V1)).norm())})
    return rows


def first_output_against_companion() -> Rows:
    """Batch norm of the batch {0, b}, its first output: -b / sqrt(b^2 + 4 eps)."""
    rows = []
    for eps in (1e-5, 1e-2):
        layer = nn.BatchNorm1d(1, eps=eps, affine=False, track_running_stats=False).double()
        for b in (np.linspace(-1, 1, 201) ** 3).tolist():  # dense around 0, where the sign turns
            first = float(layer(tensor([[0.0], [b]]))[0, 0])
            rows.append({"eps": eps, "b": b, "output of the sample 0": first})
    return rows


def write(folder: Path) -> list[Path]:
    """Write both curves to ``folder``, which is made if needed; returns the four paths.

    Raises MissingExtra without altair and vl-convert-python.
    """
    altair = _altair()
    norm, companion = output_norm_against_scale(), first_output_against_companion()
    scale = altair.X("scale:Q", title="positive scale t of an input with variance 1")
    charts = {
        "output-norm-against-scale": (
            norm,
            "Layer norm: eps decides which scales are seen",
            scale.scale(type="log").axis(format="~e", values=[10.0**k for k in range(-4, 3)]),
            altair.Y("output norm:Q", title="norm of the output, d = 2"),
        ),
        "first-output-against-companion": (
            companion,
            "Batch norm: a companion decides the output of the sample 0",
            altair.X("b:Q", title="companion b in the batch {0, b}"),
            altair.Y("output of the sample 0:Q", title="output of the sample 0"),
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (rows, title, x, y) in charts.items():
        written += [
            _csv(folder / f"{name}.csv", rows),
            _svg(folder / f"{name}.svg", altair, rows, title, x, y),
        ]
    return written


def _altair() -> Any:
    try:
        import altair
        import vl_convert  # noqa: F401  (altair's SVG writer)
    except ImportError as error:
        raise MissingExtra(error.name or "altair", "report", "--figures") from error
    return altair


def _csv(path: Path, rows: Rows) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def _svg(path: Path, altair: Any, rows: Rows, title: str, x: Any, y: Any) -> Path:
    # Okabe and Ito's blue and vermilion: told apart with any colour vision, and by dashes in print
    colour = altair.Color("eps:N", title="eps", scale=altair.Scale(range=["#0072B2", "#D55E00"]))
    dash = altair.StrokeDash("eps:N", title="eps")
    points = [{**row, "eps": f"{row['eps']:g}"} for row in rows]
    chart = altair.Chart(altair.Data(values=points), title=title, width=480, height=300)
    chart = chart.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash)
    chart.save(str(path), format="svg")
    return path
