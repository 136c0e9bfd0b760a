"""Any member of the family, drawn at random and computed by the reference, is recognized as the function that it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from normscope import reference
from normscope.identify.box import Boxed
from normscope.identify.identification import identify_box
from normscope.spec import NormSpec

# a machine at work on something else must not fail a law by its clock
drawn = settings(deadline=None, max_examples=25, derandomize=True)
NAMES = ("b", "c", "h", "w")


@st.composite
def members(draw: st.DrawFn) -> tuple[NormSpec, tuple[int, ...]]:
    """A specification with scalar denominators and sets of at least 2 elements, and an input shape."""
    rank = draw(st.integers(1, 4))
    groups: list[tuple[tuple[str, int, bool], ...]] = []
    for name in NAMES[:rank]:
        kinds = draw(st.sampled_from(["kept", "erased", "blocks", "strides"]))
        if kinds in ("kept", "erased"):
            groups.append(((name, draw(st.integers(2, 5)), kinds == "kept"),))
        else:
            outer, inner = draw(st.integers(2, 3)), draw(st.integers(2, 3))
            outer_kept = kinds == "blocks"
            groups.append(((f"{name}0", outer, outer_kept), (name, inner, not outer_kept)))
    axes = [axis for group in groups for axis in group]
    if all(kept for _, _, kept in axes):
        groups[-1] = tuple((name, size, False) for name, size, _ in groups[-1])
        axes = [axis for group in groups for axis in group]
    words = [g[0][0] if len(g) == 1 else f"({' '.join(a[0] for a in g)})" for g in groups]
    stats = f"{' '.join(words)} -> {' '.join(name for name, _, kept in axes if kept)}"
    center = draw(st.booleans())
    scale = draw(st.sampled_from(["std", "rms", "l2"]))
    eps = draw(
        st.just(0.0) | st.floats(-12, 0).map(lambda p: 10.0**p) | st.sampled_from([1e-5, 1e-6, 1e-12, 1e-3])
    )
    spec = NormSpec(
        stats,
        sizes={a[0]: a[1] for g in groups for a in g[:-1]},
        weight=draw(st.none() | places(words)),
        bias=draw(st.none() | places(words)),
        center=center,
        scale=scale,
        correction=draw(st.sampled_from([0, 1])) if scale == "std" else 0,
        eps=eps,
        eps_at=draw(st.sampled_from(["variance", "std", "max", "max_variance"])),
        gain=draw(st.sampled_from([1.0, 0.5])),
    )
    return spec, tuple(math.prod(size for _, size, _ in group) for group in groups)


def places(words: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(words), unique=True).map(
        lambda found: " ".join(w for w in words if w in found)
    )


def parameters(spec: NormSpec, shape: tuple[int, ...]) -> tuple[Any, Any]:
    bound, rng = spec.bind(shape), np.random.default_rng(5)
    w = None if bound.weight_shape is None else rng.normal(size=bound.weight_shape) + 0.2
    b = None if bound.bias_shape is None else rng.normal(size=bound.bias_shape)
    return w, b


def found_again(spec: NormSpec, shape: tuple[int, ...], dtype: str) -> None:
    """Identify the reference under ``spec`` as a callable of ``dtype``, and compare."""
    weight, bias = parameters(spec, shape)

    def norm(x: np.ndarray) -> np.ndarray:
        return reference.forward(x.astype(dtype), spec, weight, bias).astype(dtype)

    roundoff = float(np.finfo(dtype).eps) / 2
    found = identify_box(Boxed("reference", roundoff, norm), shape)
    assert found.spec is not None, found
    x = np.random.default_rng(9).normal(size=shape).astype(dtype)
    expected = reference.forward(x, spec, weight, bias)
    again = reference.forward(x, found.spec, found.weight, found.bias)
    # gain and bias are known to some roundings of the largest output
    assert np.abs(again - expected).max() <= 200 * roundoff * np.abs(expected).max()
    n = spec.bind(shape).set_size
    mine, other = (one.canonical(n) for one in (spec, found.spec))
    if spec.eps:
        assert other.eps_at == mine.eps_at
        # sets of two elements all have one spread or none, and tell eps least well
        assert other.eps is not None
        assert math.isclose(other.eps, mine.eps or 0, rel_tol=2e4 * roundoff)
    bare = [
        one.replace(weight=None, bias=None, gain=1.0, eps=0.0, eps_at="variance") for one in (mine, other)
    ]
    assert bare[0].same_function(bare[1], shape=shape), (str(spec), str(found.spec))


@drawn
@given(members())
@example((NormSpec("(b0 b) -> b0", sizes={"b0": 3}, eps=1e-5, weight="b"), (6,)))
def test_in_float64(drawn_member: tuple[NormSpec, tuple[int, ...]]) -> None:
    found_again(*drawn_member, "float64")


@drawn
@given(members())
def test_in_float32(drawn_member: tuple[NormSpec, tuple[int, ...]]) -> None:
    found_again(*drawn_member, "float32")
