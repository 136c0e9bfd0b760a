"""What feeds a site and what it feeds, seen through views and elementwise operations."""

from __future__ import annotations

from collections.abc import Iterator

from normscope.doctor.site import Neighbour
from normscope.doctor.tracing.axes import Axes, down, up
from normscope.doctor.tracing.dataflow import Node, Value
from normscope.doctor.tracing.features import feature_axis_read

Chain = tuple[tuple[Node, Axes], ...]
"""operations between the site and a neighbour, nearest to the site first, with their axes"""


def fed_by(value: Value) -> tuple[Neighbour, ...]:
    """What made ``value``, the input of a site."""
    return tuple(_above(value, (), set(), tuple(range(len(value.shape)))))


def feeds(value: Value) -> tuple[Neighbour, ...]:
    """What reads ``value``, the output of a site."""
    return tuple(_below(value, (), set(), tuple(range(len(value.shape)))))


def transparent(node: Node) -> bool:
    """Views and elementwise operations are looked through; an addition of two values that depend on the data, a
    residual connection, is a neighbour itself."""
    return node.role in ("view", "slice", "elementwise", "dropout") and not node.mixes


def _above(value: Value, chain: Chain, seen: set[Value], places: Axes) -> Iterator[Neighbour]:
    if value in seen:
        return
    seen.add(value)
    node = value.node
    if node is None:
        if value.data:
            yield Neighbour("input", "input", "", through=_through(chain), dropout=_dropout(chain))
        return
    sources = _sources(node)
    if transparent(node) and sources:
        for source in sources:
            axes = node.axes_of(source)
            yield from _above(source, (*chain, (node, axes)), seen, tuple(up(axes, i) for i in places))
        return
    axis = value.features
    for _, axes in reversed(chain):
        axis = down(axes, axis)
    yield _neighbour(node, chain, axis, places)


def _below(value: Value, chain: Chain, seen: set[Node], places: Axes) -> Iterator[Neighbour]:
    if value.output:
        yield Neighbour("output", "output", "", through=_through(chain), dropout=_dropout(chain))
    for node in value.readers:
        if node in seen:
            continue
        seen.add(node)
        if transparent(node):
            axes = node.axes_of(value)
            for made in node.outputs:
                yield from _below(made, (*chain, (node, axes)), seen, tuple(down(axes, i) for i in places))
            continue
        axis = feature_axis_read(node, value)
        for _, axes in reversed(chain):
            axis = up(axes, axis)
        yield _neighbour(node, chain, axis, places)


def _sources(node: Node) -> list[Value]:
    """The inputs whose elements become the output's: of the output's shape, where any is (gates and masks are not)."""
    data = [value for value in node.inputs if value.data]
    if node.role in ("view", "slice"):
        return data[:1]
    whole = [value for value in data if value.shape == node.outputs[0].shape]
    return list(dict.fromkeys(whole or data))


def _neighbour(node: Node, chain: Chain, axis: int | None, places: Axes) -> Neighbour:
    return Neighbour(
        kind="add" if node.mixes else node.role,
        op=node.op,
        path=node.path,
        module=node.module,
        weight=node.weight,
        bias=node.bias,
        through=_through(chain),
        dropout=_dropout(chain),
        feature_axis=axis,
        consumers=sum(consumers(made) for made in node.outputs),
        site=node.site,
        transposed=node.transposed,
        places=places,
        weight_uses=_weight_uses(node),
        padded=node.padded,
    )


def _weight_uses(node: Node) -> int:
    """How many operations read the parameter that is the node's weight, as itself or as a view of it."""
    value = next(
        (value for value in node.inputs if node.weight is not None and value.held is node.weight), None
    )
    if value is None:
        return 0
    while value.node is not None and value.node.role == "view":
        value = value.node.inputs[0]
    return consumers(value)


def consumers(value: Value) -> int:
    """How many operations read a value, as itself or as a view of it; handing it out of the model is one."""
    found = int(value.output)
    for node in value.readers:
        found += sum(consumers(made) for made in node.outputs) if node.role == "view" else 1
    return found


def _through(chain: Chain) -> tuple[str, ...]:
    """Views change no element and are not named."""
    return tuple(node.op for node, _ in chain if node.role != "view")


def _dropout(chain: Chain) -> float:
    return max((node.dropout for node, _ in chain), default=0.0)
