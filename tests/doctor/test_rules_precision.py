"""Rules on arithmetic: conditioning, overflow, precision. Faulty and innocent models, and what the dtype explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normscope
import normscope.nn as own
from normscope.doctor.report import Finding

RULES = ["NS403", "NS404", "NS405"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def findings(model: nn.Module, x: torch.Tensor, **options: Any) -> list[Finding]:
    report = normscope.check(nn.Sequential(model), x, select=RULES, **options)
    assert not [n for n in report.not_run if "internal error" in n.reason], report.not_run
    return list(report.findings)


def summary(model: nn.Module, x: torch.Tensor) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in findings(model, x)]


def images(kappa: float, shape: tuple[int, ...] = (4, 32, 28, 28)) -> torch.Tensor:
    return torch.randn(shape) + kappa


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(32),
    "batch without state": lambda: nn.BatchNorm2d(32, track_running_stats=False),
    "group": lambda: nn.GroupNorm(8, 32),
    "instance": lambda: nn.InstanceNorm2d(32, affine=True),
    "layer": lambda: nn.LayerNorm((32, 28, 28)),
    "rms": lambda: nn.RMSNorm(28),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_silent_on_torchs_layers_on_ordinary_inputs(
    name: str, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    x = images(1.0).to(dtype).to(memory_format=layout)
    model = NORMS[name]().to(dtype)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -2, 2)
    assert findings(model, x) == []


@pytest.mark.parametrize("batch", [2, 3, 7, 64])
def test_silent_on_last_bits(batch: int) -> None:
    """Batch sizes choose kernels that differ in the last bits."""
    assert findings(nn.LayerNorm(768), torch.randn(batch, 768)) == []


# NS403 -------------------------------------------------------------------------------------------------------------


def channels_last_error(kappa: float) -> float:
    x = images(kappa).to(memory_format=torch.channels_last)
    exact = nn.functional.group_norm(x.double().contiguous(), 8)
    return float((nn.functional.group_norm(x, 8).double() - exact).abs().max())


@pytest.mark.parametrize("kappa", [100.0, 1000.0])
def test_ns403_group_norm_in_channels_last(kappa: float) -> None:
    """PyTorch's kernel for this layout computes E[x^2] - E[x]^2; where a build does not, there is nothing to find."""
    error = channels_last_error(kappa)
    torch.manual_seed(0)
    found = findings(nn.GroupNorm(8, 32), images(kappa).to(memory_format=torch.channels_last))
    if error < 1e-3:
        assert found == []
        return
    conditioning, implementation = sorted(found, key=lambda f: f.code)
    assert (conditioning.code, implementation.code) == ("NS403", "NS405")
    for finding in found:
        assert finding.severity == ("error" if error >= 0.1 else "warning" if error >= 0.01 else "info")
        assert 0.1 * error < finding.evidence["measured_error"] < 10 * error
        assert finding.evidence["kappa"] == pytest.approx(kappa, rel=0.1)
    assert "in channels_last layout" in implementation.message
    assert implementation.fix == "call this norm on x.contiguous(), which takes another kernel"


def test_ns403_the_same_values_in_the_usual_layout_are_fine() -> None:
    assert findings(nn.GroupNorm(8, 32), images(100.0)) == []


def test_ns403_in_bfloat16_the_input_itself_has_lost_it() -> None:
    found = findings(nn.LayerNorm(256).bfloat16(), images(100.0, (8, 256)).bfloat16())
    assert [(f.code, f.severity) for f in found] == [("NS403", "warning")]
    # |mean| / deviation times half of bfloat16's machine epsilon of 2^-7
    assert found[0].evidence["predicted_error"] == pytest.approx(100 * 2.0**-8, rel=0.2)
    assert "rounding the input to bfloat16 may have cost up to" in found[0].message


def test_ns403_float32_far_from_zero() -> None:
    assert ("NS403", "info") in summary(nn.LayerNorm(256), images(6e4, (8, 256)))
    assert ("NS403", "warning") in summary(nn.LayerNorm(256), images(1e6, (8, 256)))


@pytest.mark.parametrize("norm", [nn.RMSNorm(256), nn.LayerNorm(256, eps=1e-12)], ids=str)
def test_ns403_is_silent_where_no_digits_go(norm: nn.Module) -> None:
    assert findings(norm, images(30.0, (8, 256))) == []


# NS404 -------------------------------------------------------------------------------------------------------------


