"""What follows from a specification by algebra on its axes.

Unless a property says else it is of the output in batch mode (statistics of the input itself) and of exact
arithmetic. By stored statistics every norm is an affine map of each element alone: it couples nothing and
removes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscope.spec.bound import BoundSpec
from normscope.spec.folds import Fold, folds
from normscope.spec.parts import require
from normscope.spec.pattern import ELLIPSIS, tokenize
from normscope.spec.validate import WHITENINGS

if TYPE_CHECKING:
    from normscope.spec.normspec import NormSpec


@dataclass(frozen=True)
class Properties:
    """The laws of one specification; see the fields. ``str`` gives them as lines of text.

    >>> from normscope.spec import families
    >>> p = families.group_norm(2).properties((8, 6, 5, 5))
    >>> p.shift_axes, p.removes_shift("g"), p.removes_shift("(g c)"), p.set_size
    (('b', 'g'), True, False, 75)
    """

    spec: NormSpec
    bound: BoundSpec | None
    """sizes, where a shape was given; axes of size 1 then count as kept, since nothing varies along them"""

    # Invariances --------------------------------------------------------------------------------------------

    shift_axes: tuple[str, ...] | None
    """axes along which an added shift is removed: y(x + s) = y(x) for every s that varies along these alone
    (is constant along all other axes). One common shift is the case of no axis; None: not even that is removed"""
    scale_axes: tuple[str, ...] | None
    """axes along which a positive factor is removed, to the degree of `scale_invariance`: y(s x) = y(x) for every
    s > 0 that varies along these alone; () and None as above"""
    scale_invariance: str
    """``"exact"``; ``"above eps"``, exact while v stays above the constant; ``"approximate"``, up to terms of relative
    size eps / v; or ``"none"``"""

    # Couplings ----------------------------------------------------------------------------------------------

    couples_samples: bool
    """in batch mode other samples of the batch change a sample's output"""
    couples_time: bool
    """other steps of the axis ``t`` change a step's output"""
    causal: bool | None
    """no later step changes an earlier step's output; None without an axis ``t``"""

    # State --------------------------------------------------------------------------------------------------

    modes: tuple[str, ...]
    """``("input",)`` without state, else ``("batch", "running")``"""
    state: tuple[str, ...]
    """names of what is stored"""
    train_differs_from_eval: bool
    """the same input gives different outputs in training and evaluation, by design"""
    training_reads_state: bool
    """the output in training depends on the stored statistics (batch renormalization)"""

    # Sizes, None without a shape ----------------------------------------------------------------------------

    set_size: int | None
    """elements per statistic set, of the smallest where virtual batches differ"""
    sets: int | None
    """number of statistic sets"""
    weight_shape: tuple[int, ...] | None
    bias_shape: tuple[int, ...] | None
    running_shape: tuple[int, ...] | None

    # Use ----------------------------------------------------------------------------------------------------

    folds: tuple[Fold, ...]
    """what of it can move into a neighbouring linear map, and where"""
    cautions: tuple[str, ...]
    """what is allowed to be written down, but rarely meant"""

    def removes_shift(self, axes: str) -> bool:
        """Whether a shift that varies along ``axes`` alone, such as a bias on ``"c"`` or ``"(g c)"``, is removed.

        ``""`` asks for one shift common to all elements. Raises SpecError where there is no such axis.
        """
        return self._within(axes, self.shift_axes)

    def removes_scale(self, axes: str) -> bool:
        """Whether a positive factor that varies along ``axes`` alone is removed, to the degree of `scale_invariance`.

        Raises SpecError where there is no such axis.
        """
        return self._within(axes, self.scale_axes)

    def _within(self, axes: str, removed: tuple[str, ...] | None) -> bool:
        names = {name for group in tokenize(axes) for name in group}
        for name in names:
            require(
                name in self.spec.pattern.names,
                f"an axis of {self.spec.stats!r} is meant",
                name,
                f"Its axes are {', '.join(self.spec.pattern.names)}.",
            )
        return removed is not None and names <= set(removed)

    def __str__(self) -> str:
        def yes(flag: bool) -> str:
            return "yes" if flag else "no"

        def along(names: tuple[str, ...] | None) -> str:
            if names is None:
                return "no"
            return f"along {', '.join(names)}" if names else "common to all elements only"

        lines = [
            ("removes a shift", along(self.shift_axes)),
            ("removes a scale", along(self.scale_axes)),
            ("to the degree", self.scale_invariance),
            ("couples samples", yes(self.couples_samples)),
            ("couples steps", yes(self.couples_time)),
            ("causal", "no axis t" if self.causal is None else yes(self.causal)),
            ("state", ", ".join(self.state) or "none"),
            ("training differs from evaluation", yes(self.train_differs_from_eval)),
            ("training reads state", yes(self.training_reads_state)),
        ]
        if self.bound is not None:
            lines.append(
                ("statistic sets", f"{self.sets} of {' or '.join(map(str, self.bound.set_sizes))} elements")
            )
        lines += [("folds", str(fold)) for fold in self.folds] or [("folds", "no")]
        lines += [("caution", caution) for caution in self.cautions]
        return "\n".join(f"{name}: {value}" for name, value in lines)


