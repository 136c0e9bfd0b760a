"""How many independent values the statistics of a site rest on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normscope.render.charts.figure import BLUE, INK, WIDTH, Figure, data, drawing, figure, log_axis, number


def effective_samples_figure(measured: Mapping[str, Any]) -> Figure:
    altair = drawing()

    elements = measured["samples"] * measured["elements"]
    rows = [
        {"what": "samples", "count": measured["samples"]},
        {"what": "independent values", "count": measured["effective"]},
        {"what": "elements", "count": elements},
    ]
    shown = [{**row, "text": number(row["count"])} for row in rows]
    y = altair.Y(
        "what:N", sort=None, axis=altair.Axis(title=None, domain=False, ticks=False, labelFontSize=12)
    )
    x = log_axis(altair.X, "count", "number, logarithmic", (1.0, 3.0 * elements))
    base = altair.Chart(data(shown), width=WIDTH - 60, height=90)
    chart = altair.layer(
        base.mark_bar(color=BLUE, height=16).encode(x=x, y=y, x2=altair.datum(1)),
        base.mark_text(align="left", dx=4, color=INK).encode(x=x, y=y, text="text:N"),
    )
    caption = (
        f"A batch mean of this site averages {elements} elements of {measured['samples']} samples; it varies like the "
        f"mean of {number(measured['effective'])} independent values, {number(measured['per_sample'])} a sample."
    )
    return figure("effective-samples", "Effective sample size", caption, chart, rows)
