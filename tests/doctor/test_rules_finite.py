"""NS406: NaN and infinity are told at the first place; and no other rule speaks of NaN as of a number."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscope
from normscope.doctor.probes.finite import Bad, bad
from normscope.doctor.report import Finding, Report

torch.set_num_threads(1)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def net(**options: Any) -> nn.Sequential:
    """conv, batch norm, ReLU, conv, group norm, head; with statistics of what it is given."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8, **options),
        nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    for _ in range(60):
        model(images(32))
    return model.eval()


def images(count: int = 8) -> Tensor:
    return torch.randn(count, 3, 8, 8)


def checked(model: nn.Module, inputs: Any = None, **options: Any) -> Report:
    report = normscope.check(model, inputs, **options)
    assert not [n for n in report.not_run if "internal error" in n.reason], report.not_run
    return report


def found(model: nn.Module, inputs: Any = None, **options: Any) -> tuple[Finding, ...]:
    return checked(model, inputs, select=["NS406"], **options).findings


def put(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[1] = value


class After(nn.Module):
    """A forward that changes what a norm gives, or what it gets."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.before(self.mix(x))))


def same(x: Tensor) -> Tensor:
    return x


def test_a_weight_before_a_norm() -> None:
    model = net()
    put(model[0].weight, NAN)
    (finding,) = found(model, images())
    assert (finding.site, finding.severity, finding.mode) == ("1", "error", "")
    assert finding.message == (
        "receives NaN in 288 of 2304 numbers. Among the parameters, 0.weight holds NaN in 1 of 216 numbers."
    )  # one of 8 channels of 8 images of 6 x 6
    assert finding.fix.startswith("take 0.weight from the last good checkpoint")
    assert [f.site for f in finding.also] == ["4"]
    with torch.no_grad():
        assert model(images()).isnan().all()


@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinite_weight(value: float) -> None:
    model = net()
    put(model[3].weight, value)
    (finding,) = found(model, images())
    assert (finding.site, finding.severity) == ("4", "error")
    assert "3.weight holds infinity in 1 of 576 numbers" in finding.message


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_gain_or_bias(name: str, value: float) -> None:
    model = net()
    put(getattr(model[4], name), value)
    (finding,) = found(model, images())
    assert (finding.site, finding.severity) == ("4", "error")
    assert finding.message.startswith("its input is finite, but it makes ")
    assert finding.evidence["parameters"] == [f"4.{name}"]
    (alone,) = found(model)
    assert (alone.site, alone.severity) == ("4", "error"), "no data is needed for it"
    assert alone.message == (
        f"the parameter 4.{name} holds {'infinity' if value == INF else 'NaN'} in 1 of 8 numbers."
    )


def test_made_before_a_norm() -> None:
    (finding,) = found(After(lambda x: x.log(), same), torch.randn(8, 6))
    assert (finding.site, finding.severity, finding.evidence["received"]) == ("norm", "error", True)
    assert finding.fix == (
        "look in linear (mix) and behind it for a division by 0, a logarithm or root of what is not positive, "
        "an exponential, a cast to half precision"
    )


@pytest.mark.parametrize("value", [NAN, INF])
def test_made_behind_the_last_norm(value: float) -> None:
    (finding,) = found(After(same, lambda x: torch.where(x > 1, value, x)), torch.randn(8, 6))
    assert (finding.site, finding.severity) == ("", "error")
    assert finding.message.startswith("every norm is finite and the model's output is not: ")
    assert finding.fix.startswith("look behind the last norm for ")


def test_only_with_batch_statistics() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.last = nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((1.5 + self.norm(x)).log())  # fine around the running mean 0 and variance 100

    model = Squared()
    model.norm.running_var.fill_(1e4)
    (finding,) = found(model, torch.randn(64, 6).clamp(-1.9, 1.9))
    assert (finding.site, finding.mode) == ("last", "train")


def test_sound_models_are_silent() -> None:
    for inputs in (None, images()):
        assert found(net(), inputs) == ()
    assert "NS406" in checked(net(), images()).passed


def test_minus_infinity_where_it_belongs_is_silent() -> None:
    class Masked(nn.Module):
        """Attention with an additive mask that is an input and a buffer; scores of the output are masked too."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.register_buffer("causal", torch.full((5, 5), -INF).triu(1))

        def forward(self, x: Tensor, scores: Tensor) -> Tensor:
            return self.layer(x, src_mask=self.causal).masked_fill(x > 1, -INF) + scores[:, :1, None]

    scores = torch.zeros(4, 5)
    scores[:, 3:] = -INF
    assert found(Masked(), (torch.randn(4, 5, 8), scores)) == ()


def test_padded_positions_are_not_asked() -> None:
    mask = torch.arange(10) < torch.tensor([[10], [8], [6], [5]])
    model = After(lambda x: torch.where(mask[..., None], x, torch.nan), same)
    assert found(model, torch.randn(4, 10, 6), mask=mask) == ()
    (finding,) = found(model, torch.randn(4, 10, 6))
    assert finding.evidence["nan"] == 6 * int((~mask).sum())


def test_large_finite_numbers_are_silent() -> None:
    assert found(nn.Sequential(nn.LayerNorm(6)), 3e38 * torch.rand(8, 6)) == (), "only their sum is infinite"
    assert found(nn.Sequential(nn.LayerNorm(512)).half(), (100 * torch.rand(8, 512)).half()) == ()


def test_infinite_inputs_are_a_reason() -> None:
    x = torch.randn(8, 6)
    x[0, 0] = INF
    report = checked(nn.Sequential(nn.LayerNorm(6)), x, select=["NS406"])
    assert report.findings == ()
    assert "inputs holds infinities: pass finite inputs" in report.not_run[0].reason


def test_a_parameter_that_nothing_reads_is_a_warning() -> None:
    model = After(same, same)
    model.spare = nn.Linear(2, 2)
    put(model.spare.bias, NAN)
    (finding,) = found(model, torch.randn(8, 6))
    assert (finding.site, finding.severity) == ("", "warning")
    assert finding.message == (
        "the parameter spare.bias holds NaN in 1 of 2 numbers; no output on this batch shows it."
    )


def test_random_inputs_make_it_a_warning() -> None:
    (finding,) = found(After(lambda x: x.log(), same), torch.randn(8, 6), synthetic=True)
    assert finding.severity == "warning"


@pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
@pytest.mark.parametrize("value", [NAN, INF, -1.0])
def test_invalid_statistics_are_told_once(buffer: str, value: float) -> None:
    model = net()
    put(getattr(model[1], buffer), value)
    report = checked(model, images(), select=["NS301", "NS406"])
    harmless = buffer == "running_mean" and value == -1.0
    quiet = buffer == "running_var" and value == INF  # 1 / sqrt(inf) is 0: finite, and wrong
    assert [f.code for f in report.findings] == ([] if harmless else ["NS301"])
    assert ("NS406" in report.passed) == (harmless or quiet)
    assert [(n.site, n.reason) for n in report.not_run] == [
        ("1", "NS301 tells why the output of this norm is not finite")
    ] * (not harmless and not quiet)


def test_overflow_is_told_once() -> None:
    norm = nn.LayerNorm(16).half()
    nn.init.constant_(norm.weight, 6e4)
    report = checked(nn.Sequential(norm), torch.randn(8, 16).half(), select=["NS404", "NS406"])
    assert [(f.code, f.severity) for f in report.findings] == [("NS404", "error")]


def test_overflow_before_the_norm_is_told_here() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).half()
    nn.init.constant_(model[0].weight, 6e4)
    report = checked(model, torch.randn(8, 16).half(), select=["NS404", "NS406"])
    assert [(f.code, f.site) for f in report.findings] == [("NS406", "1")]


