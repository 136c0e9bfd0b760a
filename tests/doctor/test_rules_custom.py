"""Norms written by hand: identified, seen by every rule, and told where they are not what their name says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscope
from normscope import families
from normscope.doctor.named import promised
from normscope.doctor.report import Finding, Report, SiteRow


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Affine(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps


class LayerNorm2d(Affine):
    """As timm and ConvNeXt write it."""

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - u) / torch.sqrt(s + self.eps)) + self.bias[:, None, None]


class LlamaRMSNorm(Affine):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class RightLayerNorm(Affine):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / (
            x.var(-1, keepdim=True, unbiased=False) + self.eps
        ).sqrt() * self.weight + self.bias


class TextbookLayerNorm(Affine):
    """Unbiased, eps outside."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias


class UncenteredLayerNorm(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) + self.bias


class CenteringRMSNorm(Affine):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class LlamaLayerNorm(Affine):
    """In float32, and the weight after casting back."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype) + self.bias


class ForgetfulLayerNorm(Affine):
    """Its eps is not used."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean(-1, keepdim=True)
        return self.weight * y / y.pow(2).mean(-1, keepdim=True).sqrt() + self.bias


class RootOfZeroLayerNorm(Affine):
    """The root of a variance is differentiated before eps is added."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean(-1, keepdim=True)
        return self.weight * y / (y.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) + self.bias


class BatchLayerNorm(Affine):
    """Named after layer norm, over the samples too."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean((0, 1), keepdim=True)
        return self.weight * y / (y.pow(2).mean((0, 1), keepdim=True) + self.eps).sqrt() + self.bias


class Norm(TextbookLayerNorm):
    """A name that promises nothing."""


class GammaNorm(nn.Module):
    """Its weight and buffers are named and shaped as nobody expects; right for a batch norm, momentum 0.2."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, size).reshape(1, size, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, size, 1, 1))
        self.register_buffer("level", torch.zeros(1, size, 1, 1))
        self.register_buffer("spread", torch.ones(1, size, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.level, self.spread
        if self.training:
            mean = x.mean((0, 2, 3), keepdim=True)
            variance = (x - mean).pow(2).mean((0, 2, 3), keepdim=True)
            with torch.no_grad():
                self.level.lerp_(mean, 0.2)
                self.spread.lerp_(variance, 0.2)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.gamma + self.beta


class AbsoluteGamma(Affine):
    """|gamma| + eps as its weight: outside of the family."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean(-1, keepdim=True)
        y = y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y * (self.weight.abs() + self.eps) + self.bias


class Inlined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.before(x))
        return self.after((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6))


def between(norm: nn.Module, size: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, size), norm, nn.Linear(size, 4))


def check(model: nn.Module, x: Tensor, *codes: str, **options: Any) -> Report:
    report = normscope.check(model, x, select=codes or None, **options)
    assert not [n for n in report.not_run if "internal error" in n.reason], report.not_run
    return report


def deviation(norm: nn.Module, x: Tensor) -> Finding:
    (found,) = check(between(norm, x.shape[-1]), x, "NS106").findings
    assert (found.code, found.site) == ("NS106", "1")
    return found


def row(report: Report, name: str) -> SiteRow:
    return next(site for site in report.sites if site.name == name)


# Identified -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (
            RightLayerNorm(8),
            "... d -> ...; centered; std, biased; eps 1e-06 inside the root; weight d; bias d",
        ),
        (
            TextbookLayerNorm(8),
            "... d -> ...; centered; std, unbiased; eps 1e-06 outside the root; weight d; bias d",
        ),
        (LlamaRMSNorm(8), "... d -> ...; not centered; rms; eps 1e-06 inside the root; weight d; no bias"),
    ],
)
def test_a_hand_written_norm_has_a_specification(norm: nn.Module, said: str) -> None:
    report = check(between(norm), torch.randn(6, 5, 8))
    site = row(report, "1")
    assert (site.kind, site.reason) == ("hand-written", "")
    assert str(site.spec).startswith(said)
    assert (site.mode_train, site.mode_eval) == ("input", "input")


