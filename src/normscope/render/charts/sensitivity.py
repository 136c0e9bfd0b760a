"""How the samples of a batch move each other at a site, as a heat map over pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normscope.render.charts.figure import BLUE, LINE, MUTED, Figure, data, drawing, figure, number

SIDE = 230


def sensitivity_figure(measured: Mapping[str, Any]) -> Figure | None:
    """None where no sample moves another; :func:`sensitivity_words` says so."""
    altair = drawing()

    samples, matrix = measured["samples"], measured["matrix"]
    if not samples:
        return None
    rows = [
        {"moved": i, "by": j, "rate": rate}
        for i, line in zip(samples, matrix, strict=True)
        for j, rate in zip(samples, line, strict=True)
    ]
    others = [row for row in rows if row["moved"] != row["by"]]
    own = [row for row in rows if row["moved"] == row["by"]]
    most = max(row["rate"] for row in others)
    least = min(row["rate"] for row in others)
    x = altair.X(
        "by:O", axis=altair.Axis(title="sample whose input changes", labelAngle=0, domain=False, ticks=False)
    )
    y = altair.Y("moved:O", axis=altair.Axis(title="sample whose output moves", domain=False, ticks=False))
    shade = altair.FillOpacity(
        "rate:Q", legend=None, scale=altair.Scale(domain=[0, most or 1.0], range=[0.03, 1])
    )
    cells = altair.Chart(data(others), width=SIDE, height=SIDE)
    layers = [
        cells.mark_rect(fill=BLUE, stroke=LINE, strokeWidth=0.5).encode(x=x, y=y, fillOpacity=shade),
        altair.Chart(data(own)).mark_text(text="·", color=MUTED, fontSize=16).encode(x=x, y=y),
    ]
    chart = altair.layer(*layers)
    caption = (
        f"Training mode, {len(samples)} samples of the batch. A cell says how fast a sample's normalized output moves, "
        f"in standard deviations, per relative change of another's input: {number(least)} to {number(most)}, the "
        f"darker the more; by its own input (dots) a sample moves at up to {number(max(row['rate'] for row in own))}."
    )
    return figure("companions", "Companion sensitivity", caption, chart, rows)


def sensitivity_words(measured: Mapping[str, Any]) -> str:
    """What to say where there is no picture."""
    if measured["samples"]:
        return ""
    if measured["coupled"]:
        return (
            f"In training, samples move each other here; by how much was not computed: {measured['reason']}."
        )
    why = (
        "stored statistics normalize"
        if measured["mode"] in ("running", "frozen")
        else "every statistic set lies within one sample"
    )
    return f"No sample moves another's output here, also in training: {why}."
