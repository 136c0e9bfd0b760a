"""The whole network at a glance: spread and error of every site, in the order in which they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normscope.render.charts.figure import (
    BLUE,
    HEIGHT,
    ORANGE,
    Figure,
    data,
    drawing,
    figure,
    log_axis,
    number,
)
from normscope.render.grouping import label

if TYPE_CHECKING:
    from normscope.doctor.report import SiteRow

WIDE = 320
LIVE = ("batch", "input")


def network_figures(sites: Sequence[SiteRow], measurements: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Of networks with two sites or more that were measured."""
    numbered = [(i, row.name, measurements.get(row.name, {})) for i, row in enumerate(sites, 1)]
    found = [_variances(numbered), _errors(numbered)]
    return [f for f in found if f is not None]


def _variances(numbered: list[tuple[int, str, Mapping[str, Any]]]) -> Figure | None:
    altair = drawing()

    rows = []
    for i, name, measured in numbered:
        statistics, floors = measured.get("statistics", ()), measured.get("denominators", ())
        live = [s for s in statistics if s["mode"] in LIVE] or list(statistics)
        if not live or not live[0]["live"]:
            continue
        low, middle, high = live[0]["variance"]
        rows.append(
            {
                "number": i,
                "site": label(name),
                "5 %": low,
                "median": middle,
                "95 %": high,
                "eps": floors[0]["floor"] ** 2 if floors else 0.0,
            }
        )
    shown = [row for row in rows if row["5 %"] > 0]
    if len(shown) < 2:
        return None
    values = [row[key] for row in shown for key in ("5 %", "95 %", "eps") if row[key] > 0]
    flat = [
        {"number": r["number"], "low": r["5 %"], "middle": r["median"], "high": r["95 %"], "eps": r["eps"]}
        for r in shown
    ]
    x = _number_axis(numbered)
    y = log_axis(altair.Y, "low", "variance", values)
    base = altair.Chart(data(flat), width=WIDE, height=HEIGHT)
    chart = altair.layer(
        base.mark_rule(color=BLUE, strokeWidth=2).encode(x=x, y=y, y2="high:Q"),
        base.mark_circle(color=BLUE, size=34, opacity=1).encode(x=x, y="middle:Q"),
        base.transform_filter("datum.eps > 0")
        .mark_tick(color=ORANGE, thickness=2, size=10)
        .encode(x=x, y="eps:Q"),
    )
    least = min(shown, key=lambda row: row["median"])
    caption = (
        f"Variance (mean square without centering) of the statistic sets of {len(shown)} sites: median (dot) and the "
        f"middle 90 % (line); ticks are eps. The smallest median is {number(least['median'])}, at {least['site']}, "
        f"with eps {number(least['eps'])}."
    )
    return figure("network-variances", "Variances along the network", caption, chart, rows)


def _errors(numbered: list[tuple[int, str, Mapping[str, Any]]]) -> Figure | None:
    altair = drawing()

    kinds = ("measured", "allowed by rounding")
    rows = [
        {"number": i, "site": label(name), "kind": kind, "error": measured["conditioning"][key]}
        for i, name, measured in numbered
        if "conditioning" in measured
        for kind, key in zip(kinds, ("error", "allowed"), strict=True)
    ]
    shown = [row for row in rows if isinstance(row["error"], float) and row["error"] > 0]
    measured = [row for row in shown if row["kind"] == kinds[0]]
    if (
        len({row["number"] for row in shown}) < 2 or not measured
    ):  # to the last bit: no point on a logarithmic axis
        return None
    bare = [{key: value for key, value in row.items() if key != "site"} for row in shown]
    chart = (
        altair.Chart(data(bare), width=WIDE, height=HEIGHT)
        .mark_point(size=34, strokeWidth=1.4)
        .encode(
            x=_number_axis(numbered),
            y=log_axis(altair.Y, "error", "error, in standard deviations", (row["error"] for row in shown)),
            color=altair.Color("kind:N", scale=altair.Scale(domain=list(kinds), range=[BLUE, ORANGE])),
            shape=altair.Shape(
                "kind:N", scale=altair.Scale(domain=list(kinds), range=["circle", "triangle-up"])
            ),
        )
    )
    worst = max(measured, key=lambda row: row["error"])
    caption = (
        f"Largest error of the output of {len(measured)} sites against the float64 reference, in standard deviations "
        f"of the output, and what rounding explains there. The largest is {number(worst['error'])}, at {worst['site']}."
    )
    return figure("network-errors", "Measured error along the network", caption, chart, rows)


def _number_axis(numbered: list[tuple[int, str, Mapping[str, Any]]]) -> Any:
    altair = drawing()

    return altair.X(
        "number:Q",
        scale=altair.Scale(domain=[0.5, len(numbered) + 0.5], nice=False),
        axis=altair.Axis(title="site, by its number", grid=False, tickMinStep=1, format="d"),
    )
