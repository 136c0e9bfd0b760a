"""Layout: the runs of a specification reach every element once, in its set, with its parameter."""

from __future__ import annotations

import ctypes
import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope.kernels import layout
from normscope.spec import NormSpec, families

SPECS = {
    "batch": (families.batch_norm(), (2, 4)),
    "layer": (families.layer_norm(), (1, 4)),
    "layer l d": (families.layer_norm("l d"), (2, 4)),
    "layer c h w": (NormSpec("b c h w -> b", weight="c h w", bias="c h w"), (4, 4)),
    "channels first": (families.channels_first_layer_norm(), (2, 4)),
    "group": (families.group_norm(2), (2, 4)),
    "group by size": (NormSpec("b (g c) ... -> b g", sizes={"c": 3}, weight="(g c)", bias="(g c)"), (2, 4)),
    "instance": (families.instance_norm(weight=True, bias=True), (3, 4)),
    "rms": (families.rms_norm(), (1, 4)),
    "pixel": (families.pixel_norm(), (2, 4)),
    "scale": (families.scale_norm(), (1, 3)),
    "td": (families.td_batch_norm(), (3, 5)),
    "through time": (families.batch_norm_through_time(), (3, 5)),
    "td layer": (families.td_layer_norm(), (3, 5)),
}


@st.composite
def placed(draw: st.DrawFn) -> tuple[NormSpec, np.ndarray]:
    """A specification and a small array in some memory order: permuted, sliced or repeated."""
    spec, (low, high) = SPECS[draw(st.sampled_from(sorted(SPECS)))]
    ndim = draw(st.integers(low, high))
    shape = [draw(st.integers(1, 4)) for _ in range(ndim)]
    for group in spec.pattern.left:
        if len(group) > 1:
            shape[spec.pattern.left.index(group)] = 6
    order = draw(st.permutations(range(ndim)))
    array = np.arange(2 * prod(shape) * 2).reshape([2, *(shape[i] for i in order), 2])
    whole = array[0, ..., 0] if draw(st.booleans()) else np.ascontiguousarray(array[0, ..., 0])
    array = whole.transpose(np.argsort(order))
    if ndim > 1 and draw(st.integers(0, 4)) == 0:
        array = np.broadcast_to(array[:1], shape)
    return spec, array


def elements(runs: tuple[layout.Run, ...]) -> list[tuple[int, tuple[int, ...], int]]:
    """(offset, coordinates on kept runs, parameter) of everything that the loops reach."""
    found = []
    for at in itertools.product(*(range(run.size) for run in runs)):
        offset = sum(i * run.stride for i, run in zip(at, runs, strict=True))
        where = tuple(i for i, run in zip(at, runs, strict=True) if run.kept)
        found.append((offset, where, sum(i * run.parameter for i, run in zip(at, runs, strict=True))))
    return found