def test_a_hand_written_batch_norm_is_one_for_every_rule() -> None:
    """Its weight, statistics and modes are found under names of its own, and the rules on them apply."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), GammaNorm(6), nn.ReLU())
    with torch.no_grad():
        model[1].gamma[0, 2] = 0.0
        model[1].spread[0, 4] = float("nan")
    report = check(model, torch.randn(8, 3, 12, 12), "NS201", "NS301", "NS302", "NS501")
    site = row(report, "1")
    assert site.spec is not None
    assert site.spec.running == normscope.Running(momentum=0.2, correction=0)
    assert (site.spec.stats, site.mode_train, site.mode_eval) == ("b c ... -> c", "batch", "running")
    found = {f.code: f for f in report.findings}
    assert set(found) == {"NS201", "NS301", "NS501"}
    assert found["NS301"].site == "1"
    assert found["NS501"].site == "1"


def test_two_modules_of_one_class_are_told_apart_by_what_they_compute() -> None:
    class Switched(RightLayerNorm):
        def __init__(self, size: int, power: list[float]) -> None:
            super().__init__(size)
            self.power = power  # a list is no plain setting, so only behaviour can tell

        def forward(self, x: Tensor) -> Tensor:
            y = x - x.mean(-1, keepdim=True)
            v = y.pow(2).mean(-1, keepdim=True)
            return y / (v + self.eps).pow(self.power[0]) if self.power[0] == 0.5 else y / (v.sqrt() + 0.5)

    model = nn.Sequential(
        nn.Linear(8, 8), Switched(8, [0.5]), nn.Linear(8, 8), Switched(8, [1.0]), nn.Linear(8, 8)
    )
    report = check(model, torch.randn(6, 8))
    places = [site.spec.eps_at for site in report.sites if site.spec is not None]
    assert places == ["variance", "std"]


def test_what_is_outside_of_the_family_keeps_its_reason() -> None:
    site = row(check(between(AbsoluteGamma(8)), torch.randn(6, 8)), "1")
    assert site.spec is None
    assert site.reason.startswith("hand-written; not identified: ")
    assert "weight" in site.reason


def test_an_inlined_norm_stays_inlined_and_says_so() -> None:
    report = check(Inlined(), torch.randn(6, 8))
    (site,) = report.sites
    assert (site.kind, site.name, site.spec) == ("inlined", "hand-written", None)
    assert site.reason == (
        "written inside a larger forward, on inputs of shape (6, 8); only a norm that is a module of its own is "
        "identified"
    )


def test_without_inputs_it_says_that_they_are_needed() -> None:
    class Tracked(GammaNorm):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.register_buffer("running_mean", torch.zeros(size))
            self.register_buffer("running_var", torch.ones(size))

    report = normscope.check(nn.Sequential(Tracked(4)))
    assert row(report, "0").reason == "hand-written; it is identified where inputs are given"


def test_the_model_and_the_random_numbers_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), GammaNorm(6), LayerNorm2d(6), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    attributes = {k: dict(vars(m)) for k, m in model.named_modules()}
    state = torch.get_rng_state()
    check(model, torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, module in model.named_modules():
        assert list(vars(module)) == list(attributes[name])
        assert module.training


# NS106 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [RightLayerNorm(8), LlamaRMSNorm(8), nn.LayerNorm(8)])
def test_ns106_silent_where_the_name_is_right(norm: nn.Module) -> None:
    assert check(between(norm), 3 * torch.randn(6, 5, 8) + 1, "NS106").findings == ()


def test_ns106_silent_on_a_channels_first_layer_norm_and_a_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), LayerNorm2d(6), nn.Conv2d(6, 6, 3), GammaNorm(6))
    report = check(model, torch.randn(8, 3, 12, 12), "NS106")
    assert report.findings == ()
    assert report.passed == ("NS106",)


def test_ns106_silent_where_the_name_promises_nothing() -> None:
    assert check(between(Norm(8)), torch.randn(6, 8), "NS106").findings == ()


def test_ns106_unbiased_variance_and_eps_outside() -> None:
    x = torch.randn(6, 8)
    found = deviation(TextbookLayerNorm(8), x)
    assert found.severity == "warning"
    assert found.evidence["deviations"] == [
        "its variance is unbiased, over n - 1",
        "eps 1e-06 stands outside the root, sqrt(v) + eps",
    ]
    assert found.message.startswith(
        "TextbookLayerNorm at 1 is no layer norm as its name says: its variance is unbiased, over n - 1; eps 1e-06 "
        "stands outside the root, sqrt(v) + eps. On your data its normalized output differs from that of layer norm "
        "by up to "
    )
    # sets are large beside eps, so the whole difference is the factor sqrt(7 / 8) on the largest normalized element
    factor = 1 - (7 / 8) ** 0.5
    assert factor < found.evidence["difference"] <= factor * 7**0.5


def test_ns106_is_for_information_where_the_data_hardly_shows_it() -> None:
    """Over 768 features the two variances differ by 0.07 %."""
    found = deviation(TextbookLayerNorm(768), torch.randn(4, 768))
    assert found.severity == "info"
    assert 1e-4 < found.evidence["difference"] < 0.01


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (UncenteredLayerNorm(8), "it does not subtract the mean"),
        (CenteringRMSNorm(8), "it subtracts the mean"),
        (BatchLayerNorm(8), "its statistics run over the samples (b ... c -> c)"),
    ],
)
def test_ns106_another_norm_than_the_name_says(norm: nn.Module, said: str) -> None:
    found = deviation(norm, torch.randn(6, 5, 8) + 2)
    assert found.severity == "warning"
    assert found.evidence["deviations"] == [said]
    assert found.evidence["difference"] > 0.1


class LayerNorm(nn.Module):
    """Over any axes, with a weight of any shape."""

    def __init__(self, axes: tuple[int, ...], *sizes: int) -> None:
        super().__init__()
        self.axes = axes
        self.weight, self.bias = nn.Parameter(torch.ones(sizes)), nn.Parameter(torch.zeros(sizes))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, self.axes, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class GlobalLayerNorm(LayerNorm):
    """Its name says that positions are in it."""


class BareLayerNorm(LayerNorm):
    """Without weight and bias."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        nn.Module.__init__(self)
        self.axes, self.weight, self.bias = axes, 1.0, 0.0


