"""An ONNX graph to ask questions of: who makes a value, who reads it, what is constant, how large it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import BadTarget
from normscope.reading.graphs.constants import Constants, values_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

SMALL = 1024
"""elements of an initializer that shape inference is given; larger ones hold no shapes"""
MOST_NODES, MOST_BYTES = 200_000, 2**31 - 1
"""of a graph with its functions written out: several times the largest exports met; what a protobuf message can hold"""
SAME = ("Identity", "Cast", "Dropout")
"""nodes that change no value but by rounding (Dropout: as deployed)"""

Sizes = tuple["int | None", ...]


class Graph:
    """One graph of a model, the main one or the body of an If, Loop or Scan.

    Args:
        model: the whole model, its local functions inlined.
        graph: the graph; by default the main one.
        folder: where tensors outside of the file lie; None where there is no file.
        outer: the graph around this one, whose values it can read.

    Raises:
        BadTarget: nodes that feed themselves.
    """

    def __init__(
        self,
        model: ModelProto,
        graph: GraphProto | None = None,
        folder: Path | None = None,
        outer: Graph | None = None,
    ) -> None:
        self.model = model
        self.proto = model.graph if graph is None else graph
        self.nodes: Sequence[NodeProto] = self.proto.node
        self.outer = outer
        self.opset = next((int(o.version) for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
        self.shapes: dict[str, Sizes] = sizes(model) if outer is None else dict(outer.shapes)
        self.stored: dict[str, TensorProto] = {} if outer is None else dict(outer.stored)
        self.stored.update((tensor.name, tensor) for tensor in self.proto.initializer)
        self.shapes.update((name, tuple(tensor.dims)) for name, tensor in self.stored.items())
        self._producers: dict[str, NodeProto] = {} if outer is None else dict(outer._producers)
        self._readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            self._producers.update((name, node) for name in node.output if name)
            for name in dict.fromkeys((*node.input, *captured(node))):
                self._readers.setdefault(name, []).append(node)
        _refuse_circles(self.nodes)
        self.inputs = [value.name for value in self.proto.input if value.name not in self.stored]
        self.outputs = [value.name for value in self.proto.output]
        self._constants = Constants(self.stored, self._producers, self.shapes, folder)
        self.folder = folder
        self.wrote_functions_out = False

    def producer(self, name: str) -> NodeProto | None:
        return self._producers.get(name)

    def readers(self, name: str) -> list[NodeProto]:
        """Nodes of this graph that read a value, each once, also those whose bodies read it."""
        return self._readers.get(name, [])

    def consumers(self, name: str) -> int:
        """How often a value is used; handing it out of the graph is one use."""
        return len(self.readers(name)) + self.outputs.count(name)

    def constant(self, name: str) -> NDArray[Any] | None:
        """The value, where it depends on no input of the graph."""
        return self._constants.get(name)

    def is_constant(self, name: str) -> bool:
        return self._constants.size(name) is not None

    def constant_shape(self, name: str) -> tuple[int, ...] | None:
        """Of a constant, without reading what is stored."""
        return self._constants.size(name)

    def scalar(self, name: str) -> float | None:
        """The one number of a constant of one element."""
        size = self._constants.size(name) if name else None
        if size is None or any(s != 1 for s in size):
            return None
        value = self.constant(name)
        return None if value is None else float(value.reshape(-1)[0])

    def origin(self, name: str) -> str:
        """The value behind casts and identities."""
        seen = set()
        while (node := self.producer(name)) is not None and node.op_type in SAME and name not in seen:
            seen.add(name)
            name = node.input[0]
        return name

    def maker(self, name: str) -> NodeProto | None:
        """The node behind casts and identities."""
        return self.producer(self.origin(name))

    def rank(self, name: str) -> int | None:
        sizes = self.shapes.get(name)
        return None if sizes is None else len(sizes)

    def bodies(self) -> Iterator[Graph]:
        """The graphs inside nodes of this one."""
        import onnx

        for node in self.nodes:
            for attribute in node.attribute:
                graphs = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs
                for graph in graphs:
                    yield Graph(self.model, graph, self.folder, self)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    return values_of(node).get(name, default)


def inlined(model: ModelProto) -> ModelProto:
    """The model with the bodies of its local functions in place of their calls.

    Raises:
        BadTarget: a function calls itself, the functions do not fit their calls, or written out they are longer than
            ``MOST_NODES`` or ``MOST_BYTES``.
    """
    from onnx import inliner

    if not model.functions:
        return model
    _refuse_unending(model)
    try:
        return inliner.inline_local_functions(model, False)
    except Exception as error:
        raise BadTarget(f"the functions of this graph do not fit their calls: {error}") from error


def _refuse_unending(model: ModelProto) -> None:
    """A few functions that call each other twice are millions of nodes: counted before anything is written out."""
    bodies: dict[tuple[str, str, str], Sequence[NodeProto]] = {
        _key(f, f.name): f.node for f in model.functions
    }
    own = {_key(f, f.name): f.ByteSize() for f in model.functions}
    calls = {
        name: Counter(_key(node, node.op_type) for node in _nested(body)) for name, body in bodies.items()
    }
    length: dict[tuple[str, str, str], tuple[int, int]] = {}  # nodes and bytes, written out
    left = set(bodies)
    while left:
        done = {name for name in left if not calls[name].keys() & left}
        if not done:
            circle = ", ".join(name for _, name, _ in sorted(left)[:3])
            raise BadTarget(f"the functions {circle} of this graph call themselves, so it cannot be run")
        for name in done:
            length[name] = _written_out(calls[name], length, own[name])
        left -= done
    main = Counter(_key(node, node.op_type) for node in _nested(model.graph.node))
    nodes, size = _written_out(main, length, model.graph.ByteSize())
    if nodes > MOST_NODES or size > MOST_BYTES:
        raise BadTarget(
            f"with its functions written out in place of their calls this graph has {nodes} nodes and {size} bytes; "
            f"it is read up to {MOST_NODES} nodes and {MOST_BYTES} bytes. Functions that call each other again and "
            "again grow so: it is broken or made to be so, or is to be exported without functions"
        )


def _written_out(
    calls: Counter[tuple[str, str, str]], length: Mapping[tuple[str, str, str], tuple[int, int]], size: int
) -> tuple[int, int]:
    known = [(count, *length.get(name, (1, 0))) for name, count in calls.items()]
    return sum(count * nodes for count, nodes, _ in known), size + sum(
        count * more for count, _, more in known
    )


def _key(called: NodeProto | FunctionProto, name: str) -> tuple[str, str, str]:
    """What ties a call to its function; onnx before 1.16 knows no overloads."""
    return called.domain, name, getattr(called, "overload", "")


def _nested(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and those of the bodies in them."""
    for node in nodes:
        yield node
        for entry in node.attribute:
            for graph in (*([entry.g] if entry.HasField("g") else []), *entry.graphs):
                yield from _nested(graph.node)


