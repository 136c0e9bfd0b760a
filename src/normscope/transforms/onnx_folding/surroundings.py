"""The linear maps beside a scale of a graph, or why it cannot be folded into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.doctor.folding.obstacles import Obstacle
from normscope.doctor.wording import listed, number
from normscope.reading.graphs.constants import values_of
from normscope.transforms.onnx_folding.layers import LINEAR, Layer, layer, operator_behind, told
from normscope.transforms.onnx_folding.scales import constant_beside, per_feature

if TYPE_CHECKING:
    from onnx import NodeProto

    from normscope.reading.graphs.graph import Graph
    from normscope.transforms.onnx_folding.scales import Features

QUANTIZED = (
    "QuantizeLinear",
    "DequantizeLinear",
    "QLinearConv",
    "QLinearMatMul",
    "ConvInteger",
    "MatMulInteger",
)
KEEPING = ("reflect", "edge", "wrap")
"""modes of Pad that fill in values of the image, which keep a scale and a shift"""


@dataclass(frozen=True, eq=False)
class Behind:
    """The layer that makes a scale's input."""

    layer: Layer
    axis: int
    """of the layer's features in the scale's input"""
    offset: Features
    """what is added on the way"""
    additions: tuple[tuple[str, str], ...]
    """input and output of the nodes that add it, in order"""


