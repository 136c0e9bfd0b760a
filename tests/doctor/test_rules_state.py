"""Rules on what norms are and hold: eps, running statistics and their counter. Each with faulty and innocent models."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normscope
from normscope.doctor.report import Finding
from normscope.doctor.rules import all_rules
from normscope.doctor.site import Call, Site
from normscope.doctor.wording import fold, listed, number
from normscope.spec import Cast, families

torch.set_num_threads(1)


def found(model: nn.Module, code: str, inputs: object = None, **options: object) -> tuple[Finding, ...]:
    report = normscope.check(model, inputs, select=[code], **options)  # type: ignore[arg-type]
    broken = [entry for entry in report.not_run if "internal error" in entry.reason]
    assert not broken, broken
    return report.findings


def judged(code: str, *sites: Site) -> list[Finding]:
    """A rule on hand-made sites, as a checkpoint alone gives them."""
    subject = SimpleNamespace(
        sites=list(sites), known=lambda: (s for s in sites if s.spec is not None), measured={}, optimizer=None
    )
    return list(all_rules()[code].check(subject))  # type: ignore[arg-type]


def trained(model: nn.Module, steps: int = 60, scale: float = 3.0) -> nn.Module:
    """Some steps of real training on random images, so that gains, biases and statistics have left their start."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(scale * torch.randn(8, 3, 6, 6) + 1).square().mean().backward()
        optimizer.step()
    return model


def small(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4, **options),  # type: ignore[arg-type]
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4, **options),  # type: ignore[arg-type]
    )


class TestFold:
    def test_one_finding_stays_itself(self) -> None:
        one = Finding("NS999", "a", "Message.")
        assert fold([one]) == [one]
        assert fold([]) == []

    def test_the_gravest_leads_and_none_is_lost(self) -> None:
        many = [
            Finding("NS999", name, "Message.", severity)
            for name, severity in zip("abcde", ["info"] * 2 + ["error"] * 3, strict=True)
        ]
        (head,) = fold(many)
        assert (head.site, head.severity, head.evidence["sites"]) == ("c", "error", 5)
        assert {head.site, *(f.site for f in head.also)} == set("abcde")
        assert head.message == "Message. The same at 4 other sites."

    def test_numbers_that_are_none_are_written_too(self) -> None:
        assert [number(x) for x in (float("inf"), float("nan"), -0.0, 1e300)] == [
            "inf",
            "nan",
            "-0",
            "1e+300",
        ]
        assert listed(["a", "b", "c"]) == "a, b, c"


