"""Rules on what stands before a norm: redundant biases and dropout; and the probe of shift invariance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import normscope
from normscope import reference
from normscope.doctor.probes.shift import removes_shift
from normscope.doctor.report import Finding
from normscope.spec import NormSpec

torch.set_num_threads(1)


def found(model: nn.Module, code: str, inputs: object = None, **options: object) -> tuple[Finding, ...]:
    report = normscope.check(model, inputs, select=[code], **options)  # type: ignore[arg-type]
    nothing_to_ask = ("no site keeps running statistics", "no site whose specification is known")
    assert not [n for n in report.not_run if n.reason not in nothing_to_ask], report.not_run
    return report.findings


def images(count: int = 16, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, 8, 8, generator=torch.Generator().manual_seed(1))


SPECS = [
    NormSpec("b c ... -> c"),
    NormSpec("b c ... -> b c"),
    NormSpec("b c ... -> b"),
    NormSpec("b c ... -> b ..."),
    NormSpec("... d -> ..."),
    NormSpec("b c ... -> b c", center=False, scale="rms"),
    NormSpec("b (g c) ... -> b g", sizes={"g": 2}),
    NormSpec("b (g c) ... -> b g", sizes={"g": 4}),
    NormSpec("(v b) c ... -> v c", sizes={"v": 2}),
    NormSpec("b c h w -> b w"),
]


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    axis=st.integers(0, 3),
    small=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_shift_invariance_is_what_the_reference_does(
    spec: NormSpec, axis: int, small: bool, seed: int
) -> None:
    """Law: adding a constant per index of an axis changes nothing exactly where the axes say so."""
    shape = (4, 4, 1, 3) if small else (4, 4, 2, 3)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    shift = rng.standard_normal([n if i == axis else 1 for i, n in enumerate(shape)])
    change = np.abs(reference.forward(x + shift, spec) - reference.forward(x, spec)).max()
    # Removing the shift rounds twice in float64, over a denominator of at least sqrt(eps).
    assert removes_shift(spec, shape, axis) == (change < 1e-10)
    assert (change < 1e-10) or (change > 1e-6)


class TestRedundantBias:
    @pytest.mark.parametrize(
        "norm",
        [
            nn.BatchNorm2d(8),
            nn.InstanceNorm2d(8),
            nn.GroupNorm(8, 8),
            nn.BatchNorm2d(8, track_running_stats=False),
        ],
        ids=["batch", "instance", "group(C)", "batch without state"],
    )
    def test_removed_by(self, norm: nn.Module) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU()).train()
        (finding,) = found(model, "NS501", images())
        assert (finding.site, finding.severity) == ("1", "info")
        assert finding.evidence["producer"] == "0"
        assert finding.evidence["parameters"] == 8
        assert finding.evidence["derived"] is True
        assert finding.evidence["relative_gradient"] < 1e-5
        before = model(images())
        with torch.no_grad():
            model[0].bias += torch.randn(8)
        # float32: a few roundings of values of order one, over a denominator of about one half
        assert (model(images()) - before).abs().max() < 1e-4

    @pytest.mark.parametrize(
        "model",
        [
            nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)),
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)),
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)),
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(6)),
            nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.LayerNorm(8)),
            nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.RMSNorm(8)),
        ],
        ids=["no bias", "relu between", "group(C/2)", "norm over w", "layer norm over c", "rms"],
    )
    def test_innocent(self, model: nn.Module) -> None:
        if isinstance(model[-1], nn.LayerNorm) and model[-1].normalized_shape == (6,):
            # Over w alone each set holds one channel: the bias is removed, and it is reported.
            assert len(found(model, "NS501", images())) == 1
        else:
            assert not found(model, "NS501", images())

    def test_a_second_reader_makes_the_bias_act(self) -> None:
        class Fork(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3)
                self.norm = nn.BatchNorm2d(8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.conv(x)
                return self.norm(y) + y

        assert not found(Fork(), "NS501", images())

    def test_a_layer_used_twice_keeps_its_bias_where_one_use_counts(self) -> None:
        """Only the gradient shows it: each use alone looks redundant or has nothing to do with a norm."""

        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 3, 3, padding=1)
                self.norm = nn.BatchNorm2d(3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.conv(torch.relu(self.norm(self.conv(x))))

        assert not found(Shared(), "NS501", images())

    def test_frozen_norms_leave_the_bias_to_act(self) -> None:
        class Frozen(nn.Sequential):
            def train(self, mode: bool = True) -> Frozen:
                super().train(mode)
                self[1].eval()
                return self

        assert not found(Frozen(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).train(), "NS501", images())

    def test_through_views(self) -> None:
        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 8)
                self.norm = nn.BatchNorm1d(8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(self.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2))

        (finding,) = found(Tokens(), "NS501", images())
        assert finding.evidence["producer"] == "linear"

    def test_wrong_axis_is_not_redundant(self) -> None:
        """A batch norm over tokens: the bias lives on another axis and acts."""

        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 8)
                self.norm = nn.BatchNorm1d(64)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(self.linear(x.flatten(2).transpose(1, 2)))

        assert not found(Tokens(), "NS501", images())

    def test_a_functional_norm(self) -> None:
        class Functional(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.instance_norm(self.conv(x))

        (finding,) = found(Functional(), "NS501", images())
        assert finding.site == "F.instance_norm"

    def test_without_gradients_the_axes_decide(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        (finding,) = found(model, "NS501", images())
        assert finding.site == "1"
        assert finding.evidence["relative_gradient"] is None

    @pytest.mark.parametrize(("axes", "redundant"), [((0, 2, 3), True), ((2, 3), True), ((1, 2, 3), False)])
    def test_a_norm_written_by_hand_is_measured(self, axes: tuple[int, ...], redundant: bool) -> None:
        class Own(nn.Module):
            """With a gain |w| + 0.1, which no specification says, so that only a measurement tells."""

            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(8, 1, 1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                mean = x.mean(axes, keepdim=True)
                y = (x - mean) / torch.sqrt((x - mean).square().mean(axes, keepdim=True) + 1e-5)
                return y * (self.w.abs() + 0.1)

        findings = found(nn.Sequential(nn.Conv2d(3, 8, 3), Own()), "NS501", images())
        assert [f.evidence["derived"] for f in findings] == [None] * redundant

    def test_many_are_one_finding(self) -> None:
        model = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(4))
        )
        (finding,) = found(model, "NS501", images())
        assert finding.evidence["sites"] == 4

    def test_raw_pixels_do_not_hide_an_acting_bias(self) -> None:
        """Inputs of size 255 make a bias's gradient small beside the weight's, but not as small as rounding."""
        model = nn.Sequential(
            nn.Conv2d(3, 64, 7, padding=3), nn.ReLU(), nn.Conv2d(64, 8, 3), nn.BatchNorm2d(8)
        )
        (finding,) = found(model, "NS501", 255 * torch.rand(8, 3, 16, 16))
        assert finding.evidence["producer"] == "2"
        assert not finding.also


class TestDropoutBeforeBatchNorm:
    @staticmethod
    def run(model: nn.Module, width: int = 8, steps: int = 200) -> nn.Module:
        torch.manual_seed(0)
        model.train()
        for _ in range(steps):
            model(torch.randn(64, width))
        return model

    def test_predicted_is_what_eval_shows(self) -> None:
        torch.manual_seed(0)
        model = self.run(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(32)))
        x = torch.randn(4096, 8)
        report = normscope.check(model, x[:512], select=["NS304", "NS601"])
        (finding,) = (f for f in report.findings if f.code == "NS601")
        assert finding.severity == "warning"
        assert "confirmed" in finding.message
        with torch.no_grad():
            ratio = (model[:2](x).var(0) / model[3].running_var).median().item()
        # 200 updates at momentum 0.1 average about 19 batches of 64: variances to about sqrt(2 / 1216), heavy tails
        assert finding.evidence["predicted_variance_ratio"] == pytest.approx(ratio, rel=0.15)
        assert finding.evidence["measured_variance_ratio"] == pytest.approx(ratio, rel=0.2)

    def test_through_a_weight_layer(self) -> None:
        torch.manual_seed(0)
        model = self.run(
            nn.Sequential(
                nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 16), nn.BatchNorm1d(16)
            )
        )
        report = normscope.check(model, torch.randn(512, 8), select=["NS304", "NS601"])
        (finding,) = (f for f in report.findings if f.code == "NS601")
        assert (finding.site, finding.severity) == ("4", "warning")
        assert finding.evidence["through"] == "3"
        assert finding.evidence["predicted_variance_ratio"] == 0.5

    def test_not_confirmed_is_info(self) -> None:
        """The statistics were recomputed with dropout off: the place is the same, the shift is gone."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(32))
        model.train()
        model[2].eval()
        for _ in range(200):
            model(torch.randn(64, 8))
        report = normscope.check(model, torch.randn(256, 8), select=["NS304", "NS601"])
        (finding,) = report.findings
        assert (finding.code, finding.severity) == ("NS601", "info")
        assert finding.evidence["measured_variance_ratio"] > 0.8

    def test_a_shift_that_dropout_does_not_explain_is_info(self) -> None:
        torch.manual_seed(0)
        model = self.run(nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(8)))
        for scale, severity, said in ((1.0, "info", ""), (0.5, "info", "which dropout does not explain")):
            report = normscope.check(model, scale * torch.randn(512, 8), select=["NS304", "NS601"])
            (finding,) = (f for f in report.findings if f.code == "NS601")
            assert finding.severity == severity
            # without dropout the variance is 0.8 of the stored one, times scale^2; sqrt(2 / 511) = 6 % each
            assert finding.evidence["measured_variance_ratio"] == pytest.approx(0.8 * scale**2, rel=0.25)
            assert said in finding.message
            assert " confirmed" not in finding.message.replace("not confirmed", "")

    def test_a_fresh_model_is_info(self) -> None:
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.BatchNorm1d(32))
        assert [f.severity for f in found(model, "NS601", torch.randn(16, 8))] == ["info"]

    @pytest.mark.parametrize(
        "model",
        [
            nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 4)),
            nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.LayerNorm(32)),
            nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.0), nn.BatchNorm1d(32)),
            nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.BatchNorm1d(32, track_running_stats=False)),
        ],
        ids=["behind", "layer norm", "p = 0", "no state"],
    )
    def test_innocent(self, model: nn.Module) -> None:
        assert not found(model, "NS601", torch.randn(16, 8))
