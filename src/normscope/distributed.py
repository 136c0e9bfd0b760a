"""Means and variances merged by counts: of batches in one process, and of the ranks of a process group.

    n = n_a + n_b,    d = mean_b - mean_a
    mean = mean_a + d * n_b / n
    m2   = m2_a + m2_b + d^2 * n_a * n_b / n        (m2: the sum of squared deviations from the mean)

In float64 and in a fixed order, so that every rank arrives at the same bits. Chan, Golub and LeVeque 1979, Updating
formulae and a pairwise algorithm for computing sample variances, equation 2.1.

`Moments` are of data that goes by, batch after batch; `pooled` and `summed` are the collectives within a network, whose
tensors stay on their device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from normscope.errors import BadInput, ModelError, told


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and sum of squared deviations of each channel, float64.

    ``count`` is a number where every channel has as many elements, else (under a mask) a tensor of the shape of
    ``mean``. A channel without elements has mean 0 and changes nothing.

    >>> a, b = Moments.of(torch.tensor([[1.0], [2.0]]), (0,)), Moments.of(torch.tensor([[6.0]]), (0,))
    >>> both = a.merge(b)
    >>> both.count, both.mean.tolist(), both.variance(1).tolist()
    (3, [3.0], [7.0])
    """

    count: int | Tensor
    """elements of a channel"""
    mean: Tensor
    m2: Tensor

    @classmethod
    def none(cls, shape: Sequence[int]) -> Moments:
        """Of no element at all, which changes nothing that it is merged with."""
        return cls(0, torch.zeros(*shape, dtype=torch.float64), torch.zeros(*shape, dtype=torch.float64))

    @classmethod
    def of(cls, x: Tensor, over: Sequence[int], mask: Tensor | None = None) -> Moments:
        """Of one tensor over some of its axes, in two passes, on the CPU.

        ``mask`` is boolean and broadcasts to ``x``: what stands where it is False, NaN included, takes no part.

        >>> x = torch.tensor([[1.0, float("nan")], [3.0, 5.0]])
        >>> found = Moments.of(x, (0,), ~x.isnan())
        >>> found.count.tolist(), found.mean.tolist(), found.m2.tolist()
        ([2.0, 1.0], [2.0, 5.0], [2.0, 0.0])
        """
        if mask is not None:
            return cls._under(mask, x, over)
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

    @classmethod
    def _under(cls, mask: Tensor, x: Tensor, over: Sequence[int]) -> Moments:
        mask = mask.expand(x.shape)
        count = mask.sum(tuple(over), keepdim=True, dtype=torch.float64) if over else mask.double()
        x = torch.where(mask, x.detach().double(), 0.0)
        mean = (x.sum(tuple(over), keepdim=True) if over else x) / count.clamp(min=1)
        away = torch.where(mask, x - mean, 0.0).square()
        m2 = away.sum(tuple(over)) if over else away
        return cls(count.reshape(m2.shape).cpu(), mean.reshape(m2.shape).cpu(), m2.cpu())

    @property
    def least(self) -> int:
        """Elements of the channel that has the fewest."""
        return int(self.count.min()) if isinstance(self.count, Tensor) else self.count

    @property
    def empty(self) -> bool:
        """No channel has an element."""
        return not (self.count.any() if isinstance(self.count, Tensor) else self.count)

    def merge(self, other: Moments) -> Moments:
        """Of all elements of both."""
        if other.empty:
            return self
        if self.empty:
            return other
        count = self.count + other.count
        both = count.clamp(min=1) if isinstance(count, Tensor) else count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / both)
        m2 = self.m2 + other.m2 + apart.square() * (self.count * other.count / both)
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
        flat = [torch.cat([_counts(m), m.mean.flatten(), m.m2.flatten()]) for m in own]
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


def _counts(moments: Moments) -> Tensor:
    """One a channel; what a rank has counted as one number, another may have counted under a mask."""
    return torch.as_tensor(moments.count, dtype=torch.float64).expand(moments.mean.shape).flatten()


def _unpacked(piece: Tensor, shape: torch.Size) -> Moments:
    counts, mean, m2 = (part.reshape(shape) for part in piece.chunk(3))
    alike = bool((counts == counts.flatten()[0]).all())
    return Moments(int(counts.flatten()[0]) if alike else counts, mean, m2)


# Within a network -------------------------------------------------------------------------------------------


_APART = threading.local()


@contextmanager
def alone() -> Iterator[None]:
    """Within, this thread runs a model by itself, and its norms wait for no other rank.

    For what one rank may do without the others, such as a check of its model.
    """
    before = getattr(_APART, "depth", 0)
    _APART.depth = before + 1
    try:
        yield
    finally:
        _APART.depth = before


def world_of(group: Any) -> int:
    """Ranks of a process group; 1 where torch.distributed does not run, and within `alone`.

    Raises BadInput where this rank is none of them.
    """
    if not (dist.is_available() and dist.is_initialized()) or getattr(_APART, "depth", 0) > 0:
        return 1
    if dist.get_rank(group) < 0:
        raise BadInput(
            f"a rank takes part in the statistics of its own process group; rank {dist.get_rank()} is not in the one "
            "that it was given. Give each rank the group that it is in."
        )
    return int(dist.get_world_size(group))


def pooled(own: Tensor, group: Any) -> Tensor:
    """Counts, means and sums of squared deviations (3, sets) of all ranks of ``group`` together: one collective.

    Raises ModelError where a rank has gone, or does not come within the time that the group was made with.
    """
    return of_all(of_each(own, group))


def of_each(own: Tensor, group: Any) -> Tensor:
    """Tensors of one shape, (ranks, ...), in the order of ranks: one collective. Raises ModelError as `pooled`."""
    parts = own.new_empty((world_of(group), *own.shape))
    with _all_ranks(group):
        dist.all_gather(list(parts.unbind()), own.contiguous(), group=group)
    return parts


def of_all(parts: Tensor) -> Tensor:
    """(3, sets) of parts (parts, 3, sets), each count, mean and sum of squared deviations; a part may be empty.

    Means are taken about that of the largest part, so that equal means merge to exactly themselves.

    >>> a, b = [[2.0], [1.5], [0.5]], [[1.0], [6.0], [0.0]]  # of (1, 2) and of (6,)
    >>> of_all(torch.tensor([a, b], dtype=torch.float64)).flatten().tolist()
    [3.0, 3.0, 14.0]
    """
    counts, means, m2s = parts.unbind(1)
    count = counts.sum(0)
    pivot = means.gather(0, counts.argmax(0, keepdim=True))
    mean = (pivot + ((means - pivot) * (counts / count.clamp(min=1))).sum(0)).squeeze(0)
    return torch.stack([count, mean, m2s.sum(0) + (counts * (means - mean).square()).sum(0)])


def summed(values: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of ``group``, in place: one collective. Raises ModelError as `pooled`."""
    with _all_ranks(group):
        dist.all_reduce(values, group=group)
    return values


@contextmanager
def _all_ranks(group: Any) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ModelError(
            f"rank {dist.get_rank()} normalizes together with {world_of(group)} ranks, and one has gone or did not "
            f"come in time: {told(error)}. Look for the first error on another rank; all must run the same norms, "
            "forward and backward, as often."
        ) from error
