"""The residual stream around a normalization: where its input meets again what was made of its output.

In ``x + f(norm(x))``, a pre-norm block, the norm's input goes around the branch to the sum. In ``norm(x + f(x))`` it
does not, and neither does it where something stands between x and the norm.
"""

from __future__ import annotations

from collections.abc import Iterator

from normscope.doctor.site import Join
from normscope.doctor.tracing.dataflow import Node, Value
from normscope.doctor.tracing.neighbours import consumers, feeds, transparent


def join(norm: Node) -> Join | None:
    """The first sum of a norm's input with what was made of its output, with all branches that the norm begins; None
    where there is none."""
    sums = sorted(set(_sums(_whole(norm.inputs[0]), norm)), key=lambda node: node.number)
    for node in sums:
        if any(_made_of(value, norm) for value in node.inputs):
            node = _last_branch(node, norm)
            total = node.outputs[0]
            return Join(
                path=node.path,
                feeds=feeds(total),
                readers=consumers(total),
                ends=tuple(sorted(set(_ends(total, set())))),
                normalized_later=_normalized_later(total),
            )
    return None


def _last_branch(total: Node, norm: Node) -> Node:
    """The sum after other branches of the same norm, attention beside a perceptron, were added."""
    for node in total.outputs[0].readers:
        others = [value for value in node.inputs if value is not total.outputs[0]]
        if node.mixes and any(_made_of(value, norm, total.outputs[0]) for value in others):
            return _last_branch(node, norm)
    return total


def _whole(value: Value) -> Value:
    """The value that this one is a view or a cast of."""
    while value.node is not None and value.node.role == "view":
        value = value.node.inputs[0]
    return value


def _sums(value: Value, norm: Node) -> Iterator[Node]:
    """Sums that a value enters as a whole (scaled, dropped out, reshaped), other than through the norm."""
    for node in value.readers:
        if node is norm:
            continue
        if node.mixes:
            yield node
        elif transparent(node) and node.role != "slice" and (node.role != "view" or node.inputs[0] is value):
            for made in node.outputs:
                yield from _sums(made, norm)


def _made_of(value: Value, norm: Node, without: Value | None = None) -> bool:
    """Whether a value was computed from the norm's output, and not through ``without`` alone. What is older than the
    norm was not."""
    seen = set() if without is None else {without}
    pending = [value]
    while pending:
        value = pending.pop()
        if value in seen or value.node is None or value.node.number < norm.number:
            continue
        if value.node is norm:
            return True
        seen.add(value)
        pending += value.node.inputs
    return False


def _ends(value: Value, seen: set[Node]) -> Iterator[str]:
    """Kinds of what reads a value, through pooling too: what a head begins with."""
    if value.output:
        yield "output"
    for node in value.readers:
        if node in seen:
            continue
        seen.add(node)
        if transparent(node) or node.role == "pool":
            for made in node.outputs:
                yield from _ends(made, seen)
        else:
            yield "add" if node.mixes else node.role


def _normalized_later(value: Value) -> bool:
    """Whether any normalization depends on a value."""
    seen: set[Node] = set()
    pending = list(value.readers)
    while pending:
        node = pending.pop()
        if node.role == "norm":
            return True
        if node not in seen:
            seen.add(node)
            pending += [reader for made in node.outputs for reader in made.readers]
    return False