def test_zero_over_zero_is_told_once() -> None:
    x = torch.randn(8, 6)
    x[0] = 0
    report = checked(nn.Sequential(nn.LayerNorm(6, eps=0.0)), x, select=["NS104", "NS406"])
    assert [f.code for f in report.findings] == ["NS104"]


BROKEN: dict[str, Callable[[], nn.Module]] = {
    "weight of the first convolution": lambda: _with(lambda m: put(m[0].weight, NAN)),
    "infinite weight": lambda: _with(lambda m: put(m[3].weight, INF)),
    "gain of the batch norm": lambda: _with(lambda m: put(m[1].weight, NAN)),
    "gain of the group norm": lambda: _with(lambda m: put(m[4].weight, NAN)),
    "bias of the head": lambda: _with(lambda m: put(m[6].bias, INF)),
    "running variance": lambda: _with(lambda m: put(m[1].running_var, NAN)),
    "running mean": lambda: _with(lambda m: put(m[1].running_mean, INF)),
    "everything": lambda: _with(lambda m: [p.data.fill_(NAN) for p in m.parameters()]),
    "bias of a convolution": lambda: _with(lambda m: put(m[0].bias, NAN)),
    "large": lambda: _with(lambda m: m[0].weight.data.mul_(1e30)),
    "made behind a batch norm": lambda: nn.Sequential(*net()[:2], Root(), *net()[3:]),
    "made before the output": lambda: nn.Sequential(*net()[:2], Root()),
    "made before the output, coupled in eval": lambda: nn.Sequential(
        nn.BatchNorm2d(3, track_running_stats=False), Root()
    ),
}


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def _with(change: Callable[[nn.Sequential], object]) -> nn.Module:
    model = net()
    change(model)
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_no_rule_prints_a_number_that_is_none(name: str, training: bool) -> None:
    model = BROKEN[name]().train(training)
    optimizer = torch.optim.AdamW(model.parameters())
    report = checked(model, images(16), optimizer=optimizer)
    messages = [f.message for head in report.findings for f in (head, *head.also)]
    assert not [m for m in messages if re.search(r"\b(nan|inf)\b", m)], messages
    assert {"NS406", "NS404", "NS301"} & {f.code for f in report.findings}, "and the fault is told"


class TestBad:
    """Elements that are no finite numbers, counted in every kind of tensor."""

    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64],
    )
    def test_counts(self, dtype: torch.dtype) -> None:
        x = torch.randn(3, 4, 5)
        assert bad(x.to(dtype)) is None
        x[0, 1, 2], x[1, 2, 3], x[2, 3, 4] = NAN, INF, -INF
        assert bad(x.to(dtype)) == Bad(1, 2, 60)
        assert bad(x.to(dtype).transpose(0, 2)) == Bad(1, 2, 60)

    def test_what_holds_no_numbers_has_no_bad_ones(self) -> None:
        assert bad(torch.arange(3)) is None
        assert bad(torch.empty(0)) is None
        assert bad(torch.eye(3).to_sparse()) is None

    def test_a_sum_that_overflows_is_counted_again(self) -> None:
        assert bad(torch.full((4,), torch.finfo(torch.float32).max)) is None
        assert bad(torch.tensor([INF, -INF])) == Bad(0, 2, 2), "their sum is NaN, they are not"

    def test_the_first_call_is_named(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(6)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(self.norm(x).log())

        (finding,) = found(Twice(), torch.randn(8, 6))
        assert (finding.site, finding.evidence["call"], finding.evidence["received"]) == ("norm", 1, True)