def properties(spec: NormSpec, shape: Sequence[int] | None = None) -> Properties:
    """Derive the laws of a specification; with an input shape its sizes count too.

    Raises PatternError where the shape does not fit.
    """
    bound = None if shape is None else spec.bind(shape)
    erased = _varying_erased(spec, bound)
    whitened = _varying_whitened(spec, bound)
    kept = tuple(name for name in spec.pattern.names if name not in erased)
    # with r and d free, batch renormalization gives back the mean (d) and the scale (r, d) of the batch
    r_max, d_max = (spec.running.renorm if spec.running else None) or (1, 0)
    renormalizes = r_max > 1 or d_max > 0
    scale = "none" if renormalizes else _scale_invariance(spec)
    return Properties(
        spec=spec,
        bound=bound,
        shift_axes=kept if spec.center and d_max == 0 else None,
        scale_axes=None if scale == "none" else _scale_axes(spec, kept, whitened),
        scale_invariance=scale,
        couples_samples=_couples_samples(spec, bound, erased + whitened),
        couples_time="t" in erased + whitened,
        causal=_causal(spec, erased, whitened),
        modes=("batch", "running") if spec.running else ("input",),
        state=_state(spec),
        train_differs_from_eval=spec.running is not None,
        training_reads_state=renormalizes,
        set_size=None if bound is None else bound.set_size,
        sets=None if bound is None else bound.sets,
        weight_shape=None if bound is None else bound.weight_shape,
        bias_shape=None if bound is None else bound.bias_shape,
        running_shape=None if bound is None else bound.running_shape,
        folds=folds(spec),
        cautions=tuple(_cautions(spec, bound)),
    )


def _varying_erased(spec: NormSpec, bound: BoundSpec | None) -> tuple[str, ...]:
    """Erased names along which a set has more than one element, as far as sizes are known."""
    if bound is None:
        return tuple(name for name in spec.pattern.erased if spec.sizes.get(name) != 1)
    sized = [axis for axis in bound.axes if not axis.kept and axis.size > 1]
    varying = {ELLIPSIS if axis.name.startswith(ELLIPSIS) else axis.name for axis in sized}
    return tuple(name for name in spec.pattern.erased if name in varying)


def _varying_whitened(spec: NormSpec, bound: BoundSpec | None) -> tuple[str, ...]:
    """Whitened names along which outputs mix, as far as sizes are known."""
    sizes = spec.sizes if bound is None else {axis.name: axis.size for axis in bound.axes}
    return tuple(name for name in spec.whiten.split() if sizes.get(name) != 1)


def _sample_names(spec: NormSpec) -> tuple[str, ...]:
    """Factors of the sample axis that tell samples apart: steps folded into it do not."""
    return tuple(name for name in spec.sample_group or () if name != "t")


