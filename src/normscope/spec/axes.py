"""Axis patterns for layers that say their axes by number or by count."""

from __future__ import annotations

from collections.abc import Sequence

_LAST = {1: "d", 2: "l d", 3: "c h w"}


def last_axes(count: int) -> str:
    """Names for the last ``count`` axes: ``d``, ``l d``, ``c h w``, else ``d1 d2 ...``."""
    return _LAST.get(count) or " ".join(f"d{i}" for i in range(1, count + 1))


def erase(dims: Sequence[int], ndim: int | None) -> str | None:
    """The pattern that erases the axes ``dims`` and keeps all others, or None where it depends on the rank.

    With ``ndim`` None, all dims must count from the same end. Axis 0, where it has a name, is ``b``; others are
    ``x1``, ``x2`` where kept and ``d1``, ``d2`` where erased.

    >>> erase((1,), 4), erase((3,), 4), erase((0, 2, 3), None), erase((0, -1), None)
    ('b d1 ... -> b ...', '... d -> ...', 'b x1 d2 d3 ... -> x1 ...', None)
    """
    if ndim is not None:
        if not all(-ndim <= dim < ndim for dim in dims):
            return None
        dims = sorted({dim % ndim for dim in dims})
        if dims == list(range(ndim - len(dims), ndim)):
            return f"... {last_axes(len(dims))} -> ..."
    if all(dim >= 0 for dim in dims):
        names = ["b", *(f"{'d' if i in dims else 'x'}{i}" for i in range(1, max(dims) + 1))]
        kept = [name for i, name in enumerate(names) if i not in dims]
        return f"{' '.join(names)} ... -> {' '.join([*kept, '...'])}"
    if all(dim < 0 for dim in dims):
        span = range(min(dims), 0)
        if set(span) == set(dims):
            return f"... {last_axes(len(span))} -> ..."
        names = [f"{'d' if i in dims else 'x'}{i - min(dims)}" for i in span]
        kept = [name for name in names if name.startswith("x")]
        return f"... {' '.join(names)} -> {' '.join(['...', *kept])}"
    return None
