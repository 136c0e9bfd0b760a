"""Where each axis of a view comes from: ``out[i]`` is the input axis that output axis ``i`` is, or None.

>>> import torch
>>> x = torch.zeros(2, 3, 4, 5)
>>> view_axes("permute", (x, 0, 2, 3, 1), {}, (2, 3, 4, 5), (2, 4, 5, 3))
(0, 2, 3, 1)
>>> view_axes("flatten", (x, 2), {}, (2, 3, 4, 5), (2, 3, 20))
(0, 1, None)
"""

from __future__ import annotations

from typing import Any

Axes = tuple["int | None", ...]
Shape = tuple[int, ...]


def view_axes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], before: Shape, after: Shape) -> Axes:
    """Output axis -> input axis for the view or slice ``name`` of a tensor of shape ``before``."""
    rank = len(before)
    if name in ("permute", "transpose", "movedim", "t", "T", "H", "mT", "mH", "adjoint"):
        return _permuted(name, args, kwargs, rank)
    if name == "getitem":
        return _indexed(args[1], before, after)
    if name in ("select", "unbind"):
        dim = _ints(args[1:2], kwargs, "dim") or [0]
        return tuple(i for i in range(rank) if i != dim[0] % rank)
    if name == "squeeze" and (dims := _ints(args[1:], kwargs, "dim")):
        gone = {d % rank for d in dims if before[d] == 1}
        return tuple(i for i in range(rank) if i not in gone)
    if name == "unsqueeze":
        place = _ints(args[1:], kwargs, "dim")[0] % (rank + 1)
        return (*range(place), None, *range(place, rank))
    if name in ("expand", "expand_as", "broadcast_to"):
        return broadcast_axes(before, after)
    if len(before) == len(after) and name not in ("view", "reshape", "view_as", "reshape_as"):
        return tuple(i if before[i] == after[i] else None for i in range(rank))  # casts, slices
    return reshaped_axes(before, after)


def broadcast_axes(before: Shape, after: Shape) -> Axes:
    """Axes are aligned from the right; an axis that was stretched carries nothing.

    >>> broadcast_axes((3, 1), (2, 3, 4))
    (None, 0, None)
    """
    shift = len(after) - len(before)
    return tuple(
        i - shift if i >= shift and before[i - shift] == after[i] else None for i in range(len(after))
    )


def reshaped_axes(before: Shape, after: Shape) -> Axes:
    """Axes that a reshape leaves whole: equal size, and equal number of elements before them.

    >>> reshaped_axes((2, 3, 4, 5), (2, 3, 20))
    (0, 1, None)
    >>> reshaped_axes((8, 16, 1, 1), (8, 16))
    (0, 1)
    """
    if before == after:
        return tuple(range(len(before)))
    starts: dict[tuple[int, int], int] = {}
    done = 1
    for i, size in enumerate(before):
        if size != 1:
            starts[done, size] = i
        done *= size
    found: list[int | None] = []
    done = 1
    for size in after:
        found.append(starts.get((done, size)) if size != 1 else None)
        done *= size
    return tuple(found)


def up(axes: Axes, axis: int | None) -> int | None:
    """Output axis to input axis."""
    return axes[axis] if axis is not None and axis < len(axes) else None


def down(axes: Axes, axis: int | None) -> int | None:
    """Input axis to output axis."""
    return axes.index(axis) if axis is not None and axis in axes else None


def _permuted(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int) -> Axes:
    order = list(range(rank))
    if name == "permute":
        return tuple(d % rank for d in _ints(args[1:], kwargs, "dims"))
    if name == "movedim":
        source = _ints(args[1:2], kwargs, "source")
        target = _ints(args[2:3], kwargs, "destination")
        moved = dict(zip((t % rank for t in target), (s % rank for s in source), strict=True))
        rest = iter(i for i in order if i not in moved.values())
        return tuple(moved[i] if i in moved else next(rest) for i in order)
    if name in ("t", "T", "H"):
        return tuple(reversed(order))
    first, second = (
        (-2, -1) if name != "transpose" else _ints(args[1:], kwargs, "dim0", "dim1", "axis0", "axis1")
    )
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def _indexed(index: Any, before: Shape, after: Shape) -> Axes:
    """Of basic indexing; index tensors and masks carry nothing."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        return (None,) * len(after)
    used = sum(item is not None and item is not Ellipsis for item in items)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    axes: list[int | None] = []
    axis = 0
    for item in items:
        if item is None:
            axes.append(None)
        elif item is Ellipsis:
            rest = len(before) - used
            axes.extend(range(axis, axis + rest))
            axis += rest
        else:
            if isinstance(item, slice):
                axes.append(axis)
            axis += 1
    return tuple(a if a is not None and before[a] == after[i] else None for i, a in enumerate(axes))


def _ints(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[int]:
    """Integers passed one by one, as one sequence, or by name."""
    given = [*args, *(kwargs[name] for name in names if name in kwargs)]
    return [int(d) for item in given for d in (item if isinstance(item, (tuple, list)) else (item,))]
