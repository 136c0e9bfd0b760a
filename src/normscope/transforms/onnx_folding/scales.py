"""Nodes that compute a x + b for each feature: batch norms by stored statistics, and those left as Mul and Add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from normscope.doctor.folding.obstacles import Obstacle
from normscope.doctor.wording import number
from normscope.reading.graphs.constants import values_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import NodeProto

    from normscope.reading.graphs.graph import Graph
    from normscope.reading.graphs.norms import NodeNorm

    Features = NDArray[np.float64]

BATCH_NORM = "onnx.BatchNormalization"
WRITTEN = "onnx nodes (scale and shift)"
EPSILON = 1e-5
"""of the operator, where the node has none"""
FIRST_INPUTS_WITH_DEFAULTS = 4
"""format version from which an initializer that is also an input is a default, which a caller may replace"""


@dataclass(frozen=True, eq=False)
class Scale:
    """a x + b, one number each for every feature."""

    site: str
    type_name: str
    nodes: tuple[tuple[str, str], ...]
    """input and output of each node that would go, in order"""
    scale: Tensor
    shift: Tensor
    zero_variance: int = 0

    @property
    def input(self) -> str:
        return self.nodes[0][0]

    @property
    def output(self) -> str:
        return self.nodes[-1][1]


def batch_norm(norm: NodeNorm) -> Scale | Obstacle:
    """Of a batch norm in the main graph, in float64; or why it has none."""
    if not norm.reachable:
        return Obstacle("stands in the body of an If, Loop or Scan node, and only the main graph is folded")
    if norm.spec is None:
        return Obstacle(norm.reason)
    if norm.mode == "batch":
        return Obstacle("is in training mode: it normalizes by the batch, and has no fixed scale")
    if norm.type_name != BATCH_NORM:
        return Obstacle(
            "takes its statistics from its input, so it cannot go; its gain and bias stay with it in a graph"
        )
    node = norm.graph.producer(norm.output)
    assert node is not None
    given = dict(zip(("gain", "bias", "mean", "variance"), node.input[1:], strict=True))
    for what, name in given.items():
        if not norm.graph.is_constant(name):
            return Obstacle(f"its {what} is computed in the graph, not stored")
        if default := defaults(norm.graph, name):
            return Obstacle(_replaceable(what, default))
    gain, bias, mean, variance = (_exact(norm.graph, name) for name in given.values())
    eps = float(np.float32(values_of(node).get("epsilon", EPSILON)))  # as the runtime has it
    with np.errstate(all="ignore"):
        a = gain / np.sqrt(variance + eps)
        b = bias - a * mean
    bad = np.flatnonzero(~(np.isfinite(a) & np.isfinite(b)))
    if bad.size:
        at = int(bad[0])
        return Obstacle(
            f"its scale or shift is not finite in {bad.size} of {a.size} channels, the first of them {at} (gain "
            f"{number(float(gain[at]))}, bias {number(float(bias[at]))}, mean {number(float(mean[at]))}, variance "
            f"{number(float(variance[at]))})"
        )
    dead = int((variance == 0).sum())
    ends = ((norm.input, norm.output),)
    return Scale(norm.name, norm.type_name, ends, torch.from_numpy(a), torch.from_numpy(b), dead)


def constant_beside(graph: Graph, node: NodeProto) -> tuple[str, str] | None:
    """The value and the constant of a node that adds or multiplies a constant, and that alone; else None.

    x - c and x / c count, c - x and c / x do not.
    """
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or node.domain not in ("", "ai.onnx"):
        return None
    if len(node.input) != 2 or not all(node.input):
        return None
    stored = [graph.is_constant(name) for name in node.input]
    if stored == [False, True]:
        return node.input[0], node.input[1]
    if stored == [True, False] and node.op_type in ("Add", "Mul"):
        return node.input[1], node.input[0]
    return None


def per_feature(graph: Graph, name: str, axis: int, ndim: int | None, features: int) -> Features | None:
    """A constant beside a value of ``ndim`` axes as one number a feature; None where it varies along other axes, or
    gives the value more axes."""
    value = graph.constant(name)
    if value is None or value.dtype.kind != "f" or defaults(graph, name):
        return None
    if value.size == 1 and value.ndim <= (ndim or 1):
        return np.full(features, float(value.reshape(-1)[0]))
    if ndim is None or value.ndim > ndim or value.size != features:
        return None
    at = axis - (ndim - value.ndim)
    if at < 0 or value.shape[at] != features:
        return None
    return value.astype(np.float64).reshape(-1)


def composed(node: NodeProto, c: Features, a: Features, b: Features) -> tuple[Features, Features]:
    """Scale and shift of a x + b with the node behind it."""
    with np.errstate(all="ignore"):
        if node.op_type == "Add":
            return a, b + c
        if node.op_type == "Sub":
            return a, b - c
        return (a * c, b * c) if node.op_type == "Mul" else (a / c, b / c)


def defaults(graph: Graph, name: str) -> str:
    """An input with a default that a constant is made of, which a caller may replace; "" where there is none."""
    if graph.model.ir_version < FIRST_INPUTS_WITH_DEFAULTS:
        return ""
    open_to_callers = {value.name for value in graph.model.graph.input}
    waiting, seen = [name], set()
    while waiting:
        one = waiting.pop()
        if one in open_to_callers:
            return one
        node = graph.producer(one)
        if node is not None and one not in seen:
            waiting += [given for given in node.input if given]
        seen.add(one)
    return ""


def _replaceable(what: str, name: str) -> str:
    return f"its {what} comes from {name}, an input of the graph with a default, which a caller may replace"


def _exact(graph: Graph, name: str) -> Features:
    value = graph.constant(name)
    assert value is not None
    return value.astype(np.float64).reshape(-1)
