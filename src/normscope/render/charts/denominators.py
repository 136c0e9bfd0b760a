"""How the denominators of a site are spread, against the least that eps lets them be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

MODES = {"batch": "of the batch", "input": "of the input", "running": "stored", "frozen": "stored, frozen"}


def denominator_figure(measured: Sequence[Mapping[str, Any]]) -> Figure | None:
    """A histogram for each kind of statistics that normalizes there, one above the other on one axis."""
    altair = drawing()

    if not measured:
        return None
    rows = [
        {
            "statistics": MODES[h["mode"]],
            "from": 10 ** ((h["first"] + i) / h["per_decade"]),
            "to": 10 ** ((h["first"] + i + 1) / h["per_decade"]),
            "sets": count,
        }
        for h in measured
        for i, count in enumerate(h["counts"])
    ]
    floor = measured[0]["floor"]
    edges = [row[key] for row in rows if row["sets"] for key in ("from", "to")] + [floor] * (floor > 0)
    high = HEIGHT if len(measured) == 1 else HEIGHT // 2 - 6
    panels = []
    for h in measured:
        last = h is measured[-1]
        x = log_axis(altair.X, "from", "denominator" if last else "", edges)
        y = altair.Y("sets:Q", axis=altair.Axis(title=f"sets, {MODES[h['mode']]}", tickCount=3, format="~s"))
        mine = [row for row in rows if row["statistics"] == MODES[h["mode"]] and row["sets"]]
        bars = altair.Chart(data(mine), width=WIDTH, height=high).mark_rect(fill=BLUE)
        bars = bars.encode(x=x, x2="to:Q", y=y, y2=altair.datum(0))
        rule = altair.Chart(data([{"from": floor}] if floor > 0 else []))
        panels.append(
            altair.layer(bars, rule.mark_rule(color=ORANGE, strokeDash=[4, 3], strokeWidth=1.5).encode(x=x))
        )
    chart = panels[0] if len(panels) == 1 else altair.vconcat(*panels, spacing=4)
    return figure("denominators", "Denominators against eps", _caption(measured), chart, rows)


def _caption(measured: Sequence[Mapping[str, Any]]) -> str:
    said = [
        f"{MODES[h['mode']]}: {h['sets']} sets, the smallest {number(h['smallest'])}, "
        f"{h['held']} within a tenth of what eps alone gives"
        for h in measured
    ]
    first = measured[0]
    return (
        f"Statistics {'; '.join(said)}. The dashed line at {number(first['floor'])} is the denominator that eps = "
        f"{number(first['eps'])} gives a set without any spread."
    )
