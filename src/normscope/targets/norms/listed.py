"""One normalization of a target, and all of them: names now, tensors when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.site import Site

FILE, MODEL, GRAPH = "file", "model", "graph"
"""weights without their code; a PyTorch model or program; an ONNX graph"""


@dataclass(frozen=True)
class ListedNorm:
    name: str
    """path of the module that it is, or was exported from"""
    title: str
    """its own name in the target, such as that of a node"""
    tensors: tuple[str, ...]
    """which of weight, bias, running_mean, running_var, num_batches_tracked it holds"""
    load: Callable[[], Site]
    """reads its tensors"""


@dataclass(frozen=True)
class NormList:
    source: str
    """the target, for people"""
    kind: str
    norms: tuple[ListedNorm, ...]
    notes: tuple[str, ...] = field(default=())
    maybe: tuple[ListedNorm, ...] = ()
    """of a file: vectors that stand alone, which are norms where the other target has some there"""
    vectors: tuple[str, ...] = ()
    """gains that stand alone under no norm's name: left out"""
