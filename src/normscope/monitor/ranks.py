"""Comparing the running statistics of ranks through the store of their process group.

Never by a collective operation: one that not all ranks reach would hang the training, and this is only a diagnosis.
Each rank writes its own small summary and reads what others have written so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from normscope.doctor.training_record import RankGap
from normscope.monitor.watch import distance

CHANNELS = 16
"""of a site that are compared, evenly spaced: ranks that saw other data differ in all"""
KEPT = 2
"""looks whose summaries stay in the store"""

Summary = dict[str, tuple[torch.Tensor, torch.Tensor]]


def process_group() -> tuple[int, int, Any]:
    """World size, rank and store of the default process group; (1, 0, None) without one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1, 0, None
    try:
        store = distributed.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):  # not a public name
        store = None
    return distributed.get_world_size(), distributed.get_rank(), store


def summary(mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A few channels of running statistics."""
    step = max(1, mean.numel() // CHANNELS)
    return mean.flatten()[::step].float().cpu(), var.flatten()[::step].float().cpu()


class Ranks:
    """Exchange of one monitor; monitors of one ``number`` belong together.

    >>> store = torch.distributed.HashStore()
    >>> ranks = [Ranks(2, rank, store, 0) for rank in (0, 1)]
    >>> at = {"bn": (torch.zeros(4), torch.ones(4))}, {"bn": (torch.ones(4), torch.ones(4))}
    >>> for rank in (0, 1):
    ...     ranks[rank].exchange(1, at[rank], {"bn": 0.0})
    >>> ranks[1].found["bn"][0].shift
    1.0
    """

    def __init__(self, world: int, rank: int, store: Any, number: int) -> None:
        self.world, self.rank = world, rank
        self._store = store
        self._prefix = f"normscope/{number}"
        self._mine: dict[int, Summary] = {}
        self._gaps: dict[str, dict[int, RankGap]] = {}

    @property
    def found(self) -> dict[str, tuple[RankGap, ...]]:
        """Site name -> the last gap to each other rank. Rank 0 reads all others, they read rank 0."""
        return {name: tuple(gaps.values()) for name, gaps in self._gaps.items()}

    def exchange(self, step: int, seen: Summary, eps: Mapping[str, float]) -> None:
        """Write this look's summary, and read what others wrote of the last looks."""
        if self._store is None or self.world < 2:
            return
        self._mine[step] = seen
        plain = {name: (mean.tolist(), var.tolist()) for name, (mean, var) in seen.items()}
        self._store.set(self._key(step, self.rank), json.dumps(plain))
        for old in sorted(self._mine)[:-KEPT]:
            del self._mine[old]
            with suppress(RuntimeError, NotImplementedError):  # a file store cannot
                self._store.delete_key(self._key(old, self.rank))
        others = range(1, self.world) if self.rank == 0 else (0,)
        for step, seen in self._mine.items():
            for other in others:
                key = self._key(step, other)
                if not self._store.check([key]):
                    continue
                for name, values in json.loads(self._store.get(key)).items():
                    if name in seen:
                        there = torch.tensor(values[0]), torch.tensor(values[1])
                        gap = RankGap(
                            self.rank, other, step, *distance(there, seen[name], eps.get(name, 0.0))
                        )
                        self._gaps.setdefault(name, {})[other] = gap

    def _key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"
