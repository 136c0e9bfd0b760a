"""The probes whose unit is the sample: moments, gap, companions, effective samples, padding, scale symmetry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from normscope.doctor.change import change
from normscope.doctor.independence import dependence, examine
from normscope.doctor.moments import SampleMoments, sample_moments
from normscope.doctor.probes import all_probes
from normscope.doctor.runs import run_probes
from normscope.doctor.sampling_error import difference, t_critical
from normscope.doctor.session import Session
from normscope.doctor.significance import matters
from normscope.doctor.site import Event, Site
from normscope.doctor.sites import find_sites
from normscope.doctor.subject import Subject
from normscope.spec import NormSpec, families

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def measure(probe: str, model: nn.Module, *args: torch.Tensor, **more: Any) -> Any:
    """What one probe measures, or the reason why it could not; the model's state must come through untouched."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Session(model) as session:
        subject = Subject(
            model=session.model,
            session=session,
            sites=find_sites(session, args, {}),
            args=args,
            batch_size=len(args[0]),
            **more,
        )
        subject.inputs_dependent = dependence(args, len(args[0]))
        reasons = run_probes(subject, [all_probes()[probe]])
        result = subject.measured.get(probe, reasons.get(probe))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return result


def event(x: torch.Tensor, spec: NormSpec) -> Event:
    site = Site(name="norm", path="norm", kind="module", type_name="norm", spec=spec)
    return Event("batch", site, 0, spec, "batch", x, x, {})


def moments(x: torch.Tensor, spec: NormSpec, samples: int) -> SampleMoments:
    out = sample_moments(event(x, spec), samples)
    assert isinstance(out, SampleMoments), out
    return out


def settle(model: nn.Module, draw: Any, steps: int = 100) -> nn.Module:
    """Running statistics of many batches of 32."""
    torch.manual_seed(0)
    model.train()
    with torch.no_grad():
        for _ in range(steps):
            model(draw(32))
    return model.eval()


class TestMoments:
    @pytest.mark.parametrize(
        ("shape", "spec", "samples", "order"),
        [
            ((6, 5, 4, 3), families.batch_norm(), 6, (0, 1, 2, 3)),
            ((6, 5), families.batch_norm(), 6, (0, 1)),
            ((4, 6, 5, 3, 3), families.td_batch_norm(v_threshold=1.0), 6, (1, 2, 0, 3, 4)),
        ],
        ids=["images", "vectors", "time first"],
    )
    def test_mean_and_variance_of_each_sample(
        self, shape: tuple[int, ...], spec: NormSpec, samples: int, order: tuple[int, ...]
    ) -> None:
        x = torch.randn(shape) * 3 + 1
        found = moments(x, spec, samples)
        rows = x.double().permute(order).reshape(samples, 5, -1).numpy()
        # one pass of float32 sums over at most 36 elements: a few ulp of the mean square
        np.testing.assert_allclose(found.mean[0], rows.mean(-1), atol=2e-6)
        np.testing.assert_allclose(found.var[0], rows.var(-1), atol=2e-5)
        assert found.elements == rows.shape[-1]

    def test_a_large_mean_costs_no_digits_of_the_variance(self) -> None:
        x = torch.randn(4, 3, 16, 16)
        x[:, 1] += 1000
        found = moments(x, families.batch_norm(), 4)
        truth = x.double().flatten(2).var(2, correction=0).numpy()
        np.testing.assert_allclose(found.var[0], truth, rtol=1e-3)

    def test_frames_are_pooled_into_their_sample_whichever_way_they_lie(self) -> None:
        x = torch.randn(4, 1, 3, 5, 5) + 10 * torch.arange(4.0).reshape(4, 1, 1, 1, 1)  # samples far apart
        frames = x + torch.zeros(4, 7, 3, 5, 5)
        together = moments(frames.flatten(0, 1), families.batch_norm(), 4)
        apart = moments(frames.transpose(0, 1).flatten(0, 1), families.batch_norm(), 4)
        for found in (together, apart):
            # read the right way the samples lie 10 apart; read the wrong way they look alike
            error = found.standard_error(found.mean)
            assert (error > 10 / 2 / 4**0.5).all()
            assert found.elements == 7 * 25

    def test_virtual_batches_share_channels(self) -> None:
        spec = NormSpec(
            "(v b) c ... -> v c", sizes={"b": 4}, running=families.batch_norm().running, remainder="short"
        )
        x = torch.randn(10, 3, 5, 5)  # 4 + 4 + 2
        plain, ghost = moments(x, families.batch_norm(), 10), moments(x, spec, 10)
        np.testing.assert_array_equal(plain.mean, ghost.mean)
        np.testing.assert_array_equal(plain.var, ghost.var)

    def test_rows_that_match_no_sample_are_a_reason(self) -> None:
        assert sample_moments(event(torch.randn(7, 3), families.batch_norm()), 4) == (
            "its input has 7 rows for 4 samples, so rows cannot be matched to samples"
        )

    def test_variance_over_few_samples_is_unbiased(self) -> None:
        x = torch.randn(1000, 4, 8, generator=torch.Generator().manual_seed(0))
        found = np.mean([moments(batch, families.batch_norm(), 4).batch_var.mean() for batch in x])
        # 1000 x 8 variances of 4 draws, each with standard deviation sqrt(2/3)
        assert found == pytest.approx(1, abs=4 * (2 / 3) ** 0.5 / 8000**0.5)


