"""Which axis of a value holds features, as the operations around it tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normscope.doctor.tracing import ops
from normscope.doctor.tracing.axes import broadcast_axes, down

if TYPE_CHECKING:
    from normscope.doctor.tracing.dataflow import Node, Value


def feature_axis_read(node: Node, value: Value) -> int | None:
    """The axis of ``value`` that the operation takes as features."""
    if node.role in ("conv", "linear", "embedding") and node.inputs[0] is not value:
        return None  # it is the weight
    if node.role == "conv":
        return _channels(node, value.shape)
    if node.role in ("linear", "attention"):
        return len(value.shape) - 1
    return value.features


def _channels(node: Node, shape: tuple[int, ...]) -> int:
    """Of a convolution's input or output: before as many axes as its kernel has."""
    kernel = len(node.inputs[1].shape) - 2
    return len(shape) - kernel - 1


def features_made(
    node: Node, shape: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """The axis that holds features in an operation's output."""
    if node.role == "conv":
        return _channels(node, shape)
    if node.role in ("linear", "embedding", "attention"):
        return len(shape) - 1
    sources = [value for value in node.inputs if value.data]
    if node.op in ops.MEANS and sources:
        return _after_mean(sources[0], shape, args, kwargs)
    if node.role in ("view", "slice"):
        sources = list(node.inputs[:1])
    elif not (node.role in ("elementwise", "dropout", "pool", "concat") or node.op in ops.KEEP_PLACES):
        return None
    found = set()
    for value in sources:
        axes = node.axes or broadcast_axes(value.shape, shape)
        if node.role in ("pool", "concat") or node.op in ops.KEEP_PLACES:
            # sizes change, places do not
            axes = tuple(range(len(shape))) if len(value.shape) == len(shape) else ()
        if value.features is not None:
            found.add(down(axes, value.features))
    return found.pop() if len(found) == 1 else None


def _after_mean(
    source: Value, shape: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    rank, axis = len(source.shape), source.features
    if axis is None or len(shape) == 0:
        return None
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    gone = {int(d) % rank for d in (dims if isinstance(dims, (tuple, list)) else (dims,)) if d is not None}
    if axis in gone:
        return None
    return axis if len(shape) == rank else axis - sum(d < axis for d in gone)
