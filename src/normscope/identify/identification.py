"""Which normalization a callable is, by probing alone: the order in which the probes are made, and the answer."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import Any

from normscope.errors import BadInput, NormscopeError
from normscope.identify import diagnose, fresh, remarks
from normscope.identify.assembly import Assembly
from normscope.identify.bias import better_bias, find_bias
from normscope.identify.box import ROUNDOFF, Array, Box, box_of, is_shape, shape_of
from normscope.identify.fit import Fit, fit
from normscope.identify.fixed import fixed_affine
from normscope.identify.other_sizes import say_other_sizes
from normscope.identify.partition import POINTWISE, Partition
from normscope.identify.probing import Contradiction, OnlyWhenShortened, Pair, Prober, direction, pair
from normscope.identify.repeats import (
    find_precision,
    global_generators_kept,
    on_this_rank,
    require_as_at_first,
    require_float32_shown,
    require_repeatable,
)
from normscope.identify.result import Identification
from normscope.identify.scan import (
    NOISE,
    crossing,
    is_linear,
    observations,
    refine,
    require_bounded,
    require_shown,
    scan,
)
from normscope.identify.second_size import fixed_factors, roomy, second_gain
from normscope.identify.spelling import names_of, spellings
from normscope.identify.statistic_sets import sets, sets_of_large
from normscope.spec import NormSpec

DIRECTIONS = 4
"""inputs that the fit is made of, besides the scales of the first"""
ROOM = 2**12
"""elements that the probes work on where the callable takes fewer than the example has"""
FLOAT32 = 1e-5
"""of the output: what float32 arithmetic may be off by"""
FITS = 200
"""roundings that the best form may leave on average; the wrong form leaves a large part of the output"""


def identify(
    fn: Any, example: Any, *, layout: str | None = None, training: bool | None = None
) -> Identification:
    """Say which normalization a callable is, as a function, and verify the answer on fresh inputs.

    ``y = weight * (x - mean) / denominator + bias``: the statistic sets come from moving one element, the bias from
    ``(f(x) + f(-x)) / 2``, eps and its place from scaling the input over 20 orders of magnitude, gain and form from one
    joint fit; the result is compared with `normscope.reference.forward`.

    Arguments:
        fn: a function of one array or tensor that returns one of the same shape, a module, or what an adapter reads.
        example: an input, of float32 or float64, or its shape (then float64). Its kind decides what the callable
            receives: arrays for an array, tensors for a tensor (whose ``.var`` and ``.std`` are unbiased, unlike
            NumPy's), for a shape arrays where it takes them. Else only shape, dtype and device matter, save for
            modules. Axes of different sizes above 1 tell most.
        layout: names of the axes, ``"b c h w"``, ``b`` the samples and ``c`` the channels; None names them by rank.
        training: for modules, the mode to look at; None is the one that the module is in.

    Returns an `Identification`: ``.spec`` with ``.weight`` and ``.bias``; or ``.fixed``, an affine map such as a batch
    norm in evaluation; or neither, and ``.reason``. ``.equivalent`` lists specifications of the same function that
    nothing told apart, ``.evidence`` which probe gave what. Whitening is not recognized.

    Raises BadInput where the example or the layout cannot be used, ModelError where the callable raises.

    >>> import numpy as np
    >>> def norm(x):
    ...     return (x - x.mean(-1, keepdims=True)) / (x.std(-1, ddof=1, keepdims=True) + 1e-6)
    >>> identify(norm, (4, 6, 8)).spec
    NormSpec('... d -> ...', correction=1, eps=1e-06, eps_at='std')
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(fn, torch.nn.Module):
        answer: Identification = import_module("normscope.identify.modules").identify_module(
            fn, example, layout, training
        )
        return answer
    if training is not None:
        raise BadInput(
            f"training is for torch modules, which have two modes; got training={training} for a {type(fn).__name__}. "
            "Identify the function of each mode."
        )
    with global_generators_kept(), on_this_rank():
        if is_shape(example):
            _require_usable(shape_of(example), layout)
        box = box_of(fn, example)
        found = identify_box(box, shape_of(example), layout=layout)
    note = getattr(box, "note", "")
    return replace(found, notes=(*found.notes, note)) if note else found


def identify_box(box: Box, shape: tuple[int, ...], *, layout: str | None = None) -> Identification:
    """`identify` for a `Box`. Raises ModelError where the callable raises on inputs of this shape."""
    _require_usable(shape, layout)
    f = Prober(box, box.roundoff)
    try:
        return _at_some_shape(f, shape, layout)
    except Contradiction as contradiction:
        reason = _steady(f) or str(contradiction)
        may_be_float32 = contradiction.size is None or contradiction.size < FLOAT32
    if may_be_float32 and box.roundoff < ROUNDOFF["float32"]:
        try:
            coarse = Prober(box, ROUNDOFF["float32"])
            with global_generators_kept():
                require_float32_shown(coarse, shape)
            return _at_some_shape(coarse, shape, layout)
        except Contradiction:
            pass  # what contradicted float64 is the reason
    return Identification(
        reason=reason,
        evidence=tuple(f.evidence),
        notes=tuple(f.notes),
        name=box.name,
        roundoff=f.roundoff,
    )


def _steady(f: Prober) -> str:
    """What stands against all that was seen: that the callable did not stay what it was; "" where it did."""
    try:
        require_as_at_first(f)
    except Contradiction as changed:
        return str(changed)
    except NormscopeError:  # it takes the input no more
        pass
    return ""


def _at_some_shape(f: Prober, shape: tuple[int, ...], layout: str | None) -> Identification:
    """Probe at a shape with few elements, and several along every axis; where that turns out to be another function
    with all elements of the example, then at its own shape."""
    with global_generators_kept():
        for most in (ROOM, prod(shape)) if prod(shape) > ROOM else (ROOM,):
            with suppress(OnlyWhenShortened):
                return _probed(f, shape, layout, most)
            require_as_at_first(f)
            f.evidence.clear()
            f.notes.clear()
        return _probed(f, shape, layout, None)


def _require_usable(shape: tuple[int, ...], layout: str | None) -> None:
    if not shape or min(shape) < 1:
        raise BadInput(
            f"an example has at least one axis and no axis of size 0; got shape {shape}. Pass one ordinary input."
        )
    names_of(layout, shape)


def _probed(f: Prober, example: tuple[int, ...], layout: str | None, most: int | None) -> Identification:
    """All probes in turn, at the example's shape where ``most`` is None. Raises Contradiction with the first thing that
    no member does."""
    given = f.roundoff
    require_repeatable(f, example)
    shape = example if most is None else roomy(f, example, most)
    find_precision(f, shape)
    pairs = [pair(f, direction(shape, seed)) for seed in range(DIRECTIONS)]
    partition = sets(f, pairs)
    bias = find_bias(f, pairs, partition)
    s = scan(f, pairs, bias)
    if is_linear(s):
        if not partition.pointwise:
            require_shown(s)
        fixed, error = fixed_affine(f, pairs, partition, bias, layout)
        return Identification(fixed=fixed, max_error=error, **_kept(f))
    if partition.pointwise:
        partition = sets_of_large(s) or partition
    if partition.pointwise:
        raise Contradiction(POINTWISE)
    require_bounded(s)
    start = crossing(s)
    if start is not None:
        refine(s, start)
    observed = observations(s, start)
    fits = fit(observed, partition, start)
    _require_fit(f, fits, pairs, partition)
    best = fits[0]
    bias = better_bias(best, observed, bias, partition)
    stays = fixed_factors(f, partition, start)
    written = tuple(spellings(partition, layout, stays))
    assembly = Assembly(f, partition, observed, best, bias, written)
    (spec, weight, bias_value), others = assembly.choose(second_gain(f, partition, best, start))
    remarks.say_eps(f, s, best, spec)
    near = None if best.root_eps == 0 else 2.0 ** (start or 0.0)
    error, resolution = _verified(f, list(dict.fromkeys([shape, example])), spec, weight, bias_value, near)
    say_other_sizes(f, partition, spec, weight, bias_value, near)
    remarks.constant_input(f, s, shape, spec)
    remarks.say_hidden(f, shape, example, bound=most is None)
    remarks.say_resolution(f, best, error)
    require_as_at_first(f)
    if given > f.box.roundoff:
        f.notes.append("part of its arithmetic is float32: it errs by some 1e-7, and was judged by that")
    return Identification(
        spec=spec,
        mode="input",
        weight=weight,
        bias=bias_value,
        max_error=error,
        resolution=resolution,
        equivalent=tuple(others),
        **_kept(f),
    )


def _require_fit(f: Prober, fits: list[Fit], pairs: list[Pair], partition: Partition) -> None:
    best = fits[0]
    if best.misfit > FITS:
        # misfit is in units of the rounding of single outputs
        left = best.misfit * NOISE * f.roundoff
        raise Contradiction(diagnose.reason(f, pairs, partition, left), left)
    rival = next((one for one in fits[1:] if one.shape != best.shape), None)
    rival_misfit = {} if rival is None else {"misfit_of_the_next": rival.misfit}
    f.conclude(f"the output is {best.shape}", "a joint fit to all inputs", misfit=best.misfit, **rival_misfit)


def _verified(
    f: Prober,
    shapes: list[tuple[int, ...]],
    spec: NormSpec,
    weight: Array | None,
    bias: Array | None,
    near_eps: float | None,
) -> tuple[float, float]:
    """The largest error over all shapes, and the largest that rounding allows.

    Raises Contradiction where one is more than that.
    """
    worst = resolution = 0.0
    for shape in shapes:
        raised: type[Contradiction] = Contradiction if shape == shapes[0] else OnlyWhenShortened
        names = fresh.ALL if shape == shapes[0] else fresh.ORDINARY
        try:
            verdict = fresh.verify(f, shape, spec, weight, bias, near_eps, names)
        except ValueError as error:  # the parameters, or the sets, are others at that shape
            raise raised(f"at the shape {shape} it is no longer {spec}: {error}") from None
        if not verdict.holds:
            raise raised(
                f"the closest member is {spec}, but at a fresh input of shape {shape} ({verdict.input}) it is off by "
                f"{verdict.error:.2g} of the largest output, where rounding allows {verdict.allowed:.2g}",
                verdict.error,
            )
        worst, resolution = max(worst, verdict.error), max(resolution, verdict.resolution)
        f.conclude(
            "the specification computes the same",
            f"the reference on {verdict.inputs} fresh inputs",
            shape=shape,
            largest_error=verdict.error,
            told_from_rounding_above=verdict.resolution,
        )
    return worst, resolution


def _kept(f: Prober) -> dict[str, Any]:
    f.conclude("nothing was read, only called", "calls", number=f.calls)
    return {
        "evidence": tuple(f.evidence),
        "notes": tuple(f.notes),
        "name": f.box.name,
        "roundoff": f.roundoff,
        "sizes": (min(fresh.SIZES.values()), max(fresh.SIZES.values())),
    }