def expected(spec: NormSpec, array: np.ndarray) -> list[tuple[int, tuple[int, ...], int]]:
    """The same by the bound axes, one element at a time: no merging and no order of memory."""
    bound = spec.bind(array.shape)
    where = (spec.weight if spec.weight is not None else spec.bias) or ""
    names = where.replace("(", " ").replace(")", " ").split()
    on = [a for a in bound.axes if a.name in names or (a.name.startswith("...") and "..." in names)]
    found = []
    for at in itertools.product(*(range(axis.size) for axis in bound.axes)):
        coordinate = dict(zip((axis.name for axis in bound.axes), at, strict=True))
        index = [0] * array.ndim
        for axis in bound.axes:
            index[axis.dim] = index[axis.dim] * axis.size + coordinate[axis.name]
        offset = sum(i * s // array.itemsize for i, s in zip(index, array.strides, strict=True))
        parameter = 0
        for axis in on:
            parameter = parameter * axis.size + coordinate[axis.name]
        kept = tuple(coordinate[axis.name] for axis in bound.axes if axis.kept)
        found.append((offset, kept, parameter))
    return found


def strides(array: np.ndarray) -> tuple[int, ...]:
    return tuple(s // array.itemsize for s in array.strides)


@given(placed())
@settings(max_examples=300, deadline=None)
def test_runs_reach_every_element_in_its_set_with_its_parameter(case: tuple[NormSpec, np.ndarray]) -> None:
    spec, array = case
    got = elements(layout.runs(spec, array.shape, strides(array)))
    want = expected(spec, array)
    assert sorted((offset, parameter) for offset, _, parameter in got) == sorted(
        (offset, parameter) for offset, _, parameter in want
    )

    def sets(found: list[tuple[int, tuple[int, ...], int]]) -> list[list[int]]:
        by_set: dict[tuple[int, ...], list[int]] = {}
        for offset, where, _ in found:
            by_set.setdefault(where, []).append(offset)
        return sorted(sorted(offsets) for offsets in by_set.values())

    assert sets(got) == sets(want)


@given(placed())
@settings(max_examples=200, deadline=None)
def test_merged_neighbours_cannot_merge_further(case: tuple[NormSpec, np.ndarray]) -> None:
    spec, array = case
    runs = layout.runs(spec, array.shape, strides(array))
    assert layout.merged(runs) == runs
    assert all(run.size != 1 for run in runs)


CHANNELS_LAST = (64 * 56 * 56, 1, 56 * 64, 64)


@pytest.mark.parametrize(
    ("spec", "shape", "order", "kernel"),
    [
        (families.layer_norm(), (8, 1024, 768), None, "rows"),
        (families.rms_norm(), (8, 1024, 768), None, "rows"),
        (families.batch_norm(), (32, 64, 56, 56), None, "rows"),
        (families.batch_norm(), (32, 64, 56, 56), CHANNELS_LAST, "columns"),
        (families.batch_norm(), (32, 64), None, "columns"),
        (families.group_norm(8), (32, 64, 56, 56), None, "rows"),
        (families.group_norm(8), (32, 64, 56, 56), CHANNELS_LAST, "columns"),
        (families.group_norm(1), (32, 64, 56, 56), CHANNELS_LAST, "rows"),
        (families.instance_norm(), (32, 64, 56, 56), None, "rows"),
        (families.instance_norm(), (32, 64, 56, 56), CHANNELS_LAST, "columns"),
        (families.channels_first_layer_norm(), (32, 64, 56, 56), None, "columns"),
        (families.channels_first_layer_norm(), (32, 64, 56, 56), CHANNELS_LAST, "rows"),
        (families.pixel_norm(), (32, 64, 56, 56), None, "columns"),
        (families.layer_norm("c h w"), (32, 64, 56, 56), None, "rows"),
        (families.layer_norm("c h w"), (32, 64, 56, 56), CHANNELS_LAST, ""),
        (families.layer_norm(), (8, 768), (1, 8), "columns"),
        (families.layer_norm(), (8, 768), (1536, 2), ""),
        (families.layer_norm(), (8, 768), (0, 1), "rows"),
    ],
)
def test_which_kernel(
    spec: NormSpec, shape: tuple[int, ...], order: tuple[int, ...] | None, kernel: str
) -> None:
    assert layout.kernel(layout.runs(spec, shape, order)) == kernel


def test_most_of_the_family_is_served() -> None:
    rank = {"td_batch_norm": 5, "td_layer_norm": 5, "batch_norm_through_time": 5}
    arguments = {"group_norm": (8,), "flax_group_norm": (8,), "keras_group_normalization": (8,)}
    unserved = {}
    for name in families.__all__:
        if name in ("batch_whitening", "ghost_batch_norm"):
            continue
        try:
            spec = getattr(families, name)(*arguments.get(name, ()))
        except TypeError:
            continue
        low = spec.ndim[0] if spec.ndim else spec.pattern.min_ndim
        reason = layout.call(spec, max(low, rank.get(name, low))).unserved
        if reason:
            unserved[name] = reason
    assert unserved == {
        "batch_renorm": "renormalization reads the stored statistics in training",
        "scaled_weight_standardization": "the sum of squares of centered values",
        "tf_l2_normalize": "eps at 'max_variance'",
    }


def lowered(
    call: layout.Call, shape: tuple[int, ...], at: tuple[int, ...], out: tuple[int, ...]
) -> tuple[layout.Run, ...] | None:
    """What ``ns_lowered`` says: the loops as runs. They are joined anew: the kernels also need one step from set to set
    to join two, which runs do not know of."""
    from normscope.kernels.library import LIBRARY
    from normscope.kernels.structs import NsCall, NsRecipe

    assert LIBRARY is not None
    numbers = [(ctypes.c_int64 * max(1, len(shape)))(*values) for values in (shape, at, out)]
    recipe = NsRecipe(call.axes, call.split, call.options, call.eps or 0.0, call.gain, call.offset)
    asked = NsCall(
        ndim=len(shape), recipe=recipe, sizes=numbers[0], x_strides=numbers[1], y_strides=numbers[2]
    )
    rows = (ctypes.c_int64 * (6 * layout.MOST_AXES))()
    function = LIBRARY.functions.ns_lowered
    function.argtypes = [ctypes.POINTER(NsCall), ctypes.POINTER(ctypes.c_int64), ctypes.c_int]
    count = function(ctypes.byref(asked), rows, layout.MOST_AXES)
    if count < 0:
        return None
    loops = [rows[6 * i : 6 * i + 6] for i in range(count)]
    found = [layout.Run(size, x, y, bool(kept), p) for size, x, y, p, _, kept in loops if size != 1]
    return layout.merged(sorted(found, key=lambda run: -run.out))


@given(placed(), st.sampled_from([1, 2**20 + 1]))
@settings(max_examples=300, deadline=None)
def test_the_kernels_lower_alike(case: tuple[NormSpec, np.ndarray], far: int) -> None:
    """With ``far``, at strides of tensors that no memory holds: the index arithmetic is 64 bits wide."""
    from normscope.kernels.library import LIBRARY

    if LIBRARY is None:
        pytest.skip("no native kernels here")
    spec, array = case
    call = layout.call(spec, array.ndim)
    at = strides(array)
    dense = layout.contiguous(array.shape) if 0 in at else at
    widest = max(range(array.ndim), key=lambda i: dense[i])
    dense, at = ([s * far**2 if i == widest else s for i, s in enumerate(ss)] for ss in (dense, at))
    runs = layout.runs(spec, array.shape, at, dense)
    got = lowered(call, array.shape, tuple(at), tuple(dense))
    if got is None:
        assert layout.kernel(runs) == ""
    else:
        assert layout.kernel(runs)
        assert got == runs
