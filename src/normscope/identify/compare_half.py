"""Two sides in half precision: bfloat16 and float16, where arithmetic that rounds on its way shows.

One function of real numbers is computed in many ways there: all in float32 and rounded once, with rounded statistics,
or in 8 bits throughout. Each side is held against itself in float64, with its input and everything that it holds
rounded to the half type first: an element is right where it is that number, correctly rounded. Elements on which the
two disagree count where one of them is not right; so parameters which two conventions round differently (w and 1 + w)
make no difference. An output that comes back in another dtype does: what follows then runs in another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.errors import NormscopeError, told
from normscope.identify.compare_result import DTYPE, HALVES, Difference, largest_difference
from normscope.identify.compare_sides import Both, BoxSide, ModuleSide, Side, SpecSide
from normscope.identify.repeats import LAST_BITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.spec import NormSpec

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]
    Gaps = Sequence["HalfGap"]

SHARE = 0.05
"""of the elements: float32 inside, summed in another order, flips one in a thousand at a mean of four standard
deviations (one in a hundred in float16); one more rounding of the statistics flips one in six"""
LEAST = 2
"""elements, however few there are: one or two near ties prove nothing"""
RIGHT = 0.95
"""share of right elements of a side that rounds once"""
ELEMENTS, DRAWS = 256, 8
"""elements that are drawn of each input, in so many arrays at most"""
GRID = 64
"""steps of a parameter to 1: w and w - 1 up to 2 are both exact in 8 bits"""


@dataclass(frozen=True, eq=False)
class HalfGap:
    """Two outputs for one input in a half type."""

    y_a: Array
    y_b: Array
    off: NDArray[np.bool_]
    """elements that differ and are not right on both sides"""
    right: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    """elements of each side that are its own exact value, rounded once"""
    errors: tuple[Array, Array]
    """of each side against its exact values rounded once, in units of the last place (of a usual output at least)"""
    dtypes: tuple[str, str]
    """of the outputs: of the half type, but where a layer forgets to cast back"""

    @property
    def other_dtype(self) -> bool:
        return self.dtypes[0] != self.dtypes[1]


def changes(side: Side, x: Array) -> bool:
    """Whether a callable gives one input two outputs, by more than sums in another order: chance, or memory."""
    if not isinstance(side, BoxSide):
        return False
    try:
        one, two = side.output(x, "eval"), side.output(x, "eval")
    except (NormscopeError, ValueError, RuntimeError, ArithmeticError):
        return False
    return not np.allclose(
        one, two, rtol=0.0, atol=LAST_BITS * side.roundoff * np.abs(one).max(), equal_nan=True
    )


def half_modes(
    both: Both, given: tuple[Array, Array], values: tuple[Values | None, Values | None], training: bool
) -> tuple[list[str], list[str]]:
    """The modes of half precision in which both sides run, and notes. ``training``: there is a mode of training.

    Two specifications alone are run only where their casts differ: everything else is decided by algebra.
    """
    specs = [spec for spec in (both.spec_a, both.spec_b) if spec is not None]
    by_cast = len({_casts(spec) for spec in specs}) == 2
    if not by_cast and isinstance(both.a, SpecSide) and isinstance(both.b, SpecSide):
        return [], []
    stateless = len(specs) == 2 and all(spec.running is None for spec in specs)
    found, notes = [], []
    for mode, half in HALVES.items():
        if half.training and (stateless or not training):
            continue
        ran = []
        for side, x, held in zip((both.a, both.b), given, values, strict=True):
            try:
                ran.append(side.half(x, mode, held) is not None)
            except (NormscopeError, ValueError, RuntimeError, ArithmeticError) as error:
                said = told(error.__cause__ or error)
                notes.append(f"not compared in {half.dtype}, where {side.name} raises {said}")
                ran.append(False)
        if all(ran):
            found.append(mode)
    if by_cast and "bfloat16" not in found:
        notes.append("their casts differ, and one of them was not run in bfloat16, where that shows")
    return found, notes


def _casts(spec: NormSpec) -> tuple[str, str]:
    """What the casts do to a bfloat16 input: without a weight their order is none."""
    return spec.cast.compute or "float32", spec.cast.weight if spec.weight is not None else "before"


def half_inputs(mode: str, shape: Sequence[int]) -> Iterator[tuple[str, Array]]:
    """Inputs of a half type: of few and of many elements alike some hundred numbers in all.

    In float16 also large ones, whose squares do not fit.
    """
    from math import prod

    wide = HALVES[mode].dtype == "float16"
    random = np.random.default_rng(5)
    for draw in range(min(DRAWS, -(-ELEMENTS // max(1, prod(shape))))):
        z = random.standard_normal(tuple(shape))
        if wide:
            yield f"large, draw {draw}", rounded(300 * (z + 1), mode)
        else:
            yield f"ordinary, draw {draw}", rounded(z, mode)
            yield f"offset, draw {draw}", rounded(z + 4, mode)


def half_gap(
    a: Side,
    b: Side,
    x: Array,
    x_b: Array,
    back: tuple[int, ...],
    mode: str,
    values: tuple[Values | None, Values | None],
) -> HalfGap | None:
    """Both sides on one input; None where one of them cannot be asked."""
    held = [None if v is None else {name: rounded(value, mode) for name, value in v.items()} for v in values]
    one, two = a.half(x, mode, held[0]), b.half(x_b, mode, held[1])
    if one is None or two is None:
        return None
    exact_a, exact_b = a.exact(x, mode, held[0]), b.exact(x_b, mode, held[1]).transpose(back)
    y_a, y_b = rounded(one.y, mode), rounded(two.y, mode).transpose(back)
    exact_a, exact_b = rounded(exact_a, mode), rounded(exact_b, mode)
    right = _equal(y_a, exact_a), _equal(y_b, exact_b)
    off = ~_equal(y_a, y_b) & ~(right[0] & right[1])
    errors = _errors(y_a, exact_a, mode), _errors(y_b, exact_b, mode)
    if one.dtype != two.dtype:  # as they came
        y_a, y_b = one.y, two.y.transpose(back)
    return HalfGap(y_a, y_b, off, right, errors, (one.dtype, two.dtype))


def differ(gaps: Gaps) -> bool:
    """Whether the outputs have two dtypes, or the elements that are off are more than near ties."""
    return any(gap.other_dtype for gap in gaps) or _rounds_differently(gaps)


def _rounds_differently(gaps: Gaps) -> bool:
    off = [gap.off for gap in gaps]
    count = sum(int(each.sum()) for each in off)
    return count > max(LEAST, SHARE * sum(each.size for each in off))


def on_the_grid(values: Values) -> dict[str, Array]:
    """Parameters that half types hold exactly, also less 1."""
    return {name: np.round(value * GRID) / GRID for name, value in values.items()}


def dtype_difference(gaps: Gaps, mode: str) -> Iterator[Difference]:
    """The dtypes of the outputs, where they are two."""
    other = [gap for gap in gaps if gap.other_dtype]
    if other:
        yield Difference(DTYPE, *other[0].dtypes, max(largest_difference(g.y_a, g.y_b) for g in other), mode)


def arithmetic_difference(gaps: Gaps, mode: str) -> Iterator[Difference]:
    """The arithmetic of the two, each by how far it is from its own exact values, where it rounds differently."""
    if not _rounds_differently(gaps):
        return
    size = max(float(np.abs(np.where(gap.off, gap.y_a - gap.y_b, 0.0)).max(initial=0.0)) for gap in gaps)
    one, two = (
        _quality([gap.right[side] for gap in gaps], [gap.errors[side] for gap in gaps]) for side in (0, 1)
    )
    yield Difference("arithmetic in half precision", one, two, size, mode)


def as_defined(side: Side, mode: str) -> Side:
    """The side, or what its specification says where its own kernel rounds statistics that its definition does not.

    PyTorch's batch and instance norms do so on the CPU where their parameters are of a half type, and not on others.
    """
    if not isinstance(side, ModuleSide) or side.spec is None or not _by_kernel(side.original):
        return side
    by_batch = side.spec.running is None or HALVES[mode].training
    held = {name: rounded(value, mode) for name, value in (side.held or {}).items()}
    return SpecSide(side.name, side.spec, held=held, settable=True) if by_batch else side


def _by_kernel(module: object) -> bool:
    from torch.nn.modules.batchnorm import _NormBase

    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.modules.")


def rounded(value: Array, mode: str) -> Array:
    """To the nearest number of the half type, through float32 as everywhere."""
    import torch

    exact = torch.from_numpy(np.array(value, dtype=np.float64)).to(torch.float32)
    out: Array = exact.to(getattr(torch, HALVES[mode].dtype)).double().numpy()
    return out


def _equal(y: Array, other: Array) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = (y == other) | (np.isnan(y) & np.isnan(other))
    return same


def _errors(y: Array, exact: Array, mode: str) -> Array:
    finite = exact[np.isfinite(exact)]
    usual = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
    with np.errstate(all="ignore"):
        unit = 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), usual or 1.0))) * HALVES[mode].spacing
        errors: Array = np.where(_equal(y, exact), 0.0, np.abs(y - exact) / unit)
    return errors


def _quality(right: Sequence[NDArray[np.bool_]], errors: Sequence[Array]) -> str:
    every = np.concatenate([each.ravel() for each in errors])
    share = 1 - float(np.concatenate([each.ravel() for each in right]).mean())
    if share <= 1 - RIGHT:
        return "rounded once"
    if not np.isfinite(every).all():
        return "overflows"
    return f"{100 * share:.0f} % of the outputs off, by up to {every.max():.2g} units of the last place"
