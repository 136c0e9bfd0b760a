"""What feeds what in one forward: a graph of operations and values that holds no tensor.

A value is one tensor at one moment; writing to the tensor in place makes a new value of it. Tensors are known by
identity through weak references, so following a forward keeps none of its activations alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.doctor.tracing import ops
from normscope.doctor.tracing.axes import Axes, broadcast_axes, view_axes
from normscope.doctor.tracing.features import features_made
from normscope.doctor.tracing.paths import Frame


@dataclass(eq=False)
class Value:
    """One tensor at one moment."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    memory_format: str
    node: Node | None = None
    """what made it; None for inputs, parameters and constants"""
    data: bool = False
    """it depends on the model's inputs"""
    held: Tensor | None = None
    """the parameter or buffer that it is, or is a view of"""
    features: int | None = None
    """the axis that holds features, where it can be told"""
    output: bool = False
    """the model returns it"""
    readers: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Node:
    """One operation."""

    number: int
    op: str
    role: str
    """see ``ops.role_of``; a normalization's is ``norm``"""
    path: str
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    axes: Axes = ()
    """of views and slices: output axis -> axis of the first input"""
    dropout: float = 0.0
    site: str | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    transposed: bool = False
    padded: bool = False
    """a convolution that fills in zeros"""

    @property
    def mixes(self) -> bool:
        """It adds two values that both depend on the data: a residual connection."""
        return self.op in ("add", "sub") and sum(value.data for value in self.inputs) > 1

    def axes_of(self, value: Value) -> Axes:
        """Output axis -> axis of the input ``value``, for operations that can be looked through."""
        return (
            self.axes
            if self.role in ("view", "slice")
            else broadcast_axes(value.shape, self.outputs[0].shape)
        )


def value_of(tensor: Tensor, **known: Any) -> Value:
    """A value without history."""
    shape = () if tensor.is_nested else tuple(tensor.shape)
    return Value(
        shape, str(tensor.dtype).removeprefix("torch."), str(tensor.device), memory_format(tensor), **known
    )


def memory_format(tensor: Tensor) -> str:
    """contiguous | channels_last | channels_last_3d | other."""
    if not _strided(tensor):
        return "other"
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "channels_last_3d"
    return "other"


