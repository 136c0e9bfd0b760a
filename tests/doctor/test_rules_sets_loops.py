"""A norm called in a loop is judged over its calls: a first state of zeros is not the loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normscope

torch.set_num_threads(1)


class Loop(nn.Module):
    """A recurrent cell whose state is normalized; the norm's inputs in ``small`` of its steps are scaled down."""

    def __init__(self, steps: int = 20, small: int = 1, scale: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.steps, self.small, self.scale = steps, small, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for index in range(self.steps):
            h = self.norm(h * self.scale if index < self.small else h)
            h = torch.tanh(self.step(h + x))
        return h


def x() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def test_constant_sets_of_the_first_call_were_said_of_all_calls() -> None:
    (found,) = normscope.check(Loop(), x(), select=["NS402"]).findings
    assert found.severity == "info"
    assert found.message == (
        "16 of 256 statistic sets in 16 calls (6.25 %) are constant on this batch: their output is the bias; the first "
        "variation is multiplied by gain / sqrt(eps)."
    )
    assert (found.evidence["constant_sets"], found.evidence["sets"], found.evidence["calls"]) == (16, 256, 16)


@pytest.mark.parametrize(("small", "severity"), [(1, "info"), (3, "info"), (4, "warning"), (8, "warning")])
def test_constant_sets_warn_from_half_of_all_calls_on(small: int, severity: str) -> None:
    (found,) = normscope.check(Loop(8, small), x(), select=["NS402"]).findings
    assert (found.severity, found.evidence["constant_share"]) == (severity, small / 8)


def test_eps_in_one_call_was_said_of_all_calls() -> None:
    assert not normscope.check(
        Loop(20, 1, 1e-4), x(), select=["NS401"]
    ).findings  # 1 of 16 calls, below a tenth
    (found,) = normscope.check(Loop(8, 2, 1e-4), x(), select=["NS401"]).findings
    assert (found.severity, found.evidence["share_over_variance"]) == ("info", 0.25)
    assert "in 25 % of 128 statistic sets in 8 calls: before the gain" in found.message
    assert found.message.endswith("(lowest 5 % of the sets in the worst call).")
    (found,) = normscope.check(Loop(8, 8, 1e-4), x(), select=["NS401"]).findings
    assert (found.severity, found.evidence["share_over_variance"]) == ("warning", 1.0)


def test_stored_variances_are_counted_once_however_often_they_are_used() -> None:
    model = Loop()
    model.norm = nn.BatchNorm1d(8)
    model.norm.running_var.fill_(1e-9)  # type: ignore[union-attr]
    (found,) = normscope.check(model.eval(), x(), select=["NS401"]).findings
    assert found.evidence["sets"] == 8


def test_explain_looked_at_the_constant_first_call_alone() -> None:
    step = normscope.explain(Loop(), x()).steps[2]
    assert step.ok, step
    (line,) = step.seen
    assert line.startswith("norm: 16 sets; least ")
    assert "without any spread" not in line
