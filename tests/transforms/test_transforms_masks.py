"""Recalibration under a mask is recalibration of what the mask leaves; and by time steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import normscope.nn as own
from normscope import NormSpec, Running, families, functional
from normscope.distributed import Moments
from normscope.doctor.refusals import Refused
from normscope.errors import BadInput
from normscope.reading import Reading
from normscope.transforms import recalibrate
from normscope.transforms.masks import Valid

torch.set_num_threads(1)
NAN = float("nan")


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stated(nn.Module):
    """A norm of any specification with stored statistics, which says what it is."""

    def __init__(self, spec: NormSpec, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("running_mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("running_var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def __normscope__(self, input_ndim: int | None) -> Reading:
        now = "batch" if self.training else "running"
        return Reading(self.spec, "Stated", dict(self.named_buffers()), now, "batch", "running", ("train",))

    def forward(self, x: Tensor) -> Tensor:
        from normscope.spec import RunningState

        state = RunningState(self.running_mean, self.running_var, int(self.num_batches_tracked))
        y = functional.normalize(x, self.spec, running=state, training=self.training)
        if self.training:
            self.num_batches_tracked.fill_(state.batches)
        return y


class Tokens(nn.Module):
    """Each position is computed alone, so padding is only in the statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv1d(3, 4, 1), nn.Conv1d(4, 2, 1)
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(2, momentum=0.3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.two(self.first(self.one(x)).relu()))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=4), min_size=1, max_size=3),
    st.sampled_from(["exact", "ema", "layerwise"]),
    st.sampled_from([0.0, 1e6, NAN, float("inf")]),
    st.sampled_from(["key", "function", "list", "one more axis"]),
)
def test_masked_is_what_the_mask_leaves(
    lengths: list[list[int]], method: str, padding: float, form: str
) -> None:
    """The same statistics as of all valid positions of a batch side by side, whatever stands in the padding."""
    # torch normalizes no batch of one element
    lengths = [[max(batch[0], 2), *batch[1:]] for batch in lengths]
    batches, masks, packed = [], [], []
    for number, sizes in enumerate(lengths):
        x = 5 + seeded(len(sizes), 3, 6, seed=number)
        mask = torch.arange(6) < torch.tensor(sizes)[:, None]
        packed.append(x.transpose(1, 2)[mask].T[None])
        x[~mask[:, None].expand_as(x)] = padding
        masks.append(mask[:, None] if form == "one more axis" else mask)
        batches.append({"x": x, "valid": masks[-1]} if form in ("key", "one more axis") else x)
    given_mask: Any = {"key": "valid", "one more axis": "valid", "list": masks}.get(form)
    if form == "function":
        table = {id(x): mask for x, mask in zip(batches, masks, strict=True)}
        given_mask = lambda x: table[id(x)]  # noqa: E731
    masked, report = recalibrate(Tokens(), batches, method=method, mask=given_mask)
    wanted, _ = recalibrate(Tokens(), packed, method=method)
    assert len(report.done) == 2
    assert report.provenance["valid"] == f"{sum(map(sum, lengths))} of {6 * sum(map(len, lengths))}"
    for (name, value), other in zip(masked.named_buffers(), wanted.buffers(), strict=True):
        # some hundred numbers near 5 in float64, in another order
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-10, msg=name)


def test_batches_with_one_valid_element_or_none() -> None:
    """They count for what they have; normalized by itself, the one element becomes the bias."""
    x = 5 + seeded(4, 3, 6)
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0], mask[1, 2], mask[3, :3] = True, True, True
    x[~mask[:, None].expand_as(x)] = NAN
    model = Tokens()
    new, report = recalibrate(model, list(x.split(1)), mask=list(mask.split(1)))
    some = model.one(x).transpose(1, 2)[mask]
    torch.testing.assert_close(
        new.first.running_mean, some.mean(0), rtol=1e-13, atol=1e-13
    )  # ten numbers near 5
    torch.testing.assert_close(new.first.running_var, some.var(0), rtol=1e-12, atol=0)
    assert (new.first.num_batches_tracked, report.provenance["valid"]) == (3, "10 of 24")
    assert bool(new.second.running_var.isfinite().all())


def test_hooks_of_the_user_come_after() -> None:
    model = Tokens()
    x, mask = seeded(2, 3, 6), torch.ones(2, 6, dtype=torch.bool)
    model.first.register_forward_hook(lambda module, args, output: 7 + output)
    wanted, _ = recalibrate(model, x)
    new, _ = recalibrate(model, x, mask=mask)
    torch.testing.assert_close(new.second.running_mean, wanted.second.running_mean, rtol=1e-12, atol=1e-12)