def test_ns404_squares_beyond_float32() -> None:
    x = torch.randn(8, 16)
    x[0] *= 1e20
    found = findings(nn.LayerNorm(16), x)
    assert [f.code for f in found] == ["NS404"]
    assert found[0].evidence["largest_square"] > 3.4e38


def test_ns404_an_output_beyond_float16() -> None:
    norm = nn.LayerNorm(16).half()
    nn.init.constant_(norm.weight, 6e4)
    found = findings(norm, torch.randn(8, 16).half())
    assert [(f.code, f.severity) for f in found] == [("NS404", "error")]
    assert (
        found[0].message
        == "the input is finite and the output is not: the exact output exceeds the largest float16."
    )


def test_ns404_activations_that_float16_cannot_hold_are_info() -> None:
    x = torch.randn(8, 16)
    x[0, 0] = 1e5
    assert summary(nn.LayerNorm(16), x) == [("NS404", "info")]


def test_ns404_is_silent_where_torch_squares_in_float32() -> None:
    x = 3e4 * torch.randn(8, 16).clamp(-2, 2)
    assert findings(nn.LayerNorm(16).half(), x.half()) == []
    assert findings(nn.RMSNorm(16), x) == []


# NS405 -------------------------------------------------------------------------------------------------------------


def patch(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A kernel that is not as good as PyTorch's."""
    exact = torch.layer_norm
    monkeypatch.setattr(torch, "layer_norm", lambda *args: change(exact(*args)))


def test_ns405_an_output_that_was_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, lambda y: y.bfloat16().float())
    found = findings(nn.LayerNorm(64), torch.randn(64, 64))
    assert [f.code for f in found] == ["NS405"]
    # the largest of 4096 normal values lies between 2 and 4 or a little above: half a step of 2^-6 there
    assert 2.0**-8 <= found[0].evidence["measured_error"] <= 2.0**-6
    assert found[0].evidence["allowed_error"] < 1e-5


def test_ns405_a_gain_that_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, lambda y: y / 2)
    norm = nn.LayerNorm(64)
    nn.init.constant_(norm.weight, 2.0)
    assert summary(norm, torch.randn(8, 64)) == [("NS405", "error")]


def test_ns405_is_silent_on_rounding_that_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, lambda y: y * (1 + 2.0**-15))
    assert findings(nn.LayerNorm(64), torch.randn(8, 64)) == []


def test_random_inputs_decide_nothing_about_the_users_data() -> None:
    report = normscope.check(
        nn.Sequential(nn.LayerNorm(64)), torch.randn(8, 64), select=RULES, synthetic=True
    )
    assert [n.code for n in report.not_run] == ["NS403", "NS404"]
    assert report.passed == ("NS405",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("convention", ["llama", "t5", "gemma"])
def test_gains_of_language_models_are_weighed_as_they_count(convention: str, dtype: torch.dtype) -> None:
    """A gemma gain counts from one: the probe failed on it."""
    norm = own.RMSNorm(64, convention=convention)
    nn.init.normal_(norm.weight, std=0.5)
    assert findings(norm.to(dtype), torch.randn(8, 16, 64, dtype=dtype)) == []


def test_a_rule_that_had_nothing_to_measure_has_not_passed() -> None:
    """Every set holds infinities: nothing has a size, a spread or a reference."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    nn.init.constant_(model[0].weight, 1e30)
    report = normscope.check(model, torch.full((8, 16), 1e20), select=["NS102", "NS4"])
    assert [finding.code for finding in report.findings] == ["NS406"]
    assert report.passed == ()
    nothing = "nothing was measured: no site had statistic sets of finite numbers"
    assert {entry.code: entry.reason for entry in report.not_run} == {
        **dict.fromkeys(("NS102", "NS401", "NS402", "NS403"), nothing),
        "NS404": "every input that was seen holds NaN or infinities, and has no size (see NS406)",
        "NS405": "nothing was compared: no site had statistic sets whose exact output is finite",
    }


def test_of_sites_that_are_not_identified_nothing_is_claimed() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            centered = x - x.mean(-1, keepdim=True)
            y = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return y + 0.1 * torch.rand(x.shape)

    report = normscope.check(nn.Sequential(Noisy()), torch.randn(8, 16), select=["NS302"])
    assert [site.spec for site in report.sites] == [None]
    (entry,) = report.not_run
    assert entry.reason == (
        "no site that is identified keeps running statistics; whether others do is not known: 0 (not identified)"
    )
