"""Real trained models on real data: what is true of them is found, and nothing else is claimed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import real_models
import torch

import normscope
from normscope.doctor.report import Finding, Report

pytestmark = pytest.mark.real


def flat(findings: Iterable[Finding]) -> list[Finding]:
    return [f for finding in findings for f in (finding, *flat(finding.also))]


def sites(report: Report, code: str, severity: str | None = None) -> set[str]:
    return {f.site for f in flat(report.findings) if f.code == code and severity in (None, f.severity)}


def grave(report: Report) -> dict[str, set[str]]:
    """Findings at or above warning: code -> sites, folded ones included."""
    out: dict[str, set[str]] = {}
    for finding in report.at_least("warning"):
        out.setdefault(finding.code, set()).update(f.site for f in flat([finding]))
    return out


def no_internal_error(report: Report) -> None:
    assert not [n for n in report.not_run if "internal error" in n.reason]


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    return real_models.efficientnet()


@pytest.fixture(scope="module")
def photos() -> torch.Tensor:
    return real_models.photographs()


@pytest.fixture(scope="module")
def fed_rightly(net: torch.nn.Module, photos: torch.Tensor) -> Report:
    return normscope.check(net, (photos - 127) / 128)


def test_efficientnet_sites_are_read_right(fed_rightly: Report) -> None:
    assert len(fed_rightly.sites) == 49
    for row in fed_rightly.sites:
        assert row.spec is not None
        assert row.spec.eps == 1e-3
        assert row.spec.running is not None
        assert row.spec.running.momentum == pytest.approx(0.01)
        assert (row.mode_train, row.mode_eval, row.calls) == ("batch", "running", 1)


def test_efficientnet_fed_rightly_has_only_its_dead_channels(fed_rightly: Report) -> None:
    no_internal_error(fed_rightly)
    # 130 of 21,008 channels, in 28 of 49 layers, were trained to exactly zero variance and keep a gain of up to 60
    # times the median; that breaks per-tensor quantization after folding, so it is a warning.
    assert set(grave(fed_rightly)) == {"NS314"}
    dead = [f for f in fed_rightly.findings if f.code == "NS314"]
    assert dead[0].evidence["dead_channels_total"] == 130
    assert dead[0].evidence["channels_total"] == 21008
    assert len(sites(fed_rightly, "NS314")) == 28


def test_efficientnet_counter_of_zero_beside_trained_statistics(fed_rightly: Report) -> None:
    assert len(sites(fed_rightly, "NS303")) == 49


def test_efficientnet_gap_is_silent_when_fed_rightly(fed_rightly: Report) -> None:
    assert sites(fed_rightly, "NS304") == set()


@pytest.mark.parametrize("scale", [1.0, 1 / 255], ids=["0..255", "0..1"])
def test_efficientnet_fed_wrongly_is_told_at_the_stem_alone(
    net: torch.nn.Module, photos: torch.Tensor, scale: float
) -> None:
    report = normscope.check(net, photos * scale, select=["NS304"])
    assert sites(report, "NS304", "error") | sites(report, "NS304", "warning") == {"_bn0"}


def test_efficientnet_eight_crops_of_one_photograph_cannot_tell(net: torch.nn.Module) -> None:
    from skimage import data

    cat = torch.from_numpy(data.chelsea().copy()).permute(2, 0, 1).float()
    crops = torch.stack(
        [cat[:, 10 * i : 10 * i + 224, 25 * i : 25 * i + 224] for i in range(7)] + [cat[:, 30:254, 90:314]]
    )
    report = normscope.check(net, (crops - 127) / 128, select=["NS304"])
    assert not report.at_least("warning")
    assert any("not independent" in note for note in report.notes)


def test_minilm_has_13_layer_norms_of_eps_1e_12_and_nothing_grave() -> None:
    model, batch = real_models.minilm()
    report = normscope.check(model, batch, mask=batch["attention_mask"])
    no_internal_error(report)
    assert len(report.sites) == 13
    assert {row.spec.eps for row in report.sites if row.spec} == {1e-12}
    assert grave(report) == {}
    assert "NS701" in report.passed


def test_crepe_momentum_of_zero_is_found() -> None:
    report = normscope.check(real_models.crepe(), real_models.tones())
    no_internal_error(report)
    assert len(sites(report, "NS308")) == 6
    assert grave(report) == {"NS308": sites(report, "NS308")}


@pytest.mark.parametrize("source", ["digits", "scikit_digits"])
def test_digit_net_fed_unnormalized_digits(source: str) -> None:
    model, x = real_models.digit_net(), getattr(real_models, source)()
    rightly = normscope.check(model, (x - real_models.USPS_MEAN) / real_models.USPS_STD)
    no_internal_error(rightly)
    assert grave(rightly) == {}
    wrongly = normscope.check(model, x)
    assert grave(wrongly)["NS304"] >= {"features.1"}
    assert [f.site for f in wrongly.findings if f.code == "NS304"] == ["features.1"]


def test_fracast_machine_epsilon_is_information() -> None:
    report = normscope.check(real_models.fracast())
    no_internal_error(report)
    assert len(report.sites) == 8
    assert sites(report, "NS104", "info") == {row.name for row in report.sites}
    assert not report.at_least("warning")
