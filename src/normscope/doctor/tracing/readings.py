"""Readings of modules while they run, each made once: reading takes longer than many small forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from normscope.reading import UnknownNormalization, read

if TYPE_CHECKING:
    from normscope.spec import NormSpec


@dataclass(frozen=True, eq=False)
class ModuleReading:
    """What reading a module gave; an error is kept as the reason why there is no spec."""

    spec: NormSpec | None
    reason: str
    type_name: str
    mode: str
    names: tuple[str, ...]
    """of the tensors that it holds"""
    again: Callable[[], dict[str, Tensor]] | None = None
    """reads them anew, where they are no attributes of these names"""
    synchronized: bool = False
    """batch statistics are taken over all ranks"""

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """As they are now: buffers may have been bound to others, and parametrized weights are computed anew."""
        return self.again() if self.again else {name: getattr(module, name) for name in self.names}


class Readings:
    """Reads modules by rank of their input and by the flags that decide their mode."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int | None, bool, bool], ModuleReading] = {}
        self.identified: dict[int, Callable[[int | None, bool], ModuleReading]] = {}
        """by id of a module that no reader knows and that was identified: rank and training flag to its reading"""

    def read(self, module: nn.Module, ndim: int | None) -> ModuleReading:
        if id(module) in self.identified:
            return self.identified[id(module)](ndim, module.training)
        key = (id(module), ndim, module.training, bool(getattr(module, "track_running_stats", False)))
        if key not in self._known:
            self._known[key] = _read(module, ndim)
        return self._known[key]


def _read(module: nn.Module, ndim: int | None) -> ModuleReading:
    try:
        found = read(module, input_ndim=ndim)
    except (UnknownNormalization, ValueError) as error:
        return ModuleReading(None, str(error), type(module).__name__, "input", ())
    held = all(getattr(module, name, None) is tensor for name, tensor in found.tensors.items())
    again = None if held else lambda: read(module, input_ndim=ndim).tensors
    names = tuple(found.tensors)
    return ModuleReading(found.spec, "", found.type_name, found.mode_now, names, again, found.synchronized)
