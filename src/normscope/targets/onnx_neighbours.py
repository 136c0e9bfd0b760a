"""What feeds a normalization of an ONNX graph, and what it feeds, through views and elementwise nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from normscope.doctor.site import Neighbour
from normscope.reading.graphs.constants import values_of

if TYPE_CHECKING:
    from onnx import NodeProto

    from normscope.reading.graphs.graph import Graph
    from normscope.reading.graphs.norms import NodeNorm

VIEWS = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand")
ELEMENTWISE = (
    "Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Clip",
    "Softplus", "Softsign", "Mish", "Swish", "ThresholdedRelu", "Erf", "Exp", "Log", "Abs", "Neg", "Sqrt",
    "Reciprocal", "Pow", "Mul", "Div", "Sub", "Dropout",
)  # fmt: skip
KINDS = {
    "Conv": "conv",
    "ConvTranspose": "conv",
    "Gemm": "linear",
    "MatMul": "linear",
    "Concat": "concat",
    "Sum": "add",
    "Attention": "attention",
    "MultiHeadAttention": "attention",
}
LAYERS = ("conv", "linear")


class Neighbours:
    """Neighbours in one graph.

    ``norms``: every normalization of the graph, by which a neighbour that is one is known.
    """

    def __init__(self, graph: Graph, norms: list[NodeNorm]) -> None:
        self._graph = graph
        self._made_by: Mapping[str, str] = {norm.output: norm.name for norm in norms}
        self._read_by: dict[str, list[str]] = {}
        for norm in norms:
            self._read_by.setdefault(norm.input, []).append(norm.name)

    def fed_by(self, norm: NodeNorm) -> tuple[Neighbour, ...]:
        return tuple(self._above(norm.input, (), True, set()))

    def feeds(self, norm: NodeNorm) -> tuple[Neighbour, ...]:
        return tuple(self._below(norm.output, (), True, set()))

    def below(self, value: str) -> tuple[Neighbour, ...]:
        """What reads any value, as `feeds` says of a norm's output."""
        return tuple(self._below(value, (), True, set()))

    def normalizes(self, value: str) -> bool:
        """Whether it is the input of a norm."""
        return value in self._read_by

    def _above(self, value: str, through: tuple[str, ...], same: bool, seen: set[str]) -> Iterator[Neighbour]:
        """``same``: no view on the way has moved the axes."""
        if value in seen:
            return
        seen.add(value)
        node = self._graph.producer(value)
        if value in self._made_by:
            yield Neighbour(
                "norm", "norm", "", through=through, site=self._made_by[value], consumers=self.uses(value)
            )
        elif node is None:
            if value in self._graph.inputs:
                yield Neighbour("input", "input", "", through=through)
        elif (biased := self._biased(node)) is not None:
            yield self._layer(biased, node, through, same)
        elif self.transparent(node):
            step = () if node.op_type in VIEWS else (node.op_type.lower(),)
            for name in self._data(node):
                moved = node.op_type in VIEWS and node.op_type not in ("Identity", "Cast")
                yield from self._above(name, (*through, *step), same and not moved, seen)
        else:
            yield self._layer(node, node, through, same)

    def _below(self, value: str, through: tuple[str, ...], same: bool, seen: set[str]) -> Iterator[Neighbour]:
        if value in self._graph.outputs:
            yield Neighbour("output", "output", "", through=through)
        for name in self._read_by.get(value, ()):
            yield Neighbour("norm", "norm", "", through=through, site=name)
        if value in self._read_by:
            return
        for node in self._graph.readers(value):
            made = node.output[0] if node.output else ""
            if made in seen:
                continue
            seen.add(made)
            if self.transparent(node):
                step = () if node.op_type in VIEWS else (node.op_type.lower(),)
                moved = node.op_type in VIEWS and node.op_type not in ("Identity", "Cast")
                yield from self._below(made, (*through, *step), same and not moved, seen)
            else:
                yield self._layer(node, node, through, same)

    def transparent(self, node: NodeProto) -> bool:
        if node.op_type == "Add":
            return len(self._data(node)) == 1
        return node.op_type in VIEWS or node.op_type in ELEMENTWISE

    def _data(self, node: NodeProto) -> list[str]:
        """The inputs that depend on the graph's."""
        found = dict.fromkeys(name for name in node.input if name and not self._graph.is_constant(name))
        return list(found)[:1] if node.op_type in VIEWS else list(found)

    def _biased(self, node: NodeProto) -> NodeProto | None:
        """The matrix product whose bias this addition is."""
        if node.op_type != "Add" or len(self._data(node)) != 1:
            return None
        (product,) = self._data(node)
        made = self._graph.producer(product)
        alone = made is not None and made.op_type == "MatMul" and self._graph.consumers(product) == 1
        return made if alone else None

    def _layer(self, node: NodeProto, last: NodeProto, through: tuple[str, ...], same: bool) -> Neighbour:
        """``last``: the node that makes the layer's output, the addition of its bias where that is a node."""
        kind = self.kind(node)
        weight = next((name for name in node.input[1:2] if self._graph.is_constant(name)), "")
        return Neighbour(
            kind=kind,
            op=node.op_type,
            path=node.name or node.output[0],
            through=through,
            feature_axis=self._feature_axis(node, kind) if same else None,
            consumers=sum(self.uses(name) for name in last.output if name),
            transposed=node.op_type in ("ConvTranspose", "MatMul")
            or (node.op_type == "Gemm" and not values_of(node).get("transB", 0)),
            weight_uses=self.uses(weight) if weight else 0,
            padded=_padded(node),
            rewritable=kind in LAYERS and bool(weight),
        )

    def kind(self, node: NodeProto) -> str:
        """As in `Neighbour.kind`."""
        if node.op_type in ("Add", "Sum"):
            return "add"
        if node.op_type == "Gather" and self._graph.is_constant(node.input[0]):
            return "embedding"
        if node.op_type == "MatMul" and not any(self._graph.is_constant(name) for name in node.input):
            return "other"
        return KINDS.get(node.op_type) or ("pool" if "Pool" in node.op_type else "other")

    def _feature_axis(self, node: NodeProto, kind: str) -> int | None:
        if kind == "conv" or node.op_type == "Gemm":
            return 1
        ndim = self._graph.rank(node.output[0])
        return ndim - 1 if kind == "linear" and ndim is not None else None

    def uses(self, value: str) -> int:
        """How often a value is read, as itself or as a view of it."""
        count = self._graph.outputs.count(value)
        for node in self._graph.readers(value):
            count += self.uses(node.output[0]) if node.op_type in ("Identity", "Cast") else 1
        return count


def _padded(node: NodeProto) -> bool:
    values = values_of(node)
    if node.op_type == "ConvTranspose":
        return True  # between the elements, or at the border of its small input
    automatic = values.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER")
    return node.op_type == "Conv" and (automatic or any(values.get("pads", ())))