class TestEpsNotUsable:
    def test_zero_is_an_error(self) -> None:
        (finding,) = found(nn.Sequential(nn.LayerNorm(4, eps=0.0)), "NS104")
        assert finding.severity == "error"
        assert finding.message == "eps is 0: a statistic set without spread gives 0/0 = NaN."
        assert F.layer_norm(torch.ones(1, 4), (4,), eps=0.0).isnan().all()

    def test_negative_is_an_error_and_counts_channels(self) -> None:
        norm = nn.BatchNorm2d(3, eps=-0.5)
        norm.running_var.copy_(torch.tensor([0.25, 0.5, 2.0]))
        (finding,) = found(norm, "NS104")
        assert finding.severity == "error"
        assert finding.evidence["channels_without_denominator"] == 2
        assert (norm.running_var - 0.5).rsqrt().isfinite().tolist() == [False, False, True]
        with pytest.raises(ValueError, match="eps must be non-negative"):
            norm.eval()(torch.randn(2, 3, 4, 4))

    def test_negative_in_a_layer_norm_is_nan_without_an_error(self) -> None:
        (finding,) = found(nn.Sequential(nn.LayerNorm(4, eps=-0.5)), "NS104", torch.randn(8, 4))
        assert finding.severity == "error"
        assert F.layer_norm(torch.tensor([[0.0, 0, 0, 1]]), (4,), eps=-0.5).isnan().all()

    def test_none_is_info_only_where_the_dtype_is_fixed(self) -> None:
        model = nn.Sequential(*(nn.RMSNorm(4) for _ in range(3)))
        (finding,) = found(model, "NS104", torch.randn(8, 4))
        assert finding.severity == "info"
        assert finding.evidence == {"eps_float32": 2.0**-23, "sites": 3}

    def test_none_in_two_dtypes_is_a_warning_and_the_outputs_do_differ(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.RMSNorm(4, elementwise_affine=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(x) + self.norm(x.double()).float()

        (finding,) = found(Twice(), "NS104", 1e-4 * torch.randn(8, 4))
        assert finding.severity == "warning"
        assert finding.evidence == {"eps_float32": 2.0**-23, "eps_float64": 2.0**-52}
        x = torch.full((1, 4), 1e-4)
        assert abs(F.rms_norm(x, (4,)) - F.rms_norm(x.double(), (4,))).max() > 0.5

    def test_a_small_eps_is_safe_where_half_inputs_compute_in_float32(self) -> None:
        half = nn.Sequential(nn.LayerNorm(4, eps=1e-12)).half()
        assert not found(half, "NS104", torch.randn(8, 4).half())
        assert half(torch.ones(1, 4).half()).isfinite().all()

    @pytest.mark.parametrize(("dtype", "lost"), [("float16", True), ("bfloat16", False), ("float32", False)])
    def test_a_small_eps_is_lost_where_float16_computes(self, dtype: str, lost: bool) -> None:
        spec = families.layer_norm().replace(eps=1e-12, cast=Cast(compute="input"))
        call = Call(0, 0, (8, 4), dtype, "cpu", "contiguous", spec)
        findings = judged("NS104", Site("n", "n", "module", "Own", spec=spec, calls=[call]))
        assert [f.severity for f in findings] == ["error"] * lost
        assert (torch.tensor(1e-12).to(getattr(torch, dtype)) == 0).item() == lost

    @pytest.mark.parametrize(
        ("dtype", "lost"), [(torch.float16, True), (torch.bfloat16, False), (torch.float32, False)]
    )
    def test_f_normalize_loses_its_default_eps_in_float16(self, dtype: torch.dtype, lost: bool) -> None:
        class Unit(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.normalize(x)

        findings = found(Unit(), "NS104", torch.randn(8, 4).to(dtype))
        assert [f.severity for f in findings] == ["error"] * lost
        assert Unit()(torch.zeros(1, 4, dtype=dtype)).isnan().any().item() == lost

    def test_zero_under_frozen_statistics_with_spread_is_info(self) -> None:
        spec = families.batch_norm().replace(eps=0.0)
        tensors = {"running_mean": torch.zeros(2), "running_var": torch.tensor([0.5, 2.0])}
        site = Site("n", "n", "module", "FrozenBatchNorm2d", spec=spec, tensors=tensors)
        site.mode_train = site.mode_eval = "frozen"
        assert [f.severity for f in judged("NS104", site)] == ["info"]
        site.tensors["running_var"][0] = 0
        site._arrays.clear()
        assert [f.severity for f in judged("NS104", site)] == ["error"]

    def test_usual_values_are_silent(self) -> None:
        model = nn.Sequential(
            nn.LayerNorm(4, eps=1e-12), nn.BatchNorm1d(4, eps=1e-3), nn.RMSNorm(4, eps=1e-6)
        )
        assert not found(model, "NS104")


class TestEpsInconsistent:
    @staticmethod
    def blocks(*values: float, last: float | None = None) -> nn.Module:
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.ModuleDict({"norm1": nn.LayerNorm(4, eps=v)}) for v in values)
        if last is not None:
            model.norm = nn.LayerNorm(4, eps=last)
        return model

    def test_an_outlier_among_repeated_blocks(self) -> None:
        (finding,) = found(self.blocks(1e-6, 1e-6, 1e-5, 1e-6), "NS105")
        assert (finding.site, finding.severity) == ("blocks.2.norm1", "warning")
        assert finding.message == (
            "eps is 1e-05, while 3 other LayerNorms have 1e-06 (blocks.0.norm1, blocks.1.norm1, blocks.3.norm1)."
        )

    def test_another_place_is_info(self) -> None:
        (finding,) = found(self.blocks(1e-6, 1e-6, last=1e-5), "NS105")
        assert (finding.site, finding.severity) == ("norm", "info")

    def test_no_majority_is_info(self) -> None:
        (finding,) = found(self.blocks(1e-6, 1e-5), "NS105")
        assert finding.severity == "info"

    def test_another_type_is_silent(self) -> None:
        model = nn.Sequential(
            nn.LayerNorm(4, eps=1e-6), nn.LayerNorm(4, eps=1e-6), nn.BatchNorm1d(4), nn.RMSNorm(4, eps=1e-8)
        )
        assert not found(model, "NS105")

    def test_a_float32_round_trip_is_the_same_number(self) -> None:
        assert not found(
            nn.Sequential(nn.BatchNorm1d(4, eps=1e-3), nn.BatchNorm1d(4, eps=float(np.float32(1e-3)))),
            "NS105",
        )

    def test_variances_decide_whether_it_matters(self) -> None:
        model = nn.Sequential(*(nn.BatchNorm1d(2, eps=e) for e in (1e-3, 1e-3, 1e-5)))
        model[2].running_var.fill_(1e-3)
        (finding,) = found(model, "NS105")
        assert finding.severity == "warning"
        expected = np.sqrt((1e-3 + 1e-3) / (1e-3 + 1e-5)) - 1
        assert finding.evidence["largest_gain_change"] == pytest.approx(expected, rel=1e-6)
        model[2].running_var.fill_(1.0)
        (finding,) = found(model, "NS105")
        assert finding.severity == "info"

    def test_the_config_decides(self) -> None:
        model = self.blocks(1e-6, 1e-6, last=1e-5)
        model.config = SimpleNamespace(layer_norm_eps=1e-6)
        (finding,) = found(model, "NS105")
        assert (finding.site, finding.severity) == ("norm", "warning")
        assert finding.message == "eps is 1e-05, the model's config says 1e-06."
        model.norm.eps = 1e-6
        assert not found(model, "NS105")

    def test_a_config_that_nothing_follows_is_info(self) -> None:
        model = self.blocks(1e-6, 1e-6)
        model.config = SimpleNamespace(layer_norm_eps=1e-12)
        (finding,) = found(model, "NS105")
        assert (finding.severity, finding.evidence["sites"]) == ("info", 2)
        assert "Most norms of this model do not follow it." in finding.message


class TestInvalidRunningVariance:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
    def test_not_finite(self, buffer: str, value: float) -> None:
        model = small()
        getattr(model[4], buffer)[1] = value
        (finding,) = found(model, "NS301")
        assert (finding.site, finding.severity, finding.evidence["buffer"]) == ("4", "error", buffer)

    def test_negative_without_a_root(self) -> None:
        model = small()
        model[1].running_var[2] = -1e-4
        (finding,) = found(model, "NS301")
        assert finding.evidence["channels_without_denominator"] == 1
        assert finding.evidence["largest_gain"] == "Infinity"
        assert model.eval()[:2](torch.randn(2, 3, 6, 6))[:, 2].isnan().all()

    def test_close_to_minus_eps_gives_the_gain_that_comes_out(self) -> None:
        norm = nn.BatchNorm1d(2, eps=1e-5).double()
        norm.running_var[0] = -1e-5 + 1e-9
        (finding,) = found(norm, "NS301")
        shown = (norm.eval()(torch.ones(1, 2).double()) - norm(torch.zeros(1, 2).double()))[0, 0].item()
        # var + eps cancels to 1e-9 of 1e-5: four digits of sixteen are lost
        assert finding.evidence["largest_gain"] == pytest.approx(shown, rel=1e-9)
        assert shown > 3e4

    def test_stored_but_never_read_is_a_warning(self) -> None:
        norm = nn.InstanceNorm1d(2, track_running_stats=True)
        norm.running_var[0] = float("nan")
        norm.track_running_stats = False
        (finding,) = found(norm, "NS301")
        assert finding.severity == "warning"

    def test_zero_and_tiny_variances_are_valid(self) -> None:
        model = small()
        model[1].running_var.copy_(torch.tensor([0.0, 1e-30, 1.0, 5e5]))
        assert not found(model, "NS301")


class TestStatisticsAtInitialization:
    def test_trained_in_eval_mode(self) -> None:
        (finding,) = found(trained(small().eval()), "NS302")
        assert finding.severity == "error"
        assert finding.evidence["sites"] == 2
        assert (
            "never updated (counter 0), although gain and bias of this norm were trained" in finding.message
        )

    def test_reset_after_training(self) -> None:
        model = trained(small())
        for norm in (model[1], model[4]):
            norm.running_mean.zero_()
            norm.running_var.fill_(1)
        (finding,) = found(model, "NS302")
        assert finding.severity == "error"
        assert "they were reset after 60 counted updates" in finding.message

    def test_momentum_zero(self) -> None:
        (finding,) = found(trained(small(momentum=0.0)), "NS302")
        assert finding.severity == "error"
        assert "momentum is 0, so 60 counted updates moved nothing" in finding.message

    def test_a_fresh_model_gets_one_info(self) -> None:
        (finding,) = found(nn.Sequential(*(small() for _ in range(5))), "NS302")
        assert (finding.severity, finding.evidence["sites"]) == ("info", 10)
        assert "nothing in this model looks trained" in finding.message

    @pytest.mark.parametrize("memory", ["Adam", "none"])
    def test_norms_without_parameters_of_their_own(self, memory: str) -> None:
        """Trained in eval mode: only an optimizer with a memory tells."""
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)).eval()
        kinds = {"Adam": torch.optim.Adam, "none": torch.optim.SGD}
        optimizer = kinds[memory](model.parameters(), lr=0.1)
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        (finding,) = normscope.check(model, optimizer=optimizer, select=["NS302"]).findings
        if memory == "Adam":
            assert finding.severity == "warning"
            assert "while this model was trained" in finding.message
        else:
            assert finding.severity == "info"
            assert (
                "no norm here would show a training: it is right before training, and wrong after one"
                in finding.message
            )

    @pytest.mark.parametrize("trained", [True, False])
    def test_gain_and_bias_made_of_a_condition_tell(self, trained: bool) -> None:
        model = normscope.nn.ConditionalBatchNorm1d(4, classes=3).eval()
        if trained:
            nn.init.normal_(model.modulation.weight, 0, 0.1)
        (finding,) = found(model, "NS302")
        assert finding.severity == ("error" if trained else "info")

    def test_a_new_norm_in_a_trained_model(self) -> None:
        model = nn.Sequential(trained(small()), nn.BatchNorm2d(4))
        (finding,) = found(model, "NS302")
        assert (finding.site, finding.severity) == ("1", "warning")

    def test_frozen_norm_with_merged_statistics_is_info(self) -> None:
        tensors = {
            "running_mean": torch.zeros(2),
            "running_var": torch.ones(2),
            "weight": torch.tensor([0.3, 4.0]),
        }
        site = Site("n", "n", "module", "FrozenBatchNorm2d", spec=families.batch_norm(), tensors=tensors)
        site.mode_train = site.mode_eval = "frozen"
        assert [f.severity for f in judged("NS302", site)] == ["info"]

    def test_innocent(self) -> None:
        assert not found(trained(small()), "NS302")
        assert not found(
            nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4, track_running_stats=False)),
            "NS302",
        )

    def test_random_initial_gains_are_no_trace_of_training(self) -> None:
        model = small()
        for norm in (model[1], model[4]):
            nn.init.normal_(norm.weight, 1.0, 0.02)  # as DCGAN does
        (finding,) = found(model, "NS302")
        assert finding.severity == "info"

    def test_zero_initialized_residual_gains_are_no_trace_of_training(self) -> None:
        model = small()
        nn.init.zeros_(model[4].weight)
        (finding,) = found(model, "NS302")
        assert finding.severity == "info"


