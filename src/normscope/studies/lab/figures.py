"""Figures of studies: means over seeds with their intervals, drawn by Altair, with the numbers behind them.

A study's figure is a function of the table that returns a `Figure`, most often by `lines` or `points` in one call. What
these cannot draw is a chart of one's own, handed to `chart` with its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from normscope.errors import BadInput
from normscope.render.charts.figure import (
    BLUE,
    HEIGHT,
    MUTED,
    ORANGE,
    WIDTH,
    Figure,
    data,
    drawing,
    drawn,
    figure,
    log_axis,
    number,
)
from normscope.render.charts.figure import table as numbers_as_csv
from normscope.studies.lab.table import Table

__all__ = ["Figure", "chart", "lines", "means", "number", "points"]

SERIES = (
    (BLUE, "#74b6f5"),
    (ORANGE, "#f7a15f"),
    ("#1b7f5c", "#58c79d"),
    ("#8e3f97", "#d295db"),
    ("#7a6a00", "#d0bd4e"),
    ("#a61e4d", "#f283a8"),
    ("#3d4a5c", "#b4c0d1"),
    ("#5a3a1f", "#c8a184"),
)
"""colours of arms in light and in dark; arms also differ in dash and in shape, for whoever sees no colours"""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [10, 3], [1, 3], [6, 2, 1, 2])
SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
)
LABELS = "format(datum.value, datum.value != 0 && (abs(datum.value) < 0.001 || abs(datum.value) >= 1e5) ? '~e' : '~g')"
Rows = list[dict[str, Any]]


def chart(key: str, title: str, caption: str, picture: Any, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """An Altair chart of one's own, and the numbers behind it."""
    return figure(key, title, caption, picture, [dict(row) for row in rows])


def lines(
    table: Table,
    key: str,
    title: str,
    caption: str,
    *,
    x: str,
    y: str,
    by: str | None = None,
    panel: str | None = None,
    x_title: str = "",
    y_title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    formula: str | None = None,
    y_domain: tuple[float, float] | None = None,
) -> Figure:
    """The mean of ``y`` over seeds against the number ``x``, a line an arm, with the interval as a band.

    Arguments:
        by: the column whose values are the arms, 8 at most.
        panel: the column whose values get a picture each, on the same axes.
        formula: a column with what a formula predicts: drawn as lines, with what was measured as points.
        log_x, log_y: logarithmic; values of 0 and below have no place there, and the caption says how many there are.
        y_domain: of the axis; as the values are, if not given.
    """
    columns = [column for column in (x, by, panel) if column is not None]
    rows = means(table, y, *columns)
    if formula is not None:
        predicted = {tuple(r[c] for c in columns): r["mean"] for r in means(table, formula, *columns)}
        rows = [{**row, formula: predicted[tuple(row[c] for c in columns)]} for row in rows]
    shown, caption = _placed(rows, caption, by, panel, log_x=log_x, log_y=log_y, x=x, formula=formula)
    heights = [row[c] for row in shown for c in ("mean", "low", "high", "formula") if row[c] is not None]
    altair = drawing()
    arm = _arms(by, shown)

    def up(column: str) -> Any:
        return _axis(altair.Y, column, y_title or y, y_domain or heights, log=log_y)

    def picture(some: Any) -> Any:
        base = altair.Chart(some, width=WIDTH, height=HEIGHT).encode(
            x=_axis(altair.X, "x", x_title or x, [row["x"] for row in shown], log=log_x), color=arm["color"]
        )
        points = base.mark_point(size=34, filled=True, opacity=0.9).encode(y=up("mean"), shape=arm["shape"])
        if formula is not None:
            return altair.layer(
                base.mark_line(strokeWidth=1.2).encode(y=up("formula"), strokeDash=arm["dash"]), points
            )
        band = base.mark_area(opacity=0.16).encode(y=up("low"), y2="high:Q")
        line = base.mark_line(strokeWidth=1.8).encode(y=up("mean"), strokeDash=arm["dash"])
        return altair.layer(band, line, points)

    return Figure(key, title, caption, _panels(shown, picture), numbers_as_csv(rows))


def points(
    table: Table,
    key: str,
    title: str,
    caption: str,
    *,
    x: str,
    rows: str,
    by: str | None = None,
    panel: str | None = None,
    x_title: str = "",
    log_x: bool = False,
    zero: bool = False,
) -> Figure:
    """The mean of ``x`` over seeds as a point with its interval, a line for each value of the column ``rows``.

    Arguments:
        by: the column whose values are arms, 8 at most, beside each other on a line of the picture.
        panel: the column whose values get a picture each.
        log_x: as of `lines`.
        zero: mark 0, for differences.
    """
    found = means(table, x, *[column for column in (rows, by, panel) if column is not None])
    shown, caption = _placed(found, caption, by, panel, log_y=log_x, row=rows)
    altair = drawing()
    arm = _arms(by, shown)
    order = list(dict.fromkeys(row["row"] for row in shown))
    values = [row[c] for row in shown for c in ("mean", "low", "high")] + [0.0] * zero
    plain = altair.Axis(title=None, domain=False, ticks=False, grid=True, labelLimit=260, labelFontSize=12)
    down: dict[str, Any] = {"y": altair.Y("row:N", sort=order, axis=plain)}
    if by is not None:
        down["yOffset"] = altair.YOffset("arm:N", sort=arm["names"])

    def across(column: str) -> Any:
        return _axis(altair.X, column, x_title or x, values, log=log_x)

    def picture(some: Any) -> Any:
        step = max(20, 11 * len(arm["names"]))
        base = altair.Chart(some, width=WIDTH, height=step * len(order)).encode(color=arm["color"], **down)
        layers = [
            base.mark_rule(strokeWidth=2).encode(x=across("low"), x2="high:Q"),
            base.mark_point(size=44, filled=True).encode(x=across("mean"), shape=arm["shape"]),
        ]
        if zero:
            at = altair.Chart(data([{"low": 0.0}])).mark_rule(color=MUTED, strokeDash=[4, 3])
            layers.insert(0, at.encode(x=across("low")))
        return altair.layer(*layers)

    return Figure(key, title, caption, _panels(shown, picture), numbers_as_csv(found))


