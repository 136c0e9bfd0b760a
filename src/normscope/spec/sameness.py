"""When two specifications are one function, and why not where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, prod, sqrt
from typing import TYPE_CHECKING, Any

from normscope.spec import align
from normscope.spec.align import Match, Misaligned, Unit
from normscope.spec.parts import SpecError
from normscope.spec.pattern import PatternError
from normscope.spec.validate import WHITENINGS

if TYPE_CHECKING:
    from normscope.spec.normspec import NormSpec

RANKS_BEYOND = 4
"""how many ranks above the least are tried where no shape is given; every law repeats from the third on"""


# The canonical form -------------------------------------------------------------------------------------------------


def canonical_factor(spec: NormSpec, set_size: int | None = None) -> float:
    """f in: canonical weight = (weight_offset + weight) * f, for sets of ``set_size`` elements.

    f = gain / sqrt(k) with k as in `canonical`.

    >>> from normscope.spec import families
    >>> canonical_factor(families.scale_norm(), 16)
    0.25
    """
    return spec.gain / sqrt(_units_ratio(spec, set_size))


def canonical(spec: NormSpec, set_size: int | None = None) -> NormSpec:
    """The same function by batch statistics with correction 0, offset 0, gain 1 and rms units.

    A variance with correction c is k times the biased one, k = n / (n - c); a sum of squares is k = n times
    the mean square. As sqrt(k v + eps) = sqrt(k) sqrt(v + eps / k), the function is that of the weight
    (weight_offset + weight) * `canonical_factor`, and eps / k (eps / sqrt(k) where it stands outside the
    root). Without a weight the factor stays as the gain. ``eps_at`` is ``"variance"`` where eps has no
    effect, and ``"max"`` for both kinds of floor.

    Arguments: ``set_size`` n, needed where k depends on it and the sizes of the specification do not tell it.
    Raises SpecError where n is missing, or not above the correction, or eps is None and would be rescaled.

    >>> from normscope.spec import NormSpec
    >>> NormSpec("... d -> ...", weight="d", correction=1, eps=1e-6).canonical(2)
    NormSpec('... d -> ...', weight='d', eps=5e-07)
    """
    factor = canonical_factor(spec, set_size)
    eps, eps_at = _canonical_eps(spec, _units_ratio(spec, set_size))
    return spec.replace(
        scale=_canonical_scale(spec),
        correction=0,
        eps=eps,
        eps_at=eps_at,
        weight_offset=0.0,
        gain=1.0 if spec.weight is not None else factor,
    )


def _canonical_scale(spec: NormSpec) -> str:
    """A mean square about the mean is the biased variance."""
    if spec.scale in ("rms", "l2"):
        return "std" if spec.center else "rms"
    return spec.scale


def _units_ratio(spec: NormSpec, set_size: int | None) -> float:
    """k: v as the specification measures it over the biased variance or the mean square."""
    if spec.scale != "l2" and spec.correction == 0:
        return 1.0
    if set_size is None:
        erased = spec.pattern.erased
        if not all(name in spec.sizes for name in erased):
            raise SpecError(
                f"the canonical form depends on the number of elements of a set; got set_size=None for {str(spec)!r}. "
                "Pass set_size, such as spec.bind(shape).set_size."
            )
        set_size = prod(spec.sizes[name] for name in erased)
    if spec.scale == "l2":
        return float(set_size)
    if set_size <= spec.correction:
        raise SpecError(
            f"a set has more elements than the correction {spec.correction!r}; got set_size={set_size}. "
            "Smaller sets have no variance."
        )
    return set_size / (set_size - spec.correction)


def _canonical_eps(spec: NormSpec, k: float) -> tuple[float | None, str]:
    if spec.eps is None:
        if k != 1:
            raise SpecError(
                f"an eps that follows the dtype cannot be rescaled; got eps=None for {str(spec)!r}. "
                "Put in the number first: spec.replace(eps=2**-23)."
            )
        return None, spec.eps_at
    eps = spec.eps
    if spec.eps_at in ("variance", "max_variance"):
        eps = eps / k
    elif spec.eps_at in ("std", "max"):
        eps = eps / sqrt(k)
    if spec.eps_at in ("max", "max_variance") and eps <= 0:
        return 0.0, "variance"
    if eps == 0:
        return 0.0, "variance"
    return (sqrt(eps), "max") if spec.eps_at == "max_variance" else (eps, spec.eps_at)


# Comparison ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sameness:
    """Whether two specifications are one function; true in a condition exactly where they are.

    >>> from normscope.spec import families
    >>> s = families.group_norm(1).same_function(families.layer_norm("c h w"), shape=(8, 6, 5, 5))
    >>> bool(s), s.conditions
    (False, ('the weight is constant along ...0 (h of the other), ...1 (w of the other)', \
'the bias is constant along ...0 (h of the other), ...1 (w of the other)'))
    """

    same: bool
    """for every input and every value of the parameters, after `weight` where that is not empty"""
    reason: str = ""
    """why they are not the same; "" where they are"""
    conditions: tuple[str, ...] = ()
    """what would make them the same where they are not; () where nothing does"""
    weight: str = ""
    """how the second's weight follows from the first's, where it is not simply equal"""

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        after = f", with {self.weight}" if self.weight else ""
        if self.same:
            return f"the same function{after}"
        if self.conditions:
            return f"the same function only where {' and '.join(self.conditions)}{after}"
        return f"not the same function: {self.reason}"


def same_function(
    a: NormSpec,
    b: NormSpec,
    *,
    layout: Mapping[str, str] | None = None,
    shape: Sequence[int] | None = None,
) -> Sameness:
    """Whether two specifications are one function of real numbers (casts, which only round, are not compared).

    Arguments:
        layout: None where both read the same tensor, axes by position. A mapping (also an empty one) where
            the second reads the same data with its axes in another order: names of the first to names of the
            second, equal names mean the same axis, and axes left over (such as those of ``...``) are paired
            in order.
        shape: of the first's input. None compares for all sizes and ranks that both read.

    Statistic sets, centering, denominator, weight, bias, source and running state are compared, the
    denominators in canonical form. Raises PatternError where the first does not fit ``shape``.

    >>> from normscope.spec import families
    >>> print(families.layer_norm().same_function(families.rms_norm(eps=1e-5)))
    the same function only where the mean of every set is 0 and the bias is 0
    """
    if shape is not None:
        a.bind(shape)
        return _verdict(a, b, tuple(shape), layout, sized=True)
    found: dict[int, Sameness] = {}
    reason = "no number of axes is read by both"
    for ndim in range(a.pattern.min_ndim, max(a.pattern.min_ndim, b.pattern.min_ndim) + RANKS_BEYOND):
        if not _fits(a, ndim) or (layout is None and not _fits(b, ndim)):
            continue
        try:
            matches = align.match(a.pattern, b.pattern, ndim, layout)
        except Misaligned as error:
            reason = str(error)
            continue
        if _fits(b, sum(len(pair.b) for pair in matches)):
            trials = [
                _generic_verdict(a, b, matches, ndim, layout, trial) for trial in range(len(align.PRIMES))
            ]
            found[ndim] = min(trials, key=lambda verdict: verdict.same)
    return _for_all_ranks(found) if found else Sameness(False, reason)


def _fits(spec: NormSpec, ndim: int) -> bool:
    low, high = spec.ndim or (
        spec.pattern.min_ndim,
        None if spec.pattern.has_ellipsis else spec.pattern.min_ndim,
    )
    return low <= ndim and (high is None or ndim <= high)


def _generic_verdict(
    a: NormSpec, b: NormSpec, matches: list[Match], ndim: int, layout: Mapping[str, str] | None, trial: int
) -> Sameness:
    """The verdict at sizes that stand for all sizes."""
    try:
        shape = align.generic_shape(a, b, matches, ndim, layout, trial)
    except Misaligned as error:
        return Sameness(False, str(error))
    return _verdict(a, b, shape, layout, sized=False)


def _for_all_ranks(found: Mapping[int, Sameness]) -> Sameness:
    """One answer for all ranks; where only some agree, the rank is a condition."""
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    # the easiest to fulfil: no condition before some, some before a plain no
    best = min(found.values(), key=lambda s: (not s.same, not s.conditions, len(s.conditions)))
    if not best.same and not best.conditions:
        return best
    ranks = [str(ndim) for ndim, s in found.items() if s == best]
    rank = f"the input has {' or '.join(ranks)} {'axis' if ranks == ['1'] else 'axes'}"
    conditions = (rank, *best.conditions)
    return Sameness(False, _only(conditions), conditions, best.weight)


def _only(conditions: Sequence[str]) -> str:
    return f"they agree only where {' and '.join(conditions)}"


def _verdict(
    a: NormSpec, b: NormSpec, shape: tuple[int, ...], layout: Mapping[str, str] | None, *, sized: bool
) -> Sameness:
    """Compare on one shape of the first's input; ``sized`` where it is the user's, not one of many."""
    try:
        matches = align.match(a.pattern, b.pattern, len(shape), layout)
        bound_a = a.bind(shape)
        bound_b = b.bind(align.shape_of_other(matches, bound_a, b.pattern, layout))
        if bound_a.segments != bound_b.segments:
            raise Misaligned("they cut the samples into virtual batches of different sizes")
        found = align.units(a, bound_a, b, bound_b, matches, layout)
    except Misaligned as error:
        return Sameness(False, str(error))
    except PatternError as error:
        return Sameness(False, f"the second does not read this input: {error}")
    return _Comparison(a, b, found, sized).verdict()


class _Comparison:
    """Collects what stands between two aligned specifications."""

    def __init__(self, a: NormSpec, b: NormSpec, units: list[Unit], sized: bool) -> None:
        self.units, self.sized = units, sized
        self.a = a if any("whiten" in unit.a.roles for unit in units) else _one_channel(a)
        self.b = b if any("whiten" in unit.b.roles for unit in units) else _one_channel(b)
        self.reasons: list[str] = []
        self.conditions: list[str] = []
        # where sets differ, what is common to both: the condition that makes them equal shrinks them to it
        self.set_size = prod(u.size for u in units if "kept" not in u.a.roles and "kept" not in u.b.roles)

    def verdict(self) -> Sameness:
        self._sets()
        ratios = self._denominators()
        weight = "" if ratios is None else self._weights(*ratios)
        self._biases()
        self._state(ratios)
        if self.reasons:
            return Sameness(False, "; ".join(self.reasons))
        if self.conditions:
            return Sameness(False, _only(self.conditions), tuple(self.conditions), weight)
        return Sameness(True, weight=weight)

    def _both(self, field: str) -> tuple[Any, Any]:
        return getattr(self.a, field), getattr(self.b, field)

    def _sets(self) -> None:
        # a variance with a correction, and a sum, also tell sets of copies apart by their size
        size_counts = any(spec.correction or spec.scale == "l2" for spec in (self.a, self.b))
        cures = [] if self.sized else ["{} has size 1"]
        cures += [] if size_counts else ["the input is the same along {}"]
        for unit in self.units:
            if unit.differs("kept"):
                if cures:
                    self.conditions.append(" or ".join(cures).format(unit.name, unit.name))
                else:
                    self.reasons.append(f"one keeps {unit.name}, the other erases it")
        if self.a.remainder != self.b.remainder:
            self.conditions.append("the samples divide into whole virtual batches")

    def _denominators(self) -> tuple[float, float] | None:
        """Compare what is subtracted and divided by; the factor that each leaves to its weight."""
        a, b = self.a, self.b
        if a.scale in WHITENINGS or b.scale in WHITENINGS:
            if a.scale != b.scale:
                self.reasons.append(f"one divides by {a.scale}, the other by {b.scale}")
                return None
            if any(unit.differs("whiten") for unit in self.units):
                self.reasons.append(f"one whitens over {a.whiten}, the other over {b.whiten}")
            if a.scale == "iternorm" and a.iterations != b.iterations:
                self.reasons.append(f"iterations {a.iterations} against {b.iterations}")
            if a.center != b.center:
                self.conditions.append("the mean of every set is 0")
        else:
            if a.center != b.center or _about_mean(a) != _about_mean(b):
                self.conditions.append("the mean of every set is 0")
        if all(getattr(a, name) == getattr(b, name) for name in ("scale", "correction", "eps", "eps_at")):
            return a.gain, b.gain
        try:
            k = _units_ratio(a, self.set_size), _units_ratio(b, self.set_size)
        except SpecError as error:
            self.reasons.append(str(error))
            return None
        if a.eps is None or b.eps is None:
            if (a.eps, a.eps_at) != (b.eps, b.eps_at) or k[0] != k[1]:
                self.reasons.append(f"eps {_eps(a)} against {_eps(b)}")
        else:
            mine, other = _canonical_eps(a, k[0]), _canonical_eps(b, k[1])
            # a few roundings of float64 lie between two ways to write one constant
            if mine[1] != other[1] or not isclose(mine[0] or 0, other[0] or 0, rel_tol=1e-12):
                self.reasons.append(f"eps {_eps(a)} against {_eps(b)}")
        return a.gain / sqrt(k[0]), b.gain / sqrt(k[1])

    def _weights(self, factor_a: float, factor_b: float) -> str:
        """Compare the gains; the conversion of the weight, or ""."""
        a, b = self.a, self.b
        if a.weight is None and b.weight is None:
            if not isclose(factor_a, factor_b, rel_tol=1e-12):
                self.reasons.append(
                    f"without a weight they differ by the factor {self._number(factor_b / factor_a)}"
                )
            return ""
        if a.weight is None or b.weight is None:
            spec, own, wanted = (b, factor_b, factor_a) if a.weight is None else (a, factor_a, factor_b)
            which = "second" if a.weight is None else "first"
            self.conditions.append(
                f"the {which}'s weight is {self._number(wanted / own - spec.weight_offset)}"
            )
            return ""
        self._parameter("weight")
        ratio = factor_a / factor_b
        if isclose(ratio, 1, rel_tol=1e-12) and a.weight_offset == b.weight_offset:
            return ""
        first = f"({a.weight_offset:g} + first's weight)" if a.weight_offset else "first's weight"
        scaled = first if isclose(ratio, 1, rel_tol=1e-12) else f"{first} * {self._number(ratio)}"
        return f"second's weight = {scaled}" + (f" - {b.weight_offset:g}" if b.weight_offset else "")

    def _number(self, value: float) -> str:
        """In words where sizes are open and it depends on them."""
        sized = self.sized or not (self.a.correction or self.b.correction or "l2" in self._both("scale"))
        return f"{value:.6g}" if sized else "a number that the size of a set decides (pass shape)"

    def _biases(self) -> None:
        if self.a.bias is None and self.b.bias is None:
            return
        if self.a.bias is None or self.b.bias is None:
            self.conditions.append("the bias is 0")
            return
        self._parameter("bias")

    def _parameter(self, what: str) -> None:
        along = [unit.name for unit in self.units if unit.differs(what)]
        if along:
            self.conditions.append(f"the {what} is constant along {', '.join(along)}")
        if self.a.source != self.b.source:
            self.reasons.append(
                f"the {what} of one is {_ORIGIN[self.a.source]}, of the other {_ORIGIN[self.b.source]}"
            )

    def _state(self, ratios: tuple[float, float] | None) -> None:
        mine, other = self._both("running")
        if mine is None and other is None:
            return
        if mine is None or other is None:
            self.conditions.append("statistics of the batch normalize, as only one carries running state")
            return
        apart = [unit.name for unit in self.units if unit.differs("state")]
        if apart:
            self.reasons.append(f"the running state of only one has an axis for {', '.join(apart)}")
        if mine.renorm != other.renorm:
            self.reasons.append(f"renorm {mine.renorm} against {other.renorm}")
        differ = [
            f"{name} {getattr(mine, name)} against {getattr(other, name)}"
            for name in ("momentum", "correction", "averages")
            if getattr(mine, name) != getattr(other, name)
        ]
        if self.a.whiten_state != self.b.whiten_state:
            differ.append(f"the stored {self.a.whiten_state} against {self.b.whiten_state}")
        if ratios is not None and self.a.correction != self.b.correction:
            differ.append("a correction that only batch statistics see")
        if differ:
            self.conditions.append(f"statistics of the batch normalize ({', '.join(differ)})")


_ORIGIN = {"parameter": "a parameter", "input": "an input"}


def _one_channel(spec: NormSpec) -> NormSpec:
    """Whitening of one channel is division by its deviation: W = 1 / sqrt(v + eps), or 1 / sqrt(v + eps v)."""
    if spec.scale not in WHITENINGS or (spec.eps_at == "trace" and (spec.eps is None or spec.eps <= -1)):
        return spec
    plain = spec.replace(scale="std", whiten="", eps_at="variance")
    if spec.eps_at == "variance":
        return plain
    return plain.replace(eps=0.0, gain=spec.gain / sqrt(1 + (spec.eps or 0.0)))


def _about_mean(spec: NormSpec) -> bool:
    return spec.center or spec.scale == "std"


def _eps(spec: NormSpec) -> str:
    value = "of the dtype" if spec.eps is None else repr(spec.eps)
    correction = f", correction {spec.correction:g}" if spec.correction else ""
    return f"{value} at {spec.eps_at} of {spec.scale}{correction}"
