"""Carrying a plan out on a copy of a graph: weights computed in float64 and rounded once, and the scales gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normscope.transforms.onnx_folding.editor import Editor
from normscope.transforms.onnx_folding.layers import Layer, bias_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

    from normscope.reading.graphs.graph import Graph
    from normscope.transforms.onnx_folding.plan import Step


class NotFinite(Exception):
    """A new weight that its type cannot hold."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(f"a weight of {layer.map.path} would not be finite in {layer.dtype}")
        self.layer = layer


def fold_into(graph: Graph, steps: Sequence[Step]) -> ModelProto:
    """A model in which the scales of ``steps`` are part of the layers beside them.

    Raises NotFinite.
    """
    layers = {layer.map.weight: layer for step in steps for layer in step.layers}
    values: dict[str, Tensor] = {}
    for layer in layers.values():
        layer.load(graph, values)
    for step in steps:
        for one in step.maps:
            if one.bias not in values and bool(step.shift.any()):
                values[one.bias] = torch.zeros(one.features, dtype=torch.float64)
            if step.where == "before":
                one.scale_outputs(values, step.scale, step.shift)
            else:
                one.scale_inputs(values, step.scale, step.shift)
    editor = Editor(graph.model)
    for step in steps:
        for ends in step.found.nodes:
            (editor.take_out if step.where == "before" else editor.bypass)(*ends)
    for layer in layers.values():
        _write(editor, graph, layer, values)
    return editor.done()


def moved(graph: Graph, steps: Sequence[Step]) -> ModelProto:
    """A model in which every number that ``steps`` would touch is moved to the next one above or below, at random.

    It differs from the original by what one rounding of these numbers does.
    """
    generator = np.random.default_rng(0)
    editor = Editor(graph.model)
    names = [layer.node for step in steps for layer in step.layers]
    names += [output for step in steps for _, output in step.found.nodes]
    names += [layer.output for step in steps for layer in step.layers]
    for name in dict.fromkeys(names):
        node = editor.node(name)
        for at, given in enumerate(node.input):
            value = graph.constant(given) if given and graph.is_constant(given) else None
            if value is not None and value.dtype.kind == "f":
                up = generator.integers(2, size=value.shape, dtype=np.int8)
                toward = np.where(up, np.inf, -np.inf).astype(value.dtype)
                editor.store(node, at, np.asarray(np.nextafter(value, toward)), f"{given}_moved")
    return editor.done()


def _write(editor: Editor, graph: Graph, layer: Layer, values: dict[str, Tensor]) -> None:
    operator, addition = graph.producer(layer.node), graph.producer(layer.output)
    assert operator is not None
    assert addition is not None
    node = editor.node(layer.node)
    weight = _rounded(layer, values[layer.map.weight])
    editor.store(node, 1, weight, f"{operator.input[1]}_folded")
    if operator.op_type == "Gemm":
        _forget(node, ("alpha", "beta"))
    if layer.map.bias not in values:
        return
    bias = _rounded(layer, values[layer.map.bias])
    name = bias_of(graph, operator, addition)
    new = f"{name}_folded" if name else f"{layer.map.path}_bias"
    if operator.op_type != "MatMul":
        editor.store(node, 2, bias, new)
    elif name:
        last = editor.node(layer.output)
        editor.store(last, list(last.input).index(name), bias, new)
    else:
        editor.add_behind(node, bias, new)


def _rounded(layer: Layer, value: Tensor) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        array: NDArray[Any] = value.numpy().astype(layer.dtype)
    if not np.isfinite(array).all():
        raise NotFinite(layer)
    return array


def _forget(node: NodeProto, names: Sequence[str]) -> None:
    for i in range(len(node.attribute) - 1, -1, -1):
        if node.attribute[i].name in names:
            del node.attribute[i]