def means(table: Table, measure: str, *columns: str) -> Rows:
    """A row for each combination of these columns where something was measured: mean, low and high, number of seeds.

    Without an interval (one seed) low and high are the mean; where a value is not finite all three are None.

    Raises BadInput where there is none.
    """
    rows = []
    for fixed, group in table.groups(*columns):
        if (
            measure not in group.columns
            or not group.values(measure)
            or any(value is None for value in fixed.values())
        ):
            continue
        found = group.interval(measure)
        edges = (found.low, found.high) if found.n > 1 else (found.mean, found.mean)
        told = [None if value != value else value for value in (found.mean, *edges)]
        rows.append({**fixed, **dict(zip(("mean", "low", "high"), told, strict=True)), "seeds": found.n})
    if not rows:
        raise BadInput(f"there is nothing to draw: no row has {measure} and {', '.join(columns)}")
    return rows


def _placed(
    rows: Rows,
    caption: str,
    by: str | None,
    panel: str | None,
    *,
    log_x: bool = False,
    log_y: bool = False,
    x: str | None = None,
    row: str | None = None,
    formula: str | None = None,
) -> tuple[Rows, str]:
    """The rows under the names that charts use, those that have a place; and the caption, which tells of the others."""
    named = [
        {
            "x": None if x is None else r[x],
            "row": "" if row is None else _told(row, r[row], alone=True),
            "arm": "" if by is None else _told(by, r[by]),
            "panel": "" if panel is None else _told(panel, r[panel]),
            "formula": None if formula is None else r[formula],
            **{edge: r[edge] for edge in ("mean", "low", "high")},
        }
        for r in rows
    ]
    shown = [
        r
        for r in named
        if r["mean"] is not None and not (log_x and r["x"] <= 0) and not (log_y and r["mean"] <= 0)
    ]
    if not shown:
        raise BadInput("there is nothing to draw: not one point has a place on these axes")
    if log_y:  # an interval that reaches 0 ends where the picture does
        least = min(value for r in shown for value in (r["low"], r["mean"]) if value > 0)
        shown = [{**r, "low": max(r["low"], least), "formula": r["formula"] or None} for r in shown]
    missing = len(named) - len(shown)
    if missing:
        caption += (
            f" {missing} of {len(named)} points have no place on these axes (0 or below, or not finite)."
        )
    return shown, caption


def _told(column: str, value: Any, *, alone: bool = False) -> str:
    """A value for people: text as it is, a number with what it is of."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return column if value else f"no {column}"
    return f"{value:g}" if alone else f"{column} {value:g}"


def _axis(channel: Any, column: str, title: str, values: Sequence[float], *, log: bool) -> Any:
    if log:
        return log_axis(channel, column, title, [value for value in values if value > 0])
    altair = drawing()
    scale = altair.Scale(domain=[min(values), max(values)], nice=True, zero=False)
    return channel(f"{column}:Q", axis=altair.Axis(title=title, tickCount=5, labelExpr=LABELS), scale=scale)


def _arms(by: str | None, rows: Rows) -> dict[str, Any]:
    """Colour, dash and shape of the arms, and their names."""
    altair = drawing()
    names = list(dict.fromkeys(row["arm"] for row in rows))
    if by is None:
        return {
            "color": altair.value(BLUE),
            "dash": altair.value([1, 0]),
            "shape": altair.value("circle"),
            "names": names,
        }
    if len(names) > len(SERIES):
        raise BadInput(
            f"{by} has {len(names)} values, and {len(SERIES)} arms can be told apart: use panel for some"
        )
    room = WIDTH if len({row["panel"] for row in rows}) == 1 else 2 * WIDTH
    columns = max(1, room // (30 + 7 * max(map(len, names))))
    legend = altair.Legend(title=None, symbolStrokeWidth=0, symbolOpacity=1, columns=columns, labelLimit=220)

    def told_apart(channel: Any, choice: Sequence[Any], legend: Any = legend) -> Any:
        scale = altair.Scale(domain=names, range=list(choice[: len(names)]))
        return channel("arm:N", sort=names, scale=scale, legend=legend)

    return {
        "color": told_apart(altair.Color, [light for light, _ in SERIES]),
        "dash": told_apart(altair.StrokeDash, DASHES, None),
        "shape": told_apart(altair.Shape, SHAPES),
        "names": names,
    }


def _panels(rows: Rows, picture: Callable[[Any], Any]) -> str:
    """A picture for each value of the panel column, two beside each other, as SVG.

    Rows go in by name: Altair copies whatever is inside of a chart again and again.
    """
    altair = drawing()
    headings = list(dict.fromkeys(row["panel"] for row in rows))
    sets = {f"rows {heading}": [row for row in rows if row["panel"] == heading] for heading in headings}
    if headings == [""]:
        return drawn(picture(altair.NamedData("rows ")), sets)
    style = {"fontSize": 12, "fontWeight": "normal", "anchor": "start", "color": MUTED}
    parts = [
        picture(altair.NamedData(f"rows {heading}")).properties(title=altair.TitleParams(heading, **style))
        for heading in headings
    ]
    return drawn(altair.concat(*parts, columns=2, spacing=18), sets)
