"""Random specifications and inputs that fit them."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from normscope.spec import Cast, NormSpec, Pattern, Running
from normscope.spec.pattern import ELLIPSIS, Group, untokenize

NAMES = ("b", "t", "c", "g", "h", "d")
# A machine at work on something else must not fail a law by its clock.
parsed = settings(deadline=None, max_examples=60)
# Laws about one axis assume it: how many problems lack it is left to chance, and must not decide a test.
measured = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
small = st.integers(1, 4)


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    names = list(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True)))
    left: list[Group] = []
    while names:
        take = draw(st.integers(1, 2))
        left.append(tuple(names[:take]))
        names = names[take:]
    if draw(st.booleans()):
        left.insert(draw(st.integers(0, len(left))), (ELLIPSIS,))
    every = [name for group in left for name in group]
    kept = draw(st.lists(st.sampled_from(every), unique=True))
    return Pattern.parse(f"{untokenize(left)} -> {' '.join(kept)}")


@st.composite
def places(draw: st.DrawFn, pattern: Pattern) -> str | None:
    """Axes for a parameter: whole input axes or single factors, in any order."""
    if draw(st.booleans()):
        return None
    groups = draw(st.lists(st.sampled_from(pattern.left), unique=True, max_size=3))
    found: list[Group] = []
    for group in groups:
        found += [group] if draw(st.booleans()) else [(name,) for name in group]
    return untokenize(found)


@st.composite
def specs(draw: st.DrawFn, *, whitening: bool = True, state: bool = True) -> NormSpec:
    pattern = draw(patterns())
    sizes = {name: draw(small) for group in pattern.left for name in group[1:]}
    scales = ["std", "rms", "l2"]
    whitened = [name for name in pattern.kept if name != ELLIPSIS]
    if whitening and whitened:
        scales += ["zca", "cholesky", "iternorm"]
    scale = draw(st.sampled_from(scales))
    whitens = scale in ("zca", "cholesky", "iternorm")
    weight = draw(places(pattern))
    spec = NormSpec(
        str(pattern),
        sizes=sizes,
        sample_axis=draw(st.sampled_from([None, "", *pattern.names])),
        weight=weight,
        bias=draw(places(pattern)),
        source=draw(st.sampled_from(["parameter", "input"])),
        center=draw(st.booleans()),
        scale=scale,
        whiten=draw(st.sampled_from(whitened)) if whitens else "",
        iterations=draw(st.integers(1, 9)),
        whiten_state=draw(st.sampled_from(["covariance", "whitening"])),
        correction=draw(st.sampled_from([0, 1, 0.5])) if scale not in ("rms", "l2") else 0,
        eps=draw(st.none() | finite),
        eps_at=draw(
            st.sampled_from(["variance", "trace"] if whitens else ["variance", "std", "max", "max_variance"])
        ),
        weight_offset=draw(finite) if weight is not None else 0.0,
        gain=draw(finite),
        cast=draw(casts()),
    )
    on_samples = ELLIPSIS in pattern.kept and spec.sample_group == (ELLIPSIS,)
    if state and not on_samples and draw(st.booleans()):
        roots = spec.scale == "std" and spec.eps_at == "variance"
        spec = spec.replace(running=draw(runnings(pattern.kept, roots)))
    if pattern.has_ellipsis and draw(st.booleans()):
        low = draw(st.integers(pattern.min_ndim, pattern.min_ndim + 2))
        spec = spec.replace(ndim=(low, draw(st.none() | st.integers(low, low + 2))))
    return spec


def casts() -> st.SearchStrategy[Cast]:
    dtypes = ["float16", "bfloat16", "float32", "float64", "input"]
    return st.builds(Cast, st.none() | st.sampled_from(dtypes), st.sampled_from(["before", "after"]))


@st.composite
def runnings(draw: st.DrawFn, kept: tuple[str, ...], roots: bool) -> Running:
    limits = st.tuples(st.floats(1, allow_nan=False), st.floats(0, allow_nan=False))
    named = [name for name in kept if name != ELLIPSIS]
    over = draw(st.none() | st.lists(st.sampled_from(named), unique=True).map(" ".join)) if named else None
    return Running(
        momentum=draw(st.none() | finite),
        correction=draw(st.sampled_from([0, 1, 2.5])),
        over=over,
        renorm=draw(st.none() | limits),
        averages=draw(st.sampled_from(["variance", "denominator"] if roots else ["variance"])),
    )


@st.composite
def shapes(draw: st.DrawFn, spec: NormSpec) -> tuple[int, ...]:
    """A shape that the specification reads."""
    shape: list[int] = []
    spread = draw(st.integers(0, 2))
    if spec.ndim is not None:
        least = spec.pattern.min_ndim
        spread = min(max(spread, spec.ndim[0] - least), (spec.ndim[1] or 99) - least)
    for group in spec.pattern.left:
        if group == (ELLIPSIS,):
            shape += [draw(small) for _ in range(spread)]
        else:
            shape.append(math.prod(spec.sizes.get(name) or draw(small) for name in group))
    return tuple(shape)
