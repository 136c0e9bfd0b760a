"""Axes by number, as patterns: what is erased is what was named, whatever the rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.spec import NormSpec
from normscope.spec.axes import erase, last_axes


@given(
    st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(-n, n - 1), min_size=1)))
)
def test_erased_axes_are_the_named_ones(drawn):
    ndim, dims = drawn
    bound = NormSpec(erase(sorted(dims), ndim)).bind(tuple(range(2, 2 + ndim)))
    assert {axis.dim for axis in bound.axes if not axis.kept} == {dim % ndim for dim in dims}


@given(st.sets(st.integers(0, 3), min_size=1), st.booleans(), st.integers(4, 6))
def test_axes_from_one_end_need_no_rank(dims, from_the_back, ndim):
    numbers = [-1 - dim if from_the_back else dim for dim in dims]
    bound = NormSpec(erase(numbers, None)).bind(tuple(range(2, 2 + ndim)))
    assert {axis.dim for axis in bound.axes if not axis.kept} == {dim % ndim for dim in numbers}


def test_axes_from_both_ends_need_a_rank():
    assert erase((0, -1), None) is None
    assert erase((4,), 3) is None


@pytest.mark.parametrize("count", range(1, 6))
def test_last_axes_have_different_names(count):
    assert len(set(last_axes(count).split())) == count
