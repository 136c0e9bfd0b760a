"""The convolutions and matrix products of a graph, as linear maps whose weight and bias can be changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from normscope.doctor.folding.linear_map import LinearMap
from normscope.doctor.folding.obstacles import Obstacle
from normscope.reading.graphs.constants import values_of
from normscope.transforms.onnx_folding.scales import defaults

if TYPE_CHECKING:
    from onnx import NodeProto

    from normscope.reading.graphs.graph import Graph

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
REARRANGED = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose")
"""behind these a stored tensor is still itself"""
FLOATS = ("float16", "float32", "float64")
AUTOMATIC = (b"SAME_UPPER", b"SAME_LOWER")


@dataclass(frozen=True, eq=False)
class Layer:
    """One operator, and the addition behind it that is a matrix product's bias."""

    map: LinearMap
    node: str
    """the value that the operator makes"""
    output: str
    """the value that the layer makes: that of the addition, where there is one"""
    axis: int | None
    """of its features in ``output``; None where the rank decides and is unknown"""
    inputs: int
    outputs: int
    """features it reads and makes"""
    dtype: str
    """of its weight"""

    def load(self, graph: Graph, values: dict[str, Tensor]) -> None:
        """Weight and bias into ``values``, in float64, with the factors of a Gemm multiplied in."""
        operator, addition = graph.producer(self.node), graph.producer(self.output)
        assert operator is not None
        assert addition is not None
        gemm = values_of(operator) if operator.op_type == "Gemm" else {}
        values[self.map.weight] = _exact(graph, operator.input[1]) * gemm.get("alpha", 1.0)
        if self.map.has_bias:
            name = bias_of(graph, operator, addition)
            held = _exact(graph, name) * gemm.get("beta", 1.0)
            whole = (*held.shape[:-1], self.outputs)  # a bias may be one number for all
            values[self.map.bias] = held.broadcast_to(whole).clone()


def bias_of(graph: Graph, operator: NodeProto, addition: NodeProto) -> str:
    """Name of the bias, "" where there is none."""
    if operator.op_type == "MatMul":
        added = [] if addition is operator else [name for name in addition.input if graph.is_constant(name)]
        return added[0] if added else ""
    return operator.input[2] if len(operator.input) > 2 else ""


def told(node: NodeProto) -> str:
    """A node in a message."""
    return f"{node.name or next(iter(node.output), '')} ({node.op_type})"


def operator_behind(graph: Graph, value: str) -> NodeProto | None:
    """The linear operator that makes a value, directly or with the bias added behind it."""
    node = graph.producer(value)
    if node is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in LINEAR:
        return node
    if node.op_type == "Add" and len(node.input) == 2:
        for one, other in ((0, 1), (1, 0)):
            made = graph.producer(node.input[one])
            if made is not None and made.op_type == "MatMul" and _addition(graph, made) is node:
                return made if graph.is_constant(node.input[other]) else None
    return None


def layer(graph: Graph, node: NodeProto, *, clone_shared: bool) -> Layer | Obstacle:
    """A linear operator as a map, or why its weight or bias cannot be changed."""
    name, attributes = told(node), values_of(node)
    found = _stored(graph, "weight", name, node.input[1] if len(node.input) > 1 else "")
    if isinstance(found, Obstacle):
        return found
    addition = _addition(graph, node) if node.op_type == "MatMul" else node
    tail = addition if addition is not None else node
    bias = bias_of(graph, node, tail)
    if bias and isinstance(problem := _stored(graph, "bias", name, bias), Obstacle):
        return problem
    uses = _uses(graph, node.input[1])
    if uses > 1 and not clone_shared:
        return Obstacle(f"the weight of {name} is used {uses} times in the graph", (node.input[1],))
    conv = node.op_type in ("Conv", "ConvTranspose")
    if len(found) != 2 and not (conv and len(found) > 2):
        return Obstacle(f"the weight of {name}, {found}, is not one matrix")
    groups = int(attributes.get("group", 1))
    transposed = node.op_type != "Conv" and not attributes.get("transB", 0)
    first, second = found[:2]
    inputs, outputs = (first, second) if transposed else (second, first)
    if groups != 1:
        inputs, outputs = (first, second * groups) if transposed else (second * groups, first)
    ndim = graph.rank(node.output[0])
    return Layer(
        LinearMap(
            path=node.name or node.output[0],
            op=node.op_type,
            weight=f"{node.output[0]}/weight",
            bias=f"{node.output[0]}/bias",
            has_bias=bool(bias),
            features=outputs,
            transposed=transposed,
            padded=_padded(node),
        ),
        node=node.output[0],
        output=tail.output[0],
        axis=1 if node.op_type != "MatMul" else None if ndim is None else ndim - 1,
        inputs=inputs,
        outputs=outputs,
        dtype=_dtype(graph, node.input[1]),
    )


