"""Layout: how a specification meets a tensor in memory.

A specification and a tensor lower to a list of **runs**, outer to inner in memory, neighbours of one kind merged: each
has a size, a stride, whether it is kept or erased, and the stride of the parameters along it (0 where they do not
live on it). The innermost runs decide which native kernel serves:

- rows (``.. K E``) and planes (``K E``, ``K E E`` with parameters constant along the innermost run): sets made of
  contiguous segments,
- columns (``E K``): the innermost axis is kept, a set is a column,
- interleaved (``K E K E``): columns, adjacent ones merged into one set.

What a specification alone decides, for every size and stride, is a `Call`: the codes that the native kernels read.
The kernels lower again in C++ (``native/lower.hpp``), so that a call costs no Python; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from normscope.spec import NormSpec
from normscope.spec.pattern import ELLIPSIS, Group, tokenize

KEPT, PARAMETER = 1, 2
SPLIT_SHIFT, INNER_GIVEN = 40, 1 << 39
CENTER = 1
SCALES = {"std": 0, "rms": 1, "l2": 2}
EPS_AT = {"variance": 0, "std": 1, "max": 2}
SCALE_SHIFT, EPS_SHIFT, ROUND_FIRST, CORRECTION_SHIFT = 1, 3, 32, 8
MOST_AXES = 12
SHORT_PIECE = 48  # longer pieces are rows: whole vectors of one set


@dataclass(frozen=True)
class Call:
    """What does not change between two calls of one layer: the codes that ``native/normscope.h`` explains."""

    spec: NormSpec
    ndim: int
    axes: int
    split: int
    options: int
    eps: float | None
    """None: the machine epsilon of the dtype, resolved where the dtype is known"""
    gain: float
    offset: float
    stored_axes: int
    """`axes` for normalization by stored statistics: the kept axes are those that running state lives on"""
    parameter_dims: tuple[int, ...]
    """input dimensions that the parameters live on, whole"""
    unserved: str
    """why native kernels cannot serve it, or "" """
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """what dispatch works out from it once"""


@lru_cache(maxsize=4096)
def call(spec: NormSpec, ndim: int) -> Call:
    """The codes of a specification for inputs of ``ndim`` axes.

    >>> from normscope.spec import families
    >>> c = call(families.batch_norm(), 4)
    >>> [axis_code(c.axes, i) for i in range(4)], c.unserved
    ([0, 3, 0, 0], '')
    >>> call(families.l2_normalize(), 2).unserved, call(families.batch_whitening(4), 4).unserved
    ('', 'whitening needs a matrix per set')
    """
    names = _elementary(spec, ndim)
    unserved = _unserved(spec, names)
    kept = _expanded(spec.pattern.kept, names)
    where = spec.weight if spec.weight is not None else spec.bias
    parameters = _expanded([n for group in tokenize(where or "") for n in group], names)
    state = _expanded([n for group in tokenize(spec.running_axes) for n in group], names)
    flat = [name for name, _ in names]
    axes = stored = 0
    for i, name in enumerate(flat[:MOST_AXES]):
        on = PARAMETER * (name in parameters)
        axes |= (on | KEPT * (name in kept)) << 4 * i
        stored |= (on | KEPT * (name in state)) << 4 * i
    options = (
        CENTER * spec.center
        | SCALES.get(_scale(spec), 0) << SCALE_SHIFT
        | EPS_AT.get(spec.eps_at, 0) << EPS_SHIFT
        | ROUND_FIRST * (spec.cast.weight == "after")
        | int(spec.correction) << CORRECTION_SHIFT
    )
    return Call(
        spec=spec,
        ndim=ndim,
        axes=axes,
        split=0 if unserved else _split(spec, names),
        options=options,
        eps=spec.eps,
        gain=float(spec.gain),
        offset=float(spec.weight_offset),
        stored_axes=stored,
        parameter_dims=tuple(dict.fromkeys(dim for name, dim in names if name in parameters)),
        unserved=unserved,
    )


def axis_code(axes: int, i: int) -> int:
    """The four bits of elementary axis ``i``."""
    return axes >> 4 * i & 15


def _scale(spec: NormSpec) -> str:
    """The mean square of what was centered is the variance."""
    return "std" if spec.center and spec.scale == "rms" else spec.scale


def _elementary(spec: NormSpec, ndim: int) -> list[tuple[str, int]]:
    """Elementary axes as (name, input dimension)."""
    names: list[tuple[str, int]] = []
    dim = 0
    for group in spec.pattern.left:
        spread = range(ndim - spec.pattern.min_ndim) if group == (ELLIPSIS,) else range(1)
        for i in spread:
            inside = [f"{ELLIPSIS}{i}"] if group == (ELLIPSIS,) else group
            names += [(name, dim) for name in inside]
            dim += 1
    return names


def _expanded(wanted: Sequence[str], names: list[tuple[str, int]]) -> list[str]:
    """Names with the ellipsis replaced by the axes it stands for."""
    spread = [name for name, _ in names if name.startswith(ELLIPSIS)]
    return [n for name in wanted for n in (spread if name == ELLIPSIS else [name])]


def _factored(spec: NormSpec) -> list[Group]:
    return [group for group in spec.pattern.left if len(group) > 1]


def _unserved(spec: NormSpec, names: list[tuple[str, int]]) -> str:
    order = [name for name, _ in names]
    if spec.whiten:
        return "whitening needs a matrix per set"
    if len(names) > MOST_AXES:
        return f"more than {MOST_AXES} axes"
    if len(_factored(spec)) > 1 or any(len(group) > 2 for group in _factored(spec)):
        return "more than one axis is made of others, or one of more than two"
    if spec.remainder != "error":
        return "virtual batches of different sizes"
    if spec.running is not None and spec.running.renorm is not None:
        return "renormalization reads the stored statistics in training"
    if spec.running is not None and spec.running.averages != "variance":
        return "an average of denominators"
    if spec.source != "parameter":
        return "gain and bias come from the input"
    if not spec.center and spec.scale == "std":
        return "divides by a deviation about a mean that it does not subtract"
    if spec.center and spec.scale == "l2":
        return "the sum of squares of centered values"
    if spec.eps_at not in EPS_AT:
        return f"eps at {spec.eps_at!r}"
    if spec.correction not in (0, 1):
        return f"a correction of {spec.correction}"
    if spec.cast.compute is not None and spec.cast.compute != "float32":
        return f"arithmetic in {spec.cast.compute}"
    if spec.weight is not None and spec.bias is not None and spec.weight != spec.bias:
        return "weight and bias live on different axes"
    for where in (spec.weight, spec.bias, spec.running_axes):
        on = _expanded([n for group in tokenize(where or "") for n in group], names)
        if [name for name in order if name in on] != on:
            return "parameters or state have their axes in another order than the input"
    return ""


def _split(spec: NormSpec, names: list[tuple[str, int]]) -> int:
    for group in _factored(spec):
        outer, inner = group
        dim = next(d for name, d in names if name == outer)
        if outer in spec.sizes:
            return (dim + 1) << SPLIT_SHIFT | spec.sizes[outer]
        return (dim + 1) << SPLIT_SHIFT | INNER_GIVEN | spec.sizes[inner]
    return 0


# Runs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Neighbouring axes of one kind, as one loop over memory."""

    size: int
    stride: int
    out: int
    """stride of the output"""
    kept: bool
    parameter: int
    """stride of the parameters along it, 0 where they do not live on it"""

    def __str__(self) -> str:
        return f"{'K' if self.kept else 'E'}{self.size}"