def test_the_model_is_left_as_it_was_under_nan() -> None:
    model = Tokens()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = seeded(2, 3, 6)
    x[:, :, 4:] = NAN
    recalibrate(model, x, mask=torch.arange(6).expand(2, 6) < 4)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(BadInput, match=r"inputs holds 12 NaN of 36 values"):
        recalibrate(model, x)


def test_instance_norm_averages_what_valid_positions_of_each_sample_have() -> None:
    x = 3 + 2 * seeded(3, 2, 8)
    sizes = (8, 3, 5)
    mask = torch.arange(8) < torch.tensor(sizes)[:, None]
    new, _ = recalibrate(nn.InstanceNorm1d(2, track_running_stats=True).double(), x, mask=mask)
    each = [x[i, :, :n] for i, n in enumerate(sizes)]
    # sums of at most eight numbers near 3
    torch.testing.assert_close(
        new.running_mean, torch.stack([e.mean(1) for e in each]).mean(0), rtol=1e-13, atol=0
    )
    torch.testing.assert_close(
        new.running_var, torch.stack([e.var(1) for e in each]).mean(0), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("method", ["exact", "ema", "layerwise"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "pattern", ["t b c ... -> t c", "(t b) c ... -> t c", "b t c ... -> t c", "t b c ... -> c"]
)
def test_statistics_of_each_time_step(pattern: str, masked: bool, method: str) -> None:
    steps, samples, channels = 3, 4, 2
    spec = NormSpec(
        pattern, sizes={"t": steps} if "(" in pattern else {},
        running=Running(momentum=None, average="cumulative"),
    )  # fmt: skip
    per_step = "t c" in pattern
    whole = 2 + seeded(steps, samples, channels, 5) + torch.arange(3.0)[:, None, None, None]
    mask = torch.rand(samples, steps, generator=torch.Generator().manual_seed(1)) < 0.7
    x = torch.where(mask.T[:, :, None, None], whole, NAN) if masked else whole
    laid = {"(": x.flatten(0, 1), "b": x.transpose(0, 1)}.get(pattern[0], x)
    model = Stated(spec, (steps, channels) if per_step else (channels,))
    new, report = recalibrate(model, laid, method=method, mask=mask if masked else None)
    assert report.done
    assert new.num_batches_tracked == 1
    there = mask.T if masked else torch.ones(steps, samples, dtype=torch.bool)
    parts = [whole[t][there[t]] for t in range(steps)] if per_step else [whole[there]]
    mean = torch.stack([part.transpose(0, 1).flatten(1).mean(1) for part in parts]).squeeze(0)
    var = torch.stack([part.transpose(0, 1).flatten(1).var(1) for part in parts]).squeeze(0)
    # at most 60 numbers near 4 in float64
    torch.testing.assert_close(new.running_mean, mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(new.running_var, var, rtol=1e-11, atol=0)


@pytest.mark.parametrize("method", ["exact", "ema", "layerwise"])
@pytest.mark.parametrize("outer", [False, True])
def test_what_a_model_tells_its_layer_counts_too(outer: bool, method: str) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = own.BatchNorm1d(2, momentum=1.0)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.norm(x, lengths=lengths)

    x, lengths = seeded(3, 2, 6), torch.tensor([6, 2, 4])
    x[1, :, 5] = 1e6
    there = torch.arange(6) < lengths[:, None]
    mask = torch.tensor([True, True, False])[:, None].expand(3, 6) if outer else None
    new, _ = recalibrate(
        Padded().double(), [(x, lengths)], method=method, mask=None if mask is None else [mask]
    )
    some = x.transpose(1, 2)[there if mask is None else there & mask]
    torch.testing.assert_close(new.norm.running_mean, some.mean(0), rtol=1e-13, atol=0)  # twelve numbers
    torch.testing.assert_close(new.norm.running_var, some.var(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["exact", "layerwise"])
def test_a_norm_called_at_each_step_takes_all_steps_alike(method: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.norm(step) for step in x.unbind(1)], 1)

    batches = [seeded(5, 3, 2), 4 + seeded(2, 3, 2)]
    new, _ = recalibrate(Recurrent().double(), batches, method=method)
    every = torch.cat([batch.flatten(0, 1) for batch in batches])
    torch.testing.assert_close(new.norm.running_mean, every.mean(0), rtol=1e-13, atol=0)  # 21 numbers
    torch.testing.assert_close(new.norm.running_var, every.var(0), rtol=1e-12, atol=0)
    assert new.norm.num_batches_tracked == 6, "two batches of three calls, as training counts them"


def test_ghost_norm_counts_every_virtual_batch() -> None:
    spec = families.ghost_batch_norm(size=2, weight=False, bias=False, momentum=0.5)
    x = 3 + seeded(6, 2)
    new, _ = recalibrate(Stated(spec, (2,)), x, method="ema")
    trained = Stated(spec, (2,))
    trained(x)
    torch.testing.assert_close(new.running_mean, trained.running_mean, rtol=1e-13, atol=0)  # three updates
    torch.testing.assert_close(new.running_var, trained.running_var, rtol=1e-13, atol=0)
    assert new.num_batches_tracked == trained.num_batches_tracked == 3
    whole, _ = recalibrate(Stated(spec, (2,)), x)
    torch.testing.assert_close(whole.running_var, x.var(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (own.GhostBatchNorm2d(2, size=4), seeded(8, 2, 3, 3)),
        (own.BatchRenorm2d(2), seeded(8, 2, 3, 3)),
        (own.ThresholdBatchNorm2d(2), seeded(3, 4, 2, 3, 3)),
        (own.BatchNormThroughTime2d(3, 2), seeded(3, 4, 2, 3, 3)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_ema_is_what_training_stores(norm: nn.Module, x: Tensor) -> None:
    norm = norm.double()
    new, _ = recalibrate(norm, [x, 3 + 2 * x], method="ema")
    trained = copy.deepcopy(norm)
    for batch in (x, 3 + 2 * x):
        trained(batch)
    for (name, value), wanted in zip(new.named_buffers(), trained.buffers(), strict=True):
        # two updates by some hundred numbers in float64
        torch.testing.assert_close(value, wanted, rtol=1e-13, atol=1e-13, msg=name)
    everything = torch.ones(x.shape[1] if x.ndim == 5 else len(x), dtype=torch.bool)
    masked, _ = recalibrate(norm, [x, 3 + 2 * x], method="ema", mask=[everything, everything])
    for (name, value), wanted in zip(masked.named_buffers(), trained.buffers(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-13, atol=1e-13, msg=name)


# -- where a mask lies -------------------------------------------------------------------------------------------------

BN = families.batch_norm()


@pytest.mark.parametrize(
    ("mask", "shape", "spec", "wanted"),
    [
        ((4,), (4, 3, 5), BN, (4, 1, 1)),
        ((4, 5), (4, 3, 5), BN, (4, 1, 5)),
        ((4, 1, 5), (4, 3, 5), BN, (4, 1, 5)),
        ((4, 5, 6), (4, 3, 5, 6), BN, (4, 1, 5, 6)),
        ((4, 6), (4, 3, 5, 6), BN, (4, 1, 1, 6)),
        ((4, 5), (5, 4, 3), families.td_batch_norm(), (5, 4, 1)),
        ((4, 2), (8, 3), families.td_batch_norm(layout="(t b) c ...", steps=2), (8, 1)),
        ((4,), (8, 3), families.td_batch_norm(layout="(t b) c ...", steps=2), (8, 1)),
        ((4, 3), (4, 3), BN, (4, 3)),
    ],
)  # fmt: skip
def test_where_a_mask_lies(
    mask: tuple[int, ...], shape: tuple[int, ...], spec: NormSpec, wanted: Any
) -> None:
    found = Valid(torch.ones(mask, dtype=torch.bool), ((4, 3),)).placed(shape, spec)
    assert isinstance(found, Tensor), found
    assert tuple(found.shape) == wanted


def test_steps_and_samples_of_one_axis_are_told_apart() -> None:
    mask = torch.tensor([[True, False], [True, True], [False, True]])  # three samples, two steps
    spec = families.td_batch_norm(layout="(t b) c ...", steps=2)
    found = Valid(mask, ()).placed((6, 3), spec)
    assert isinstance(found, Tensor)
    assert found[:, 0].tolist() == [True, True, False, False, True, True]


def test_a_mask_as_large_as_the_input_of_a_norm_was_refused() -> None:
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    full = mask[:, None].expand(5, 6, 7)
    found = Valid(full, ((5, 3, 7),)).placed((5, 6, 7), BN)
    assert isinstance(found, Tensor), found
    assert torch.equal(found, full)
    model = nn.Sequential(nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6)).double()
    new, _ = recalibrate(model, seeded(5, 3, 7), mask=full)
    wanted, _ = recalibrate(model, seeded(5, 3, 7), mask=mask)
    assert torch.equal(new[1].running_var, wanted[1].running_var)


@pytest.mark.parametrize(
    ("mask", "shape", "text"),
    [
        ((4, 7), (4, 3, 5),
         "the mask (4, 7) has no place in its input (4, 3, 5): of b and ...0, axes of 4 and 5, none takes "
         "them"),
        ((4, 3), (4, 3),
         "the mask (4, 3) has no place in its input (4, 3): it is as large, and not alike along the axis of "
         "features; give one of size 1 there"),
        ((4, 7), (28, 3),
         "the mask (4, 7) has no place in its input (28, 3): axis of 28 may hold its axes in either "
         "order; give a mask of that one axis"),
        ((4, 6), (4, 3, 6, 6),
         "the mask (4, 6) fits its input (4, 3, 6, 6) in 2 ways; give one with 4 axes, of size 1 where it "
         "is alike"),
    ],
)  # fmt: skip
def test_a_mask_without_a_place(mask: tuple[int, ...], shape: tuple[int, ...], text: str) -> None:
    generator = torch.Generator().manual_seed(0)
    valid = Valid(torch.rand(mask, generator=generator) < 0.5, ((4, 3, 9),))
    assert valid.placed(shape, BN) == text


def test_a_norm_that_the_mask_does_not_fit_is_left() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Conv1d(3, 3, 2, stride=2), nn.BatchNorm1d(3)).double()
    x, mask = seeded(4, 3, 6), torch.ones(4, 6, dtype=torch.bool)
    reason = (
        "the mask (4, 6) has no place in its input (4, 3, 3): of b and ...0, axes of 4 and 3, none takes them"
    )
    for method in ("exact", "ema", "layerwise"):
        new, report = recalibrate(model, x, mask=mask, method=method)
        assert [site.name for site in report.done] == ["0"]
        assert [(site.name, site.reason) for site in report.left] == [("2", reason)]
        assert torch.equal(new[2].running_mean, torch.zeros(3))
    with pytest.raises(Refused) as caught:
        recalibrate(model, x, mask=mask, select="2")
    assert str(caught.value) == f"the mask fits no norm, so nothing was recalibrated (2: {reason})"


X = seeded(4, 3, 6)
ALL = torch.ones(4, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("data", "mask", "text"),
    [
        (X, 3, "mask is a function of a batch, a key of it, a tensor or a list of them; got int"),
        (X, ALL.double(),
         "a mask is boolean, True where an element counts, or holds 0 and 1; got torch.float64 of shape "
         "(4, 6). Compare first: lengths > position"),
        (X, torch.tensor([6, 5, 4, 6]),
         "a mask is boolean, True where an element counts, or holds 0 and 1; got torch.int64 of shape "
         "(4,). Compare first: lengths > position"),
        ([X, X], ALL,
         "mask is one tensor and data are batches: give a list of as many masks, or mask=lambda batch: "
         "..."),
        ([X, X], [ALL], "mask holds 1 masks, and there are more batches"),
        ([X], [ALL, ALL], "mask holds 2 masks, and there are 1 batches"),
        (X, ~ALL, "mask is False everywhere: no element would count; is it inverted?"),
        (X, "valid", "mask='valid' is the key of a batch that is a dict, and batch 0 holds Tensor"),
        ({"input": X}, "valid", "mask='valid' is the key of a batch that is a dict, and batch 0 holds input"),
        (X, lambda batch: batch.valid,
         "mask failed on batch 0: AttributeError: 'Tensor' object has no attribute 'valid'"),
        (X, ALL & (torch.arange(6) < 1) & (torch.arange(4) < 1)[:, None],
         "0: 3 of 3 channels get statistics that are not finite (one element a channel came in); the "
         "model is as it was. Check the data and what stands before this norm"),
    ],
)  # fmt: skip
def test_errors(data: Any, mask: Any, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        recalibrate(nn.Sequential(nn.BatchNorm1d(3)).double(), data, mask=mask, method="layerwise")
    assert str(caught.value) == text


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 2**31))
def test_masked_moments_merge_by_channel(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 7 + torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(x.shape, generator=generator) < 0.5
    parts = [
        Moments.of(part, (0,), there) for part, there in zip(x.split(sizes), mask.split(sizes), strict=True)
    ]
    found = Moments.none([3])
    for part in parts:
        found = found.merge(part)
    counts = torch.as_tensor(found.count).expand(3)
    for channel in range(3):
        some = x[mask[:, channel], channel]
        assert counts[channel] == len(some)
        if len(some):
            # at most 25 numbers near 7
            torch.testing.assert_close(found.mean[channel], some.mean(), rtol=1e-14, atol=0)
            torch.testing.assert_close(
                found.m2[channel], (some - some.mean()).square().sum(), rtol=1e-12, atol=1e-13
            )
