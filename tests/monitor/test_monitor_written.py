"""Norms written by hand are identified after the first look, and then measured and judged as any site."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from normscope import Monitor

torch.set_num_threads(1)


class HandLayer(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.g, self.b, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return self.g * centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt() + self.b


class HandBatch(nn.Module):
    """Statistics under names of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mu", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var = self.mu, self.var
        if self.training:
            mean, var = x.mean(0), x.var(0, unbiased=False)
            with torch.no_grad():
                self.mu.lerp_(mean, 0.1)
                self.var.lerp_(var * len(x) / (len(x) - 1), 0.1)
        return (x - mean) / (var + 1e-5).sqrt()


class Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.erf(x / 2**0.5)) / 2


class Third(nn.Module):
    """Divides by the third moment, which no specification says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().pow(3).mean(-1, keepdim=True).pow(1 / 3)


class Block(nn.Module):
    """A norm and more."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = norm, Gelu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(x))


def net(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *parts, nn.Linear(8, 2))


def trained(model: nn.Module, steps: int = 3, *, watch: bool = True, passes: int = 1) -> Monitor | None:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model, optimizer).start() if watch else None
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
    if monitor is not None:
        monitor.stop()
    return monitor


def test_they_are_read_and_measured_and_nothing_else_is_listed() -> None:
    monitor = trained(net(HandLayer(8), Gelu(), Block(HandBatch(8))))
    report = monitor.report()
    assert [(s.name, s.kind, s.spec is not None, s.mode_train, s.mode_eval) for s in report.sites] == [
        ("1", "hand-written", True, "input", "input"),
        ("3.norm", "hand-written", True, "batch", "running"),
    ]
    # the first step finds them, the second measures them
    assert {name: look.step for name, look in monitor.looks.items()} == {"1": 2, "3.norm": 2}
    look = monitor.looks["3.norm"]
    assert (look.mode, look.elements, look.samples, look.calls) == ("batch", 16, 16, 1)
    assert look.running_variance > 0
    assert monitor.looks["1"].gain_median == pytest.approx(1.0, abs=0.05)
    assert report.findings == ()
    assert not [note for note in report.notes if "not measured" in note or "could not" in note]
    assert {"NS402", "NS403", "NS404", "NS405"} <= set(report.passed)


@pytest.mark.parametrize(
    "norm", [HandLayer(8), Block(HandBatch(8)), Third()], ids=["layer", "batch", "third"]
)
def test_the_same_bits_are_trained_and_no_hook_is_left(norm: nn.Module) -> None:
    plain = net(norm)
    watched = copy.deepcopy(plain)
    trained(plain, watch=False)
    numbers = torch.rand(3)
    trained(watched)
    assert torch.equal(torch.rand(3), numbers)
    for (name, value), other in zip(plain.state_dict().items(), watched.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), watched.parameters(), strict=True)
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())


def test_rules_on_the_batch_work_there() -> None:
    model = net(HandLayer(8, eps=100.0))
    monitor = trained(model)
    assert [(f.code, f.site) for f in monitor.findings] == [("NS401", "1")]


def test_rules_on_state_work_there() -> None:
    model = net(HandBatch(8))
    model[1].var[2] = float("nan")
    assert ("NS301", "1") in {(f.code, f.site) for f in trained(model).findings}


def test_rules_on_updates_work_there() -> None:
    (finding,) = (f for f in trained(net(HandBatch(8)), passes=2).report().findings if f.code == "NS310")
    assert (finding.site, finding.evidence["diagnosis"]) == ("1", "accumulation")


def test_what_cannot_be_measured_is_named_with_the_reason() -> None:
    class Kept(HandBatch):
        def __init__(self) -> None:
            super().__init__(8)
            self.register_buffer("running_mean", torch.zeros(8))
            self.register_buffer("running_var", torch.ones(8))

        def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
            return super().forward(x) if scale is None else super().forward(x) * scale

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.third, self.two, self.idle = nn.Linear(6, 8), Third(), Kept(), Kept()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.third(self.inner(x)), 2.0)

    report = trained(Net()).report()
    told = {
        note.partition(" ")[0]: note.partition(": ")[2] for note in report.notes if "not measured" in note
    }
    assert told.keys() == {"third", "two", "idle"}
    assert told["two"] == "hand-written; not identified: called with more than its input"
    assert told["idle"] == "hand-written; not identified: not called in training in the first look"
    assert told["third"].startswith("hand-written; not identified: ")


def test_without_a_step_nothing_is_known_yet() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(4))
            self.register_buffer("running_var", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - self.running_mean) / (self.running_var + 1e-5).sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Own())
    with Monitor(model) as monitor:
        model(torch.randn(8, 4)).sum().backward()
    (note,) = (n for n in monitor.report().notes if "not measured" in n)
    assert note.startswith("1 (")
    assert note.endswith("was not measured: hand-written; not identified: no look has ended yet")
    assert not any(m._forward_hooks for m in model.modules())
