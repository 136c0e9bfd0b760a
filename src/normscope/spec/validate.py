"""The rules that the fields of a specification obey together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normscope.spec.parts import Cast, Running, is_number, require
from normscope.spec.pattern import ELLIPSIS, Pattern, PatternError, tokenize, untokenize

if TYPE_CHECKING:
    from normscope.spec.normspec import NormSpec

MOMENTS = ("std", "rms", "l2")
WHITENINGS = ("zca", "cholesky", "iternorm")
EPS_AT: dict[str, tuple[str, ...]] = dict.fromkeys(MOMENTS, ("variance", "std", "max", "max_variance"))
EPS_AT |= dict.fromkeys(WHITENINGS, ("variance", "trace"))


def tidy_ndim(ndim: tuple[int, int | None] | int | None, pattern: Pattern) -> tuple[int, int | None] | None:
    """Bounds of the rank in one form: None where they say no more than the pattern does."""
    if ndim is None:
        return None
    low, high = (ndim, ndim) if isinstance(ndim, int) else ndim
    require(
        low >= 0 and (high is None or high >= low),
        "ndim is (low, high) with 0 <= low <= high, high None for no bound",
        ndim,
        "Write (4, 4) or 4 for exactly four axes.",
    )
    least = pattern.min_ndim
    most = None if pattern.has_ellipsis else least
    require(
        (high is None or high >= least) and (most is None or low <= most),
        f"ndim allows a rank that {str(pattern)!r} can have",
        ndim,
        f"The pattern has {'at least ' if pattern.has_ellipsis else ''}{least} axes.",
    )
    low = max(low, least)
    high = most if most is not None else high
    return None if (low, high) == (least, most) else (low, high)


def check(spec: NormSpec) -> None:
    """Raise SpecError for the first rule that the specification breaks."""
    _axes(spec)
    _affine(spec)
    _denominator(spec)
    _running(spec)


def _axes(spec: NormSpec) -> None:
    pattern = spec.pattern
    for name in spec.sizes:
        require(
            name in pattern.names and name != ELLIPSIS,
            f"sizes name axes of {spec.stats!r}",
            name,
            f"Its axes are {', '.join(pattern.names)}.",
        )
    for group in pattern.left:
        free = [name for name in group if name not in spec.sizes]
        if spec.remainder != "error" and group == spec.sample_group:
            continue
        require(
            len(free) <= 1,
            f"at most one size of a factored axis is free, to be inferred; {untokenize([group])!r} leaves "
            f"{' and '.join(free)} free",
            dict(spec.sizes),
            f"Add one, such as sizes={{{free[0] if free else ''!r}: 4}}.",
        )
    require(
        spec.sample_axis in (None, "", *pattern.names),
        f"sample_axis is an axis of {spec.stats!r}, '' or None",
        spec.sample_axis,
        f"Its axes are {', '.join(pattern.names)}; '' says that there are no samples.",
    )
    require(
        spec.remainder in ("error", "short", "balanced"),
        "remainder is 'error', 'short' or 'balanced'",
        spec.remainder,
        "'short' leaves a short last virtual batch, 'balanced' evens them out.",
    )
    if spec.remainder != "error":
        group = spec.sample_group or ()
        require(
            len(group) == 2 and group[0] in pattern.kept and group[1] not in pattern.kept,
            "a remainder needs a sample axis of two factors, the outer kept and the inner erased",
            spec.stats,
            "Write it like '(v b) c ... -> v c', or leave remainder at 'error'.",
        )
        require(
            sum(name in spec.sizes for name in group) == 1,
            f"with a remainder exactly one of {group[0]} and {group[1]} has a size",
            dict(spec.sizes),
            f"{{{group[1]!r}: 32}} fixes the size of a virtual batch, {{{group[0]!r}: 4}} their number.",
        )


def _affine(spec: NormSpec) -> None:
    for what in ("weight", "bias"):
        where = getattr(spec, what)
        if where is not None:
            _composed(spec, what, where)
    require(
        spec.source in ("parameter", "input"),
        "source is 'parameter' or 'input'",
        spec.source,
        "Adaptive and conditional norms are 'input'.",
    )
    require(is_number(spec.gain), "gain is a finite number", spec.gain, "Leave it at 1.0 for none.")
    require(
        is_number(spec.weight_offset),
        "weight_offset is a finite number",
        spec.weight_offset,
        "It is 1.0 where the stored weight is the distance from one, else 0.0.",
    )
    require(
        spec.weight is not None or spec.weight_offset == 0,
        "weight_offset is added to a weight, and there is none",
        spec.weight_offset,
        "Name the weight's axes, or use gain for a fixed factor.",
    )


def _composed(spec: NormSpec, what: str, where: str) -> None:
    """Axes that a parameter lives on: input axes, or runs of their factors, each once."""
    pattern = spec.pattern
    axes = f"Its axes are {', '.join(pattern.names)}."
    groups = tokenize(where)
    names = [name for group in groups for name in group]
    for name in names:
        require(name in pattern.names, f"{what} lives on axes of {spec.stats!r}", where, axes)
        require(names.count(name) == 1, f"{what} names each axis once", where, "Drop the second one.")
    for group in groups:
        inside = " ".join(pattern.group_of(group[0]))
        require(
            f" {' '.join(group)} " in f" {inside} ",
            f"{what} composes axes as the input does; {untokenize([group])!r} is no part of an axis "
            f"of {spec.stats!r}",
            where,
            "Without parentheses each axis is one of its own: 'c h w' has shape (C, H, W).",
        )


def _denominator(spec: NormSpec) -> None:
    require(isinstance(spec.center, bool), "center is True or False", spec.center, "RMS norms do not center.")
    require(
        spec.scale in EPS_AT,
        f"scale is one of {', '.join(EPS_AT)}",
        spec.scale,
        "A variance is 'std', a mean square 'rms', a sum of squares 'l2'.",
    )
    require(
        spec.eps is None or is_number(spec.eps),
        "eps is a finite number, or None for the machine epsilon of the computing dtype",
        spec.eps,
        "Usual values are 1e-5 and 1e-6.",
    )
    require(
        spec.eps_at in EPS_AT[spec.scale],
        f"with scale {spec.scale!r}, eps_at is one of {', '.join(EPS_AT[spec.scale])}",
        spec.eps_at,
        "'variance' is sqrt(v + eps), 'std' is sqrt(v) + eps.",
    )
    require(
        is_number(spec.correction) and spec.correction >= 0,
        "correction is a number from 0 up",
        spec.correction,
        "0 divides by n, 1 by n - 1.",
    )
    require(
        spec.correction == 0 or spec.scale not in ("rms", "l2"),
        f"a correction belongs to a variance, and scale is {spec.scale!r}",
        spec.correction,
        "Leave correction at 0.",
    )
    whitens = spec.scale in WHITENINGS
    require(
        bool(spec.whiten) == whitens,
        "whiten names axes exactly where scale is a whitening",
        (spec.scale, spec.whiten),
        "Write scale='zca', whiten='c', or leave whiten empty.",
    )
    for name in spec.whiten.split():
        require(
            name in spec.pattern.kept and name != ELLIPSIS,
            f"whitened axes are kept and named in {spec.stats!r}",
            spec.whiten,
            f"Kept axes are {', '.join(spec.pattern.kept)}.",
        )
    require(
        isinstance(spec.iterations, int) and spec.iterations >= 1,
        "iterations is a positive integer",
        spec.iterations,
        "The usual number is 5.",
    )
    require(
        spec.whiten_state in ("covariance", "whitening"),
        "whiten_state is 'covariance' or 'whitening'",
        spec.whiten_state,
        "It says which matrix running state holds.",
    )
    require(isinstance(spec.cast, Cast), "cast is a Cast", spec.cast, "Write Cast(compute='float32').")


def _running(spec: NormSpec) -> None:
    if spec.running is None:
        return
    require(
        isinstance(spec.running, Running),
        "running is a Running or None",
        spec.running,
        "Write Running() for the usual one.",
    )
    require(
        spec.running.averages == "variance" or (spec.scale == "std" and spec.eps_at == "variance"),
        "running.averages='denominator' is of sqrt(variance + eps): scale 'std' with eps_at 'variance'",
        (spec.scale, spec.eps_at),
        "Leave running.averages at 'variance'.",
    )
    kept = spec.pattern.kept
    try:
        over = tokenize(spec.running_axes)
    except PatternError as error:
        require(False, f"running.over names axes ({error})", spec.running.over, "Write it like 'c'.")
        raise
    if spec.running.over is not None:
        _composed(spec, "running state", spec.running_axes)
    group = spec.sample_group
    for name in (name for part in over for name in part):
        require(
            name in kept,
            f"running state lives on kept axes of {spec.stats!r}",
            spec.running.over,
            f"Kept axes are {', '.join(kept)}.",
        )
        require(
            not (name == ELLIPSIS and group == (ELLIPSIS,)),
            f"running state cannot live on samples, and the first of '...' in {spec.stats!r} holds them",
            spec.running_axes,
            "Name the sample axis b, or say running.over.",
        )
