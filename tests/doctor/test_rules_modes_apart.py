"""Hand-written norms that are not identified: their two modes must be one function of the settled statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscope
from normscope.doctor.probes.settled import settled
from normscope.doctor.report import Finding

CHANNELS = 6


class Norm(nn.Module):
    """By the batch in training, by what it stores in evaluation; right as it stands here."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(CHANNELS))
        self.register_buffer("running_var", torch.ones(CHANNELS))
        self.register_buffer("steps", torch.tensor(3000))

    def rate(self) -> float:
        return 0.1

    def stored(self, variance: Tensor) -> Tensor:
        return variance

    def root(self, variance: Tensor) -> Tensor:
        return (variance + 1e-5).sqrt()

    def move(self, mean: Tensor, variance: Tensor) -> None:
        self.steps += 1
        self.running_mean.lerp_(mean, self.rate())
        self.running_var.lerp_(self.stored(variance), self.rate())

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.ndim - 2))
        if self.training:
            axes = [axis for axis in range(x.ndim) if axis != 1]
            mean, variance = x.mean(axes), x.var(axes, correction=0)
            with torch.no_grad():
                self.move(mean, variance)
            return (x - mean.view(shape)) / (variance + 1e-5).sqrt().view(shape)
        return (x - self.running_mean.view(shape)) / self.root(self.running_var).view(shape)


class AnotherEps(Norm):
    def root(self, variance: Tensor) -> Tensor:
        return variance.sqrt() + 0.5


class StoresTheRoot(Norm):
    def stored(self, variance: Tensor) -> Tensor:
        return variance.sqrt()


class DividesByTheVariance(Norm):
    def root(self, variance: Tensor) -> Tensor:
        return variance + 1e-5


class KeepsTheMean(Norm):
    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.ndim - 2))
        return super().forward(x) if self.training else x / self.root(self.running_var).view(shape)