class TestCounterInconsistent:
    @staticmethod
    def ported(**options: object) -> nn.Module:
        """Trained statistics without their history, as ports from TensorFlow have them."""
        model = trained(small(**options))
        for norm in (model[1], model[4]):
            norm.num_batches_tracked.zero_()
        return model

    def test_a_ported_checkpoint_is_one_info(self) -> None:
        (finding,) = found(self.ported(), "NS303")
        assert (finding.severity, finding.evidence["sites"]) == ("info", 2)

    def test_cumulative_average_is_overwritten_by_the_next_batch(self) -> None:
        model = self.ported(momentum=None)
        (finding,) = found(model, "NS303")
        assert finding.severity == "warning"
        before = copy.deepcopy(model[1])
        model(torch.zeros(4, 3, 6, 6))
        assert before.running_var.min() > 0.01
        # the batch was constant, and its variance is all that is left
        assert model[1].running_var.max() < 1e-6

    def test_cumulative_without_a_counter_never_moves(self) -> None:
        model = trained(small(momentum=None))
        model[1].num_batches_tracked = None
        (finding,) = found(model, "NS303")
        assert (finding.site, finding.severity) == ("1", "warning")
        before = model[1].running_var.clone()
        model(torch.randn(4, 3, 6, 6))
        assert torch.equal(model[1].running_var, before)

    @pytest.mark.parametrize(("dtype", "last"), [(torch.float16, 2048), (torch.bfloat16, 256)])
    def test_a_floating_counter_stops(self, dtype: torch.dtype, last: int) -> None:
        model = trained(small())
        model[1].num_batches_tracked = torch.tensor(1.0, dtype=dtype)
        (finding,) = found(model, "NS303")
        assert finding.severity == "info"
        assert f"stops counting at {last}" in finding.message
        counter = torch.tensor(float(last), dtype=dtype)
        assert torch.equal(counter + 1, counter)
        assert not torch.equal(counter - 1, counter)

    def test_negative(self) -> None:
        model = trained(small())
        model[1].num_batches_tracked.fill_(-1)
        (finding,) = found(model, "NS303")
        assert finding.severity == "warning"

    def test_innocent(self) -> None:
        assert not found(trained(small()), "NS303")
        assert not found(trained(small(momentum=None)), "NS303")
        assert not found(small(), "NS303")

    @pytest.mark.parametrize("momentum", [0.1, 0.01])
    def test_the_idle_counter_of_an_instance_norm_says_nothing(self, momentum: float) -> None:
        norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True, momentum=momentum)
        model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), norm))
        assert norm.num_batches_tracked == 0, "PyTorch never counts here"
        report = normscope.check(model, torch.randn(16, 3, 6, 6), select=["NS302", "NS303", "NS311"])
        assert report.findings == ()

    def test_an_instance_norm_that_was_never_updated_is_still_found(self) -> None:
        model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)))
        model[1].track_running_stats = True
        model[1].register_buffer("running_mean", torch.zeros(4))
        model[1].register_buffer("running_var", torch.ones(4))
        (finding,) = found(model.eval(), "NS302")
        assert (finding.severity, finding.evidence["updates"]) == ("error", None)


