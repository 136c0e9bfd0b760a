"""Building the graph of a forward: what feeds what, and which norms are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from normscope.doctor.tracing.collapse import WrittenNorm
from normscope.doctor.tracing.dataflow import Dataflow, Node
from normscope.doctor.tracing.paths import Frame
from normscope.doctor.tracing.written import WrittenNorms


class Graph:
    """Takes every call of a forward, in order; ``tell`` is called with each norm written by hand."""

    def __init__(self, held: Iterable[Tensor], inputs: Any, tell: Callable[[WrittenNorm], None]) -> None:
        self._flow = Dataflow(held)
        self._flow.inputs(inputs)
        self._written = WrittenNorms(self._flow)
        self._tell = tell

    def entered(self, frame: Frame, args: tuple[Any, ...]) -> None:
        """A module's forward begins."""
        self._written.entered(frame, args)

    def left(self, frame: Frame, kwargs: dict[str, Any], output: Any) -> None:
        """It ended; the output is None where it raised."""
        for norm in self._written.left(frame, kwargs, output):
            self._tell(norm)

    def returned(self, output: Any) -> None:
        """The model's own forward ended."""
        self._flow.outputs(output)

    def called(
        self, frame: Frame, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """An operation ran; returns the output to hand on."""
        output, node = self._flow.called(frame, op, args, kwargs, output)
        if node is not None:
            self._written.follow(frame, node, args, kwargs)
        return output

    def normalized(self, frame: Frame, site: str, op: str, given: Tensor, output: Tensor) -> Node:
        """A known normalization ran."""
        return self._flow.normalized(frame, site, op, given, output)
