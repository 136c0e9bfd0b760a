"""Axes that a layer names by number, as patterns: Keras and Flax count from either end and put channels anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from normscope.spec.axes import erase


def over_axes(erased: Sequence[int], features: Sequence[int], ndim: int | None) -> tuple[str, str] | None:
    """The pattern that erases ``erased``, and the axes ``features`` by its names; None where it depends on the rank.

    >>> over_axes((-1,), (-1,), None), over_axes((1,), (1,), None), over_axes((-1,), (1,), None)
    (('... d -> ...', 'd'), ('b d1 ... -> b ...', 'd1'), None)
    >>> over_axes((-1,), (1,), 3)
    ('b x1 d2 -> b x1', 'x1')
    """
    if ndim is not None:
        erased, features = (sorted({axis % ndim for axis in axes}) for axes in (erased, features))
    stats = erase(erased, ndim)
    if stats is not None:
        names = _names(stats, ndim)
        if all(axis in names for axis in features):
            return stats, " ".join(names[axis] for axis in features)
    if ndim is None:
        return None
    every = ["b", *(f"{'d' if axis in erased else 'x'}{axis}" for axis in range(1, ndim))]
    kept = [name for axis, name in enumerate(every) if axis not in erased]
    return f"{' '.join(every)} -> {' '.join(kept)}", " ".join(every[axis] for axis in features)


def _names(stats: str, ndim: int | None) -> dict[int, str]:
    """Axis -> its name in a pattern whose ellipsis stands first or last."""
    left = stats.partition(" ->")[0].split()
    if left[-1] == "...":
        return dict(enumerate(left[:-1]))
    offset = (ndim or 0) - len(left)
    return {axis + offset: name for axis, name in enumerate(left) if name != "..."}


def channels_at(axis: int, ndim: int | None, channel: str = "c") -> str:
    """The left side of a pattern with the channels at ``axis``.

    >>> channels_at(-1, None), channels_at(1, None, "(g c)"), channels_at(3, 4), channels_at(-2, None)
    ('b ... c', 'b (g c) ...', 'b ... c', 'b ... c x1')
    """
    if ndim is not None and axis % ndim == ndim - 1:
        axis = -1
    if axis >= 0:
        before = ["b", *(f"x{i}" for i in range(1, axis))] if axis else []
        return " ".join([*before, channel, "..."])
    return " ".join(["b", "...", channel, *(f"x{i}" for i in range(1, -axis))])
