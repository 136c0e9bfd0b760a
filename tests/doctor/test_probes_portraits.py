"""What a report draws is what happens: closed forms against finite differences and dense Jacobians."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope import NormSpec, families, reference
from normscope.doctor.portraits import short
from normscope.doctor.probes.channel_statistics import CHANNELS
from normscope.doctor.probes.denominator_histogram import PER_DECADE
from normscope.doctor.probes.sensitivity import SAMPLES
from normscope.doctor.probes.spectrum import of_set
from normscope.doctor.report import Report


def batch(samples: int = 6, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Samples of different level and spread."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    level, spread = draw(samples, channels, 1, 1), 1 + draw(samples, 1, 1, 1).abs()
    return (2 + level + spread * draw(samples, channels, 4, 4)).float()


def measured(norm: nn.Module, x: torch.Tensor) -> dict[str, object]:
    report = normscope.check(nn.Sequential(norm).train(), x)
    assert not report.notes or not any("internal error" in note for note in report.notes)
    return dict(report.measurements["0"])


def rates(norm: nn.Module, x: torch.Tensor) -> np.ndarray:
    """The matrix by central differences, in float64, with the norm's own training forward and without its gain."""
    norm = norm.double().train()
    x, step = x.double(), 1e-6
    found = np.empty((len(x), len(x)))
    for j in range(len(x)):
        moved = []
        for sign in (1, -1):
            y = x.clone()
            y[j] *= 1 + sign * step
            moved.append(norm(y).detach())
        rate = (moved[0] - moved[1]) / (2 * step)
        found[:, j] = rate.square().flatten(1).mean(1).sqrt()
    return found


