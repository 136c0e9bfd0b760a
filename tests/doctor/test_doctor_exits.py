"""User code that calls ``sys.exit`` on shapes it does not expect ends a probe, not the program."""

from __future__ import annotations

import sys

import torch
from torch import nn

import normscope

torch.set_num_threads(1)


class Picky(nn.Module):
    """A hand-written norm that takes batches of 16 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 16:
            sys.exit("bad shape")
        centered = x - x.mean(-1, keepdim=True)
        return self.weight * centered * (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()


def test_exit_on_unexpected_shapes_ended_the_program() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Picky(), nn.Linear(8, 2)), torch.randn(16, 8)
    report = normscope.check(model, x)
    assert [row.name for row in report.sites] == ["1"]
    explanation = normscope.explain(model, x)
    assert [step.number for step in explanation.steps] == [1, 2, 3, 4, 5, 6]
