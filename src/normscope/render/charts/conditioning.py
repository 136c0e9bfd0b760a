"""How hard the sets of a site are to center, and how large the error of its output is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normscope.render.charts.figure import (
    BLUE,
    HEIGHT,
    ORANGE,
    WIDTH,
    Figure,
    data,
    drawing,
    figure,
    log_axis,
    number,
)


def conditioning_figure(measured: Mapping[str, Any]) -> Figure | None:
    """None where no set compared has a mean to take off and an error that is a number."""
    altair = drawing()

    kinds = ("measured", "allowed by rounding")
    rows = [
        {"kappa": kappa, "error": value, "kind": kind}
        for kappa, error, allowed in measured["points"]
        for kind, value in zip(kinds, (error, allowed), strict=True)
    ]
    known = [row for row in rows if all(isinstance(v, (int, float)) for v in (row["kappa"], row["error"]))]
    shown = [row for row in known if row["kappa"] > 0 and row["error"] > 0]
    if not any(row["kind"] == kinds[0] for row in shown):
        return None
    scale = altair.Scale(domain=list(kinds), range=[BLUE, ORANGE])
    shape = altair.Scale(domain=list(kinds), range=["circle", "triangle-up"])
    chart = (
        altair.Chart(data(shown), width=WIDTH, height=HEIGHT)
        .mark_point(size=26, filled=False, strokeWidth=1.3)
        .encode(
            x=log_axis(altair.X, "kappa", "κ = |mean| / denominator", (row["kappa"] for row in shown)),
            y=log_axis(altair.Y, "error", "error, in standard deviations", (row["error"] for row in shown)),
            color=altair.Color("kind:N", scale=scale),
            shape=altair.Shape("kind:N", scale=shape),
        )
    )
    caption = (
        f"{len(measured['points'])} sets against the float64 reference ({measured['input_dtype']} in, arithmetic in "
        f"{measured['working']}). Largest error {_told(measured['error'])} standard deviations of the output, where "
        f"rounding explains {_told(measured['allowed'])} and κ is {_told(measured['kappa'])}; typically "
        f"{_told(measured['typical_error'])}."
    )
    return figure("conditioning", "Conditioning and measured error", caption, chart, rows)


def _told(value: Any) -> str:
    return number(value) if isinstance(value, (int, float)) else str(value)