class Outside(nn.Module):
    """(x - mean) / (std + eps), with the unbiased deviation of each channel over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        return (x - mean) / (x.std((0, 2, 3), keepdim=True) + 0.1)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_sensitivity_is_what_finite_differences_give(eps: float) -> None:
    x = batch()
    found = measured(nn.BatchNorm2d(3, eps=eps), x)["sensitivity"]
    assert found["coupled"] is True
    assert found["samples"] == list(range(6))
    # differences of step 1e-6 in float64 are right to about 1e-9, moments of float32 data to 1e-6; five digits are told
    np.testing.assert_allclose(found["matrix"], rates(nn.BatchNorm2d(3, eps=eps), x), rtol=1e-4)


def test_sensitivity_of_a_hand_written_norm() -> None:
    x = batch()
    found = measured(Outside(), x).get("sensitivity")
    if found is None:
        pytest.skip("the hand-written norm was not identified here")
    np.testing.assert_allclose(found["matrix"], rates(Outside(), x), rtol=1e-4)


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(1, 3), nn.InstanceNorm2d(3), nn.LayerNorm(4), nn.BatchNorm2d(3).eval()]
)
def test_norms_within_a_sample_and_stored_statistics_couple_nothing(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    if isinstance(norm, nn.BatchNorm2d):
        model.train = lambda mode=True: model  # type: ignore[method-assign,assignment]  # frozen for good
    found = normscope.check(model, batch()).measurements["0"]["sensitivity"]
    assert (found["coupled"], found["matrix"], found["measured"]) == (False, [], 0.0)


def test_sensitivity_of_a_large_batch_tells_some_samples() -> None:
    found = measured(nn.BatchNorm2d(3), batch(50))["sensitivity"]
    assert len(found["samples"]) == len(found["matrix"]) == SAMPLES
    assert (found["samples"][0], found["samples"][-1]) == (0, 49)


SPECS = {
    "layer": (families.layer_norm(eps=0.1), 1),
    "rms": (families.rms_norm(eps=0.1), 0),
    "scale": (families.scale_norm(), 1),  # eps as the least, far below: the change of scale is gone
    "no eps": (families.layer_norm(eps=0.0), 2),
    "unbiased, outside": (families.layer_norm(eps=0.1).replace(correction=1, eps_at="std"), 1),
    "max": (families.layer_norm(eps=0.1).replace(eps_at="max"), 2),
    "max, held": (families.layer_norm(eps=50.0).replace(eps_at="max"), 1),
}
"""and how many directions are removed"""


@pytest.mark.parametrize("name", SPECS)
def test_spectrum_is_that_of_the_dense_jacobian(name: str) -> None:
    given, removed = SPECS[name]
    spec: NormSpec = given.replace(weight=None, bias=None)
    x = np.random.default_rng(1).normal(0.5, 2.0, 12)
    _, v, count = reference.statistics(x, spec)
    under_root = float(np.asarray(v).item())
    if spec.correction:
        under_root = float(x.var(ddof=1))
    levels = of_set(spec, under_root, float(spec.eps or 0.0), 12)
    told = sorted((level.value for level in levels for _ in range(level.times)), reverse=True)
    dense = np.linalg.svd(reference.jacobian(x, spec), compute_uv=False)
    assert int(np.asarray(count).item()) == len(told) == 12
    np.testing.assert_allclose(told, dense, rtol=1e-9, atol=1e-12 * dense[0])
    kinds = {level.kind: level.times for level in levels}
    assert kinds.get("removed", 0) == removed


def test_spectrum_of_a_site_is_that_of_its_middle_set() -> None:
    x = batch(8)
    found = measured(nn.BatchNorm2d(3, eps=1e-3), x)["spectrum"]
    deviations = np.sort(np.sqrt(x.double().numpy().var((0, 2, 3)) + 1e-3))
    assert found["denominator"] == pytest.approx(deviations[1], rel=1e-4)
    assert [(level["times"], level["kind"]) for level in found["levels"]] == [
        (8 * 16 - 2, "kept"),
        (1, "suppressed"),
        (1, "removed"),
    ]
    assert found["levels"][1]["value"] == pytest.approx(1e-3 / deviations[1] ** 3, rel=1e-3)


def test_the_histogram_counts_every_set_where_it_belongs() -> None:
    x = torch.randn(64, 32) * torch.logspace(-4, 2, 64)[:, None]
    (found,) = measured(nn.LayerNorm(32, eps=1e-4), x)["denominators"]
    exact = np.sqrt(x.double().numpy().var(1) + 1e-4)
    assert found["sets"] == sum(found["counts"]) == 64
    assert found["floor"] == pytest.approx(1e-2)
    assert found["held"] == int((exact < 1.1e-2).sum()) > 0
    assert found["smallest"] == pytest.approx(exact.min(), rel=1e-4)
    first, last = found["first"], found["first"] + len(found["counts"]) - 1
    assert first == math.floor(PER_DECADE * math.log10(exact.min()))
    assert last == math.floor(PER_DECADE * math.log10(exact.max()))


def test_padding_is_not_in_the_histogram() -> None:
    x, mask = torch.randn(4, 6, 16), torch.ones(4, 6, dtype=torch.bool)
    mask[:, 4:] = False
    report = normscope.check(nn.Sequential(nn.LayerNorm(16)), x, mask=mask)
    assert report.measurements["0"]["denominators"][0]["sets"] == 16


def test_both_kinds_of_statistics_of_a_batch_norm() -> None:
    found = measured(nn.BatchNorm2d(3), batch())["denominators"]
    assert [(h["mode"], h["run"], h["sets"]) for h in found] == [
        ("running", "eval", 3),
        ("batch", "batch", 3),
    ]


def test_channels_are_those_of_the_batch_and_the_worst_come_first() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 200, 3, 3)
    norm = nn.BatchNorm2d(200)
    norm.running_mean.copy_(x.mean((0, 2, 3)))
    norm.running_var.copy_(x.var((0, 2, 3)))
    norm.running_mean[17] += 50.0
    before = norm.running_mean.clone()
    found = measured(norm, x)["channels"]
    assert torch.equal(norm.running_mean, before)
    assert (found["channels"], len(found["index"]), found["index"][0]) == (200, CHANNELS, 17)
    assert len(set(found["index"])) == CHANNELS
    index = found["index"]
    np.testing.assert_allclose(found["batch_mean"], x.mean((0, 2, 3))[index], rtol=1e-4, atol=1e-6)
    # float32, and before the run moved them
    np.testing.assert_allclose(found["running_mean"], before[index], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["running_var"], norm.running_var[index], rtol=1e-4)


def test_statistics_never_updated_are_not_compared() -> None:
    assert "channels" not in measured(nn.BatchNorm2d(3), batch())


def test_errors_are_told_set_by_set() -> None:
    found = measured(nn.LayerNorm(4), batch())["conditioning"]
    errors = [error for _, error, _ in found["points"]]
    assert 1 < len(found["points"]) <= 32
    assert max(errors) == found["error"]
    assert all(error <= allowed for _, error, allowed in found["points"])


def test_what_is_drawn_makes_no_run_happen() -> None:
    steps: list[str] = []
    report = normscope.check(
        nn.Sequential(nn.BatchNorm2d(3)), batch(), select=["NS104"], progress=steps.append
    )
    assert steps == ["sites", "rules"]
    assert report.measurements == {}
    assert isinstance(report, Report)


def test_a_probe_that_fails_costs_itself_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from normscope.doctor.probes.spectrum import SpectrumProbe

    def fails(*_: object) -> None:
        raise ZeroDivisionError("nothing there")

    monkeypatch.setattr(SpectrumProbe, "observe", fails)
    report = normscope.check(nn.Sequential(nn.BatchNorm2d(3)), batch())
    assert "spectrum" not in report.measurements["0"]
    assert "sensitivity" in report.measurements["0"]
    assert "internal error in probe spectrum: ZeroDivisionError: nothing there" in report.notes


def test_numbers_are_short() -> None:
    assert short({"a": [1 / 3, float(2**40)], "b": "x", "c": None}) == {
        "a": [0.33333, 1.0995e12],
        "b": "x",
        "c": None,
    }
