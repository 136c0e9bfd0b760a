"""An input that two normalizations both take, where the caller gives no example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm, prod
from typing import TYPE_CHECKING, Any

from normscope.spec.align import expand
from normscope.spec.pattern import ELLIPSIS, tokenize

if TYPE_CHECKING:
    from normscope.spec import NormSpec

RANKS = (4, 3, 2, 5, 1)
"""in this order: most layers take images, and four axes keep apart what fewer confuse"""
USUAL = (4, 6, 5, 3, 2)
"""sizes of axes that may have any, all different"""


def shapes(*sides: tuple[NormSpec, Mapping[str, tuple[int, ...]], Any]) -> Iterator[tuple[int, ...]]:
    """Shapes that all sides read, by their patterns and by the shapes of what they hold.

    Arguments: for each side its specification, the shapes of its tensors by name, and the object itself.

    >>> from normscope.spec import families
    >>> next(shapes((families.group_norm(3), {"weight": (12,)}, None)))
    (4, 12, 5, 3)
    """
    for ndim in RANKS:
        if not all(_reads(spec, ndim) for spec, _, _ in sides):
            continue
        shape: list[int] = []
        for axis in range(ndim):
            wanted = [_wanted(spec, held, obj, ndim, axis) for spec, held, obj in sides]
            exact = {size for size, fixed in wanted if fixed}
            if len(exact) > 1:
                break
            multiple = lcm(*(size for size, _ in wanted))
            size = exact.pop() if exact else multiple * (USUAL[axis] if multiple == 1 else 2)
            if any(size % factor for factor, _ in wanted):
                break
            shape.append(size)
        if len(shape) == ndim:
            yield tuple(shape)


def common_rank(a: NormSpec, b: NormSpec) -> bool:
    """Whether an input of some number of axes is read by both."""
    return any(_reads(a, ndim) and _reads(b, ndim) for ndim in range(1, 12))


def _reads(spec: NormSpec, ndim: int) -> bool:
    least = spec.pattern.min_ndim
    low, high = spec.ndim or (least, None if spec.pattern.has_ellipsis else least)
    return max(low, least) <= ndim and (high is None or ndim <= high)


def _wanted(
    spec: NormSpec, held: Mapping[str, tuple[int, ...]], obj: Any, ndim: int, axis: int
) -> tuple[int, bool]:
    """The size of an input axis that one side wants, and whether exactly that; else a multiple of it."""
    group = expand(spec.pattern, ndim)[axis]
    places = {"weight": spec.weight, "bias": spec.bias}
    places["running_mean"] = spec.running_axes if spec.running is not None else None
    for name, where in places.items():
        groups = tokenize(where or "")
        if name in held and group in groups and (ELLIPSIS,) not in groups:
            return held[name][groups.index(group)], True
    last = tuple(getattr(obj, "normalized_shape", None) or ())  # of a layer norm without parameters
    if last and axis >= ndim - len(last):
        return int(last[axis - ndim + len(last)]), True
    if axis == 1 and isinstance(
        getattr(obj, "num_channels", None), int
    ):  # of a group norm without parameters
        return int(obj.num_channels), True
    known = [spec.sizes[name] for name in group if name in spec.sizes]
    return prod(known), len(known) == len(group)
