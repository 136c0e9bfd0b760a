"""The residual stream around a normalization of an ONNX graph: where its input meets again what was made of its output.

The same question as of a traced model (``doctor/tracing/stream.py``): in ``x + f(norm(x))`` the norm's input goes
around the branch to the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from normscope.doctor.site import Join

if TYPE_CHECKING:
    from onnx import NodeProto

    from normscope.reading.graphs.graph import Graph
    from normscope.reading.graphs.norms import NodeNorm
    from normscope.targets.onnx_neighbours import Neighbours

SAME = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand")
POOLS = ("ReduceMean", "ReduceMax", "Slice", "Gather", "Split")
"""what takes a part or a mean of the stream before a head, beside the pooling operators"""


class Streams:
    """Joins of one graph."""

    def __init__(self, graph: Graph, neighbours: Neighbours, norms: list[NodeNorm]) -> None:
        self._graph = graph
        self._norms = norms
        self._neighbours = neighbours
        self._order = {name: i for i, node in enumerate(graph.nodes) for name in node.output if name}

    def join(self, norm: NodeNorm) -> Join | None:
        """The first sum of the norm's input with what was made of its output, with all branches that the norm begins;
        None where there is none."""
        inside = self._inside(norm)
        sums = {node.output[0]: node for node in self._sums(self._whole(norm.input), inside, set())}
        for made in sorted(sums, key=lambda name: self._order[name]):
            if any(self._made_of(name, norm) for name in sums[made].input):
                return self._joined(self._last_branch(sums[made], norm))
        return None

    def _joined(self, node: NodeProto) -> Join:
        total = node.output[0]
        return Join(
            path=node.name or total,
            feeds=self._neighbours.below(total),
            readers=self._readers(total),
            ends=tuple(sorted(set(self._ends(total, set())))),
            normalized_later=self._normalized_later(total),
        )

    def _readers(self, value: str) -> int:
        """How many operations read a value; a norm of many nodes is one."""
        norms = [norm for norm in self._norms if norm.input == value]
        inside = set().union(*(self._inside(norm) for norm in norms))
        others = [node for node in self._graph.readers(value) if not inside & set(node.output)]
        return len(norms) + len(others) + self._graph.outputs.count(value)

    def _last_branch(self, node: NodeProto, norm: NodeNorm) -> NodeProto:
        """The sum after other branches of the same norm, attention beside a perceptron, were added."""
        total = node.output[0]
        for reader in self._graph.readers(total):
            others = [name for name in reader.input if name != total]
            if self._mixes(reader) and any(self._made_of(name, norm, total) for name in others):
                return self._last_branch(reader, norm)
        return node

    def _whole(self, value: str) -> str:
        """The value that this one is a view or a cast of."""
        while (node := self._graph.producer(value)) is not None and node.op_type in SAME:
            value = node.input[0]
        return value

    def _inside(self, norm: NodeNorm) -> set[str]:
        """Values made by the nodes of the norm itself, where it is written as many."""
        inside, pending = set(), [norm.output]
        while pending:
            value = pending.pop()
            node = self._graph.producer(value)
            if value == norm.input or node is None or value in inside:
                continue
            if self._order.get(value, -1) < self._order.get(norm.input, -1):
                continue
            inside.add(value)
            pending += [name for name in node.input if name]
        return inside

    def _mixes(self, node: NodeProto) -> bool:
        data = [name for name in node.input if name and not self._graph.is_constant(name)]
        return node.op_type in ("Add", "Sum") and len(data) > 1

    def _sums(self, value: str, inside: set[str], seen: set[str]) -> Iterator[NodeProto]:
        """Sums that a value enters as a whole (scaled, reshaped), other than through the norm."""
        for node in self._graph.readers(value):
            made = node.output[0] if node.output else ""
            if made in inside or made in seen:
                continue
            seen.add(made)
            if self._mixes(node):
                yield node
            elif self._neighbours.transparent(node) and (node.op_type not in SAME or node.input[0] == value):
                yield from self._sums(made, inside, seen)

    def _made_of(self, value: str, norm: NodeNorm, without: str = "") -> bool:
        """Whether a value was computed from the norm's output, and not through ``without`` alone. What is older than
        the norm was not."""
        first, seen, pending = self._order.get(norm.output, 0), {without}, [value]
        while pending:
            value = pending.pop()
            if value == norm.output:
                return True
            node = self._graph.producer(value)
            if value in seen or node is None or self._order.get(value, -1) < first:
                continue
            seen.add(value)
            pending += [name for name in node.input if name]
        return False

    def _ends(self, value: str, seen: set[str]) -> Iterator[str]:
        """Kinds of what reads a value, through pooling too: what a head begins with."""
        if value in self._graph.outputs:
            yield "output"
        if self._neighbours.normalizes(value):
            yield "norm"
            return
        for node in self._graph.readers(value):
            made = node.output[0] if node.output else ""
            if not made or made in seen:
                continue
            seen.add(made)
            kind = self._neighbours.kind(node)
            if self._neighbours.transparent(node) or kind == "pool" or node.op_type in POOLS:
                yield from self._ends(made, seen)
            else:
                yield kind

    def _normalized_later(self, value: str) -> bool:
        """Whether any normalization depends on a value."""
        seen: set[str] = set()
        pending = [value]
        while pending:
            value = pending.pop()
            if self._neighbours.normalizes(value):
                return True
            if value not in seen:
                seen.add(value)
                pending += [name for node in self._graph.readers(value) for name in node.output if name]
        return False
