"""Ranks that normalize together have the same layer, which each layer asks of them once.

Where the sums of one rank are longer than those of another, gloo ends a process or goes on with numbers that are none.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from normscope.distributed import of_each
from normscope.errors import ModelError
from normscope.functional.outside_programs import outside_programs

_ASKED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""the process group that a layer has agreed with; no part of the layer, whose copies ask for themselves"""


@outside_programs
@torch.no_grad()
def agreed(layer: nn.Module, group: Any, input: Tensor, *sizes: int) -> None:
    """One collective at a layer's first call over the ranks of ``group``, none later.

    Raises ModelError, on all ranks, where those of the ranks have other ``sizes``: channels, then those of a group.
    """
    if layer in _ASKED and _ASKED[layer] is group:
        return
    found = of_each(torch.tensor(sizes, device=input.device), group).tolist()
    if any(one != found[0] for one in found):
        said = ", ".join(f"rank {rank} {_told(*one)}" for rank, one in enumerate(found))
        raise ModelError(
            f"{type(layer).__name__} normalizes over ranks that have the same number of channels; got {said}; here it "
            f"is {layer!r}. Build the same model on every rank, and call its norms in the same order."
        )
    _ASKED[layer] = group


def _told(channels: int, group: int) -> str:
    return f"{channels}" if group == 1 else f"{channels} in groups of {group}"