LINEAR, CONV1, CONV2 = (lambda: nn.Linear(7, 8)), (lambda: nn.Conv1d(5, 6, 1)), (lambda: nn.Conv2d(3, 6, 1))
APART = "its statistics run over the positions, for each feature apart"
TOO = "its statistics run over the positions too"


@pytest.mark.parametrize(
    ("before", "norm", "shape", "said"),
    [
        (LINEAR, LayerNorm((1,), 8), (4, 5, 7), f"{APART} (b ... c -> b c)"),
        (LINEAR, BareLayerNorm((1,)), (4, 5, 7), f"{APART} (b ... c -> b c)"),
        (LINEAR, LayerNorm((1, 2), 8), (4, 5, 7), f"{TOO} (... l d -> ...)"),
        (LINEAR, BareLayerNorm((1, 2)), (4, 5, 7), f"{TOO} (... l d -> ...)"),
        (LINEAR, LayerNorm((1, 2), 8), (4, 3, 5, 7), f"{APART} (b ... c -> b c)"),
        (CONV1, LayerNorm((2,), 6, 1), (4, 5, 7), f"{APART} (b c ... -> b c)"),
        (CONV2, LayerNorm((2, 3), 6, 1, 1), (4, 3, 5, 7), f"{APART} (b c ... -> b c)"),
    ],
)
def test_ns106_a_layer_norm_over_positions(
    before: Any, norm: nn.Module, shape: tuple[int, ...], said: str
) -> None:
    (found,) = check(nn.Sequential(before(), norm), 2 * torch.randn(shape) + 1, "NS106").findings
    assert (found.severity, found.evidence["deviations"]) == ("warning", [said])
    assert found.evidence["difference"] > 0.1
    assert found.fix == (
        "Use the layer of torch.nn or normscope.nn, with weights converted as normscope.compare(old, new) says; or "
        "name the class after what it computes."
    )


@pytest.mark.parametrize(
    ("before", "norm", "shape"),
    [
        (LINEAR, LayerNorm((-1,), 8), (4, 5, 7)),
        (LINEAR, BareLayerNorm((-1,)), (4, 5, 7)),
        (LINEAR, LayerNorm((1, 2), 5, 8), (4, 5, 7)),
        (LINEAR, GlobalLayerNorm((1, 2), 8), (4, 5, 7)),
        (CONV1, LayerNorm((1,), 6, 1), (4, 5, 7)),
        (CONV1, LayerNorm((2,), 7), (4, 5, 7)),
        (CONV1, LayerNorm((1, 2), 6, 1), (4, 5, 7)),
        (CONV1, BareLayerNorm((1, 2)), (4, 5, 7)),
        (CONV2, LayerNorm((1, 2, 3), 6, 1, 1), (4, 3, 5, 7)),
        (CONV2, LayerNorm((2, 3), 5, 7), (4, 3, 5, 7)),
        (CONV2, BareLayerNorm((1, 2, 3)), (4, 3, 5, 7)),
        (nn.Identity, LayerNorm((3,), 3, 1, 1), (4, 3, 5, 7)),
    ],
)
def test_ns106_silent_on_what_layer_norm_may_mean(
    before: Any, norm: nn.Module, shape: tuple[int, ...]
) -> None:
    report = check(nn.Sequential(before(), norm), 2 * torch.randn(shape) + 1, "NS106")
    assert (report.findings, report.passed) == ((), ("NS106",))


