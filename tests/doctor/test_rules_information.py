"""Rules on what a norm does to information: weights whose scale it hides, statistics that it takes away."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import normscope
from normscope.doctor.report import Finding

torch.set_num_threads(1)


def found(
    model: nn.Module, code: str, inputs: object, *more: object, **options: object
) -> tuple[Finding, ...]:
    report = normscope.check(model, inputs, *more, select=[code], **options)  # type: ignore[arg-type]
    broken = [entry for entry in report.not_run if "internal error" in entry.reason]
    assert not broken, broken
    return report.findings


def reasons(model: nn.Module, code: str, *inputs: object, **options: object) -> list[str]:
    report = normscope.check(model, *inputs, select=[code], **options)  # type: ignore[arg-type]
    assert not report.findings
    return [entry.reason for entry in report.not_run]


# NS503 --------------------------------------------------------------------------------------------------------------

NORMS = {
    "batch": nn.BatchNorm2d,
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": nn.InstanceNorm2d,
}


def convs(norm: str) -> nn.Sequential:
    torch.manual_seed(0)
    make = NORMS[norm]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), make(8), nn.ReLU(), nn.Conv2d(8, 8, 3), make(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )  # fmt: skip


def images(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def sgd(model: nn.Module, decay: float = 5e-4, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay)


class TestScaleInvariantWeight:
    @pytest.mark.parametrize("norm", NORMS)
    def test_one_folded_finding_for_all_weights_before_norms(self, norm: str) -> None:
        model = convs(norm)
        (finding,) = found(model, "NS503", images(), optimizer=sgd(model))
        weights = {f.evidence["weight"] for f in (finding, *finding.also)}
        assert weights == {"0.weight", "3.weight"}  # the last layer feeds no norm
        assert finding.severity == "info"
        rates = [f.evidence["effective_learning_rate"] for f in (finding, *finding.also)]
        assert rates == sorted(rates, reverse=True)

    def test_numbers_are_those_of_the_weight(self) -> None:
        model = convs("batch")
        (finding,) = found(model, "NS503", images(), optimizer=sgd(model))
        by_name = {f.evidence["weight"]: f.evidence for f in (finding, *finding.also)}
        norm = float(model[0].weight.detach().double().norm())
        first = by_name["0.weight"]
        assert first["norm"] == pytest.approx(norm)
        assert first["effective_learning_rate"] == pytest.approx(0.1 / norm**2)
        assert first["half_life_in_steps"] == round(math.log(2) / -math.log1p(-0.1 * 5e-4))
        # Euler: <w, grad> = 0 but for eps and rounding
        assert first["largest_cosine"] < 1e-4 < first["gradient_norm"]

    def test_decay_really_shortens_at_that_rate(self) -> None:
        """Without gradients, SGD halves a weight in the stated number of steps."""
        model = convs("batch")
        optimizer = sgd(model, decay=0.05)
        (finding,) = found(model, "NS503", images(), optimizer=optimizer)
        before = float(model[0].weight.detach().norm())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for _ in range(finding.evidence["half_life_in_steps"]):
            optimizer.step()
        assert float(model[0].weight.detach().norm()) == pytest.approx(before / 2, rel=0.01)

    def test_adaptive_optimizers_are_told_in_their_own_terms(self) -> None:
        model = convs("batch")
        decoupled = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        (finding,) = found(model, "NS503", images(), optimizer=decoupled)
        weight = dict(model.named_parameters())[finding.evidence["weight"]].detach()
        rms = float(weight.square().mean().sqrt())
        assert finding.evidence["effective_learning_rate"] == pytest.approx(1e-3 / rms, rel=1e-5)
        assert finding.evidence["half_life_in_steps"] is not None
        coupled = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.05)
        (finding,) = found(model, "NS503", images(), optimizer=coupled)
        assert finding.evidence["half_life_in_steps"] is None

    def test_silent_without_decay_there(self) -> None:
        model = convs("batch")
        assert not found(model, "NS503", images(), optimizer=sgd(model, decay=0.0))
        groups = [
            {"params": [model[0].weight, model[3].weight], "weight_decay": 0.0},
            {"params": [model[7].weight], "weight_decay": 0.1},
        ]
        assert not found(model, "NS503", images(), optimizer=torch.optim.SGD(groups, lr=0.1))

    def test_silent_where_norms_are_frozen(self) -> None:
        model = convs("batch")
        for norm in (model[1], model[4]):
            norm.eval()
            norm.train = lambda mode=True, norm=norm: norm  # type: ignore[method-assign]
        assert not found(model, "NS503", images(), optimizer=sgd(model))

    def test_silent_where_eps_is_felt(self) -> None:
        model = convs("batch")
        with torch.no_grad():
            model[0].weight.mul_(1e-3)
        (finding,) = found(model, "NS503", images(), optimizer=sgd(model))
        assert {f.evidence["weight"] for f in (finding, *finding.also)} == {"3.weight"}

    def test_silent_where_a_skip_reads_the_weight_too(self) -> None:
        class Skip(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.conv(x)
                return (y + self.norm(y)).mean((2, 3))

        torch.manual_seed(0)
        model = Skip()
        assert not found(model, "NS503", images(), optimizer=sgd(model))

    def test_needs_an_optimizer(self) -> None:
        assert reasons(convs("batch"), "NS503", images()) == ["no optimizer was given: pass optimizer="]


# NS504 --------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A norm at the input, then a small network; ``bypass`` hands a statistic of the input to the last layer."""

    def __init__(self, norm: nn.Module, bypass: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.conv, self.inner = norm, nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.bypass = bypass
        self.head = nn.Linear(8 + bool(bypass), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(self.conv(self.norm(x))).relu().mean((2, 3))
        if self.bypass:
            kept = x.mean((1, 2, 3)) if self.bypass == "level" else x.std((1, 2, 3)).log()
            h = torch.cat([h, kept[:, None]], 1)
        return self.head(h)


def task(
    kind: str, samples: int, *, numbers: bool = False, seed: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose label is their level, their contrast, a pattern, or nothing in them."""
    generator = torch.Generator().manual_seed(seed)
    hidden, other = torch.randn(2, samples, 1, 1, 1, generator=generator)
    x = torch.randn(samples, 3, 8, 8, generator=generator)
    if kind == "level":
        x = x + hidden
    elif kind == "contrast":
        x = x * torch.exp(0.7 * hidden)
    elif kind == "pattern":  # a gradient across the image, under a contrast that says nothing
        x = (x + 0.7 * hidden.sign() * torch.linspace(-1, 1, 8)) * torch.exp(0.5 * other)
    else:
        x = x + other
    labels = hidden.flatten()
    return x, labels if numbers else (labels > 0).long()


def norms() -> dict[str, nn.Module]:
    return {
        "instance": nn.InstanceNorm2d(3),
        "layer": nn.LayerNorm([3, 8, 8]),
        "group": nn.GroupNorm(1, 3),
    }


class TestRemovedInformation:
    @pytest.mark.parametrize("numbers", [False, True])
    @pytest.mark.parametrize("kind", ["level", "contrast"])
    @pytest.mark.parametrize("norm", ["instance", "layer", "group"])
    def test_faulty(self, norm: str, kind: str, numbers: bool) -> None:
        (finding,) = found(Net(norms()[norm]), "NS504", *task(kind, 128, numbers=numbers))
        assert (finding.site, finding.severity) == ("norm", "warning")
        numbers_seen = finding.evidence
        assert numbers_seen["removed"] > 0.85
        assert max(numbers_seen["kept"], numbers_seen["output"]) < 0.75
        assert numbers_seen["classes"] == (0 if numbers else 2)

    @pytest.mark.parametrize("kind", ["level", "contrast"])
    def test_silent_where_a_bypass_keeps_it(self, kind: str) -> None:
        model = Net(nn.LayerNorm([3, 8, 8]), bypass=kind)
        assert not found(model, "NS504", *task(kind, 128))
        other = {"level": "contrast", "contrast": "level"}[kind]
        assert found(Net(nn.LayerNorm([3, 8, 8]), bypass=other), "NS504", *task(kind, 128))

    def test_silent_where_the_task_lies_elsewhere(self) -> None:
        for norm in norms().values():
            assert not found(Net(norm), "NS504", *task("pattern", 128))
            assert not found(Net(norm), "NS504", *task("none", 128))

    def test_silent_with_batch_statistics(self) -> None:
        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.norm(x).mean((2, 3)))

        assert reasons(Plain(), "NS504", *task("level", 64)) == [
            "no norm here takes the statistics of a sample away"
        ]

    def test_the_last_that_removes_it_is_named(self) -> None:
        """In a pre-norm stack the sum carries the level past every norm but the last."""

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.down(self.up(self.norm(x)).relu())

        torch.manual_seed(0)
        level = torch.randn(256, 1)
        x, labels = torch.randn(256, 16) + 2 * level, (level > 0).long().flatten()
        stack = nn.Sequential(Block(), Block(), Block())
        assert not found(nn.Sequential(stack, nn.Linear(16, 4)), "NS504", x, labels)
        (finding,) = found(nn.Sequential(stack, nn.LayerNorm(16), nn.Linear(16, 4)), "NS504", x, labels)
        assert finding.site == "1"

    def test_false_alarms(self) -> None:
        """Labels that have nothing to do with the input; 274 innocent runs of more kinds had none either."""
        for seed in range(8):
            model = Net(nn.LayerNorm([3, 8, 8]))
            assert not found(model, "NS504", *task("none", (32, 64)[seed % 2], seed=seed))

    def test_what_it_needs(self) -> None:
        model = Net(nn.LayerNorm([3, 8, 8]))
        x, labels = task("level", 32)
        assert reasons(model, "NS504", x) == ["needs targets: pass targets="]
        assert reasons(model, "NS504", x[:16], labels[:16]) == [
            "cannot tell with 16 samples: pass at least 32"
        ]
        few = torch.cat([torch.zeros(30), torch.ones(2)]).long()
        assert reasons(model, "NS504", x, few) == [
            "a class has 2 samples in this batch: pass at least 5 of each"
        ]
        assert reasons(model, "NS504", x, torch.zeros(32).long()) == [
            "all targets of this batch are the same"
        ]
        assert reasons(model, "NS504", x, torch.zeros(32, 9).long()) == [
            "needs one class or number a sample, got targets of shape (32, 9)"
        ]
        assert reasons(model, "NS504", x, {"label": labels}) == [
            "needs targets as one tensor or array, got dict"
        ]

    def test_missing_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("normscope.doctor.probes.removed.find_spec", lambda name: None)
        assert reasons(Net(nn.LayerNorm([3, 8, 8])), "NS504", *task("level", 32)) == [
            "the linear probe of targets needs scikit-learn, which is not installed: pip install 'normscope[studies]'"
        ]

    def test_arrays_and_poison(self) -> None:
        model = Net(nn.LayerNorm([3, 8, 8]))
        x, labels = task("level", 128)
        assert found(model, "NS504", x.numpy(), labels.numpy())
        assert found(model, "NS504", x.numpy(), labels.numpy().astype(np.int8))
        wrong = labels.float()
        wrong[3] = float("nan")
        assert reasons(model, "NS504", x, wrong) == ["the targets hold NaN or infinities"]