class TestSamplingError:
    @pytest.mark.parametrize(
        ("dof", "value"), [(1, 636.619), (2, 31.599), (3, 12.924), (7, 5.408), (30, 3.646), (1000, 3.300)]
    )
    def test_critical_values_are_those_of_the_tables(self, dof: int, value: float) -> None:
        assert t_critical(dof) == pytest.approx(value, rel=5e-4)

    @staticmethod
    def against_zero_and_one(x: torch.Tensor) -> Any:
        channels = x.shape[1]
        live = np.ones(channels, dtype=bool)
        batch = moments(x, families.batch_norm(), len(x))
        return difference(batch, np.zeros(channels), np.ones(channels), live, 1e-5)

    def test_size_of_a_difference(self) -> None:
        x = 2 * torch.randn(64, 200, 4, 4, generator=torch.Generator().manual_seed(0)) + 0.5
        found = self.against_zero_and_one(x)
        assert found.shift == pytest.approx(0.5, abs=0.02)
        assert found.log_var == pytest.approx(np.log(4), abs=0.05)
        assert found.share_mean > 0.99
        assert found.share_var > 0.99
        assert matters(found)[1]

    @pytest.mark.parametrize("samples", [4, 8, 16])
    def test_innocent_channels_differ_as_often_as_promised(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        found = self.against_zero_and_one(torch.randn(samples, 20_000, generator=generator))
        # p = 0.001 of 20000 channels: 20, and 5 standard deviations of that count
        assert found.share_mean * 20_000 <= 20 + 5 * 20**0.5
        assert not matters(found)[1]

    def test_sparse_activations_are_not_called_quiet(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, 500, generator=generator) * torch.bernoulli(
            torch.full((8, 500), 0.1), generator=generator
        )
        x = x / 0.1**0.5  # variance 1, but most of it in one sample of ten
        found = self.against_zero_and_one(x)
        assert not matters(found)[1]

    def test_significance_without_effect_and_effect_without_significance(self) -> None:
        many = self.against_zero_and_one(torch.randn(2000, 50) + 0.15)
        assert many.share_mean > 0.9
        assert matters(many) == (pytest.approx(0.6, abs=0.1), False)
        few = self.against_zero_and_one(torch.randn(2, 50) + 1)
        assert few.shift > 0.25
        assert not matters(few)[1]


class TestGap:
    def net(self) -> nn.Module:
        layers = [
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        ]
        return settle(nn.Sequential(*layers), lambda n: torch.randn(n, 3, 10, 10))

    def test_a_stale_site_stays_one_site(self) -> None:
        net = self.net()
        with torch.no_grad():
            net[1].running_var.mul_(4)
        found = measure("gap", net, torch.randn(8, 3, 10, 10))
        assert [matters(found[name].gap)[1] for name in ("1", "4")] == [True, False]
        assert found["1"].gap.log_var == pytest.approx(-np.log(4), abs=0.2)

    def test_dead_channels_do_not_count(self) -> None:
        net = self.net()
        with torch.no_grad():
            net[0].weight[:8] = 0
            net[0].bias[:8] = 0
            net[1].running_mean[:8] = 0
            net[1].running_var[:8] = 0
        found = measure("gap", net, torch.randn(8, 3, 10, 10))
        assert found["1"].channels == 8
        assert not matters(found["1"].gap)[1]

    def test_reasons(self) -> None:
        net = self.net()
        assert measure("gap", net, torch.randn(3, 3, 10, 10)) == "cannot tell with 3 samples: pass at least 8"
        assert measure("gap", net, torch.randn(8, 3, 10, 10), synthetic=True) == (
            "the inputs are random numbers; needs real data"
        )
        assert measure("gap", nn.LayerNorm(4), torch.randn(8, 4)) == "no site keeps running statistics"
        fresh = measure("gap", nn.BatchNorm1d(4), torch.randn(8, 4))
        assert (
            fresh[""].reason
            == "its running statistics are at their initial values, there is nothing to compare"
        )

    def test_instance_norm_stores_the_variance_within_samples(self) -> None:
        draw = lambda n: torch.randn(n, 6, 8, 8) + 3 * torch.randn(n, 6, 1, 1)  # noqa: E731
        net = settle(nn.Sequential(nn.InstanceNorm2d(6, track_running_stats=True)), draw)
        found = measure("gap", net, draw(16))
        assert abs(found["0"].gap.log_var) < 0.1  # the variance of all elements is ten times that

    def test_infinities_are_a_reason(self) -> None:
        class Inverse(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(3)
                self.norm.running_var.fill_(2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(1 / x.clamp_min(0))

        x = torch.randn(8, 3)
        for probe in ("gap", "effective_samples"):
            reason = "its input holds NaN or infinities on this batch"
            assert measure(probe, Inverse(), x)["norm"].reason == reason
        assert measure("companions", Inverse(), x).eval["norm"].strength == 0


class TestCompanions:
    def test_batch_norm_couples_in_training_alone(self) -> None:
        net = settle(
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8)),
            lambda n: torch.randn(n, 4),
        )
        found = measure("companions", net, torch.randn(8, 4))
        assert found.eval["1"].strength == 0
        assert found.output_eval == 0
        assert found.batch["1"].responsible
        assert found.batch["1"].strength > 0.5
        assert found.batch["3"].received
        assert not found.batch["3"].responsible

    def test_time_first_layout_is_no_coupling(self) -> None:
        class TimeFirst(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(6)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(x.transpose(0, 1)).transpose(0, 1)

        for steps in (8, 16, 5):  # as many steps as samples, twice as many, an odd number
            found = measure("companions", TimeFirst(), torch.randn(8, steps, 6))
            assert not any(c.changed for c in (*found.eval.values(), *found.batch.values()))

    def test_group_norm_and_a_frozen_norm_do_not_couple(self) -> None:
        frozen = nn.BatchNorm2d(8)
        frozen.train = lambda mode=True: frozen  # type: ignore[method-assign,assignment]
        frozen.training = False
        found = measure("companions", nn.Sequential(nn.GroupNorm(2, 8), frozen), torch.randn(4, 8, 5, 5))
        assert not any(c.changed for c in found.batch.values())

    def test_one_sample_has_no_companions(self) -> None:
        found = measure("companions", nn.Sequential(nn.LayerNorm(4)), torch.randn(1, 4))
        assert found.eval == {}
        assert found.output_eval is None


class TestEffectiveSamples:
    @staticmethod
    def at_the_input(x: torch.Tensor) -> Any:
        net = settle(nn.Sequential(nn.BatchNorm2d(x.shape[1])), lambda n: torch.randn(n, *x.shape[1:]), 3)
        return measure("effective_samples", net, x)["0"]

    def test_independent_pixels_all_count(self) -> None:
        found = self.at_the_input(torch.randn(64, 200, 6, 6, generator=torch.Generator().manual_seed(0)))
        assert found.effective == pytest.approx(64 * 36, rel=0.1)

    def test_one_value_repeated_over_the_image_counts_once(self) -> None:
        found = self.at_the_input(torch.randn(16, 50, 1, 1).expand(16, 50, 6, 6).contiguous())
        assert found.effective == pytest.approx(16, rel=1e-5)
        assert found.elements == 36

    def test_blocks_of_four_pixels(self) -> None:
        x = torch.randn(64, 200, 4, 4, generator=torch.Generator().manual_seed(0))
        found = self.at_the_input(x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        assert found.effective == pytest.approx(64 * 16, rel=0.1)

    def test_never_more_than_there_are_elements(self) -> None:
        x = torch.randn(8, 50, 2, 2)
        found = self.at_the_input(x - x.mean((2, 3), keepdim=True))
        assert found.per_sample == 4


class TestPadding:
    mask = torch.arange(12) < torch.tensor([[12], [9], [5], [7]])

    @pytest.mark.parametrize("layout", ["time before channels", "channels before time", "folded"])
    def test_layouts(self, layout: str) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.safe = nn.LayerNorm(6)
                self.mixing = nn.GroupNorm(2, 6)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if layout == "folded":
                    flat = self.safe(x.flatten(0, 1)).unflatten(0, x.shape[:2])
                else:
                    flat = self.safe(x)
                return self.mixing(flat.transpose(1, 2)) if layout == "channels before time" else flat

        found = measure("padding", Net(), torch.randn(4, 12, 6), mask=self.mask)
        for run in (found.content, found.length):
            assert not run["safe"].changed
            assert run["safe"].relative == 0
            if layout == "channels before time":
                assert run["mixing"].responsible
                assert run["mixing"].relative > 0.01

    def test_square_shapes_are_read_the_right_way(self) -> None:
        found = measure("padding", nn.Sequential(nn.LayerNorm(12)), torch.randn(4, 12, 12), mask=self.mask)
        assert not found.content["0"].changed
        assert not found.length["0"].changed

    def test_masked_pooling_is_followed_behind_the_positions(self) -> None:
        class Pooled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(6)

            def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                return self.norm((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

        found = measure("padding", Pooled(), torch.randn(4, 12, 6), self.mask, mask=self.mask)
        assert not found.content["norm"].changed
        assert found.output_content == found.output_length == 0

    def test_needs_padding(self) -> None:
        everything = torch.ones(4, 12, dtype=torch.bool)
        assert measure("padding", nn.LayerNorm(6), torch.randn(4, 12, 6)) == (
            "needs a mask: pass mask= (True at valid positions)"
        )
        assert measure("padding", nn.LayerNorm(6), torch.randn(4, 12, 6), mask=everything) == (
            "no position is masked: pass a batch with padding"
        )


def decayed(model: nn.Module, x: torch.Tensor) -> Any:
    """Scale symmetries, of which only an optimizer's user makes use."""
    return measure("scale_symmetry", model, x, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


class TestScaleSymmetry:
    x = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize(
        ("norm", "sets", "bias"),
        [
            (nn.BatchNorm2d(8), 8, ""),
            (nn.InstanceNorm2d(8), 8, ""),
            (nn.GroupNorm(2, 8), 2, "0.bias"),
            (nn.GroupNorm(1, 8), 1, "0.bias"),
        ],
    )
    def test_sets_that_share_statistics_share_a_scale(self, norm: nn.Module, sets: int, bias: str) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(800, 4))
        found = decayed(net, self.x)["0.weight"]
        assert (found.sets, found.bias, found.invariant) == (sets, bias, True)
        # eps 1e-5 against a variance of about 0.3, and float32 sums of 27 products
        assert found.cosine < 1e-3
        assert found.change < 1e-3
        vector = torch.cat([net[0].weight.flatten(), net[0].bias] if bias else [net[0].weight.flatten()])
        assert found.norm == pytest.approx(float(vector.detach().norm()), rel=1e-6)

    def test_layer_norm_takes_the_scale_of_the_whole_layer(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 6), nn.LayerNorm(6), nn.Linear(6, 2))
        found = decayed(net, torch.randn(8, 10))
        assert list(found) == ["0.weight"]
        assert found["0.weight"].invariant
        assert found["0.weight"].sets == 1

    def test_what_is_not_invariant_is_not_called_so(self) -> None:
        torch.manual_seed(0)
        tiny = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        with torch.no_grad():
            tiny[0].weight.mul_(1e-2)  # variances of 1e-5: eps decides
        assert not decayed(tiny, self.x)["0.weight"].invariant
        frozen = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        frozen[1].eval()
        frozen[1].train = lambda mode=True: frozen[1]  # type: ignore[method-assign,assignment]
        assert not decayed(frozen, self.x)["0.weight"].invariant


class TestIndependence:
    def test_copies(self) -> None:
        x = torch.randn(8, 5)
        assert dependence(x, 8) == ""
        assert dependence(x[[0, 0, 0, 0, 1, 1, 2, 3]], 8) == "only 4 of 8 samples are distinct (copies)"
        tokens = torch.randint(100, (8, 12))
        assert (
            dependence({"ids": tokens[[0] * 8], "other": torch.arange(8)}, 8) == ""
        )  # another input tells them apart
        assert dependence(tokens[[0] * 8], 8) == "only 1 of 8 samples are distinct (copies)"

    def test_augmented_copies(self) -> None:
        x = torch.randn(2, 3, 20, 20)[[0, 0, 0, 0, 1, 1, 1, 1]]
        x = x + 0.01 * torch.randn(8, 3, 20, 20)
        assert dependence(x, 8) == "only 2 of 8 samples are distinct (near copies, or views of one image)"

    def test_crops_of_one_photograph(self) -> None:
        data = pytest.importorskip("skimage.data")
        photo = torch.tensor(data.coffee(), dtype=torch.float32).permute(2, 0, 1)
        generator = torch.Generator().manual_seed(0)
        crops = []
        for _ in range(8):
            side = int(torch.randint(180, 360, (), generator=generator))
            top = int(torch.randint(400 - side, (), generator=generator))
            left = int(torch.randint(600 - side, (), generator=generator))
            crop = photo[None, :, top : top + side, left : left + side]
            crop = nn.functional.interpolate(crop, size=(128, 128), mode="bilinear", antialias=True)
            crops.append(crop.flip(-1) if torch.rand((), generator=generator) < 0.5 else crop)
        assert examine(torch.cat(crops), 8).groups <= 4

    def test_aligned_images_are_independent(self) -> None:
        data = pytest.importorskip("skimage.data")
        faces = torch.tensor(data.lfw_subset()[:16], dtype=torch.float32)[:, None]
        assert dependence(faces, 16) == ""
        assert dependence(nn.functional.interpolate(faces, size=(100, 100), mode="bilinear"), 16) == ""
        ones = torch.tensor([[0.0, 1.0, 0.0]]).expand(16, 1, 8, 3) + 0.3 * torch.rand(16, 1, 8, 3)
        assert dependence(ones, 16) == ""

    def test_two_features_of_tabular_data_are_no_image(self) -> None:
        x = torch.randn(8, 4) + torch.tensor([1e3, 1e4, 0.0, -1e5])  # rows correlate almost perfectly
        assert dependence(x, 8) == ""


class TestChange:
    def test_infinities_that_stay_are_no_change(self) -> None:
        x = np.array([1.0, np.inf, np.nan])
        assert not change(x, x.copy(), torch.float32).real
        assert change(x, np.array([1.0, 0.0, np.nan]), torch.float32).real

    def test_tolerance_follows_the_dtype(self) -> None:
        x = np.ones(100)
        assert change(x, x * (1 + 1e-3), torch.float32).real
        assert not change(x, x * (1 + 1e-3), torch.bfloat16).real
        assert not change(x, x * (1 + 1e-6), torch.float32).real
