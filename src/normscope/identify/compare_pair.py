"""The two sides of a comparison, and the shape of an input that both take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import BadInput, NormscopeError
from normscope.identify.compare_handed import as_written, fits, shape_of, side_of
from normscope.identify.compare_layout import Layout, as_first_reads
from normscope.identify.compare_result import Comparison, Difference
from normscope.identify.compare_shapes import common_rank, shapes
from normscope.identify.compare_sides import Side
from normscope.identify.compare_values import free_values
from normscope.spec import NormSpec, PatternError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]

LARGE = 2**12
"""elements of an example above which its free axes are cut"""
SHORT = (4, 2)


def two_sides(a: Any, b: Any, example: Any, order: Layout) -> Comparison | tuple[Side, Side, tuple[int, ...]]:
    """The two as sides, with the shape that they are compared on; or the answer where no input is read by both.

    Raises BadInput where an example is missing, or is not an input of both.
    """
    if example is not None:
        shape = shape_of(example)
        if order.names_a is not None and len(order.names_a.split()) != len(shape):
            raise BadInput(
                f"the layout {order.names_a!r} names {len(order.names_a.split())} axes, the example has {len(shape)}. "
                "Name each axis once."
            )
        one = side_of(a, _given(a, example), order.names_a, "the first")
        two = side_of(b, _given(b, order.forth(example)), order.names_b, "the second")
        for side, at in ((one, shape), (two, order.forth(shape))):
            why = fits(side, np.random.default_rng(0).standard_normal(at), _some(side, at))
            if why:
                raise BadInput(f"an example is an input of both; {side.name} does not take shape {at}: {why}")
        return one, two, _short(shape, one, two, order)
    known = [_readable(obj, which) for obj, which in ((a, "first"), (b, "second"))]
    specs = [known[0][0], known[1][0]]
    if order.order is not None:
        known[1] = (as_first_reads(known[1][0], order, len(order.order)), *known[1][1:])
    for shape in shapes(*known):
        x = np.random.default_rng(0).standard_normal(shape)
        try:
            one = side_of(a, x, order.names_a, "the first")
            two = side_of(b, order.forth(x), order.names_b, "the second")
        except (NormscopeError, ValueError):
            continue
        if not fits(one, x, _some(one, shape)) and not fits(
            two, order.forth(x), _some(two, order.forth(shape))
        ):
            return one, two, shape
    if order.order is None and not common_rank(*specs):
        return _no_common_input(a, b, *specs)
    raise BadInput("no shape was found that both take. Pass an example: compare(a, b, example).")


def _no_common_input(a: Any, b: Any, spec_a: NormSpec, spec_b: NormSpec) -> Comparison:
    """No number of axes is read by both."""
    mine, other = (
        f"{spec.stats}, ndim {spec.ndim}" if spec.ndim else spec.stats for spec in (spec_a, spec_b)
    )
    names = [f"spec ({x.stats})" if isinstance(x, NormSpec) else type(as_written(x)).__name__ for x in (a, b)]
    return Comparison(
        names[0],
        names[1],
        same=False,
        differences=(Difference("axes", mine, other, np.nan, "both"),),
        modes={"train": False, "eval": False},
        spec_a=spec_a,
        spec_b=spec_b,
        notes=("no input has a number of axes that both take",),
    )


def _readable(obj: Any, which: str) -> tuple[NormSpec, dict[str, tuple[int, ...]], Any]:
    """What can be known without an input. Raises BadInput where that is too little."""
    if isinstance(obj, NormSpec):
        return obj, {}, obj
    from normscope.reading import UnknownNormalization, read

    try:
        reading = read(as_written(obj))
    except UnknownNormalization as error:
        raise BadInput(
            f"the {which} cannot be read without running it ({error}) Pass an example of its input: "
            "compare(a, b, example)."
        ) from None
    return reading.spec, {name: tuple(t.shape) for name, t in reading.tensors.items()}, obj


def _given(obj: Any, example: Any) -> Any:
    """Sizes as an array where a module wants one."""
    if hasattr(obj, "named_parameters") and isinstance(example, (tuple, list)):
        return np.zeros(tuple(example))
    return example


def _some(side: Side, shape: Sequence[int]) -> Values | None:
    """Values for a side that has none of its own."""
    return free_values(side.spec, shape) if side.held is None and side.settable and side.spec else None


def _short(shape: tuple[int, ...], a: Side, b: Side, order: Layout) -> tuple[int, ...]:
    """Large examples cut along the axes whose size both leave open."""
    for short, axis in ((short, axis) for short in SHORT for axis in range(len(shape))):
        if prod(shape) <= LARGE:
            break
        shorter = (*shape[:axis], min(short, shape[axis]), *shape[axis + 1 :])
        x = np.random.default_rng(0).standard_normal(shorter)
        try:
            takes = not fits(a, x, _some(a, shorter)) and not fits(
                b, order.forth(x), _some(b, order.forth(shorter))
            )
        except PatternError:
            takes = False
        shape = shorter if takes else shape
    return shape
