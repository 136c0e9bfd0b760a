"""Means and variances merged by counts: of batches in one process, and of the ranks of a process group.

    n = n_a + n_b,    d = mean_b - mean_a
    mean = mean_a + d * n_b / n
    m2   = m2_a + m2_b + d^2 * n_a * n_b / n        (m2: the sum of squared deviations from the mean)

In float64 and in a fixed order, so that every rank arrives at the same bits. Chan, Golub and LeVeque 1979, Updating
formulae and a pairwise algorithm for computing sample variances, equation 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from normscope.errors import ModelError


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and sum of squared deviations of each channel, float64.

    >>> a, b = Moments.of(torch.tensor([[1.0], [2.0]]), (0,)), Moments.of(torch.tensor([[6.0]]), (0,))
    >>> both = a.merge(b)
    >>> both.count, both.mean.tolist(), both.variance(1).tolist()
    (3, [3.0], [7.0])
    """

    count: int
    """elements of a channel"""
    mean: Tensor
    m2: Tensor

    @classmethod
    def none(cls, shape: Sequence[int]) -> Moments:
        """Of no element at all, which changes nothing that it is merged with."""
        return cls(0, torch.zeros(*shape, dtype=torch.float64), torch.zeros(*shape, dtype=torch.float64))

    @classmethod
    def of(cls, x: Tensor, over: Sequence[int]) -> Moments:
        """Of one tensor over some of its axes, in two passes, on the CPU."""
        kept = [axis for axis in range(x.ndim) if axis not in over]
        count = 1
        for axis in over:
            count *= x.shape[axis]
        if count == 0:
            return cls.none([x.shape[axis] for axis in kept])
        x = x.detach().double()
        mean = x.mean(tuple(over), keepdim=True) if over else x
        m2 = (x - mean).square().sum(tuple(over)) if over else torch.zeros_like(x)
        return cls(count, mean.reshape(m2.shape).cpu(), m2.cpu())

    def merge(self, other: Moments) -> Moments:
        """Of all elements of both."""
        if not other.count:
            return self
        if not self.count:
            return other
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        m2 = self.m2 + other.m2 + apart.square() * (self.count * other.count / count)
        return Moments(count, mean, m2)

    def variance(self, correction: float) -> Tensor:
        """m2 / (count - correction)."""
        return self.m2 / (self.count - correction)


def merged(parts: Iterable[Moments]) -> Moments:
    """All of them, one after the other."""
    found: Moments | None = None
    for part in parts:
        found = part if found is None else found.merge(part)
    if found is None:
        raise ValueError("nothing to merge: at least one Moments is needed")
    return found


@dataclass(frozen=True)
class Ranks:
    """The ranks of the default process group, which all make the same calls in the same order.

    >>> Ranks.present().world
    1
    """

    world: int = 1
    rank: int = 0

    @classmethod
    def present(cls) -> Ranks:
        """Those of the default process group; one rank where there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_world_size(), dist.get_rank())
        return cls()

    def gathered(self, value: Any) -> list[Any]:
        """A plain value of each rank, in the order of ranks."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def agree(self, error: BaseException | None) -> None:
        """Raise where any rank has failed, so that none waits for it: the own error, else one that names the rank."""
        said = self.gathered(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = next((rank for rank, text in enumerate(said) if text is not None), None)
        if failed is not None:
            raise ModelError(f"rank {failed} failed, so all ranks stop: {said[failed]}")

    def merged(self, own: Sequence[Moments]) -> list[Moments]:
        """Each of the moments merged over the ranks, in the order of ranks: the same bits on every rank.

        All ranks give as many moments, of the same shapes; a rank without data gives `Moments.none`.
        """
        if self.world == 1:
            return list(own)
        device = torch.device("cuda", torch.cuda.current_device()) if _wants_cuda() else torch.device("cpu")
        flat = [torch.cat([m.mean.new_tensor([m.count]), m.mean.flatten(), m.m2.flatten()]) for m in own]
        packed = torch.cat(flat).to(device)
        parts = [torch.empty_like(packed) for _ in range(self.world)]
        dist.all_gather(parts, packed)
        tables = [torch.split(part.cpu(), [piece.numel() for piece in flat]) for part in parts]
        return [
            merged(_unpacked(table[site], moments.mean.shape) for table in tables)
            for site, moments in enumerate(own)
        ]


def _wants_cuda() -> bool:
    return "nccl" in str(dist.get_backend())


def _unpacked(piece: Tensor, shape: torch.Size) -> Moments:
    mean, m2 = piece[1:].chunk(2)
    return Moments(int(piece[0]), mean.reshape(shape), m2.reshape(shape))