class UnbiasedLayerNorm(Affine):
    def forward(self, x: Tensor) -> Tensor:
        v = x.var(-1, keepdim=True)
        return self.weight * (x - x.mean(-1, keepdim=True)) / torch.sqrt(v + self.eps) + self.bias


class UnbiasedInstanceNorm(nn.Module):
    """The size of its sets is that of the image."""

    def forward(self, x: Tensor) -> Tensor:
        v, m = torch.var_mean(x, (2, 3), keepdim=True)
        return (x - m) / torch.sqrt(v + 1e-5)


def test_ns106_a_merely_unbiased_variance_of_a_fixed_size_is_for_information() -> None:
    found = deviation(UnbiasedLayerNorm(8), torch.randn(6, 8))
    assert (found.severity, found.evidence["deviations"]) == (
        "info",
        ["its variance is unbiased, over n - 1"],
    )
    assert found.evidence["difference"] > 0.05
    assert found.message.endswith("That is one factor for all, which a weight trained with it has absorbed.")
    assert found.fix == (
        "Nothing where the weights stay here. Before they move to or from the layer of that name, convert them as "
        "normscope.compare(old, new) says; in a new model take the biased variance (correction=0)."
    )
    model = nn.Sequential(nn.Conv2d(3, 6, 1), UnbiasedInstanceNorm())
    (varying,) = check(model, torch.randn(4, 3, 4, 4), "NS106").findings
    assert varying.severity == "warning"


def test_ns106_an_eps_that_is_lost() -> None:
    found = deviation(ForgetfulLayerNorm(8), torch.randn(6, 8))
    assert "its eps is lost: it holds 1e-06 and computes as with 0" in found.evidence["deviations"]
    assert found.severity == "info"


