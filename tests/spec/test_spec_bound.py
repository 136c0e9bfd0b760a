"""Binding to shapes: parameters, state, samples, ranks and ragged virtual batches."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_strategies import parsed, shapes, specs

from normscope.spec import NormSpec, PatternError, Running, families


@pytest.mark.parametrize(
    ("spec", "shape", "weight", "bias", "running", "set_size"),
    [
        (families.batch_norm(), (8, 3, 5, 5), (3,), (3,), (3,), 200),
        (families.batch_norm(layout="b ... c"), (8, 5, 5, 3), (3,), (3,), (3,), 200),
        (families.layer_norm(), (8, 7, 16), (16,), (16,), None, 16),
        (families.layer_norm("l d"), (8, 7, 16), (7, 16), (7, 16), None, 112),
        (families.layer_norm("c h w"), (8, 3, 5, 4), (3, 5, 4), (3, 5, 4), None, 60),
        (families.channels_first_layer_norm(), (8, 3, 5, 5), (3,), (3,), None, 3),
        (families.group_norm(2), (8, 6, 5, 5), (6,), (6,), None, 75),
        (families.instance_norm(weight=True, bias=True, running=True), (8, 3, 7), (3,), (3,), (3,), 7),
        (families.instance_norm(batched=False), (3, 7), None, None, None, 7),
        (families.rms_norm(), (8, 16), (16,), None, None, 16),
        (families.pixel_norm(), (8, 3, 5, 5), None, None, None, 3),
        (families.scale_norm(), (8, 7, 16), (), None, None, 16),
        (families.filter_response_norm(), (8, 3, 5, 5), (3,), (3,), None, 25),
        (families.ghost_batch_norm(size=4), (8, 3, 5), (3,), (3,), (3,), 20),
        (families.td_batch_norm(), (4, 8, 3, 5, 5), (3,), (3,), (3,), 800),
        (families.td_batch_norm(layout="(t b) c ...", steps=4), (32, 3, 5, 5), (3,), (3,), (3,), 800),
        (families.td_layer_norm(), (4, 8, 3, 5, 5), (3,), (3,), None, 75),
        (families.td_layer_norm(per_step=False), (4, 8, 3, 5, 5), (3,), (3,), None, 300),
        (families.batch_norm_through_time(), (4, 8, 3, 5, 5), (4, 3), None, (4, 3), 200),
        (families.weight_standardization(), (16, 3, 3, 3), None, None, None, 27),
        (families.weight_norm(), (16, 3), (16,), None, None, 3),
        (families.batch_whitening(4), (8, 12, 5), (12,), (12,), (12,), 40),
    ],
)
def test_sizes_follow(spec, shape, weight, bias, running, set_size) -> None:
    bound = spec.bind(shape)
    assert (bound.weight_shape, bound.bias_shape, bound.running_shape) == (weight, bias, running)
    assert bound.set_size == set_size
    assert bound.sets == math.prod(shape) // set_size


@parsed
@given(st.data(), specs())
def test_parameter_shapes_multiply_to_the_axes_they_name(data: st.DataObject, spec: NormSpec) -> None:
    bound = spec.bind(data.draw(shapes(spec)))
    for where, shape in ((spec.weight, bound.weight_shape), (spec.bias, bound.bias_shape)):
        assert (where is None) == (shape is None)
        if where is not None:
            named = where.replace("(", " ").replace(")", " ").split()
            assert math.prod(shape) == math.prod(
                a.size for a in bound.axes if a.name.rstrip("0123456789") in named
            )


@pytest.mark.parametrize(
    ("stats", "sample_axis", "shape", "dim"),
    [
        ("b c ... -> c", None, (8, 3, 5), 0),
        ("t b c -> c", None, (4, 8, 3), 1),
        ("t b c -> c", "t", (4, 8, 3), 0),
        ("(t b) c -> c", None, (32, 3), 0),
        ("... d -> ...", None, (8, 7, 16), 0),
        ("... d -> ...", None, (16,), None),
        ("... d -> ...", "", (8, 16), None),
        ("c ... -> c", None, (3, 7), None),
        ("c ... -> c", "...", (3, 7, 5), 1),
        ("o i ... -> o", None, (16, 3, 3, 3), None),
    ],
)
def test_the_sample_axis(
    stats: str, sample_axis: str | None, shape: tuple[int, ...], dim: int | None
) -> None:
    sizes = {"t": 4} if "(t b)" in stats else {}
    assert NormSpec(stats, sample_axis=sample_axis, sizes=sizes).bind(shape).sample_dim == dim


@pytest.mark.parametrize(
    ("ndim", "shape", "message"),
    [
        ((4, 4), (8, 3, 5), "the input has 4 axes, the shape has 3."),
        ((3, 4), (8, 3, 5, 5, 5), "the input has 3 to 4 axes, the shape has 5."),
        ((3, None), (8, 3), "the input has 3 or more axes, the shape has 2."),
    ],
)
def test_a_wrong_rank_is_an_error(ndim: tuple[int, int | None], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(PatternError) as caught:
        NormSpec("b c ... -> b c", ndim=ndim).bind(shape)
    assert str(caught.value) == f"{message}\n  pattern: b c ... -> b c\n  shape: {shape}\n  sizes: {{}}"


def test_ranks_are_said_once() -> None:
    assert NormSpec("b c ... -> c", ndim=(2, None)).ndim is None
    assert NormSpec("b c ... -> c", ndim=4).ndim == (4, 4)
    assert NormSpec("b c h -> c", ndim=(2, 5)).ndim is None
    assert NormSpec("b c ... -> c", ndim=(0, 3)).ndim == (2, 3)


@pytest.mark.parametrize(
    ("samples", "sizes", "remainder", "segments"),
    [
        (33, {"b": 32}, "short", (32, 1)),
        (33, {"b": 32}, "balanced", (17, 16)),
        (33, {"v": 4}, "short", (9, 9, 9, 6)),
        (33, {"v": 4}, "balanced", (9, 8, 8, 8)),
        (3, {"v": 4}, "balanced", ()),
        (64, {"b": 32}, "short", ()),
        (5, {"b": 32}, "short", ()),
        (0, {"b": 32}, "short", ()),
    ],
)
def test_virtual_batches(
    samples: int, sizes: dict[str, int], remainder: str, segments: tuple[int, ...]
) -> None:
    spec = NormSpec("(v b) c ... -> v c", sizes=sizes, remainder=remainder)
    bound = spec.bind((samples, 3, 5))
    assert bound.segments == segments
    assert bound.ragged == bool(segments)
    if segments:
        assert sum(segments) == samples
        assert bound.set_sizes == tuple(5 * n for n in segments)
        assert bound.set_size == 5 * min(segments)
        assert bound.sets == 3 * len(segments)
    elif samples:
        assert bound.set_size * bound.sets == samples * 3 * 5


@parsed
@given(st.integers(1, 200), st.integers(1, 40), st.booleans(), st.sampled_from(["short", "balanced"]))
def test_virtual_batches_share_out_all_samples(
    samples: int, size: int, by_size: bool, remainder: str
) -> None:
    spec = families.ghost_batch_norm(**{"size" if by_size else "number": size}, remainder=remainder)
    bound = spec.bind((samples, 1))
    parts = bound.segments or (bound.size_of("b"),) * bound.size_of("v")
    assert sum(parts) == samples
    assert min(parts) >= 1
    if by_size:
        assert max(parts) <= size
        assert len(parts) == -(-samples // size)
    else:
        assert len(parts) <= size
    if remainder == "balanced":
        assert max(parts) - min(parts) <= 1
    else:
        assert len(set(parts[:-1])) <= 1
        assert parts[-1] <= parts[0]


def test_a_remainder_is_an_error_unless_allowed() -> None:
    with pytest.raises(PatternError, match="axis 0 is 33, which b=32 does not divide; no size of v fits"):
        families.ghost_batch_norm(size=32).bind((33, 3))


def test_state_lives_where_it_is_told() -> None:
    spec = NormSpec("b (g c) ... -> g c", sizes={"g": 2}, running=Running(over="(g c)"))
    assert spec.bind((8, 6, 5)).running_shape == (6,)
    assert NormSpec("t b c -> t c", running=Running()).bind((4, 8, 3)).running_shape == (4, 3)
    assert NormSpec("b ... -> ...", running=Running()).bind((8, 3, 5)).running_shape == (3, 5)
    assert NormSpec("n c -> n c", sample_axis="n", running=Running()).bind((8, 3)).running_shape == (3,)


def test_an_unknown_axis_is_named() -> None:
    with pytest.raises(KeyError, match="no axis 'z'; there are b, c"):
        NormSpec("b c -> c").bind((8, 3)).size_of("z")
