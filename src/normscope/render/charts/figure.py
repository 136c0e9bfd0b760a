"""A figure: a picture, its numbers, and what it shows in words. Drawn by Vega-Lite, offline, as SVG.

Colours are those of ``PALETTE`` in light; a page turns them into those for dark by style rules on the same values, so
that a picture taken out of the page stands by itself.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.render.charts.svg import shrunk

PALETTE = {
    "ink": ("#1c2230", "#e8eaf0"),
    "muted": ("#566072", "#a9b2c3"),
    "line": ("#dfe3ea", "#343c4b"),
    "blue": ("#1261a6", "#74b6f5"),
    "orange": ("#b4480c", "#f7a15f"),
    "pale": ("#c9d6e6", "#3a475a"),
    "paper": ("#ffffff", "#171c26"),
}
"""name: colour in light, colour in dark. Blue and orange are told apart with any colour vision."""
INK, MUTED, LINE, BLUE, ORANGE, PALE, PAPER = (light for light, _ in PALETTE.values())
WIDTH, HEIGHT = 300, 170
FONT = "Arial, Helvetica, sans-serif"
THEME: dict[str, Any] = {
    "aria": False,
    "background": PAPER,
    "font": FONT,
    "padding": 4,
    "view": {"stroke": None},
    "axis": {
        "domainColor": MUTED,
        "gridColor": LINE,
        "labelColor": MUTED,
        "labelFontSize": 11,
        "tickColor": MUTED,
        "titleColor": INK,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 6,
        "labelOverlap": "greedy",
    },
    "legend": {
        "labelColor": INK,
        "labelFontSize": 12,
        "orient": "top",
        "title": None,
        "symbolStrokeWidth": 2,
        "offset": 4,
    },
}

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    key: str
    """short name, part of the names of files"""
    title: str
    caption: str
    """what the picture shows, with its main numbers: its text alternative"""
    svg: str
    csv: str


def figure(key: str, title: str, caption: str, chart: Any, rows: Rows) -> Figure:
    """A drawn Altair chart with its numbers."""
    return Figure(key, title, caption, drawn(chart), table(rows))


def drawing() -> Any:
    """Altair, imported where a chart is made: it takes half a second."""
    import altair

    return altair


def drawn(chart: Any, named: Mapping[str, Rows] | None = None) -> str:
    """An Altair chart as SVG; ``named`` are the rows that it has by name only."""
    import vl_convert

    whole = chart.configure(**THEME).to_dict()
    return shrunk(vl_convert.vegalite_to_svg(whole if named is None else {**whole, "datasets": named}))


def table(rows: Rows) -> str:
    """Rows as CSV, the columns those of the first row."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def data(rows: Iterable[dict[str, Any]]) -> Any:
    """Rows as data inside a chart."""
    altair = drawing()

    return altair.Data(values=list(rows))


def log_axis(channel: Any, name: str, title: str, values: Iterable[float]) -> Any:
    """A position channel on a logarithmic scale over these values, all above 0."""
    altair = drawing()

    known = list(values)
    low, high = math.log10(min(known)), math.log10(max(known))
    room = max(0.05 * (high - low), 0.08)
    low, high = low - room, high + room
    axis = altair.Axis(title=title, values=ticks(low, high), labelExpr=LABELS)
    return channel(f"{name}:Q", axis=axis, scale=altair.Scale(type="log", domain=[10**low, 10**high]))


LABELS = "format(datum.value, datum.value < 0.001 || datum.value >= 10000 ? '~e' : '~g')"


def ticks(low: float, high: float) -> list[float]:
    """At most six numbers from 10^low to 10^high: powers of ten, or between them where there are few.

    >>> ticks(-3.2, 1.4), ticks(-0.1, 1.1), ticks(0.0, 0.2)
    ([0.001, 0.01, 0.1, 1.0, 10.0], [1.0, 2.0, 5.0, 10.0], [1.0, 1.2, 1.4])
    """
    lowest, highest = math.ceil(low), math.floor(high)
    if highest - lowest >= 2:
        return [10.0**k for k in range(lowest, highest + 1, -(-(highest - lowest + 1) // 6))]
    for steps in ((1, 2, 5), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)):
        found = [s * 10.0**k for k in range(lowest - 1, highest + 1) for s in steps]
        inside = [float(f"{value:.3g}") for value in found if low <= math.log10(value) <= high]
        if len(inside) >= 3:
            return inside[:: -(-len(inside) // 6)]
    return [float(f"{10 ** ((low + high) / 2):.3g}")]


def number(value: float) -> str:
    """For captions: three significant digits, whole numbers below a million in full.

    >>> number(0.00316228), number(4096.4), number(1.5e-07)
    ('0.00316', '4096', '1.5e-07')
    """
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
