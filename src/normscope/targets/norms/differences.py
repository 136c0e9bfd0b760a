"""In what two normalizations that stand for one differ: fields of their specifications, parameters, statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.doctor.wording import number, percent, plural
from normscope.errors import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Site
    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

FIELDS = ("center", "scale", "correction", "eps", "eps_at", "gain", "weight_offset")
NEUTRAL = {"weight": 1.0, "bias": 0.0}
"""what a norm without that parameter has"""
LAST_PLACES = 2
"""of the coarser of two dtypes: a copy in another dtype, or an eps that went through float32, is off by one"""
SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
COUNTERS = ("int64", "int32", "float32")
ROLES = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class NormDifference:
    """One field or one tensor of a pair."""

    field: str
    """of `NormSpec`, ``axes``, ``mode``, ``momentum``, or the tensor: ``weight``, ``running_var``"""
    a: str = ""
    b: str = ""
    """both, in words"""
    size: float = math.nan
    """of a tensor: the largest difference of two elements; infinite where one alone is a number"""
    relative: float = math.nan
    """that over the largest of both tensors"""
    deviations: float = math.nan
    """of ``running_mean``: the largest difference in standard deviations; of ``running_var``: the largest factor
    between the standard deviations"""
    place: tuple[int, ...] = ()
    """where the two differ most"""

    def __str__(self) -> str:
        return printable(self._said())

    def _said(self) -> str:
        if math.isnan(self.size):
            return f"{self.field}: {self.a} against {self.b}"
        at = f" at [{', '.join(map(str, self.place))}]" if self.place else ""
        said = f"{self.field}: {self.a} against {self.b}{at}"
        if not math.isfinite(self.size):
            return said
        said += f", off by up to {number(self.size)} ({percent(self.relative)} of the largest)"
        if not math.isfinite(self.deviations):
            return said
        factor = self.field == "running_var"
        told = f"a factor of {self.deviations:.3g} between the standard deviations" if factor else (
            f"{self.deviations:.2g} standard deviations"
        )  # fmt: skip
        return f"{said}, up to {told}"


def differences(a: Site, b: Site) -> list[NormDifference]:
    """Every difference of a pair; what one of them does not tell is none."""
    both = _both_known(a, b)
    fields = [*_fields(a.spec, b.spec, a.unknown | b.unknown)] if both and a.spec and b.spec else []
    if not both and not (a.unknown | b.unknown) & {"eps"} and a.spec is not None and b.spec is not None:
        fields = [*_numbers("eps", a.spec.eps, b.spec.eps)]
    offsets = [0.0, 0.0]
    if both and a.spec is not None and b.spec is not None and "weight_offset" not in a.unknown | b.unknown:
        offsets = [a.spec.weight_offset, b.spec.weight_offset]
    roles = ROLES[1:] if one_more(a, b) else ROLES
    tensors = [d for role in roles for d in _tensor(role, a, b, offsets)]
    if not any(d.field == "weight" for d in tensors):  # w and 1 + w say the same here
        fields = [d for d in fields if d.field != "weight_offset"]
    return [*fields, *_momentum(a, b), *_mode(a, b), *tensors]


def counters_differ(a: Site, b: Site) -> bool:
    """Whether two norms that both count the batches they have seen have seen different numbers."""
    if any(site.dtype("num_batches_tracked") not in COUNTERS for site in (a, b)):
        return False
    one, two = (site.array("num_batches_tracked") for site in (a, b))
    assert one is not None
    assert two is not None
    return not np.array_equal(one, two, equal_nan=True)


def one_more(a: Site, b: Site) -> bool:
    """Whether one is a node of a graph whose gain is 1 + the weight that a file of weights holds.

    Which of the two a norm multiplies by is in the code; an exporter writes the sum into the graph.
    """
    offsets = [float(site.kind == "stored" and "weight_offset" in site.unknown) for site in (a, b)]
    if {a.kind, b.kind} != {"stored", "node"} or not any(offsets):
        return False
    return any(_tensor("weight", a, b, [0.0, 0.0])) and not any(_tensor("weight", a, b, offsets))


def _both_known(a: Site, b: Site) -> bool:
    """Both specifications are known by more than the name that tensors stand under."""
    stored = [site.kind == "stored" for site in (a, b)]
    return a.spec is not None and b.spec is not None and not any(stored)


def _fields(a: NormSpec, b: NormSpec, unknown: frozenset[str]) -> Iterator[NormDifference]:
    """Fields in which they differ as functions; other spellings of one function are none."""
    one, two = (spec.replace(ndim=None, weight=None, bias=None, running=None, weight_offset=0.0, source="parameter")
                for spec in (a, b))  # fmt: skip
    two = two.replace(cast=one.cast)
    if _close(one.eps, two.eps):
        two = two.replace(eps=one.eps)
    offset = a.weight_offset, b.weight_offset
    if one.same_function(two).same and offset[0] == offset[1]:
        return
    told = [name for name in FIELDS if name not in unknown and getattr(one, name) != getattr(two, name)]
    for name in told:
        yield from _numbers(name, getattr(one, name), getattr(two, name))
    equal = two.replace(**{name: getattr(one, name) for name in told})
    if not one.same_function(equal).same:
        yield NormDifference("axes", _axes(a), _axes(b))
    if offset[0] != offset[1]:
        yield from _numbers("weight_offset", *offset)


def _axes(spec: NormSpec) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in spec.sizes.items())
    return f"{spec.stats}, {sizes}" if sizes else spec.stats


def _momentum(a: Site, b: Site) -> Iterator[NormDifference]:
    """Of two that update their statistics: a graph, and what is frozen in training, never do."""
    running = [
        site.spec.running if site.spec is not None and site.mode_train == "batch" else None
        for site in (a, b)
        if site.kind not in ("node", "stored")
    ]
    if len(running) < 2:
        return
    if running[0] is None or running[1] is None:
        return
    for name in ("momentum", "correction", "average"):
        yield from _numbers(f"running.{name}", getattr(running[0], name), getattr(running[1], name))


def _mode(a: Site, b: Site) -> Iterator[NormDifference]:
    """Batch statistics in evaluation beside stored ones."""
    stored = ("running", "frozen")
    if {a.mode_eval in stored, b.mode_eval in stored} == {True, False} and "batch" in (
        a.mode_eval,
        b.mode_eval,
    ):
        yield NormDifference("mode in evaluation", a.mode_eval, b.mode_eval)


def _numbers(name: str, a: Any, b: Any) -> Iterator[NormDifference]:
    if a == b or _close(a, b):
        return
    for digits in range(6, 18):
        one, two = (f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in (a, b))
        if one != two:
            break
    yield NormDifference(name, one, two)


def _close(a: Any, b: Any) -> bool:
    """One number, but for the digits that float32 drops."""
    if not isinstance(a, float) or not isinstance(b, float):
        return bool(a == b)
    return abs(a - b) <= LAST_PLACES * SPACING["float32"] * max(abs(a), abs(b))


def _tensor(role: str, a: Site, b: Site, offsets: list[float]) -> Iterator[NormDifference]:
    one, two = a.array(role), b.array(role)
    if one is None and two is None:
        return
    if one is None or two is None:
        there = two if one is None else one
        assert there is not None
        offset = 0.0 if role != "weight" else offsets[1 if one is None else 0]
        if role in NEUTRAL and bool((there + offset == NEUTRAL[role]).all()):
            return
        said = _span(there)
        yield NormDifference(role, "none" if one is None else said, said if one is None else "none")
        return
    if role == "weight":
        one, two = one + offsets[0], two + offsets[1]
    if one.shape != two.shape and one.size == two.size and 1 in (one.ndim, two.ndim):
        one, two = one.ravel(), two.ravel()  # a graph may keep a vector as (1, C, 1, 1)
    if one.shape != two.shape:
        yield NormDifference(role, f"shape {one.shape}", f"shape {two.shape}")
        return
    apart = _apart(one, two)
    spacing = max(SPACING.get(site.dtype(role) or "", 0.0) for site in (a, b))
    same_dtype = a.dtype(role) == b.dtype(role)
    allowed = (
        0.0
        if same_dtype and offsets[0] == offsets[1]
        else LAST_PLACES * spacing * np.fmax(abs(one), abs(two))
    )
    if not one.size or not bool((apart > allowed).any()):
        return
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), one.shape))
    largest = float(np.abs([*one.ravel(), *two.ravel()]).max(where=_finite(one, two), initial=0.0))
    size = float(apart[at])
    told = [*_numbers(role, float(one[at]), float(two[at]))] or [
        NormDifference(role, str(one[at]), str(two[at]))
    ]
    deviations = _deviations(role, a, b, one, two)
    yield replace(
        told[0], size=size, relative=size / largest if largest else math.nan, deviations=deviations, place=at
    )


def _apart(a: Array, b: Array) -> Array:
    """|a - b|; NaN beside NaN and equal infinities are no difference, NaN beside a number is infinite."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        off: Array = np.where(same, 0.0, np.abs(a - b))
    return np.where(np.isnan(off), np.inf, off)


def _finite(a: Array, b: Array) -> NDArray[np.bool_]:
    finite: NDArray[np.bool_] = np.isfinite(np.concatenate([a.ravel(), b.ravel()]))
    return finite


def _deviations(role: str, a: Site, b: Site, one: Array, two: Array) -> float:
    """How far statistics moved, in units of the spread that they describe."""
    variances = a.array("running_var"), b.array("running_var")
    if not role.startswith("running") or variances[0] is None or variances[1] is None:
        return math.nan
    if variances[0].size != one.size or variances[1].size != one.size:
        return math.nan
    with np.errstate(all="ignore"):
        first, second = np.sqrt(variances[0].ravel()), np.sqrt(variances[1].ravel())
        if role == "running_var":
            found = np.maximum(first, second) / np.minimum(first, second)
        else:
            found = np.abs(one.ravel() - two.ravel()) / np.sqrt((first**2 + second**2) / 2)
    found = found[np.isfinite(found)]
    return float(found.max()) if found.size else math.nan


def _span(values: Array) -> str:
    if not values.size:
        return "no elements"
    low, high = float(values.min()), float(values.max())
    return f"{plural(values.size, 'element')}, {low:.6g}" + (f" to {high:.6g}" if low != high else "")