class Surroundings:
    """What stands beside the scales of one graph, while some of them are planned to go."""

    def __init__(self, graph: Graph, *, clone_shared: bool) -> None:
        self._graph = graph
        self._clone_shared = clone_shared
        self._taken: dict[str, tuple[Layer, int]] = {}
        self._layers: dict[str, Layer | Obstacle] = {}

    def take(self, output: str, behind: Behind) -> None:
        """A scale goes into the layer behind it, which from now on makes the scale's output."""
        self._taken[output] = (behind.layer, behind.axis)

    def behind(self, value: str) -> Behind | Obstacle:
        """The one layer that makes ``value``, with nothing on the way but what keeps its features."""
        passed: list[NodeProto] = []
        while True:
            node = self._graph.producer(value)
            if node is None:
                return Obstacle("its input is an input of the graph, and no layer makes it")
            if found := self._readers(node, value):
                return found
            if value in self._taken:
                made, axis = self._taken[value]
                return self._way(made, axis, passed[::-1])
            operator = operator_behind(self._graph, value)
            if operator is not None:
                found_layer = self._layer(operator)
                if isinstance(found_layer, Obstacle):
                    return found_layer
                if found_layer.axis is None:
                    return Obstacle(f"the number of axes that {told(operator)} makes is unknown")
                return self._way(found_layer, found_layer.axis, passed[::-1])
            beside = constant_beside(self._graph, node)
            if node.op_type in ("Add", "Sub") and beside is not None:
                passed.append(node)
                value = beside[0]
            elif self._keeps(node):
                passed.append(node)
                value = node.input[0]
            elif node.op_type in QUANTIZED:
                return Obstacle(
                    f"{told(node)} makes its input: the graph is quantized there, fold it before that"
                )
            else:
                return Obstacle(f"{told(node)} makes its input, which is no linear layer or convolution")

    def ahead(self, value: str, axis: int, shift: float, features: int) -> tuple[Layer, ...] | Obstacle:
        """All the layers that read ``value``, where nothing else does; ``shift``: the largest that it would miss."""
        if value in self._graph.outputs:
            return Obstacle("the graph returns its output")
        found: list[Layer] = []
        for node in self._graph.readers(value):
            if value not in node.input:
                return Obstacle(f"the body of {told(node)} reads its output")
            if node.op_type in LINEAR and node.domain in ("", "ai.onnx"):
                made = self._reading(node, value, axis, shift, features)
            elif self._keeps(node) or self._pads(node, axis):
                axis_behind = _moved(node, axis)
                made = self.ahead(node.output[0], axis_behind, shift, features)
            else:
                made = Obstacle(f"{told(node)} reads its output, which is no linear layer or convolution")
            if isinstance(made, Obstacle):
                return made
            found += made
        return tuple(found) or Obstacle("nothing reads its output")

    def _reading(
        self, node: NodeProto, value: str, axis: int, shift: float, features: int
    ) -> tuple[Layer, ...] | Obstacle:
        made = self._layer(node) if list(node.input).index(value) == 0 else None
        if made is None:
            return Obstacle(f"{told(node)} reads its output as a weight")
        if isinstance(made, Obstacle):
            return made
        ndim = self._graph.rank(value)
        wanted = 1 if node.op_type != "MatMul" else None if ndim is None else ndim - 1
        if wanted != axis or values_of(node).get("transA", 0) or made.inputs != features:
            return Obstacle(f"its channels are not the features that {told(node)} reads")
        if made.map.padded and shift:
            where = (
                "between the elements and at the border"
                if node.op_type == "ConvTranspose"
                else "at the border"
            )
            return Obstacle(
                f"{told(node)} fills in zeros {where}, where the norm's shift of up to {number(shift)} would be "
                "missing, and no bias makes up for that"
            )
        return (made,)

    def _readers(self, node: NodeProto, value: str) -> Obstacle | None:
        """Who else wants the value as it is."""
        others = self._graph.consumers(value)
        if others == 1 and value not in self._graph.outputs:
            return None
        if value in self._graph.outputs:
            return Obstacle(f"the graph returns the output of {told(node)} as it is")
        readers = listed([told(reader) for reader in self._graph.readers(value)])
        return Obstacle(
            f"the output of {told(node)} has {others} readers ({readers}), and the others want it as it is"
        )

    def _way(self, made: Layer, axis: int, passed: list[NodeProto]) -> Behind | Obstacle:
        """From the layer to the scale: where its features come to lie, and what is added to them."""
        offset = np.zeros(made.outputs)
        additions = []
        for node in passed:
            if node.op_type not in ("Add", "Sub"):
                axis = _moved(node, axis)
                continue
            beside = constant_beside(self._graph, node)
            assert beside is not None
            value, constant = beside
            c = per_feature(self._graph, constant, axis, self._graph.rank(value), made.outputs)
            if c is None:
                return Obstacle(f"{told(node)} stands between {made.map.path} ({made.map.op}) and it")
            offset = offset + c if node.op_type == "Add" else offset - c
            additions.append((value, node.output[0]))
        return Behind(made, axis, offset, tuple(additions))

    def _layer(self, node: NodeProto) -> Layer | Obstacle:
        key = node.output[0]
        if key not in self._layers:
            self._layers[key] = layer(self._graph, node, clone_shared=self._clone_shared)
        return self._layers[key]

    def _keeps(self, node: NodeProto) -> bool:
        """It hands on what it reads, at most with its axes in another order."""
        if node.domain not in ("", "ai.onnx"):
            return False
        if node.op_type == "Dropout":
            training = node.input[2] if len(node.input) > 2 else ""
            trains = bool(training) and self._graph.scalar(training) != 0
            return not trains and all(not self._graph.consumers(name) for name in node.output[1:] if name)
        return node.op_type == "Identity" or (node.op_type == "Transpose" and "perm" in values_of(node))

    def _pads(self, node: NodeProto, axis: int) -> bool:
        """It fills in values of the image, and leaves the features alone."""
        attributes: dict[str, Any] = values_of(node)
        if node.op_type != "Pad" or attributes.get("mode", b"constant").decode() not in KEEPING:
            return False
        pads = attributes.get("pads")
        if pads is None and len(node.input) == 2:
            constant = self._graph.constant(node.input[1])
            pads = None if constant is None else constant.reshape(-1).tolist()
        if pads is None or len(pads) % 2 or axis >= len(pads) // 2:
            return False
        return not pads[axis] and not pads[axis + len(pads) // 2]


def _moved(node: NodeProto, axis: int) -> int:
    """Where an axis lies behind a node."""
    return list(values_of(node)["perm"]).index(axis) if node.op_type == "Transpose" else axis