def runs(
    spec: NormSpec,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    out: Sequence[int] | None = None,
) -> tuple[Run, ...]:
    """The runs of a specification on a tensor, outermost in memory first; axes of size 1 vanish.

    Arguments: ``strides`` of the input in elements, of a contiguous tensor where not given; ``out``, those of the
        output, by default the input's, or contiguous where the input repeats itself (a stride of 0). The output's
        order counts.

    >>> from normscope.spec import families
    >>> [str(r) for r in runs(families.batch_norm(), (32, 64, 56, 56))]
    ['E32', 'K64', 'E3136']
    >>> channels_last = (64 * 56 * 56, 1, 56 * 64, 64)
    >>> [str(r) for r in runs(families.group_norm(8), (32, 64, 56, 56), channels_last)]
    ['K32', 'E3136', 'K8', 'E8']
    """
    bound = spec.bind(shape)
    strides = contiguous(shape) if strides is None else tuple(strides)
    if out is None:
        repeats = any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))
        out = contiguous(shape) if repeats else strides
    where = spec.weight if spec.weight is not None else spec.bias
    on = _expanded(
        [n for group in tokenize(where or "") for n in group], [(axis.name, axis.dim) for axis in bound.axes]
    )
    found: list[Run] = []
    inner: dict[int, int] = {}  # per input dimension, elements of the factors that stand further in
    parameter = 1
    for axis in reversed(bound.axes):
        lives = axis.name in on
        within = inner.get(axis.dim, 1)
        stride, put = strides[axis.dim] * within, out[axis.dim] * within
        found.append(Run(axis.size, stride, put, axis.kept, parameter if lives else 0))
        inner[axis.dim] = inner.get(axis.dim, 1) * axis.size
        parameter *= axis.size if lives else 1
    found.reverse()
    return merged(sorted((r for r in found if r.size != 1), key=lambda r: -abs(r.out)))


def merged(loops: Sequence[Run]) -> tuple[Run, ...]:
    """Neighbours of one kind that are one loop over memory and over the parameters, joined."""
    done: list[Run] = []
    for run in loops:
        last = done[-1] if done else None
        if (
            last is not None
            and last.kept == run.kept
            and last.stride == run.size * run.stride
            and last.out == run.size * run.out
            and last.parameter == run.size * run.parameter
        ):
            done[-1] = Run(last.size * run.size, run.stride, run.out, run.kept, run.parameter)
        else:
            done.append(run)
    return tuple(done)


def kernel(loops: Sequence[Run]) -> str:
    """The native kernel that serves these runs: ``"rows"``, ``"columns"``, or ``""`` where a packed copy is needed.

    >>> from normscope.spec import families
    >>> kernel(runs(families.layer_norm(), (8, 768))), kernel(runs(families.batch_norm(), (8, 768)))
    ('rows', 'columns')
    """
    if not loops:
        return "rows"
    last = loops[-1]
    if last.stride != 1 or last.out != 1 or last.parameter not in (0, 1):
        return ""
    if last.kept:
        return "columns"
    return "columns" if _interleaved(loops) else "rows"


def _interleaved(loops: Sequence[Run]) -> bool:
    """``.. E K E``: short contiguous pieces of a set, next to those of other sets, repeated by an outer erased run."""
    if len(loops) < 3 or not loops[-2].kept or loops[-3].kept:
        return False
    piece = loops[-1].size
    return piece <= SHORT_PIECE and loops[-2].stride == loops[-2].out == piece


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(prod(max(1, n) for n in shape[i + 1 :]) for i in range(len(shape)))