class TestCheckpointAlone:
    """A site that is nothing but tensors, as a checkpoint without its code gives it."""

    @staticmethod
    def site(**tensors: torch.Tensor) -> Site:
        site = Site("bn1", "bn1", "module", "batch norm", tensors=tensors)
        site.mode_train, site.mode_eval, site.mode_now = "batch", "running", "running"
        return site

    @pytest.mark.parametrize(
        "code", [code for code, rule in all_rules().items() if set(rule.kinds) & set("SC") and not rule.needs]
    )
    def test_no_rule_needs_more_than_the_state(self, code: str) -> None:
        full = self.site(
            weight=torch.rand(4),
            bias=torch.rand(4),
            running_mean=torch.rand(4),
            running_var=torch.rand(4),
            num_batches_tracked=torch.tensor(1000),
        )
        bare = self.site(weight=torch.rand(4))
        subject = SimpleNamespace(
            sites=[full, bare],
            known=lambda: iter(()),
            measured={},
            state=None,
            lacking=None,
            optimizer=None,
            frozen_policy="",
            inputs_dependent="",
            model=nn.Module(),
        )
        assert not [f for f in all_rules()[code].check(subject) if isinstance(f, Finding)]  # type: ignore[arg-type]

    def test_faults_of_the_state_are_found(self) -> None:
        start = {
            "running_mean": torch.zeros(3),
            "running_var": torch.ones(3),
            "num_batches_tracked": torch.tensor(7),
        }
        assert [f.severity for f in judged("NS302", self.site(**start))] == ["error"]
        assert [
            f.severity
            for f in judged("NS301", self.site(**{**start, "running_var": torch.tensor([1.0, -1, 2])}))
        ] == ["error"]
        assert [
            f.severity
            for f in judged(
                "NS303", self.site(running_mean=torch.ones(3), num_batches_tracked=torch.tensor(0))
            )
        ] == ["info"]
        assert [
            f.severity
            for f in judged(
                "NS309", self.site(running_mean=torch.ones(3).half(), running_var=torch.ones(3).half())
            )
        ] == ["info"]


def test_eps_or_momentum_that_is_no_number_is_an_error_and_no_crash() -> None:
    model = nn.Sequential(
        nn.LayerNorm(4, eps=float("nan")), nn.BatchNorm1d(4, momentum=float("inf")), nn.LayerNorm(4)
    )
    report = normscope.check(model, torch.randn(8, 4))
    found = {f.site: f for f in report.findings if f.code == "NS104"}
    assert {site: f.severity for site, f in found.items()} == {"0": "error", "1": "error"}
    assert (
        found["0"].message
        == "it is built with eps nan: not a finite number, so neither is what it computes or stores."
    )
    assert "NS307" not in {f.code for f in report.findings}
