"""Which axes of the input a tensor lives on, from the number of it that each element uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normscope.spec import NormSpec
from normscope.spec.pattern import ELLIPSIS, Group, untokenize

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Placed:
    """A field over the input, written on the axes along which it varies."""

    axes: str
    """composed as in the input: ``"c"``, ``"(g c)"``, ``"c h w"``, ``""`` for one number"""
    places: NDArray[np.int64]
    """for each number of the parameter, in the shape that ``axes`` says, a flat index into the input"""

    def read(self, field: Array) -> Array:
        """The values of a field over the input at each number of the parameter."""
        return np.asarray(field).ravel()[self.places]


def place(spec: NormSpec, field: NDArray[np.int64] | Array) -> Placed | None:
    """Write a field of the shape of the input on axes of ``spec``; None where its axes have no name there.

    >>> from normscope.spec import families
    >>> place(families.group_norm(2), np.arange(6).reshape(1, 6, 1) + np.zeros((4, 6, 5))).axes
    '(g c)'
    """
    bound = spec.bind(field.shape)
    grid = field.reshape(bound.shape)
    varies = [
        axis.size > 1 and bool(np.any(grid != np.take(grid, [0], axis=position)))
        for position, axis in enumerate(bound.axes)
    ]
    groups: list[Group] = []
    for dim in range(field.ndim):
        inside = [(axis.name, varies[p]) for p, axis in enumerate(bound.axes) if axis.dim == dim]
        run: list[str] = []
        for name, moves in (*inside, ("", False)):
            if moves:
                run.append(name)
            elif run:
                groups.append(tuple(run))
                run = []
    spread = [axis.name for axis in bound.axes if axis.name.startswith(ELLIPSIS)]
    told = [group for group in groups if group[0] in spread]
    if told:
        if len(told) != len(spread):
            return None
        groups = [(ELLIPSIS,) if g == told[0] else g for g in groups if g not in told[1:]]
    flat = np.arange(field.size).reshape(bound.shape)
    for position, moves in enumerate(varies):
        flat = flat if moves else np.take(flat, [0], axis=position)
    axes = untokenize(groups)
    sizes = {axis.name: axis.size for axis in bound.axes}
    shape: list[int] = []
    for group in groups:
        if group == (ELLIPSIS,):
            shape += [sizes[name] for name in spread]
        else:
            shape.append(int(np.prod([sizes[name] for name in group])))
    return Placed(axes, flat.reshape(shape))