def _refuse_circles(nodes: Sequence[NodeProto]) -> None:
    """Every walk through a graph relies on its end."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = [{makers[name] for name in (*node.input, *captured(node)) if name in makers} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, needed in enumerate(needs):
        for maker in needed:
            readers[maker].append(i)
    ready = [i for i, needed in enumerate(needs) if not needed]
    waiting = [len(needed) for needed in needs]
    for i in ready:
        for reader in readers[i]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    if len(ready) < len(nodes):
        stuck = next(node for i, node in enumerate(nodes) if waiting[i])
        raise BadTarget(
            f"the node {(stuck.name or stuck.output[0])!r} of this graph waits for itself, so it cannot be run"
        )


def captured(node: NodeProto) -> Iterator[str]:
    """Values that the bodies of a node may read from around it."""
    for entry in node.attribute:
        for graph in (*([entry.g] if entry.HasField("g") else []), *entry.graphs):
            for inner in graph.node:
                yield from inner.input
                yield from captured(inner)
            yield from (value.name for value in graph.output)


def sizes(model: ModelProto, given: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Sizes]:
    """Sizes of the main graph's values as far as the model, and inputs of ``given`` sizes, imply them."""
    import onnx

    skeleton = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = skeleton.graph
    graph.name = "shapes"
    graph.node.extend(model.graph.node)
    graph.input.extend(_of_size(value, (given or {}).get(value.name)) for value in model.graph.input)
    graph.output.extend(model.graph.output)
    declared = {value.name for value in graph.input}
    for tensor in model.graph.initializer:
        small = sum(1 for d in tensor.dims if d < 0) == 0 and _count(tensor) <= SMALL
        if small and tensor.data_location != onnx.TensorProto.EXTERNAL:
            graph.initializer.append(tensor)
        elif tensor.name not in declared:
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    except Exception:  # a broken graph, or operators of others: what it says itself remains
        inferred = model.graph
    return {
        value.name: tuple(d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim)
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
        if value.type.tensor_type.HasField("shape")
    }  # fmt: skip


def _of_size(value: ValueInfoProto, sizes: tuple[int, ...] | None) -> ValueInfoProto:
    import onnx

    if sizes is None:
        return value
    return onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, sizes)


def _count(tensor: TensorProto) -> int:
    count = 1
    for size in tensor.dims:
        count *= size
    return count