class OtherEpsRMSNorm(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class OtherEps(OtherEpsRMSNorm):
    """Its name says nothing."""


class SquaredEpsRMSNorm(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps**2)


class FlooredRMSNorm(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.pow(2).mean(-1, keepdim=True).clamp(min=self.eps).sqrt()


class SummingRMSNorm(Affine):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)


class FactorRMSNorm(SummingRMSNorm):
    factor = 8**0.5


def test_ns106_an_eps_other_than_the_one_it_holds() -> None:
    x = torch.randn(6, 8)
    (found,) = check(OtherEpsRMSNorm(8), x, "NS106").findings
    assert found.severity == "info"
    assert found.evidence["deviations"] == ["its eps is another: it holds 1e-06 and computes as with 0.001"]
    assert found.fix.endswith("Let one eps be both what the module holds and what its forward uses.")
    # of normalized values of root mean square 1, 1/sqrt(v + 1e-3) differs from 1/sqrt(v) by about 1e-3 / 2v: below 1e-2
    # at v around 1, and of order 1 where v is around 1e-3
    assert 1e-4 < found.evidence["difference"] < 1e-2
    (small,) = check(OtherEpsRMSNorm(8), 0.03 * x, "NS106").findings
    assert small.severity == "warning"
    assert "differs from that of RMS norm by up to" in small.message
    assert small.evidence["difference"] > 0.1
    (nameless,) = check(OtherEps(8), 0.03 * x, "NS106").findings
    assert nameless.severity == "warning"
    assert "differs from that of one with the eps it holds by up to" in nameless.message


@pytest.mark.parametrize(
    "norm",
    [
        SquaredEpsRMSNorm(8),
        FlooredRMSNorm(8, eps=1e-10),
        LlamaRMSNorm(8, eps=0.5),
        FactorRMSNorm(8),
        FactorRMSNorm(8, 0.5),
    ],
)
def test_ns106_an_eps_that_is_there_in_another_writing(norm: nn.Module) -> None:
    report = check(norm, torch.randn(6, 8), "NS106")
    assert not any("its eps" in text for f in report.findings for text in f.evidence["deviations"])
    assert report.sites[0].spec is not None


class Raising(RightLayerNorm):
    @property
    def eps(self) -> float:
        raise RuntimeError("no eps")

    @eps.setter
    def eps(self, value: float) -> None:
        self.other = value

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt() * self.weight + self.bias


@pytest.mark.parametrize("eps", [None, float("inf"), float("nan"), 10**400, "1e-6", True])
def test_ns106_an_attribute_that_is_no_eps_says_nothing(eps: Any) -> None:
    norm = Raising(8)
    if eps is not None:
        norm.__class__ = type("Raising", (Raising,), {"eps": eps})
    assert check(norm, torch.randn(6, 8), "NS106").passed == ("NS106",)


def test_ns106_a_sum_of_squares_under_the_name_of_a_mean() -> None:
    found = deviation(SummingRMSNorm(8), torch.randn(6, 8))
    assert found.severity == "warning"
    assert found.evidence["deviations"] == [
        "it divides by the root of the sum of the 8 squares, not of their mean: its output is 0.354 of what its "
        "name says"
    ]
    # the normalized values are those of the RMS norm less 1 - 1/sqrt(8) of them, and one of 8 is at least 1
    assert found.evidence["difference"] > 1 - 8**-0.5 - 1e-3


@pytest.mark.parametrize("weight", [1.0, 8**0.5, 2.0])
def test_ns106_is_silent_where_weight_or_factor_make_up_for_the_sum(weight: float) -> None:
    norm = SummingRMSNorm(8) if weight != 1.0 else FactorRMSNorm(8)
    with torch.no_grad():
        norm.weight.fill_(weight)
    report = check(norm, torch.randn(6, 8), "NS106")
    assert report.findings == ()
    assert report.passed == ("NS106",)


class WithConstantSet(nn.Module):
    """Its norm sees one sample without spread."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


@pytest.mark.parametrize("norm", [ForgetfulLayerNorm(8), RootOfZeroLayerNorm(8)])
def test_ns106_an_error_where_a_constant_set_occurs(norm: nn.Module) -> None:
    x = torch.randn(6, 8)
    x[2] = 1.0
    (found,) = check(WithConstantSet(norm), x, "NS106").findings
    assert found.severity == "error"
    assert "the gradient of a constant set is not a number" in found.evidence["deviations"]
    assert found.message.endswith("It happens here: 1 set of one call without spread.")
    assert found.evidence["constant_sets"] == 1


def test_ns106_a_bad_gradient_is_for_information_where_no_set_is_constant() -> None:
    found = deviation(RootOfZeroLayerNorm(8), torch.randn(6, 8))
    assert found.severity == "info"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pkg.LayerNorm2d", "layer norm"),
        ("LN", "layer norm"),
        ("channels_first_layer_norm", "layer norm"),
        ("MyLN2d", "layer norm"),
        ("T5LayerNorm", "T5's RMS norm"),
        ("Qwen2RMSNorm", "RMS norm"),
        ("RMSnorm", "RMS norm"),
        ("BatchNorm", "batch norm"),
        ("GN", "group norm"),
        ("InstanceNormalization", "instance norm"),
        ("L2NormSSD", None),
        ("TransformsNorm", None),
        ("XLNetNorm", None),
        ("BNNBlock", None),
        ("Norm", None),
    ],
)
def test_ns106_what_a_name_promises(name: str, words: str | None) -> None:
    found = promised(name, families.layer_norm())
    assert (None if found is None else found[0]) == words


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (RightLayerNorm(8), ["its statistics are computed in bfloat16"]),
        (
            LlamaLayerNorm(8),
            ["its weight is applied after casting back to bfloat16, as in Llama's RMS norm"],
        ),
        (LlamaRMSNorm(8), []),
    ],
)
def test_ns106_casts_where_the_data_is_in_half_precision(norm: nn.Module, said: list[str]) -> None:
    x = torch.randn(6, 8)
    assert check(between(norm), x, "NS106").findings == ()
    found = check(between(norm).to(torch.bfloat16), x.to(torch.bfloat16), "NS106").findings
    assert [f.evidence["deviations"] for f in found] == ([said] if said else [])


class PlainMean(nn.Module):
    """A batch norm by the plain mean of all batches, with a counter of another name, and no momentum."""

    momentum = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            mean, var = x.mean(0), x.var(0, correction=0)
            with torch.no_grad():
                self.n += 1
                self.mean.lerp_(mean, 1 / float(self.n))
                self.var.lerp_(var, 1 / float(self.n))
        return (x - mean) / (var + 1e-5).sqrt()


def test_ns303_is_silent_on_a_count_of_another_name() -> None:
    norm = PlainMean()
    for _ in range(3):
        norm(torch.randn(16, 8))
    report = normscope.check(nn.Sequential(norm).eval(), torch.randn(16, 8), select=["NS303"])
    assert report.sites[0].spec is not None
    assert report.sites[0].spec.running.average == "cumulative"
    assert list(report.findings) == []