def _addition(graph: Graph, node: NodeProto) -> NodeProto | None:
    """The addition of one number a feature right behind a matrix product."""
    readers = graph.readers(node.output[0])
    if graph.consumers(node.output[0]) != 1 or not readers or readers[0].op_type != "Add":
        return None
    if readers[0].domain not in ("", "ai.onnx"):
        return None
    other = [name for name in readers[0].input if name != node.output[0]]
    size = graph.constant_shape(other[0]) if len(other) == 1 else None
    width = graph.constant_shape(node.input[1])
    ndim = graph.rank(node.output[0])
    if size is None or width is None or len(size) > (ndim or 1):
        return None
    flat = all(one == 1 for one in size[:-1]) and (not size or size[-1] in (1, width[-1]))
    return readers[0] if flat else None


def _stored(graph: Graph, what: str, name: str, value: str) -> tuple[int, ...] | Obstacle:
    """The shape of a stored weight or bias."""
    if not value or not graph.is_constant(value):
        maker = graph.maker(value)
        if maker is not None and maker.op_type == "DequantizeLinear":
            return Obstacle(f"the {what} of {name} is quantized: fold the graph before it is quantized")
        return Obstacle(f"the {what} of {name} is computed in the graph, not stored as a dense tensor")
    if default := defaults(graph, value):
        return Obstacle(
            f"the {what} of {name} comes from {default}, an input of the graph with a default, which a caller may "
            "replace"
        )
    if (dtype := _dtype(graph, value)) not in FLOATS:
        return Obstacle(f"the {what} of {name} is of type {dtype}; float16, float32 and float64 fold")
    shape = graph.constant_shape(value)
    assert shape is not None
    return shape


def _dtype(graph: Graph, name: str) -> str:
    """Of a constant, without reading what is stored."""
    import onnx

    if name in graph.stored:
        return str(onnx.helper.tensor_dtype_to_np_dtype(graph.stored[name].data_type))
    value = graph.constant(name)
    return "" if value is None else str(value.dtype)


def _uses(graph: Graph, name: str) -> int:
    """How often a stored tensor is read, as itself or rearranged."""
    while (node := graph.producer(name)) is not None and node.op_type in REARRANGED:
        name = node.input[0]
    return _reads(graph, name)


def _reads(graph: Graph, name: str) -> int:
    count = graph.outputs.count(name)
    for node in graph.readers(name):
        count += _reads(graph, node.output[0]) if node.op_type in REARRANGED else 1
    return count


def _padded(node: NodeProto) -> bool:
    attributes = values_of(node)
    if node.op_type == "ConvTranspose":
        return True  # between the elements, or at the border of its small input
    points = set(attributes.get("kernel_shape", ())) == {1}  # the same size needs no border
    automatic = attributes.get("auto_pad", b"NOTSET") in AUTOMATIC and not points
    return node.op_type == "Conv" and (automatic or any(attributes.get("pads", ())))


def _exact(graph: Graph, name: str) -> Tensor:
    value = graph.constant(name)
    assert value is not None
    return torch.from_numpy(np.array(value, np.float64, order="C"))
