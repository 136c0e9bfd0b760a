"""One rank runs a callable to look at it: its norms take the statistics of this rank alone, and nothing waits for
ranks that are not looking at anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.distributed import alone
from normscope.errors import ModelError

COLLECTIVES = ("c10d", "_c10d_functional")
"""namespaces of torch's operators over ranks"""


@contextmanager
def by_itself(copy: nn.Module | None = None) -> Iterator[None]:
    """Within, this thread calls a callable, or the ``copy`` of a module, without other ranks.

    Synchronized batch norms, ours and torch's own, are batch norms; whatever else asks other ranks raises ModelError,
    since they do not answer.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    for part in () if copy is None else copy.modules():
        if type(part).forward is nn.SyncBatchNorm.forward:
            part.forward = MethodType(nn.modules.batchnorm._BatchNorm.forward, part)
    with alone(), _NoCollectives():  # type: ignore[no-untyped-call]
        yield


class AsksOtherRanks(ModelError):
    """A callable that is looked at on one rank calls for the others."""


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise AsksOtherRanks(
                f"what is identified runs on this rank alone; it called {func.__name__.partition('.')[0].strip('_')}, "
                "for which other ranks would have to come. Identify it in a process without torch.distributed"
            )
        return func(*args, **(kwargs or {}))