class Dataflow:
    """Builds the graph, one call at a time.

    Args:
        held: the model's parameters and buffers.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        self.nodes: list[Node] = []
        self._values: dict[int, tuple[weakref.ref[Tensor], Value]] = {}
        for tensor in held:
            self.set(tensor, value_of(tensor, held=tensor))

    def inputs(self, *given: Any) -> None:
        """The model's inputs."""
        for tensor in tensors_in(given):
            self.set(tensor, value_of(tensor, data=True))

    def outputs(self, *given: Any) -> None:
        """What the model returned."""
        for tensor in tensors_in(given):
            self.value(tensor).output = True

    def value(self, tensor: Tensor) -> Value:
        """The present value of a tensor; one that no followed operation made is a constant."""
        known = self._values.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        return self.set(tensor, value_of(tensor))

    def set(self, tensor: Tensor, value: Value) -> Value:
        key = id(tensor)

        def forget(reference: weakref.ref[Tensor]) -> None:
            if key in values and values[key][0] is reference:
                del values[key]

        values = self._values
        values[key] = weakref.ref(tensor, forget), value
        return value

    def called(
        self, frame: Frame, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> tuple[Any, Node | None]:
        """Follow one call.

        Returns the output to hand on and the new node, None where there was nothing to follow. Dropout that does
        nothing returns its input itself, and a path around it would look as if it went through: it gets an alias.
        """
        results = [args[0]] if op in ("setitem", "copy") else list(tensors_in((output,)))
        if not results or not isinstance(results[0], Tensor):
            return output, None
        role = ops.role_of(op)
        given = list(tensors_in((args, tuple(kwargs.values()))))
        same = any(results[0] is tensor for tensor in given)
        if same and (op in ops.CASTS or (role == "view" and results[0].shape == given[0].shape)):
            return output, None
        if same and role == "dropout" and _strided(results[0]):
            output = results[0].view_as(results[0])
            results = [output]
        node = self._node(frame, op, role, args, kwargs, given, results)
        return output, node

    def normalized(self, frame: Frame, site: str, op: str, given: Tensor, output: Tensor) -> Node:
        """One call of a known normalization."""
        source = self.value(given)
        node = Node(len(self.nodes), op, "norm", frame.path, frame.module, (source,), site=site)
        source.readers.append(node)
        made = value_of(output, node=node, data=source.data)
        made.features = source.features if made.shape == source.shape else None
        node.outputs = (self.set(output, made),)
        self.nodes.append(node)
        return node

    def _node(
        self,
        frame: Frame,
        op: str,
        role: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        results: list[Tensor],
    ) -> Node:
        inputs = tuple(self.value(tensor) for tensor in given)
        node = Node(len(self.nodes), op, role, frame.path, frame.module, inputs)
        for value in {id(value): value for value in inputs}.values():
            value.readers.append(node)
        if role in ("conv", "linear", "embedding") and len(inputs) < 2:
            node.role = role = "other"  # its weight is packed, as in quantized models
        if role == "linear":
            _linear(node)
        elif role in ("conv", "embedding"):
            _weighted(node, args, kwargs)
        elif role == "dropout":
            node.dropout = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        shape = () if results[0].is_nested else tuple(results[0].shape)
        if role in ("view", "slice") and inputs:
            node.axes = _axes_of_view(op, args, kwargs, inputs[0].shape, shape)
        # expand_as, view_as and type_as take no values from what they follow
        data = any(value.data for value in (inputs[:1] if role == "view" else inputs))
        node.outputs = tuple(self.set(tensor, value_of(tensor, node=node, data=data)) for tensor in results)
        first = node.outputs[0]
        if role == "view" and not data and inputs:
            first.held = inputs[0].held
        for made in node.outputs:
            made.features = features_made(node, made.shape, args, kwargs)
        self.nodes.append(node)
        return node


def tensors_in(items: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in nested sequences, mappings and dataclass-like outputs."""
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            yield from tensors_in(item)
        elif isinstance(item, dict):
            yield from tensors_in(item.values())
        elif hasattr(item, "__dataclass_fields__"):
            yield from tensors_in(vars(item).values())


def _strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _axes_of_view(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], before: tuple[int, ...], after: tuple[int, ...]
) -> Axes:
    try:
        return view_axes(op, args, kwargs, before, after)
    except (ArithmeticError, IndexError, KeyError, TypeError, ValueError):
        return (None,) * len(after)  # a spelling of the call that is not known here


def _linear(node: Node) -> None:
    """A matrix product is a linear layer where its second factor does not depend on the data."""
    place = 2 if node.op == "addmm" else 1
    if len(node.inputs) <= place or node.inputs[place].data:
        node.role = "other"
        return
    factor = node.inputs[place]
    node.weight = factor.held
    # a matrix product takes (in, out), a linear layer (out, in)
    node.transposed = node.op != "linear" and factor.held is not None and factor.node is None
    if node.op == "addmm":
        node.bias = node.inputs[0].held
        node.inputs = (node.inputs[1], node.inputs[2], node.inputs[0])
    elif len(node.inputs) > place + 1:
        node.bias = node.inputs[place + 1].held


def _weighted(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Weight and bias of convolutions and embeddings, and the input first."""
    place = 0 if node.role == "embedding" and node.op == "embedding" and _table_first(node) else 1
    node.weight = node.inputs[place].held if len(node.inputs) > place else None
    if place == 0:  # the operator takes the table first, the function the indices
        node.inputs = tuple(reversed(node.inputs))
    if node.role == "conv":
        node.bias = node.inputs[2].held if len(node.inputs) > 2 else None
        node.transposed = "transpose" in node.op or (node.op == "conv" and len(args) > 6 and bool(args[6]))
        padding = args[4] if len(args) > 4 else kwargs.get("padding", 0)
        sizes = padding if isinstance(padding, (tuple, list)) else (padding,)
        kernel = node.inputs[1].shape[2:] if len(node.inputs) > 1 else ()
        fills = [size for size in sizes if size not in (0, "valid")]
        node.padded = node.transposed or (bool(fills) and not (fills == ["same"] and set(kernel) == {1}))


def _table_first(node: Node) -> bool:
    return len(node.inputs) > 1 and node.inputs[0].held is not None and node.inputs[1].held is None