def _couples_samples(spec: NormSpec, bound: BoundSpec | None, mixed: tuple[str, ...]) -> bool:
    names = _sample_names(spec)
    if bound is not None and names == (ELLIPSIS,):
        return any(axis.name == f"{ELLIPSIS}0" and not axis.kept and axis.size > 1 for axis in bound.axes)
    return any(name in mixed for name in names)


def _causal(spec: NormSpec, erased: tuple[str, ...], whitened: tuple[str, ...]) -> bool | None:
    """Sets that span steps look ahead, and so does whitening over steps, save by a Cholesky factor: its inverse is
    triangular, and each row needs the covariance of the steps so far only."""
    if "t" not in spec.pattern.names:
        return None
    looks_ahead = "t" in whitened and (spec.scale, spec.eps_at, spec.whiten) != ("cholesky", "variance", "t")
    return "t" not in erased and not looks_ahead


def _scale_invariance(spec: NormSpec) -> str:
    """A common factor s: v grows by s^2, so the constant must be absent, relative to v, or beaten by v."""
    if spec.eps == 0 or spec.eps_at == "trace":
        return "exact"
    if spec.eps_at in ("max", "max_variance"):
        # a negative floor is never reached
        return "exact" if spec.eps is not None and spec.eps < 0 else "above eps"
    return "approximate"


def _scale_axes(spec: NormSpec, kept: tuple[str, ...], whitened: tuple[str, ...]) -> tuple[str, ...]:
    """Kept axes, as each set is divided by its own scale. Of whitening only the Cholesky factor follows a factor
    per channel, S -> D S D and L -> D L, and only where eps does not mix the channels."""
    if spec.scale == "cholesky" and spec.eps == 0:
        return kept
    return tuple(name for name in kept if name not in whitened)


def _state(spec: NormSpec) -> tuple[str, ...]:
    if spec.running is None:
        return ()
    second = "running_var"
    if spec.scale in WHITENINGS:
        second = "running_covariance" if spec.whiten_state == "covariance" else "running_whitening"
    return ("running_mean", second, "num_batches_tracked")


def _cautions(spec: NormSpec, bound: BoundSpec | None) -> list[str]:
    said: list[str] = []
    if spec.eps is None:
        said.append("eps is the machine epsilon, so the function depends on the dtype")
    elif spec.eps == 0:
        said.append("eps is 0: a set without spread divides 0 by 0")
    elif spec.eps < 0:
        said.append(f"eps is negative ({spec.eps!r}): a set of small spread has no real denominator")
    if spec.running is not None and spec.running.momentum is not None and not 0 < spec.running.momentum <= 1:
        what = "never move" if spec.running.momentum == 0 else "do not average"
        said.append(f"momentum is {spec.running.momentum!r}: stored statistics {what}")
    if spec.gain == 0:
        said.append("gain is 0: the output is the bias")
    if spec.source == "parameter":
        samples = set(_sample_names(spec)) - {ELLIPSIS}
        for what, where in (("weight", spec.weight), ("bias", spec.bias)):
            on = sorted(samples & {name for group in tokenize(where or "") for name in group})
            if on:
                said.append(f"the {what} is a parameter on the samples ({on[0]}), so it fixes the batch size")
    for size in sorted(set(bound.set_sizes)) if bound is not None else ():
        if spec.center:
            small = {
                1: "a set has 1 element: it is its own mean, and the output is the bias",
                2: "a set has 2 elements: the output carries the sign of their difference alone, but for eps",
            }
        elif spec.scale == "std":
            small = {1: "a set has 1 element: its variance is 0, and eps alone divides"}
        else:
            small = {1: "a set has 1 element: the output carries its sign alone, but for eps"}
        if size in small:
            said.append(small[size])
        if size and size <= spec.correction:
            said.append(
                f"a set has {size} elements, not more than the correction {spec.correction!r}: no variance"
            )
    return said
