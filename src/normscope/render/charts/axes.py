"""Which axes a normalization erases: a corner of the input, with one statistic set dark."""

from __future__ import annotations

from itertools import groupby, product
from math import prod
from typing import TYPE_CHECKING, Any

from normscope.render.charts.figure import BLUE, MUTED, PALE, WIDTH, Figure, data, drawing, figure
from normscope.spec import PatternError

if TYPE_CHECKING:
    from normscope.doctor.report import SiteRow
    from normscope.spec.pattern import Axis

DOWN = (5, 2)
"""shown of the axes that the first dimension of the input is made of, outermost first"""
ACROSS = ((8,), (5, 4), (4, 3, 2), (3, 2, 2, 2))
"""shown of the axes behind it, where there are one, two, three or four"""
GAP = 0.6
"""before a new place on an outer axis, in cells; half of it one level further in, and so on"""
CELL = 0.86
UNIT = 20.0
"""pixels of a cell, where there is room for it"""

Part = tuple[str, bool, int]
"""neighbouring axes that are kept or erased alike: name, kept, number of places"""


def axes_figure(row: SiteRow) -> Figure | None:
    """The sets of the first shape that came; None where there is none, or the specification is not known."""
    if row.spec is None or not row.shapes:
        return None
    try:
        bound = row.spec.bind(row.shapes[0])
    except PatternError:
        return None
    if bound.ragged or 0 in bound.shape or len(bound.axes) < 2:
        return None
    rows = [
        {"axis": name(a), "size": a.size, "kept": str(a.kept).lower(), "input dimension": a.dim}
        for a in bound.axes
    ]
    return figure("axes", "Axes", _caption(row, bound.axes), _picture(bound.axes), rows)


def name(axis: Axis) -> str:
    """An axis for people: its letter, or the dimension of the input where the pattern has none."""
    return f"axis {axis.dim}" if axis.name.startswith("...") else axis.name


def _caption(row: SiteRow, axes: tuple[Axis, ...]) -> str:
    kept, erased = ([a for a in axes if a.kept is which] for which in (True, False))
    size, sets = prod(a.size for a in erased), prod(a.size for a in kept)
    shape = " × ".join(map(str, row.shapes[0]))
    over = _told(erased) if erased else "no axis"
    each = f"one for each place on {_told(kept)}" if kept else "one for the whole input"
    return (
        f"Input {shape}. The statistics run over {over}: {size} element{'s' * (size != 1)} a set, {each} "
        f"({sets} in all). The picture shows a corner of the input; the dark cells belong to one set."
    )


def _told(axes: list[Axis]) -> str:
    return ", ".join(f"{name(a)} ({a.size})" for a in axes)


def _parts(axes: list[Axis]) -> list[Part]:
    """Neighbours of one kind as one: kept or erased alike, and of the pattern's letters or of its ellipsis alike."""
    return [
        (" × ".join(name(a) for a in together), kept, prod(a.size for a in together))
        for (kept, _), group in groupby(axes, key=lambda a: (a.kept, a.name.startswith("...")))
        for together in [list(group)]
    ]


def _places(parts: list[Part], most: tuple[int, ...]) -> list[tuple[float, bool]]:
    """Where each cell lies along one direction, and whether it is at the first place of every kept axis."""
    found, at, before = [], 0.0, None
    for places in product(*(range(min(size, n)) for (_, _, size), n in zip(parts, most, strict=False))):
        if before is not None:
            level = next(i for i, (a, b) in enumerate(zip(before, places, strict=True)) if a != b)
            at += 1 + (GAP / 2**level if level < len(parts) - 1 else 0.0)
        found.append(
            (at, all(place == 0 for place, (_, kept, _) in zip(places, parts, strict=False) if kept))
        )
        before = places
    return found


def _picture(axes: tuple[Axis, ...]) -> Any:
    altair = drawing()

    down, across = _parts([a for a in axes if a.dim == 0]), _parts([a for a in axes if a.dim != 0])
    rows, columns = _places(down, DOWN), _places(across, ACROSS[min(len(across), 4) - 1])
    cells = [
        {"x": x, "x2": x + CELL, "y": y, "y2": y + CELL, "set": "one set" if here and there else "others"}
        for y, here in rows
        for x, there in columns
    ]
    wide, high = columns[-1][0] + CELL, rows[-1][0] + CELL
    unit = min(UNIT, WIDTH / wide)

    def title(parts: list[Part]) -> str:
        return "  ›  ".join(f"{what} ({size}, {'kept' if kept else 'erased'})" for what, kept, size in parts)

    def axis(parts: list[Part], orient: str) -> Any:
        return altair.Axis(
            title=title(parts),
            orient=orient,
            labels=False,
            ticks=False,
            grid=False,
            domain=False,
            titleColor=MUTED,
        )

    return (
        altair.Chart(data(cells), width=wide * unit, height=high * unit)
        .mark_rect()
        .encode(
            x=altair.X("x:Q", axis=axis(across, "top"), scale=altair.Scale(domain=[0, wide], nice=False)),
            x2="x2:Q",
            y=altair.Y("y:Q", axis=axis(down, "left"), scale=altair.Scale(domain=[high, 0], nice=False)),
            y2="y2:Q",
            color=altair.Color(
                "set:N", legend=None, scale=altair.Scale(domain=["one set", "others"], range=[BLUE, PALE])
            ),
        )
    )
