"""Copies of the stretches of a tensor that count: taken together on one axis, and put back, each the other's gradient.

A mask of sequences is a few long stretches, which memory gives up faster than elements one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

SHORTEST = 8
"""positions of a stretch on average, below which one copy of all elements by index is faster"""

Stretch = tuple[int, int, int]
"""index on the first axis, first and last position (beyond it) on the last axis"""


def stretches(mask: Tensor) -> tuple[Stretch, ...] | None:
    """The runs of True in each row of a mask (A, B), or None where they are short.

    >>> stretches(torch.tensor([[True] * 9 + [False], [False] * 2 + [True] * 8]))
    ((0, 0, 9), (1, 2, 10))
    """
    edges = torch.zeros(mask.shape[0], mask.shape[1] + 2, dtype=torch.int8, device=mask.device)
    edges[:, 1:-1] = mask
    steps = edges.diff(dim=1)
    starts, ends = (steps == 1).nonzero().tolist(), (steps == -1).nonzero().tolist()
    found = tuple((row, start, end) for (row, start), (_, end) in zip(starts, ends, strict=True))
    length = sum(end - start for _, start, end in found)
    return found if found and length >= SHORTEST * len(found) else None


class Together(Function):
    """(A, ..., B) to (1, ..., M): the stretches, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: tuple[Stretch, ...]) -> Tensor:
        ctx.found, ctx.size = found, x.shape
        joined = x.new_empty(1, *x.shape[1:-1], sum(end - start for _, start, end in found))
        at = 0
        for row, start, end in found:
            joined[0, ..., at : at + end - start] = x[row, ..., start:end]
            at += end - start
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return apart(grad, ctx.found, ctx.size, None), None


class Apart(Function):
    """(1, ..., M) to (A, ..., B): the stretches in their places, 0 elsewhere; laid out in memory as ``like``."""

    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, found: tuple[Stretch, ...], size: torch.Size, like: Tensor | None
    ) -> Tensor:
        ctx.found = found
        whole = joined.new_empty(size) if like is None else torch.empty_like(like, dtype=joined.dtype)
        at, filled = 0, [0] * size[0]
        for row, start, end in found:
            whole[row, ..., filled[row] : start] = 0
            whole[row, ..., start:end] = joined[0, ..., at : at + end - start]
            at, filled[row] = at + end - start, end
        for row, end in enumerate(filled):
            whole[row, ..., end:] = 0
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return together(grad, ctx.found), None, None, None


together: Callable[..., Tensor] = Together.apply
apart: Callable[..., Tensor] = Apart.apply