class ByLayerInEvaluation(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else nn.functional.layer_norm(x, x.shape[1:])


class StoresTheLogarithm(Norm):
    def stored(self, variance: Tensor) -> Tensor:
        return (variance + 1e-5).log()

    def root(self, variance: Tensor) -> Tensor:
        return (variance / 2).exp()


class StoresTheInverse(Norm):
    def stored(self, variance: Tensor) -> Tensor:
        return (variance + 1e-5).rsqrt()

    def root(self, variance: Tensor) -> Tensor:
        return 1 / variance


class InlinedUnmoved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, 4)
        self.register_buffer("level", torch.zeros(CHANNELS))
        self.register_buffer("spread", torch.ones(CHANNELS))

    def move(self, mean: Tensor, variance: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        mean, variance = self.level, self.spread
        if self.training:
            mean, variance = x.mean(0), x.var(0)
            with torch.no_grad():
                self.move(mean, variance)
        return self.after((x - mean) / (variance + 1e-5).sqrt())


class Inlined(InlinedUnmoved):
    def move(self, mean: Tensor, variance: Tensor) -> None:
        self.level.lerp_(mean, 0.1)
        self.spread.lerp_(variance, 0.1)


class WarmUp(Norm):
    """The rate falls with the steps, to 0.001."""

    def rate(self) -> float:
        return max(0.001, 1.0 / (1.0 + float(self.steps)) ** 0.7)


class Cumulative(Norm):
    """An average that weighs late batches more, after three thousand of them."""

    def rate(self) -> float:
        return 2.0 / (1.0 + float(self.steps))


class Debiased(Norm):
    """An exponential average of what was seen alone: its first value counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.tensor(1.0))

    def rate(self) -> float:
        return 0.1 / (1.0 - float(self.left))

    def move(self, mean: Tensor, variance: Tensor) -> None:
        self.left.mul_(0.9)
        super().move(mean, variance)


class Ghost(Norm):
    """Four parts of the batch, each by its own statistics, which move the stored ones at a rate that falls."""

    def rate(self) -> float:
        return 0.5 if int(self.steps) % 4 else 0.2

    def forward(self, x: Tensor) -> Tensor:
        forward = super().forward
        return torch.cat([forward(part) for part in x.chunk(4)]) if self.training else forward(x)


class Renorm(Norm):
    """Batch renormalization: in training corrected towards what is stored, within bounds."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not self.training:
            return out
        shape = (1, -1, *[1] * (x.ndim - 2))
        axes = [axis for axis in range(x.ndim) if axis != 1]
        mean, root = x.mean(axes).detach(), self.root(x.var(axes, correction=0)).detach()
        r = (root / self.root(self.running_var)).clamp(1 / 3, 3)
        d = ((mean - self.running_mean) / self.root(self.running_var)).clamp(-5, 5)
        return out * r.view(shape) + d.view(shape)


class ByTheStored(Norm):
    """Moves what it stores, then divides by that in training too."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            super().forward(x)
        shape = (1, -1, *[1] * (x.ndim - 2))
        mean, variance = self.running_mean.clone(), self.running_var.clone()
        return (x - mean.view(shape)) / self.root(variance).view(shape)


def _found(layer: nn.Module, *shape: int) -> list[Finding]:
    """What NS106 finds at ``layer``, whose model must stay as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), layer).eval()
    before = copy.deepcopy(model.state_dict())
    report = normscope.check(model, 3 * torch.randn(*shape) + 1, select=["NS106"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [site.spec for site in report.sites] == [None]
    return list(report.findings)


@pytest.mark.parametrize("shape", [(32, CHANNELS), (16, CHANNELS, 3, 3)])
@pytest.mark.parametrize(
    "layer", [WarmUp, Cumulative, Debiased, Ghost, Renorm, StoresTheLogarithm, StoresTheInverse]
)
def test_what_moves_statistics_in_its_own_way_is_no_fault(layer: Any, shape: tuple[int, ...]) -> None:
    assert _found(layer(), *shape) == []


def test_a_norm_inside_a_forward_whose_modes_agree_is_no_fault() -> None:
    assert _found(Inlined(), 64, CHANNELS) == []


@pytest.mark.parametrize("layer", [AnotherEps, StoresTheRoot])
def test_two_modes_that_are_two_functions_are_a_warning(layer: Any) -> None:
    (finding,) = _found(layer(), 16, CHANNELS, 3, 3)
    assert finding.severity == "warning"
    assert "training and evaluation are two different functions" in finding.message
    # of x / sqrt(9): + 0.5 beside the root is 3 / 3.5; the root of 3 in place of 3
    expected = {AnotherEps: 1 - 3 / 3.5, StoresTheRoot: 3**0.5 - 1}[layer]
    assert finding.evidence["modes_gap"] == pytest.approx(expected, rel=0.1)  # of 144 values of spread 3


@pytest.mark.parametrize("layer", [DividesByTheVariance, KeepsTheMean, ByLayerInEvaluation])
def test_a_norm_that_shows_in_training_alone_is_a_site(layer: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), layer()).eval()
    before = copy.deepcopy(model.state_dict())
    report = normscope.check(model, 3 * torch.randn(16, CHANNELS, 3, 3) + 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    (finding,) = [found for found in report.findings if found.code == "NS106"]
    assert (finding.site, finding.severity) == ("1", "warning")
    assert "training and evaluation are two different functions" in finding.message


def test_the_two_eps_are_told() -> None:
    (finding,) = _found(AnotherEps(), 16, CHANNELS, 3, 3)
    assert (
        "training divides with eps 1e-05 inside the root and gain 1, evaluation with eps 0.5"
        in finding.message
    )


def test_statistics_that_training_never_moves_are_a_warning_where_the_data_says_so() -> None:
    (finding,) = _found(InlinedUnmoved(), 256, CHANNELS)
    assert finding.severity == "warning"
    assert "no call in training moves" in finding.message
    (few,) = _found(InlinedUnmoved(), 4, CHANNELS)  # the sampling of 4 explains 3 / sqrt(4)
    assert few.severity == "info"


def test_what_normalizes_by_its_stored_statistics_in_training_is_told() -> None:
    (finding,) = _found(ByTheStored(), 32, CHANNELS)
    assert finding.severity == "info"
    assert "training normalizes by the stored statistics, which it moves" in finding.message


@pytest.mark.parametrize("layer", [WarmUp, Cumulative, Debiased, Renorm])
def test_statistics_settle_whatever_the_rule(layer: Any) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(32, CHANNELS) + 1
    seen = settled(layer().eval(), (x,), (32, CHANNELS))
    assert seen is not None
    assert seen.moved
    assert seen.before > 0.3  # stored are 0 and 1, where the batch has 1 and 9
    assert max(seen.gap, seen.alike) < 1e-3  # ten times what may be left of the way to the limit
