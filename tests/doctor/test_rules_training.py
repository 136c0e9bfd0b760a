"""Rules on what training does to norms: freezing, flags, momentum, precision, warm-up, dead channels, weight decay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.doctor.report import Finding

torch.set_num_threads(1)


def found(model: nn.Module, code: str, inputs: object = None, **options: object) -> tuple[Finding, ...]:
    report = normscope.check(model, inputs, select=[code], **options)  # type: ignore[arg-type]
    broken = [entry for entry in report.not_run if "internal error" in entry.reason]
    assert not broken, broken
    return report.findings


class Net(nn.Module):
    """A backbone of one block and a head; ``sticky`` keeps the norm in eval across train()."""

    def __init__(self, *, sticky: bool = False, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, **options), nn.ReLU())  # type: ignore[arg-type]
        self.head = nn.Linear(6, 2)
        self.sticky = sticky

    @property
    def norm(self) -> nn.BatchNorm2d:
        return self.block[1]

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        if self.sticky:
            self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x).mean((2, 3)))


def images(count: int = 16, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    return scale * torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)) + shift


def frozen(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


class TestHalfFrozen:
    def test_frozen_block_with_live_statistics(self) -> None:
        model = Net().train()
        frozen(model.block)
        (finding,) = found(model, "NS305")
        assert (finding.site, finding.severity, finding.evidence["diagnosis"]) == (
            "block.1",
            "warning",
            "block",
        )
        before = model.norm.running_mean.clone()
        model(images())
        assert not torch.equal(model.norm.running_mean, before)

    def test_only_gain_and_bias_frozen_names_the_policies(self) -> None:
        model = Net().train()
        frozen(model.norm)
        (finding,) = found(model, "NS305")
        assert (finding.severity, finding.evidence["diagnosis"]) == ("info", "open")
        assert "only gain and bias are to be frozen (affine)" in finding.message

    def test_a_measured_gap_makes_it_a_warning(self) -> None:
        model = Net().train()
        for _ in range(80):
            model(torch.randn(16, 3, 8, 8))
        frozen(model.norm)
        report = normscope.check(model, images(shift=3), select=["NS304", "NS305"])
        (finding,) = (f for f in report.findings if f.code == "NS305")
        assert (finding.severity, finding.evidence["diagnosis"]) == ("warning", "moving")
        report = normscope.check(model, images(), select=["NS304", "NS305"])
        assert [f.severity for f in report.findings] == ["info"]

    @pytest.mark.parametrize(
        ("policy", "expected"), [("affine", []), ("both", ["warning"]), ("statistics", ["warning"])]
    )
    def test_the_declared_policy_decides(self, policy: str, expected: list[str]) -> None:
        model = Net().train()
        frozen(model.block)
        assert [f.severity for f in found(model, "NS305", frozen_policy=policy)] == expected

    def test_sticky_freeze_is_silent(self) -> None:
        model = Net(sticky=True).train()
        frozen(model.block)
        assert not found(model, "NS305")
        assert not found(model, "NS305", frozen_policy="both")

    def test_trained_norms_and_stateless_norms_are_silent(self) -> None:
        assert not found(Net().train(), "NS305")
        stateless = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
        frozen(stateless)
        assert not found(stateless.train(), "NS305")

    def test_a_model_in_use_is_one_info(self) -> None:
        model = Net().eval()
        frozen(model)
        (finding,) = found(model, "NS305")
        assert (finding.severity, finding.evidence["diagnosis"]) == ("info", "in use")

    def test_a_frozen_teacher_in_train_mode_is_a_warning(self) -> None:
        model = Net().train()
        frozen(model)
        (finding,) = found(model, "NS305")
        assert finding.severity == "warning"

    def test_a_norm_without_gain_in_a_frozen_block(self) -> None:
        model = Net(affine=False).train()
        frozen(model.block)
        (finding,) = found(model, "NS305")
        assert finding.message.startswith("the parameters around this norm are frozen")

    @pytest.mark.parametrize("policy", ["", "statistics", "both"])
    def test_a_norm_in_eval_for_now_is_told_once(self, policy: str) -> None:
        """A loop of ``model.train(); backbone.eval()``."""
        model = Net().train()
        frozen(model.block)
        model.block.eval()
        report = normscope.check(model, select=["NS305", "NS306"], frozen_policy=policy)
        assert [(f.code, f.severity) for f in report.findings] == [("NS306", "warning")]

    @pytest.mark.parametrize("policy", ["", "statistics", "both"])
    def test_overriding_train_makes_both_go_away(self, policy: str) -> None:
        model = Net().train()
        frozen(model.block)
        assert "override train()" in found(model, "NS305", frozen_policy=policy)[0].fix
        model.sticky = True
        model.train()
        assert not normscope.check(model, select=["NS305", "NS306"], frozen_policy=policy).findings

    def test_the_other_fixes(self) -> None:
        model = Net().train()
        frozen(model.block)
        assert "frozen_policy='affine'" in found(model, "NS305")[0].fix
        assert not found(model, "NS305", frozen_policy="affine")

    @pytest.mark.parametrize("policy", ["statistics", "both", "affine"])
    def test_a_policy_when_nothing_is_frozen(self, policy: str) -> None:
        model = Net().train()
        (finding,) = found(model, "NS305", frozen_policy=policy)
        assert (finding.severity, finding.evidence["diagnosis"]) == ("warning", "nothing frozen")
        if policy != "statistics":
            frozen(model.norm)
        model.sticky = policy != "affine"
        model.train()
        assert not found(model, "NS305", frozen_policy=policy), "its fix, applied"

    def test_trained_gains_in_a_frozen_block_with_live_statistics(self) -> None:
        model = Net().train()
        frozen(model.block[0])
        (finding,) = found(model, "NS305", frozen_policy="statistics")
        assert (finding.severity, finding.evidence["diagnosis"]) == ("warning", "policy")
        assert [f.evidence["diagnosis"] for f in found(model, "NS305", frozen_policy="affine")] == [
            "nothing frozen"
        ]
        assert not found(model, "NS305"), "without a policy this is how batch norms alone are trained"

    def test_a_new_head_beside_a_frozen_backbone_is_silent(self) -> None:
        class Headed(Net):
            def __init__(self) -> None:
                super().__init__(sticky=True)
                self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

        model = Headed()
        frozen(model.block)
        for policy in ("statistics", "both", "affine"):
            assert not found(model.train(), "NS305", frozen_policy=policy)


class TestFreezeNotSticky:
    def test_eval_inside_a_training_model(self) -> None:
        model = Net().train()
        model.norm.eval()
        (finding,) = found(model, "NS306")
        assert (finding.site, finding.severity) == ("block.1", "warning")
        assert finding.evidence["moved_after_100"] == pytest.approx(1 - 0.9**100)
        assert not model.norm.training, "the probe has put the modes back"

    def test_sticky_is_silent(self) -> None:
        assert not found(Net(sticky=True).train(), "NS306")

    def test_a_wrapper_in_train_mode_around_a_model_in_eval_is_silent(self) -> None:
        assert not found(nn.Sequential(Net().eval(), nn.Softmax(1)), "NS306")

    @pytest.mark.parametrize(
        "head", [nn.Linear(6, 2), nn.Dropout(0.5), nn.BatchNorm1d(6, affine=False)], ids=str
    )
    def test_a_head_in_training_on_a_model_in_eval_is_found(self, head: nn.Module) -> None:
        (finding,) = found(nn.Sequential(Net().eval(), nn.Flatten(), head), "NS306")
        assert finding.site == "0.block.1"

    def test_all_in_eval_is_silent_unless_a_policy_says_frozen(self) -> None:
        assert not found(Net().eval(), "NS306")
        assert not found(Net(sticky=True).eval(), "NS306", frozen_policy="statistics")
        assert len(found(Net().eval(), "NS306", frozen_policy="statistics")) == 1

    def test_all_in_train_is_silent(self) -> None:
        assert not found(Net().train(), "NS306")

    def test_stateless_norm_in_eval_is_silent(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).train()
        model[1].eval()
        assert not found(model, "NS306")


class TestTrackingFlagFlipped:
    def test_flag_off_with_buffers(self) -> None:
        model = Net().train()
        model.norm.track_running_stats = False
        (finding,) = found(model, "NS307")
        assert (finding.site, finding.severity) == ("block.1", "warning")
        assert (
            "train normalizes by the batch, eval by the stored statistics, and the buffers stand still"
            in finding.message
        )
        before = model.norm.running_var.clone()
        model(images())
        assert torch.equal(model.norm.running_var, before)
        x = images(scale=5)
        assert (model.block.eval()(x) - model.block.train()(x)).abs().max() > 1

    def test_instance_norm_moves_its_buffers_in_eval(self) -> None:
        norm = nn.InstanceNorm1d(3, track_running_stats=True)
        norm.track_running_stats = False
        (finding,) = found(norm.eval(), "NS307")
        assert "the buffers move in eval too, unread" in finding.message
        before = norm.running_var.clone()
        norm(5 * torch.randn(4, 3, 8))
        assert not torch.equal(norm.running_var, before)

    def test_flag_on_without_buffers(self) -> None:
        norm = nn.BatchNorm1d(3, track_running_stats=False)
        norm.track_running_stats = True
        (finding,) = found(norm, "NS307")
        assert finding.evidence["track_running_stats"] is True

    @pytest.mark.parametrize("track", [True, False])
    def test_as_constructed_is_silent(self, track: bool) -> None:
        assert not found(Net(track_running_stats=track), "NS307")


class TestMomentumSuspicious:
    @pytest.mark.parametrize(
        ("momentum", "severity", "fix"),
        [
            (0.0, "warning", "0.1 before training"),
            (0.9, "warning", "set momentum to 0.1"),
            (0.99, "warning", "set momentum to 0.01"),
            (1.0, "warning", "set momentum to 0.1"),
            (-0.1, "error", "0.1"),
            (1.5, "error", "0.1"),
        ],
    )
    def test_values(self, momentum: float, severity: str, fix: str) -> None:
        (finding,) = found(Net(momentum=momentum), "NS308")
        assert finding.severity == severity
        assert fix in finding.fix

    @pytest.mark.parametrize("momentum", [0.1, 0.01, 0.003, 0.5])
    def test_usual_values_are_silent(self, momentum: float) -> None:
        assert not found(Net(momentum=momentum), "NS308")

    def test_cumulative_right_after_recalibration_is_silent(self) -> None:
        model = Net(momentum=None).train()
        nn.init.normal_(model.norm.bias)
        for _ in range(20):
            model(images())
        assert not found(model, "NS308")
        model.norm.num_batches_tracked.fill_(100_000)
        assert not found(model.eval(), "NS308")

    def test_cumulative_in_a_long_training_is_info(self) -> None:
        model = Net(momentum=None).train()
        nn.init.normal_(model.norm.bias)
        model.norm.num_batches_tracked.fill_(5000)
        (finding,) = found(model, "NS308")
        assert finding.severity == "info"
        assert "after 5000 batches the next one counts 1 / 5001" in finding.message

    def test_one_finding_a_diagnosis(self) -> None:
        model = nn.Sequential(*(nn.BatchNorm1d(3, momentum=m) for m in (0.0, 0.99, 0.99, 0.1, 0.0)))
        findings = found(model, "NS308")
        assert [(f.site, f.evidence["sites"]) for f in findings] == [("0", 2), ("1", 2)]


class TestLowPrecisionStatistics:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("momentum", [0.1, 0.01])
    @pytest.mark.parametrize("stored", [1.5, 0.01, 300.0])
    def test_dead_zone_is_where_one_rounded_update_stops(
        self, dtype: torch.dtype, momentum: float, stored: float
    ) -> None:
        """Law: an update rounded once to the dtype leaves the value exactly where the batch lies inside the zone."""
        norm = nn.BatchNorm1d(1, momentum=momentum).to(dtype).train()
        norm.running_var.fill_(stored)
        (finding,) = found(norm, "NS309")
        zone = finding.evidence["dead_zone_variance"]
        assert finding.severity == ("warning" if zone > 0.01 else "info")
        value = norm.running_var.double()
        seen = set()
        for off in torch.linspace(0.05, 3, 60).tolist():
            batch = value * (1 + off * zone)
            moved = ((1 - momentum) * value + momentum * batch).to(dtype) != norm.running_var
            if abs(off - 1) > 1e-3:
                assert moved.item() == (off > 1)
                seen.add(off > 1)
        assert seen == {False, True}

    @pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.2), (torch.float16, 0.02)])
    def test_torch_stops_short_of_the_data(self, dtype: torch.dtype, least: float) -> None:
        """3000 batches of one variance, and the stored one still stands apart by about the width of the zone."""
        norm = nn.BatchNorm1d(1, momentum=0.01).to(dtype).train()
        norm.running_var.fill_(0.8)
        x = torch.tensor([[-1.0], [1.0]]).mul(0.75**0.5).to(dtype)
        for _ in range(3000):
            norm(x)
        (finding,) = found(norm, "NS309")
        left = x.double().var().item() / norm.running_var.item() - 1
        assert left > least
        # kernels round more than once: the zone is the least that is lost
        assert left > 0.5 * finding.evidence["dead_zone_variance"]

    def test_the_mean_counts_in_standard_deviations(self) -> None:
        norm = nn.BatchNorm1d(4).bfloat16()
        norm.running_mean.fill_(10.0)
        (finding,) = found(norm, "NS309")
        # spacing of bfloat16 in 8..16 is 8 / 128
        assert finding.evidence["dead_zone_mean"] == pytest.approx(8 / 128 / 2 / 0.1)

    def test_for_inference_it_is_info(self) -> None:
        (finding,) = found(Net(momentum=0.01).bfloat16().eval(), "NS309")
        assert finding.severity == "info"

    def test_float32_statistics_under_half_weights_are_silent(self) -> None:
        model = Net()
        model.block[0].half()
        model.head.half()
        assert not found(model, "NS309")
        assert not found(nn.LayerNorm(4).half(), "NS309")


class TestStatisticsNotWarm:
    def test_share_and_errors_are_those_of_the_data(self) -> None:
        """Constant batches have known statistics: what the rule derives must be them."""
        norm = nn.BatchNorm1d(2, momentum=0.05, eps=1e-5).double().train()
        x = torch.tensor([[1.0, 20.0], [3.0, 60.0]]).double()
        for _ in range(30):
            norm(x)
        (finding,) = found(norm, "NS311")
        share = 0.95**30
        assert finding.evidence["initial_share"] == pytest.approx(share)
        mean, var = x.mean(0).numpy(), x.var(0).numpy()
        stored = share + (1 - share) * var
        assert finding.evidence["gain_error"] == pytest.approx(
            np.median(np.abs(np.sqrt(var / stored) - 1)), rel=1e-4
        )
        assert finding.evidence["mean_error"] == pytest.approx(
            np.median(share * mean / np.sqrt(var)), rel=1e-4
        )
        assert finding.severity == "info", "a counter alone proves nothing"
        assert "a batch of data tells" in finding.message

    @staticmethod
    def short(steps: int, momentum: float = 0.1) -> Net:
        model = Net(momentum=momentum).train()
        with torch.no_grad():
            for _ in range(steps):
                model(torch.randn(32, 3, 8, 8) * 4 + 2)
        return model

    def images(self) -> torch.Tensor:
        return images(32, scale=4.0, shift=2.0)

    @pytest.mark.parametrize("steps", [8, 14])
    def test_the_batch_confirms_it(self, steps: int) -> None:
        model = self.short(steps)
        (finding,) = found(model, "NS311", self.images())
        assert finding.severity == "warning"
        assert finding.evidence["shown_by_this_batch"] == pytest.approx(1, abs=0.5)
        model.norm.reset_running_stats()
        model.norm.momentum = None
        needed = int(finding.fix.split("over ")[1].split()[0])
        with torch.no_grad():
            for _ in range(needed):  # the fix
                model(torch.randn(32, 3, 8, 8) * 4 + 2)
        model.norm.momentum = 0.1
        assert not found(model, "NS311", self.images())
        assert not found(model, "NS311")

    @pytest.mark.parametrize("steps", [8, 22])
    @pytest.mark.parametrize("samples", [8, 32])
    def test_update_bn_is_silent(self, steps: int, samples: int) -> None:
        """Momentum is None while it averages and 0.1 again behind it: the counter is small, the statistics right."""
        model = self.short(5)
        loader = [torch.randn(32, 3, 8, 8) * 4 + 2 for _ in range(steps)]
        torch.optim.swa_utils.update_bn(loader, model)
        assert (model.norm.momentum, int(model.norm.num_batches_tracked)) == (0.1, steps)
        assert not found(model, "NS311", self.images()[:samples])
        (finding,) = found(model, "NS311")
        assert finding.severity == "info"
        assert "(update_bn, momentum None) or loaded are right all the same" in finding.message

    def test_copies_prove_nothing(self) -> None:
        (finding,) = found(self.short(8), "NS311", self.images()[:1].repeat(16, 1, 1, 1))
        assert finding.severity == "info"

    def test_standardized_inputs_are_info(self) -> None:
        norm = nn.BatchNorm1d(2, momentum=0.01).train()
        for _ in range(30):
            norm(torch.randn(256, 2))
        (finding,) = found(norm, "NS311")
        assert finding.severity == "info"

    def test_statistics_that_never_started_at_one_are_silent(self) -> None:
        norm = nn.BatchNorm1d(2, momentum=0.01).train()
        norm.running_var.fill_(0.02)  # loaded, without its counter
        for _ in range(10):
            norm(0.1 * torch.randn(256, 2))
        assert not found(norm, "NS311")

    def test_warm_untouched_and_cumulative_are_silent(self) -> None:
        warm = nn.BatchNorm1d(2).train()
        for _ in range(100):
            warm(7 * torch.randn(64, 2))
        cumulative = nn.BatchNorm1d(2, momentum=None).train()
        cumulative(7 * torch.randn(64, 2))
        for norm in (warm, cumulative, nn.BatchNorm1d(2)):
            assert not found(norm, "NS311")


class TestDeadChannel:
    @staticmethod
    def with_dead_filter(**options: object) -> Net:
        model = Net(momentum=1.0, **options).train()
        with torch.no_grad():
            model.block[0].weight[2] = 0
            model.block[0].bias[2] = 0
        model(images())
        return model

    def test_number_and_amplification(self) -> None:
        model = self.with_dead_filter()
        (finding,) = found(model, "NS314")
        assert (finding.site, finding.severity) == ("block.1", "warning")
        assert finding.evidence["dead_channels"] == 1
        assert finding.evidence["indices"] == [2]
        assert (finding.evidence["dead_channels_total"], finding.evidence["channels_total"]) == (1, 6)
        assert finding.evidence["largest_factor"] == pytest.approx(1e-5**-0.5, rel=1e-6)
        # The factor is what a disturbance of that channel really meets.
        norm = model.norm.eval()
        zero = torch.zeros(1, 6, 1, 1)
        zero[0, 2] = 1e-3
        shown = (norm(zero) - norm(torch.zeros(1, 6, 1, 1)))[0, 2].item() / 1e-3
        assert shown == pytest.approx(finding.evidence["largest_factor"], rel=1e-5)

    def test_gain_zero_is_silent(self) -> None:
        model = self.with_dead_filter()
        with torch.no_grad():
            model.norm.weight[2] = 0
        assert not found(model, "NS314")

    def test_a_small_gain_is_info(self) -> None:
        model = self.with_dead_filter()
        with torch.no_grad():
            model.norm.weight[2] = 2e-3
        (finding,) = found(model, "NS314")
        assert finding.severity == "info"
        assert finding.evidence["amplification"] < 10

    def test_small_but_living_variances_are_silent(self) -> None:
        model = Net()
        model.norm.running_var.copy_(torch.tensor([1e-6, 1e-3, 1.0, 2.0, 5e5, 1e-7]))
        assert not found(model, "NS314")

    def test_batch_norm_without_stored_statistics_is_silent(self) -> None:
        assert not found(self.with_dead_filter(track_running_stats=False), "NS314")

    def test_many_small_gains(self) -> None:
        norm = nn.LayerNorm(8)
        with torch.no_grad():
            norm.weight[:3] = 1e-5
        (finding,) = found(norm, "NS314")
        assert (finding.severity, finding.evidence["small_gains"]) == ("info", 3)
        with torch.no_grad():
            norm.weight[1:3] = 1
        assert not found(norm, "NS314")

    def test_zero_initialized_residual_gains_are_silent(self) -> None:
        model = Net()
        nn.init.zeros_(model.norm.weight)
        assert not found(model, "NS314")


class TestDecayedNormParameters:
    def test_all_parameters_decayed(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4))
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
        (finding,) = found(model, "NS502", optimizer=optimizer)
        assert (finding.site, finding.severity) == ("1", "info")
        assert finding.evidence["parameters"] == ["weight", "bias"]
        assert finding.evidence["numbers"] == 8
        assert finding.also[0].evidence["parameters"] == ["weight"]
        with torch.no_grad():
            before = model[1].weight.clone()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert (model[1].weight < before).all(), "decay alone shrinks the gains"

    def test_two_groups_are_matched_by_identity(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        groups = [
            {"params": model[0].parameters(), "weight_decay": 0.1},
            {"params": model[1].parameters(), "weight_decay": 0.0},
        ]
        assert not found(model, "NS502", optimizer=torch.optim.SGD(groups, lr=0.1))
        groups = [
            {"params": model[0].parameters(), "weight_decay": 0.0},
            {"params": [model[1].weight], "weight_decay": 0.0},
            {"params": [model[1].bias], "weight_decay": 0.1},
        ]
        (finding,) = found(model, "NS502", optimizer=torch.optim.SGD(groups, lr=0.1))
        assert finding.evidence["parameters"] == ["bias"]

    def test_frozen_parameters_are_not_decayed(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        frozen(model[1])
        assert not found(
            model, "NS502", optimizer=torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        )

    def test_without_an_optimizer_it_has_not_run(self) -> None:
        report = normscope.check(nn.LayerNorm(4), select=["NS502"])
        assert [(e.code, e.reason) for e in report.not_run] == [
            ("NS502", "no optimizer was given: pass optimizer=")
        ]
