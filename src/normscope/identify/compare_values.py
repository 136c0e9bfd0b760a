"""Parameters and stored statistics of two specifications, so put that both mean the same function where they can."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from normscope.reference.axes import Axes, locate
from normscope.reference.running import over
from normscope.spec import SpecError, canonical_factor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

Values = dict[str, "Array"]
FREE = {"weight": (0.5, 2.0), "bias": (-1.0, 1.0), "running_mean": (-0.5, 0.5), "running_var": (0.5, 2.0)}
"""range of the values that are tried where any are as good: evenly spaced, so that a counterexample can be read"""


def free_values(spec: NormSpec, shape: Sequence[int]) -> Values:
    """Values for everything that a specification holds on an input of this shape, all different.

    >>> from normscope.spec import families
    >>> free_values(families.rms_norm(), (2, 4))
    {'weight': array([0.5, 1. , 1.5, 2. ])}
    """
    found: Values = {}
    for name, groups in _places(spec, locate(spec, shape)).items():
        low, high = FREE[name]
        extent = locate(spec, shape).extent(groups)
        found[name] = np.linspace(low, high, prod(extent)).reshape(extent)
        if name == "weight":
            found[name] = found[name] - spec.weight_offset
    return found


def carried(values: Mapping[str, Array], a: NormSpec, b: NormSpec, shape: Sequence[int]) -> Values:
    """The values of ``b`` that mean what ``values`` mean in ``a``, on an input of this shape that both read.

    The weight is converted as `sameness.canonical` says; an entry of ``b`` that stands for several of ``a`` takes
    their mean, and what ``a`` has no value for is its neutral one.
    """
    here, there = locate(a, shape), locate(b, shape)
    mine, theirs = _places(a, here), _places(b, there)
    found: Values = {}
    for name, groups in theirs.items():
        neutral = 1.0 if name in ("weight", "running_var") else 0.0
        if name in values and name in mine:
            field = _spread(values[name], here, mine[name])
            field = field + a.weight_offset if name == "weight" else field
        else:
            field = np.full(prod(here.shape), neutral)
        if name == "weight":
            field = field * _factor_ratio(a, b, shape) - b.weight_offset
        labels = there.label(n for group in groups for n in group)
        extent = there.extent(groups)
        number = np.maximum(np.bincount(labels, minlength=prod(extent)), 1)
        found[name] = (np.bincount(labels, weights=field, minlength=prod(extent)) / number).reshape(extent)
    return found


def set_means(x: Array, spec: NormSpec) -> Array:
    """The mean of its statistic set at every element.

    >>> from normscope.spec import families
    >>> set_means(np.array([[1.0, 3.0], [2.0, 4.0]]), families.layer_norm())
    array([[2., 2.],
           [3., 3.]])
    """
    axes = locate(spec, x.shape)
    labels = axes.label(axes.kept)
    sums, number = np.bincount(labels, weights=x.ravel()), np.bincount(labels)
    means: Array = (sums / np.maximum(number, 1))[labels].reshape(x.shape)
    return means


def _places(spec: NormSpec, axes: Axes) -> dict[str, list[tuple[str, ...]]]:
    """Name of a parameter or stored statistic -> the axes that it lives on."""
    places = {
        name: axes.names(where)
        for name, where in (("weight", spec.weight), ("bias", spec.bias))
        if where is not None
    }
    if spec.running is not None and not spec.whiten:
        places |= dict.fromkeys(("running_mean", "running_var"), over(spec, axes))
    return places


def _spread(value: Array, axes: Axes, groups: list[tuple[str, ...]]) -> Array:
    spread: Array = value.ravel()[axes.label(name for group in groups for name in group)]
    return spread


def _factor_ratio(a: NormSpec, b: NormSpec, shape: Sequence[int]) -> float:
    """What the weight of ``b`` must be multiplied with for what the two conventions leave to it.

    Where statistics are stored a correction is left out: evaluation does not have it, so no weight makes up for it.
    """
    if a.running is not None or b.running is not None:
        a, b = a.replace(correction=0), b.replace(correction=0)
    try:
        return canonical_factor(a, a.bind(shape).set_size) / canonical_factor(b, b.bind(shape).set_size)
    except (SpecError, ZeroDivisionError):  # no variance at this size: nothing is the same then
        return 1.0
