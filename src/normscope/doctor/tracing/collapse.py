"""A norm that was found among operations, and the one node that takes their place in the graph."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.doctor.tracing.dataflow import Node, Value
from normscope.doctor.tracing.paths import Frame


@dataclass(eq=False)
class WrittenNorm:
    """A hit: the node that divides, and the value that is normalized."""

    node: Node
    input: Value
    output: Value
    frame: Frame
    stored: bool = False
    """it normalizes by statistics that were there before"""
    own_module: bool = False


def collapse(hit: WrittenNorm, first: int) -> None:
    """Make one node of the graph out of a norm's operations, so that neighbours see a norm."""
    node, x, y = hit.node, hit.input, hit.output
    inside = {y.node} if y.node is not None else set()
    pending = list(inside)
    while pending:
        for value in pending.pop().inputs:
            maker = value.node
            if value is not x and maker is not None and maker.number >= first and maker not in inside:
                inside.add(maker)
                pending.append(maker)
    x.readers = [n for n in x.readers if n not in inside or _read_outside(n, inside)]
    node.role, node.inputs, node.outputs, node.axes = "norm", (x,), (y,), ()
    x.readers.append(node)
    y.node = node
    y.features = x.features if x.shape == y.shape else None


def _read_outside(node: Node, inside: set[Node]) -> bool:
    """A part of the norm whose result is used elsewhere too."""
    return any(made.output or any(reader not in inside for reader in made.readers) for made in node.outputs)
