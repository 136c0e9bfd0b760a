"""The fields in which two specifications differ, each with the change that it alone makes.

For the size of a field the first specification takes it from the second (and the other way round), all else staying,
and both are computed by the reference on the inputs of `compare_inputs`. A field that changes nothing on any of them
is another way to write the same, and is not told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.identify.compare_gap import gap
from normscope.identify.compare_inputs import inputs_for
from normscope.identify.compare_result import Difference
from normscope.identify.compare_sides import SpecSide
from normscope.identify.compare_values import Values, carried, free_values
from normscope.spec import NormSpec, PatternError, SpecError
from normscope.spec.align import Misaligned, match, units

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

NUMBERS = ("center", "scale", "correction", "eps", "eps_at", "weight_offset", "gain", "whiten", "iterations")
"""fields that are taken over one by one"""
SETS = ("center", "scale", "correction", "eps", "eps_at")
"""what is done with a statistic set"""
ROUNDED = 1e-12
"""relative: a few roundings between two ways to write one value"""
READ_OFF = 64
"""roundoffs of |weight| + |bias| that a value read off a function may be off by: 16 of an output, which is up to 4
times the weight plus the bias at the inputs that identification probes with"""


def differences(a: NormSpec, b: NormSpec, shape: Sequence[int]) -> list[Difference]:
    """Every difference between two specifications that read one input of ``shape``.

    >>> from normscope.spec import families
    >>> for d in differences(families.layer_norm(), families.layer_norm(eps=1e-6), (2, 4)):
    ...     print(d.field, d.a, d.b, d.mode)
    eps 1e-05 1e-06 both
    """
    a, b = _same_words(a, b), _same_words(b, a)
    found = [*_axes(a, b, shape)]
    for name in NUMBERS:
        if getattr(a, name) != getattr(b, name):
            found += _told(name, name, a, b, shape)
    if a.source != b.source:
        found.append(Difference("source", a.source, b.source, math.nan, "both"))
    found += _running(a, b, shape)
    for name in ("compute", "weight"):
        mine, other = getattr(a.cast, name), getattr(b.cast, name)
        if mine != other:
            found += _cast(name, mine, other, a, b, shape)
    return found


def value_differences(
    a: NormSpec, b: NormSpec, held_a: Values, held_b: Values, shape: Sequence[int], roundoff: float
) -> Iterator[Difference]:
    """Parameters and stored statistics in which two norms differ that could hold the same, by more than arithmetic of
    this roundoff tells."""
    wanted = carried(held_a, a, b, shape)
    for name in sorted(set(wanted) & set(held_a) & set(held_b)):
        # equal in what they mean, or equal as numbers, which is then told of the convention
        near = ROUNDED * np.abs(wanted[name]).max(initial=0.0) + READ_OFF * roundoff * _reach(name, wanted, b)
        if any(_within(value, held_b[name], near) for value in (wanted[name], held_a[name])):
            continue
        side, other = SpecSide("", b), {**wanted, name: held_b[name]}
        sizes = {mode: _largest(side, side, shape, (b,), mode, (wanted, other)) for mode in ("train", "eval")}
        shows = [mode for mode, size in sizes.items() if size > 0]
        if shows:
            mode = "both" if len(shows) == 2 else shows[0]
            size = max(sizes[m] for m in shows)
            yield Difference(f"{name} values", *_values_apart(wanted[name], held_b[name]), size, mode)


def _reach(name: str, values: Values, spec: NormSpec) -> Array:
    """|weight| + |bias| of each element of a value, which rounding goes by where the two are read off together."""
    parts = [
        np.abs(values[part] + (spec.weight_offset if part == "weight" else 0.0))
        for part in (("weight", "bias") if name in ("weight", "bias") else (name,))
        if part in values
    ]
    if any(part.shape != parts[0].shape for part in parts):
        parts = [part.max(initial=0.0) for part in parts]
    reach: Array = np.add.reduce(parts)
    return reach


def _within(value: Array, other: Array, near: Array) -> bool:
    return value.shape == other.shape and bool((np.abs(value - other) <= near).all())


def _same_words(spec: NormSpec, other: NormSpec) -> NormSpec:
    """The biased variance is the mean square about the mean: said so beside one that says it."""
    plain = spec.center and spec.scale == "std" and spec.correction == 0
    return spec.replace(scale="rms") if plain and other.scale == "rms" else spec


def _axes(a: NormSpec, b: NormSpec, shape: Sequence[int]) -> Iterator[Difference]:
    """Statistic sets, and where weight, bias and state live, whatever the axes are called."""
    mode = "both" if a.running is None and b.running is None else "train"
    try:
        bound_a, bound_b = a.bind(shape), b.bind(shape)
        pieces = units(a, bound_a, b, bound_b, match(a.pattern, b.pattern, len(shape), None), None)
        apart = {
            role: any(unit.differs(role) for unit in pieces) for role in ("kept", "weight", "bias", "state")
        }
    except Misaligned:
        apart = dict.fromkeys(("kept", "weight", "bias"), True)
    if apart["kept"]:
        one, other = _bare(a), _bare(b)
        if not (a.whiten or b.whiten):
            other = other.replace(**{name: getattr(one, name) for name in (*SETS, "gain")})
        size = _size(one, other, shape, "train", converted=False)
        yield Difference("axes", _stats(a), _stats(b), size, mode)
    for role in ("weight", "bias"):
        mine, other = getattr(a, role), getattr(b, role)
        if (mine is None) != (other is None) or (mine is not None and apart[role]):
            size = math.nan if apart["kept"] else _parameter_size(a, b, role, shape)
            yield Difference(role, _where(mine), _where(other), size, "both")
    if a.running is not None and b.running is not None and apart.get("state", False):
        yield Difference("running.over", a.running_axes, b.running_axes, math.nan, "both")


def _parameter_size(a: NormSpec, b: NormSpec, role: str, shape: Sequence[int]) -> float:
    """Of a parameter alone: values on one side, which the other can only follow on average, or not at all."""
    one, other = _bare(a), _bare(b)
    numbers = {name: getattr(one, name) for name in (*SETS, "gain")}
    one, other = one.replace(**{role: getattr(a, role)}), other.replace(**numbers, **{role: getattr(b, role)})
    return _size(one, other, shape, "train", converted=True)


def _told(field: str, name: str, a: NormSpec, b: NormSpec, shape: Sequence[int]) -> Iterator[Difference]:
    mine, other = getattr(a, name), getattr(b, name)
    sizes: dict[str, float] = {}
    converted: dict[str, float] = {}
    for base, value in ((a, other), (b, mine)):
        try:
            changed = base.replace(**{name: value})
        except (SpecError, PatternError):
            continue
        for mode in ("train", "eval"):
            sizes[mode] = _least(sizes.get(mode), _size(base, changed, shape, mode, converted=False))
            converted[mode] = _least(converted.get(mode), _size(base, changed, shape, mode, converted=True))
    if not sizes:  # neither can take the other's alone
        yield Difference(field, *_apart(mine, other), math.nan, "both")
        return
    shows = [mode for mode, size in sizes.items() if size > 0]
    if not shows:
        return
    weighted = a.weight is not None and b.weight is not None
    only_numbers = weighted and all(size == 0 for size in converted.values())
    mode = "parameters" if only_numbers else "both" if len(shows) == 2 else shows[0]
    size = max(sizes[mode] for mode in shows)
    yield Difference(field, *_apart(mine, other), size, mode)


def _running(a: NormSpec, b: NormSpec, shape: Sequence[int]) -> Iterator[Difference]:
    mine, other = a.running, b.running
    if mine is None and other is None:
        return
    if mine is None or other is None:
        yield Difference("running", _kept(mine), _kept(other), math.nan, "eval")
        return
    for name in ("momentum", "average", "correction"):
        one, two = getattr(mine, name), getattr(other, name)
        changes = {name: two}
        if mine.average != other.average:  # a plain mean has no momentum: the two go together
            changes = {"momentum": other.momentum, "average": other.average} if name == "average" else changes
        if one == two or (name == "momentum" and mine.average != other.average):
            continue
        size = _size(a, a.replace(running=replace(mine, **changes)), shape, "update", converted=False)
        # 0 where no update was computed: the reference moves no whitened state here
        yield Difference(f"running.{name}", *_apart(one, two), size or math.nan, "update")
    if mine.averages != other.averages:
        changed = a.replace(running=replace(mine, averages=other.averages))
        size = _size(a, changed, shape, "update", converted=False)
        yield Difference("running.averages", mine.averages, other.averages, size, "update")
    if mine.renorm != other.renorm:
        changed = a.replace(running=replace(mine, renorm=other.renorm))
        size = _size(a, changed, shape, "train", converted=False)
        yield Difference("running.renorm", *_apart(mine.renorm, other.renorm), size, "train")


def _cast(
    part: str, mine: Any, other: Any, a: NormSpec, b: NormSpec, shape: Sequence[int]
) -> Iterator[Difference]:
    """Told where bfloat16 shows it: an order of casts without a weight is none."""
    size = _size(a, a.replace(cast=replace(a.cast, **{part: other})), shape, "bfloat16", converted=True)
    if size > 0:
        yield Difference(f"cast.{part}", *_apart(mine, other), size, "bfloat16")


def _size(a: NormSpec, b: NormSpec, shape: Sequence[int], mode: str, *, converted: bool) -> float:
    """The largest real gap over all inputs; with ``converted`` weights that mean the same, else equal numbers."""
    one, two = SpecSide("", a), SpecSide("", b)
    return max(_largest(one, two, shape, (a, b), mode, values) for values in _values(a, b, shape, converted))


def _largest(
    one: SpecSide,
    two: SpecSide,
    shape: Sequence[int],
    specs: Sequence[NormSpec],
    mode: str,
    values: tuple[Values, Values],
) -> float:
    largest = 0.0
    for _, x in inputs_for(mode, shape, specs):
        try:
            seen = gap(one, two, x, x, tuple(range(x.ndim)), mode, values)
        except (ValueError, ArithmeticError):
            continue  # a set too small for the correction
        largest = max(largest, seen.size if seen.real else 0.0)
    return largest


def _values(
    a: NormSpec, b: NormSpec, shape: Sequence[int], converted: bool
) -> Iterator[tuple[Values, Values]]:
    mine = free_values(a, shape)
    if not converted:
        yield mine, {**free_values(b, shape), **{k: v for k, v in mine.items() if k in free_values(b, shape)}}
        return
    yield mine, carried(mine, a, b, shape)
    theirs = free_values(b, shape)
    yield carried(theirs, b, a, shape), theirs


def _least(before: float | None, size: float) -> float:
    """The smaller change of the two ways round, where both make one: other fields may blow one of them up."""
    known = [value for value in (before, size) if value]
    return min(known, default=0.0)


def _bare(spec: NormSpec) -> NormSpec:
    return spec.replace(weight=None, bias=None, weight_offset=0.0, running=None, source="parameter")


def _stats(spec: NormSpec) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in spec.sizes.items())
    return f"{spec.stats}, {sizes}" if sizes else spec.stats


def _where(axes: str | None) -> str:
    return "none" if axes is None else f"on {axes}" if axes else "one scalar"


def _kept(running: Any) -> str:
    return "none" if running is None else "stored statistics normalize in evaluation"


def _apart(mine: Any, other: Any) -> tuple[str, str]:
    """Two values in as few digits as tell them apart, six at least where they have as many.

    >>> _apart(1e-5, 0.001), _apart(1e-5, 1.0000001e-5)
    (('1e-05', '0.001'), ('1e-05', '1.0000001e-05'))
    """
    for digits in range(6, 18):
        said = tuple(
            f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in (mine, other)
        )
        if said[0] != said[1]:
            break
    return said[0], said[1]


def _values_apart(value: Array, other: Array) -> tuple[str, str]:
    """The ranges of two tensors; where these look alike, the element that differs most."""
    spans = _span(value), _span(other)
    if spans[0] != spans[1] or value.shape != other.shape:
        return spans
    at = np.unravel_index(int(np.argmax(np.abs(value - other))), value.shape)
    one, two = _apart(float(value[at]), float(other[at]))
    place = f" at [{', '.join(str(int(n)) for n in at)}]" if at else ""
    return one + place, two + place


def _span(value: Array) -> str:
    low, high = float(value.min(initial=math.inf)), float(value.max(initial=-math.inf))
    return f"{low:g}" if low == high else f"{low:.6g} to {high:.6g}"
