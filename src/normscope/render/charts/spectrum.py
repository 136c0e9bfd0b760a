"""What a normalization lets through: the singular values of its Jacobian at one statistic set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normscope.render.charts.figure import (
    BLUE,
    HEIGHT,
    INK,
    ORANGE,
    WIDTH,
    Figure,
    data,
    drawing,
    figure,
    log_axis,
    number,
)

KINDS = ("kept", "suppressed", "removed")


def spectrum_figure(measured: Mapping[str, Any], *, center: bool) -> Figure | None:
    """``center``: the site takes off a mean, so that the direction of a common shift is among those removed."""
    altair = drawing()

    rows, rank = [], 0
    for level in measured["levels"]:
        rows.append(
            {
                "first": rank + 1,
                "last": rank + level["times"],
                "singular value": level["value"],
                "direction": level["kind"],
            }
        )
        rank += level["times"]
    above = [row["singular value"] for row in rows if row["singular value"] > 0]
    if not above:
        return None
    # A logarithmic axis has no 0: what is removed stands at the bottom, and says so.
    bottom = min(above) if len(above) == len(rows) else min(above) / 30
    shown = [{**row, "at": max(row["singular value"], bottom), "text": _text(row)} for row in rows]
    x = altair.X(
        "first:Q",
        scale=altair.Scale(domain=[0, rank + 1], nice=False),
        axis=altair.Axis(title="direction, by rank", grid=False, tickMinStep=1, tickCount=5, format=",d"),
    )
    y = log_axis(altair.Y, "at", "singular value", [bottom, max(above)])
    colour = altair.Color("direction:N", scale=altair.Scale(domain=list(KINDS), range=[BLUE, ORANGE, ORANGE]))
    shapes = altair.Scale(domain=list(KINDS), range=["circle", "triangle-down", "cross"])
    base = altair.Chart(data(shown), width=WIDTH, height=HEIGHT)
    lines = base.mark_rule(strokeWidth=4, color=BLUE).encode(x=x, x2="last:Q", y=y)
    size = altair.condition("datum.direction == 'kept'", altair.value(26), altair.value(90))
    marks = base.mark_point(filled=True, opacity=1).encode(
        x=altair.X("last:Q"), y=y, color=colour, shape=altair.Shape("direction:N", scale=shapes), size=size
    )
    words = base.transform_filter("datum.text != ''").mark_text(align="right", dx=-9, color=INK)
    chart = altair.layer(lines, marks, words.encode(x=altair.X("last:Q"), y=y, text="text:N"))
    return figure("spectrum", "Jacobian spectrum", _caption(measured, center), chart, rows)


def _text(row: Mapping[str, Any]) -> str:
    if row["direction"] == "removed":
        return "0"
    return number(row["singular value"]) if row["direction"] == "suppressed" else ""


def _caption(measured: Mapping[str, Any], center: bool) -> str:
    found = {kind: [level for level in measured["levels"] if level["kind"] == kind] for kind in KINDS}
    if measured["mode"] in ("running", "frozen"):
        values = [level["value"] for level in found["kept"]]
        return (
            f"Stored statistics normalize: each element is scaled alone, by {number(min(values))} to "
            f"{number(max(values))} over {measured['size']} channels, and nothing is removed."
        )
    which = f"The set {measured['set']}" if measured["set"] else "The whole input"
    said = [f"{v['times']} directions pass, at {number(v['value'])} = 1 / denominator" for v in found["kept"]]
    said += [
        f"of a change of scale {number(v['value'])} passes (triangle), by eps alone"
        for v in found["suppressed"]
    ]
    said += [
        f"removed (cross, drawn at the bottom): {_removed(v['times'], center)}" for v in found["removed"]
    ]
    return f"{which}, {measured['size']} elements, without gain and bias: {'; '.join(said)}."


def _removed(count: int, center: bool) -> str:
    if not center:
        return "a change of scale"
    return "a common shift" if count == 1 else "a common shift, and a change of scale"
