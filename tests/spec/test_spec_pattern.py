"""The axis language: parsing, binding, and every error in full."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_strategies import parsed, patterns, shapes, small, specs

from normscope.spec import NormSpec, Pattern, PatternError
from normscope.spec.pattern import ELLIPSIS, tokenize, untokenize


@parsed
@given(patterns())
def test_a_pattern_prints_as_it_parses(pattern: Pattern) -> None:
    assert Pattern.parse(str(pattern)) == pattern


@parsed
@given(patterns())
def test_names_are_kept_or_erased(pattern: Pattern) -> None:
    assert sorted(pattern.kept + pattern.erased) == sorted(pattern.names)


@parsed
@given(patterns(), st.randoms())
def test_spaces_and_the_order_on_the_right_mean_nothing(pattern: Pattern, random) -> None:
    kept = list(pattern.kept)
    random.shuffle(kept)
    left = untokenize(pattern.left).replace("(", " ( ").replace(" ", "   ")
    assert Pattern.parse(f"{left}->{' '.join(kept)}  ") == pattern


@parsed
@given(st.data(), specs())
def test_bound_axes_multiply_to_the_shape(data: st.DataObject, spec: NormSpec) -> None:
    shape = data.draw(shapes(spec))
    bound = spec.bind(shape)
    for dim, size in enumerate(shape):
        assert math.prod(axis.size for axis in bound.axes if axis.dim == dim) == size
    assert bound.set_size * bound.sets == math.prod(shape)
    assert set(bound.kept) | set(bound.erased) == {axis.name for axis in bound.axes}
    for name, size in spec.sizes.items():
        assert bound.size_of(name) == size


@parsed
@given(patterns(), small)
def test_an_ellipsis_stands_for_any_number_of_axes(pattern: Pattern, more: int) -> None:
    sizes = {name: 2 for group in pattern.left for name in group[1:]}
    shape = [2 ** len(group) for group in pattern.left if group != (ELLIPSIS,)]
    if pattern.has_ellipsis:
        assert len(pattern.bind(shape + [4] * more, sizes)) == len(pattern.names) - 1 + more
    else:
        with pytest.raises(
            PatternError, match=f"the pattern has {len(shape)} axes, the shape has {len(shape) + more}"
        ):
            pattern.bind(shape + [4] * more, sizes)


def test_tokens() -> None:
    assert tokenize(" b(g  c)... ") == (("b",), ("g", "c"), ("...",))
    assert tokenize("") == ()
    assert untokenize((("b",), ("g", "c"), ("...",))) == "b (g c) ..."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b c", "a pattern has exactly one '->', this has 0."),
        ("b -> c -> d", "a pattern has exactly one '->', this has 2."),
        ("b (g c -> b", "a parenthesis is not closed in 'b (g c'."),
        ("b g c) -> b", "a parenthesis closes nothing in 'b g c)'."),
        ("b () -> b", "a parenthesis holds no axis in 'b ()'."),
        ("b ((g) c) -> b", "parentheses cannot be nested in 'b ((g) c)'."),
        ("b (... c) -> b", "'...' cannot stand in parentheses in 'b (... c)'."),
        ("b 1 -> b", "'1' in 'b 1' is no axis name: a letter, then letters, digits or '_'."),
        ("b _c -> b", "'_' in 'b _c' is no axis name: a letter, then letters, digits or '_'."),
        ("b é -> b", "'é' in 'b é' is no axis name: a letter, then letters, digits or '_'."),
        ("b c c -> b", "'c' occurs twice on the left; each axis has its own name."),
        ("... c ... -> c", "'...' occurs twice on the left; each axis has its own name."),
        ("b c -> b b", "'b' occurs twice on the right; each axis has its own name."),
        ("b c -> d", "'d' on the right does not occur on the left; only input axes can be kept."),
        ("b c -> ...", "'...' on the right does not occur on the left; only input axes can be kept."),
        (
            "b (g c) -> b (g c)",
            "'(g c)' on the right: kept axes are named one by one, without parentheses.",
        ),
        (" -> ", "the left side is empty; name the input axes."),
    ],
)
def test_a_bad_pattern_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        Pattern.parse(text)
    assert str(caught.value) == f"{message}\n  pattern: {text}"


@pytest.mark.parametrize(
    ("text", "shape", "sizes", "message"),
    [
        ("b c h w -> c", (2, 3), {}, "the pattern has 4 axes, the shape has 2."),
        ("b c ... -> c", (2,), {}, "the pattern has at least 2 axes, the shape has 1."),
        (
            "b (g c) ... -> b g",
            (8, 10, 5),
            {"g": 4},
            "axis 1 is 10, which g=4 does not divide; no size of c fits.",
        ),
        ("b (g c) -> b g", (8, 10), {}, "sizes of g, c in '(g c)' cannot be told apart."),
        ("b (g c) -> b g", (8, 10), {"g": 2, "c": 4}, "axis 1 is 10, but '(g c)' is 8."),
        ("... d -> ...", (8, 10), {"d": 12}, "axis 1 is 10, but 'd' is 12."),
    ],
)
def test_a_bad_shape_says_what_is_wrong(
    text: str, shape: tuple[int, ...], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(PatternError) as caught:
        Pattern.parse(text).bind(shape, sizes)
    assert str(caught.value) == f"{message}\n  pattern: {text}\n  shape: {shape}\n  sizes: {sizes}"


def test_a_set_over_everything() -> None:
    pattern = Pattern.parse("b c ->")
    assert (str(pattern), pattern.kept, pattern.erased) == ("b c ->", (), ("b", "c"))


def test_an_empty_axis_binds() -> None:
    assert [axis.size for axis in Pattern.parse("b (g c) -> b g").bind((0, 6), {"g": 2})] == [0, 2, 3]
