"""A copy of an ONNX model in which nodes are taken out and stored tensors replaced; everything else stays as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from normscope.reading.graphs.graph import captured
from normscope.transforms.onnx_folding.scales import FIRST_INPUTS_WITH_DEFAULTS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto


class Editor:
    """Nodes are asked for by the value they made in the original."""

    def __init__(self, original: ModelProto) -> None:
        import onnx

        self.model = onnx.ModelProto()
        self.model.CopyFrom(original)
        self._graph = self.model.graph
        self._nodes: list[NodeProto] = list(self._graph.node)
        self._by_output = {name: node for node in self._nodes for name in node.output if name}
        self._makers = dict(self._by_output)
        """current name of a value -> node"""
        self._dropped: list[str] = []
        self._vanished: set[str] = set()
        self._stored = {tensor.name: tensor for tensor in self._graph.initializer}
        self._names = _all_names(self._graph)
        self._reads = Counter(value.name for value in self._graph.output)
        for node in self._nodes:
            self._reads.update(_reads(node))

    def node(self, made: str) -> NodeProto:
        return self._by_output[made]

    def take_out(self, value: str, made: str) -> None:
        """The node that makes ``made`` of ``value`` goes, and what makes ``value`` makes ``made`` in its place."""
        node, maker = self._by_output[made], self._makers.pop(value)
        maker.output[list(maker.output).index(value)] = made
        self._makers[made] = maker
        self._vanished.add(value)
        self._remove(node, value)

    def bypass(self, value: str, made: str) -> None:
        """The node that makes ``made`` of ``value`` goes, and what reads ``made`` reads ``value`` in its place."""
        node = self._makers.pop(made)
        for reader in self._nodes:
            for i, name in enumerate(reader.input):
                if name == made:
                    reader.input[i] = value
                    self._reads[value] += 1
        self._vanished.add(made)
        self._remove(node, value)

    def _remove(self, node: NodeProto, value: str) -> None:
        self._nodes = [other for other in self._nodes if other is not node]
        self._reads.subtract(_reads(node))
        self._dropped += [name for name in node.input if name and name != value]

    def store(self, node: NodeProto, at: int, array: NDArray[Any], name: str) -> None:
        """A stored tensor as an input of a node: under the name of what stood there, where nothing else reads that."""
        import onnx

        old = node.input[at] if at < len(node.input) else ""
        tensor = onnx.numpy_helper.from_array(array)
        held = self._stored.get(old)
        if held is not None and self._reads[old] == 1 and held.dims == tensor.dims:
            tensor.name, tensor.doc_string = old, held.doc_string
            held.CopyFrom(tensor)
            return
        tensor.name = self._fresh(name)
        self._graph.initializer.append(tensor)
        if self.model.ir_version < FIRST_INPUTS_WITH_DEFAULTS:  # which wants them among the inputs too
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            self._graph.input.append(value)
        node.input.extend([""] * (at + 1 - len(node.input)))
        node.input[at] = tensor.name
        self._reads.update([tensor.name])
        self._reads.subtract([old])
        self._dropped += [old] if old else []

    def add_behind(self, node: NodeProto, array: NDArray[Any], name: str) -> None:
        """An addition of a stored tensor behind a node, which takes over the name of its value."""
        import onnx

        made, inner = node.output[0], self._fresh(f"{node.output[0]}_product")
        node.output[0] = inner
        self._makers[inner] = node
        addition = onnx.helper.make_node(
            "Add", [inner, ""], [made], name=self._fresh(f"{node.name or made}_bias")
        )
        self._reads.update(addition.input)
        self._makers[made] = addition
        at = next(i for i, other in enumerate(self._nodes) if other is node)
        self._nodes.insert(at + 1, addition)
        self.store(addition, 1, array, name)

    def done(self) -> ModelProto:
        """The model, without what is no longer read because of the changes."""
        self._sweep()
        del self._graph.node[:]
        self._graph.node.extend(self._nodes)
        for entries in (self._graph.value_info, self._graph.input):
            _drop(entries, self._vanished, "name")
        _drop(self._graph.quantization_annotation, self._vanished, "tensor_name")
        return self.model

    def _sweep(self) -> None:
        while self._dropped:
            name = self._dropped.pop()
            if self._reads[name] > 0 or name in self._vanished:
                continue
            node = self._makers.get(name)
            if node is None:
                self._vanished |= {name} & set(self._stored)  # an input that is not stored stays one
            elif not any(self._reads[made] > 0 for made in node.output if made):
                self._vanished |= {made for made in node.output if made}
                self._remove(node, "")
        _drop(self._graph.initializer, self._vanished, "name")

    def _fresh(self, name: str) -> str:
        found, again = name, 1
        while found in self._names:
            again += 1
            found = f"{name}_{again}"
        self._names.add(found)
        return found


def _reads(node: NodeProto) -> Iterator[str]:
    yield from node.input
    yield from captured(node)


def _drop(entries: Any, names: set[str], key: str) -> None:
    for i in range(len(entries) - 1, -1, -1):
        if getattr(entries[i], key) in names:
            del entries[i]


def _all_names(graph: Any) -> set[str]:
    """Of values and nodes, also those inside bodies, which a new name must not hide."""
    found = {entry.name for entry in (*graph.input, *graph.initializer, *graph.value_info)}
    for node in graph.node:
        found |= {node.name, *node.input, *node.output}
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                found |= _all_names(body)
    return found
