"""Statistic sets and the probes that read them, against NumPy in float64 and against what is known by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normscope import reference
from normscope.doctor.probes import Probe
from normscope.doctor.probes.precision import Precision, PrecisionOfOutput
from normscope.doctor.probes.ranges import RangeOfActivations, Ranges
from normscope.doctor.probes.statistics import SetStatistics, Statistics
from normscope.doctor.sets import Sets, sets_of
from normscope.doctor.site import Event, Site
from normscope.doctor.subject import Subject
from normscope.spec import Cast, NormSpec, families

FLOAT32 = 2.0**-23


def event(
    x: torch.Tensor,
    spec: NormSpec,
    output: torch.Tensor | None = None,
    *,
    run: str = "eval",
    mode: str = "input",
    index: int = 0,
    kind: str = "module",
    **tensors: Any,
) -> Event:
    site = Site(name="norm", path="norm", kind=kind, type_name="Norm", spec=spec)
    return Event(run, site, index, spec, mode, x, x if output is None else output, tensors)


def sets(x: torch.Tensor, spec: NormSpec, **tensors: torch.Tensor) -> Sets:
    found = sets_of(event(x, spec, **tensors))
    assert isinstance(found, Sets), found
    return found


def measure(kind: Callable[[], Probe], *events: Event, mask: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
    subject = Subject(model=torch.nn.Identity(), session=None, sites=[], mask=mask)  # type: ignore[arg-type]
    probe = kind()
    assert probe.start(subject) is None
    for seen in events:
        probe.observe(seen)
    return probe.finish(subject)


def statistics(*events: Event, mask: torch.Tensor | None = None) -> list[SetStatistics]:
    found: list[SetStatistics] = measure(Statistics, *events, mask=mask)["norm"]
    return found


def precision(seen: Event) -> Precision:
    found: Precision = measure(PrecisionOfOutput, seen)["norm"]
    return found


def ranges(seen: Event) -> Ranges:
    found: Ranges = measure(RangeOfActivations, seen)["norm"]
    return found


SPECS = {
    "batch": (families.batch_norm(), (6, 4, 5, 7)),
    "layer": (families.layer_norm(), (3, 5, 16)),
    "layer over two": (NormSpec("... l d -> ..."), (3, 2, 4, 6)),
    "whole": (NormSpec("... -> "), (3, 8)),
    "group": (families.group_norm(2), (3, 8, 5, 5)),
    "instance": (families.instance_norm(), (3, 4, 6, 6)),
    "channels first": (NormSpec("b c ... -> b ...", weight="c", bias="c"), (3, 8, 4, 4)),
    "rms": (families.rms_norm(), (3, 5, 16)),
    "unbiased": (NormSpec("... d -> ...", correction=1), (3, 5, 16)),
    "l2": (NormSpec("... d -> ...", center=False, scale="l2", eps=1e-12, eps_at="max"), (4, 9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_moments_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    spec, shape = SPECS[name]
    x = (3 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    found = sets(x, spec)
    mean, v, count = reference.statistics(x.double().numpy(), spec)
    # Two float32 passes with a correction: a few roundings of each element, and sums in pairs.
    tolerance = 8 * FLOAT32 * (4 + np.log2(found.size))
    np.testing.assert_allclose(found.mean, mean.ravel(), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.under_root, v.ravel(), rtol=tolerance)
    assert (count == found.size).all()
    assert not found.constant.any()


@settings(max_examples=40, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e3), st.integers(0, 2**16))
def test_variance_does_not_depend_on_the_level(level: float, spread: float, seed: int) -> None:
    """What E[x^2] - E[x]^2 gets wrong from a level of 3000 standard deviations on."""
    x = level + spread * torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(seed))
    found = sets(x, families.batch_norm())
    exact = x.double().var(dim=(0, 2), correction=0).numpy()
    np.testing.assert_allclose(found.variance, exact, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_large_inputs_are_cut_into_pieces(memory_format: torch.memory_format) -> None:
    """Pieces cut kept and erased axes alike. These patterns name their axes, so every element is read."""
    x = torch.randn(3, 5, 130, 210).to(memory_format=memory_format) + 10
    for stats in ("b c h w -> c", "b c h w -> b c", "b c h w -> h", "b c h w -> "):
        spec = NormSpec(stats)
        mean, variance, _ = reference.statistics(x.numpy(), spec)
        found = sets(x, spec)
        np.testing.assert_allclose(found.mean, mean.ravel(), rtol=1e-6)
        np.testing.assert_allclose(found.variance, variance.ravel(), rtol=1e-5)


@pytest.mark.parametrize(
    "spec", [families.batch_norm(), families.instance_norm(), families.group_norm(5)], ids=str
)
def test_of_large_images_some_rows_are_read(spec: NormSpec) -> None:
    x = torch.randn(3, 5, 130, 210) + 10
    x[..., ::2] += 4  # stripes of two pixels
    mean, variance, _ = reference.statistics(x.numpy(), spec)
    found = sets(x, spec)
    # some 2000 elements and more: a standard error of 1 / sqrt(2000) deviations, and sqrt(2 / 2000) of the variance
    np.testing.assert_allclose(found.mean, mean.ravel(), atol=5 * np.sqrt(variance.max() / 2000))
    np.testing.assert_allclose(found.variance, variance.ravel(), rtol=5 * np.sqrt(2 / 2000))


def test_one_pixel_of_a_large_image_is_a_variation() -> None:
    x = torch.zeros(2, 3, 200, 200)
    x[0, 1, 101, 77] = 1.0
    found = sets(x, families.batch_norm())
    assert found.constant.tolist() == [True, False, True]
    np.testing.assert_allclose(found.variance[1], (1 / 80000) * (1 - 1 / 80000), rtol=1e-9)


@pytest.mark.parametrize("value", [0.0, 1e-30, 0.1, 1e6, -1000.1, 3e30])
def test_constant_sets_are_exactly_so(value: float) -> None:
    x = torch.randn(4, 3, 8, 8)
    x[:, 1] = value
    found = sets(x, families.batch_norm())
    assert found.constant.tolist() == [False, True, False]
    assert found.variance[1] == 0.0
    x[0, 1, 0, 0] = torch.nextafter(x[0, 1, 0, 0], torch.tensor(float("inf")))
    assert not sets(x, families.batch_norm()).constant.any(), "one ulp is a variation"


def test_nothing_is_written_and_nothing_is_required_to_be_dense() -> None:
    x = torch.randn(6, 3, 4).transpose(1, 2)
    before = x.clone()
    sets(x, families.batch_norm()).variance  # noqa: B018
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", SPECS)
def test_taken_sets_have_their_own_moments(name: str) -> None:
    spec, shape = SPECS[name]
    x = torch.randn(shape)
    found = sets(x, spec)
    which = np.arange(found.bound.sets)[::2]
    rows = found.take(x, which)
    assert rows.shape == (len(which), found.size)
    np.testing.assert_allclose(rows.mean(1), found.mean[which], atol=1e-6)
    np.testing.assert_allclose(rows.var(1), found.variance[which], rtol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_gain_and_bias_lie_where_the_reference_has_them(name: str) -> None:
    spec, shape = SPECS[name]
    bound = spec.bind(shape)
    generator = torch.Generator().manual_seed(1)
    held: dict[str, Any] = {
        kind: torch.randn(size, generator=generator)
        for kind, size in (("weight", bound.weight_shape), ("bias", bound.bias_shape))
        if size is not None
    }
    x = torch.randn(shape, generator=generator)
    live = spec.replace(running=None)
    exact = reference.forward(
        x.numpy(), live, *(held[name].numpy() if name in held else None for name in ("weight", "bias"))
    )
    bare = reference.forward(x.numpy(), live.replace(weight=None, bias=None))
    found = sets(x, live, **held)
    every = np.arange(bound.sets)
    hat = found.take(torch.from_numpy(bare), every)
    y = found.gain(held.get("weight"), every) * hat + found.bias(held.get("bias"), every)
    np.testing.assert_allclose(y, found.take(torch.from_numpy(exact), every), rtol=1e-12, atol=1e-12)


def test_labels_name_the_kept_axes() -> None:
    assert sets(torch.randn(3, 8, 5, 5), families.group_norm(2)).label(5) == "b=2, g=1"
    assert sets(torch.randn(3, 5, 16), families.layer_norm()).label(7) == "axis 0=1, axis 1=2"
    assert sets(torch.randn(3, 5), NormSpec("... -> ")).label(0) == ""


@pytest.mark.parametrize(
    ("x", "spec", "reason"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), families.layer_norm(), "its input holds no real numbers"),
        (torch.zeros(0, 3), families.layer_norm(), "its input holds no real numbers"),
    ],
)
def test_what_cannot_be_measured_says_why(x: torch.Tensor, spec: NormSpec, reason: str) -> None:
    assert sets_of(event(x, spec)) == reason


def test_a_weight_that_is_not_the_specs_is_told() -> None:
    assert (
        sets_of(event(torch.zeros(2, 3), families.layer_norm(), weight=torch.ones(4)))
        == "its weight of shape (4,) is not the (3,) of its specification"
    )


# The probe of statistics -------------------------------------------------------------------------------------------


def test_shrinkage_is_the_standard_deviation_that_comes_out() -> None:
    x = 0.002 * torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    y = torch.nn.functional.layer_norm(x, (512,))
    (seen,) = statistics(event(x, families.layer_norm(), y))
    assert seen.shrinkage[1] == pytest.approx(float(y.std(1, correction=0).median()), rel=1e-3)
    assert seen.eps_all == 1.0
    assert seen.live == seen.sets == 64


@pytest.mark.parametrize(("eps_at", "expected"), [("variance", 0.5**0.5), ("std", 0.5), ("max", 1.0)])
def test_every_place_of_eps_has_its_shrinkage(eps_at: str, expected: float) -> None:
    x = torch.tensor([[-1.0, 1.0] * 8])
    (seen,) = statistics(event(x, NormSpec("... d -> ...", eps=1.0, eps_at=eps_at)))
    assert seen.shrinkage[1] == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_an_eps_of_none_is_that_of_the_computing_dtype(dtype: torch.dtype) -> None:
    """PyTorch computes half types in float32, and takes its epsilon: the output shows which it was."""
    x = (0.01 * torch.randn(16, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    spec = families.rms_norm(eps=None)
    assert sets(x, spec).eps == torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    seen = precision(event(x, spec, torch.nn.functional.rms_norm(x, (64,))))
    assert 0 < seen.error <= 4 * seen.allowed


def test_constant_sets_are_no_live_sets() -> None:
    x = torch.randn(8, 4, 6, 6)
    x[:, 2] = 5.0
    weight = torch.tensor([1.0, 1.0, -3.0, 1.0])
    (seen,) = statistics(event(x, families.batch_norm(), run="batch", mode="batch", weight=weight))
    assert (seen.constant, seen.live, seen.sets) == (0.25, 3, 4)
    assert (seen.constant_set, seen.constant_value, seen.constant_gain) == ("c=2", 5.0, 3.0)


def test_a_constant_that_is_not_zero_is_alive_without_centering() -> None:
    (seen,) = statistics(event(torch.ones(4, 8), families.rms_norm()))
    assert seen.constant == 0.0
    (seen,) = statistics(event(torch.zeros(4, 8), families.rms_norm()))
    assert seen.constant == 1.0


def test_masked_positions_do_not_count() -> None:
    x = torch.randn(2, 5, 16)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    x[~mask] = 0.0
    (seen,) = statistics(event(x, families.layer_norm()), mask=mask)
    assert (seen.sets, seen.constant) == (8, 0.0)


def test_each_mode_is_measured_where_it_first_runs() -> None:
    x = torch.randn(8, 4)
    spec = families.batch_norm()
    stored = {"running_mean": torch.zeros(4), "running_var": torch.tensor([0.0, 1.0, 4.0, 1e-9])}
    seen = statistics(
        event(x, spec, run="eval", mode="running", **stored),
        event(x, spec, run="batch", mode="batch", **stored),
        event(x, spec, run="batch", mode="batch", index=1, **stored),
    )
    assert [(s.run, s.mode) for s in seen] == [("eval", "running"), ("batch", "batch"), ("batch", "batch")]
    assert (seen[0].live, seen[0].sets, seen[0].set_size) == (3, 4, 0)
    assert seen[0].eps_all == pytest.approx(1 / 3)
    assert seen[1].set_size == 8
    twice = statistics(event(x, families.layer_norm()), event(x, families.layer_norm(), run="batch"))
    assert len(twice) == 1, "a site without running statistics is the same in both runs"


def test_no_nan_reaches_the_numbers() -> None:
    x = torch.randn(4, 16)
    x[1, 3] = float("nan")
    x[2, 3] = float("inf")
    (seen,) = statistics(event(x, families.layer_norm()))
    assert seen.sets == 2
    assert all(np.isfinite([*seen.variance, *seen.shrinkage, *seen.kappa]))


# Precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [0.0, 1.0, 100.0])
def test_torchs_layer_norm_is_as_exact_as_its_dtype_allows(kappa: float) -> None:
    x = torch.randn(16, 768, generator=torch.Generator().manual_seed(0)) + kappa
    seen = precision(event(x, families.layer_norm(), torch.nn.functional.layer_norm(x, (768,))))
    assert 0 < seen.error <= 4 * seen.allowed
    # |mean| / sqrt(v + eps), times half a float32 ulp
    assert seen.predicted == pytest.approx(kappa * FLOAT32 / 2, rel=0.1, abs=1e-8)


def test_the_error_is_in_standard_deviations_of_the_output() -> None:
    x = torch.randn(8, 64)
    weight = torch.full((64,), 0.01)
    y = torch.nn.functional.layer_norm(x, (64,), weight)
    y[3, 5] += 0.002
    seen = precision(event(x, families.layer_norm(bias=False), y, weight=weight))
    assert seen.error == pytest.approx(0.2, rel=1e-3)
    assert seen.worst_set == "axis 0=3"


def test_the_hardest_set_is_always_compared() -> None:
    x = torch.randn(4000, 64)
    x[1234] += 500
    y = torch.nn.functional.layer_norm(x, (64,))
    y[1234, 0] += 1.0
    seen = precision(event(x, families.layer_norm(), y))
    assert seen.sets < 4000
    assert (seen.worst_set, seen.predicted_set) == ("axis 0=1234", "axis 0=1234")


def test_stored_statistics_are_compared_as_stored() -> None:
    bn = torch.nn.BatchNorm2d(8).eval()
    torch.nn.init.uniform_(bn.weight)
    torch.nn.init.normal_(bn.bias)
    bn.running_mean.normal_()  # type: ignore[union-attr]
    bn.running_var.uniform_(0.1, 2)  # type: ignore[union-attr]
    x = torch.randn(4, 8, 6, 6)
    tensors = {**dict(bn.named_parameters()), **dict(bn.named_buffers())}
    del tensors["num_batches_tracked"]
    with torch.no_grad():
        y = bn(x)
    seen = precision(event(x, families.batch_norm(), y, mode="running", **tensors))
    assert 0 < seen.error <= seen.allowed
    off = precision(event(x, families.batch_norm(), y + 0.1, mode="running", **tensors))
    assert off.error > 1e4 * seen.error


def test_a_constant_set_is_held_to_its_bias() -> None:
    x = torch.randn(8, 4, 6, 6)
    x[:, 2] = 5.0
    bias = torch.tensor([0.0, 0.0, 7.0, 0.0])
    y = torch.nn.functional.batch_norm(x, None, None, None, bias, training=True)
    good = precision(event(x, families.batch_norm(), y, run="batch", mode="batch", bias=bias))
    y[:, 2] = 7.5
    bad = precision(event(x, families.batch_norm(), y, run="batch", mode="batch", bias=bias))
    assert good.constant_error <= good.constant_allowed < 0.01  # rounding of 5.0, over sqrt(eps)
    assert bad.constant_error == pytest.approx(0.5)
    assert (bad.constant_set, bad.constant_value) == ("c=2", 5.0)
    assert bad.error == good.error, "it is no error of the sets that vary"


def test_gains_of_zero_leave_nothing_to_compare() -> None:
    weight = torch.zeros(16)
    x = torch.randn(4, 16)
    assert measure(PrecisionOfOutput, event(x, families.layer_norm(bias=False), x * 0, weight=weight)) == {}


# Ranges ------------------------------------------------------------------------------------------------------------


def test_squares_are_counted_in_the_dtype_that_holds_them() -> None:
    x = torch.tensor([[300.0, -4.0, 0.0, 1.0]], dtype=torch.float16)
    torchs, own = (
        ranges(event(x, families.layer_norm())),
        ranges(event(x, replace(families.rms_norm(), cast=Cast("input")), kind="hand-written")),
    )
    assert (torchs.largest, torchs.square) == (300.0, 90000.0)
    assert torchs.sum_of_squares == pytest.approx(90017.0)
    assert (torchs.working, own.working) == ("float32", "float16")
    assert torchs.squares < torchs.working_max
    assert own.squares > own.working_max == 65504.0


def test_stored_statistics_square_nothing() -> None:
    x = torch.full((2, 4), 1e30)
    assert ranges(event(x, families.batch_norm(), mode="running")).square == 0.0
    broken = ranges(event(x, families.batch_norm(), torch.full((2, 4), float("inf")), mode="running"))
    assert broken.broken
    assert (broken.square, broken.largest) == (0.0, pytest.approx(1e30))


def test_only_a_finite_input_can_be_broken() -> None:
    x, nan = torch.randn(2, 4), torch.full((2, 4), float("nan"))
    assert ranges(event(x, families.layer_norm(), nan)).broken
    assert not ranges(event(nan, families.layer_norm(), nan)).broken
    assert not ranges(event(x, families.layer_norm(), x)).broken
