"""Batch statistics against running statistics, a point a channel: on the diagonal where they agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normscope.render.charts.figure import (
    BLUE,
    HEIGHT,
    MUTED,
    WIDTH,
    Figure,
    data,
    drawing,
    figure,
    log_axis,
    number,
)


def channel_figures(measured: Mapping[str, Any]) -> list[Figure]:
    """Means, and variances where any is above 0."""
    return [found for found in (_means(measured), _variances(measured)) if found is not None]


def _rows(measured: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    columns = (measured["index"], measured[f"running_{what}"], measured[f"batch_{what}"])
    return [{"channel": c, "running": r, "batch": b} for c, r, b in zip(*columns, strict=True)]


def _means(measured: Mapping[str, Any]) -> Figure:
    altair = drawing()

    rows = _rows(measured, "mean")
    values = [row[key] for row in rows for key in ("running", "batch")]
    low, high = min(values), max(values)
    room = 0.04 * (high - low) or 1.0
    scale = altair.Scale(domain=[low - room, high + room], nice=False, zero=False)
    axis = {"tickCount": 5, "format": "~g"}
    x = altair.X("running:Q", scale=scale, axis=altair.Axis(title="running mean", **axis))
    y = altair.Y("batch:Q", scale=scale, axis=altair.Axis(title="mean of this batch", **axis))
    return figure(
        "channel-means",
        "Means by channel",
        _caption(measured, "means", rows),
        _scatter(rows, x, y, low, high),
        rows,
    )


def _variances(measured: Mapping[str, Any]) -> Figure | None:
    altair = drawing()

    rows = _rows(measured, "var")
    shown = [row for row in rows if row["running"] > 0 and row["batch"] > 0]
    if not shown:
        return None
    values = [row[key] for row in shown for key in ("running", "batch")]
    x = log_axis(altair.X, "running", "running variance", values)
    y = log_axis(altair.Y, "batch", "variance of this batch", values)
    chart = _scatter(shown, x, y, min(values), max(values))
    caption = _caption(measured, "variances", rows)
    if len(shown) < len(rows):
        caption += f" {len(rows) - len(shown)} with a variance of 0 have no place on these axes."
    return figure("channel-variances", "Variances by channel", caption, chart, rows)


def _scatter(rows: list[dict[str, Any]], x: Any, y: Any, low: float, high: float) -> Any:
    altair = drawing()

    ends = altair.Chart(data([{"running": low, "batch": low}, {"running": high, "batch": high}]))
    points = altair.Chart(data(rows), width=WIDTH, height=HEIGHT)
    return altair.layer(
        ends.mark_line(color=MUTED, strokeDash=[4, 3], strokeWidth=1).encode(x=x, y=y),
        points.mark_circle(color=BLUE, opacity=0.75, size=26).encode(x=x, y=y),
    )


def _caption(measured: Mapping[str, Any], what: str, rows: list[dict[str, Any]]) -> str:
    worst = rows[0]
    told = len(rows)
    some = (
        f"{told} of {measured['channels']} channels, half of them those farthest apart, the others an even choice"
        if told < measured["channels"]
        else f"All {told} channels"
    )
    return (
        f"{some}, {measured['samples']} samples. Farthest apart, by mean or variance, is channel {worst['channel']}: "
        f"{what} {number(worst['running'])} stored and {number(worst['batch'])} in this batch. "
        "On the dashed line both are equal."
    )
