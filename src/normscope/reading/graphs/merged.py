"""Batch norms that exporters write as multiplication and addition by stored statistics.

    merged     y = x * a + (beta - mean * a),   a = gamma / sqrt(var + eps)
    in steps   y = (x - mean) * a + beta,       or (x - mean) / sqrt(var + eps) * gamma + beta

TensorFlow's ``batch_normalization`` computes the first, and tf2onnx writes it down as it stands. The search begins at a
square root of a constant plus eps. Where the constants were multiplied out there is none: what is left is one scale and
one shift, of which nothing tells that it was a norm, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from normscope.reading.graphs.graph import Graph
from normscope.reading.onnx_nodes import shortest_float32
from normscope.spec import NormSpec, families

if TYPE_CHECKING:
    from onnx import NodeProto

VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast", "Expand")


@dataclass(frozen=True)
class Merged:
    """A batch norm made of several nodes; the parameters are names of constants."""

    spec: NormSpec
    input: str
    output: str
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Factor:
    """A constant that is gamma / sqrt(var + eps), or that root where ``divides``."""

    value: str
    var: str
    eps: float
    gamma: str = ""
    divides: bool = False


def merged_norm(graph: Graph, node: NodeProto) -> Merged | None:
    """The batch norm whose stored variance this node takes the root of, None where it is none.

    ``node``: a Sqrt, or a Pow by 0.5 or -0.5.
    """
    if node.op_type == "ReduceL2" or not graph.is_constant(node.input[0]):
        return None
    exponent = graph.scalar(node.input[1]) if node.op_type == "Pow" else 0.5
    under = graph.maker(node.input[0])
    if exponent not in (0.5, -0.5) or under is None or under.op_type != "Add":
        return None
    for var, number in (under.input, under.input[::-1]):
        eps = graph.scalar(number)
        if eps is not None and 0 < eps < 1 and graph.is_constant(var):
            root = _Factor(node.output[0], var, shortest_float32(eps), divides=exponent == 0.5)
            return next(filter(None, (_applied(graph, factor) for factor in _factors(graph, root))), None)
    return None


def _factors(graph: Graph, factor: _Factor) -> Iterator[_Factor]:
    """The factor and what constants make of it: its reciprocal, with a gain, in another shape."""
    yield factor
    for node in graph.readers(factor.value):
        made = node.output[0]
        if not graph.is_constant(made):
            continue
        if node.op_type in VIEWS:
            yield from _factors(graph, replace(factor, value=made))
        elif factor.divides and node.op_type == "Reciprocal":
            yield from _factors(graph, replace(factor, value=made, divides=False))
        elif factor.divides and node.op_type == "Div" and node.input[1] == factor.value:
            gamma = "" if graph.scalar(node.input[0]) == 1 else node.input[0]
            yield from _factors(graph, replace(factor, value=made, divides=False, gamma=gamma))
        elif not factor.divides and not factor.gamma and node.op_type == "Mul":
            yield from _factors(graph, replace(factor, value=made, gamma=_other(node, factor.value)))


def _applied(graph: Graph, factor: _Factor) -> Merged | None:
    """The norm that multiplies (divides) something of the graph's inputs by the factor."""
    for node in graph.readers(factor.value):
        if node.op_type != ("Div" if factor.divides else "Mul"):
            continue
        x = _other(node, factor.value)
        if graph.is_constant(x) or (factor.divides and node.input[1] != factor.value):
            continue
        found = _in_steps(graph, factor, x, node.output[0]) or _shifted(graph, factor, x, node.output[0])
        if found is not None:
            return found
    return None


def _in_steps(graph: Graph, factor: _Factor, x: str, y: str) -> Merged | None:
    centered = graph.maker(x)
    if centered is None or centered.op_type != "Sub" or not graph.is_constant(centered.input[1]):
        return None
    if not factor.gamma and (scaled := _next(graph, y, "Mul")) is not None:
        factor, y = replace(factor, gamma=scaled[0]), scaled[1]
    beta, y = _next(graph, y, "Add") or ("", y)
    return _norm(graph, factor, centered.input[0], y, centered.input[1], beta)


def _shifted(graph: Graph, factor: _Factor, x: str, y: str) -> Merged | None:
    if factor.divides:
        return None
    shift = _next(graph, y, "Add")
    if shift is not None:
        made = graph.producer(_plain(graph, shift[0]))
        if made is None or made.op_type != "Sub":
            return None
        mean = _scaled_mean(graph, factor, made.input[1])
        return None if mean is None else _norm(graph, factor, x, shift[1], mean, made.input[0])
    taken = _next(graph, y, "Sub")
    mean = None if taken is None else _scaled_mean(graph, factor, taken[0])
    if taken is None or mean is None:
        return None
    beta, y = _next(graph, taken[1], "Add") or ("", taken[1])
    return _norm(graph, factor, x, y, mean, beta)


def _scaled_mean(graph: Graph, factor: _Factor, value: str) -> str | None:
    """The mean of mean * a."""
    made = graph.producer(_plain(graph, value))
    if made is None or made.op_type != "Mul":
        return None
    of_factor = [_plain(graph, name) == _plain(graph, factor.value) for name in made.input]
    return made.input[of_factor.index(False)] if sorted(of_factor) == [False, True] else None


def _norm(graph: Graph, factor: _Factor, x: str, y: str, mean: str, beta: str) -> Merged | None:
    """None where the statistics do not lie on one axis, first behind the samples or last."""
    ndim = graph.rank(x) or graph.rank(y)
    on = _axis(graph, factor.value, ndim)
    size = _count(graph, factor.var)
    names = {"running_mean": mean, "running_var": factor.var, "weight": factor.gamma, "bias": beta}
    given = {name: value for name, value in names.items() if value}
    if on is None or any(_count(graph, value) != size for value in given.values()):
        return None
    layout = "b c ..." if on == 1 else "b ... c"
    spec = families.batch_norm(
        eps=factor.eps, momentum=0.0, weight=bool(factor.gamma), bias=bool(beta), layout=layout
    )
    return Merged(spec, x, y, given)


def _axis(graph: Graph, value: str, ndim: int | None) -> int | None:
    """1 or -1: the input axis that a constant of one number a channel lives on."""
    sizes = graph.constant_shape(value)
    where = [i - len(sizes) for i, size in enumerate(sizes) if size != 1] if sizes else []
    if len(where) != 1:
        return None
    if where[0] == -1:
        return 1 if ndim == 2 else -1
    return 1 if ndim is not None and where[0] == 1 - ndim else None


def _count(graph: Graph, value: str) -> int:
    count = 1
    for size in graph.constant_shape(value) or ():
        count *= size
    return count


def _plain(graph: Graph, value: str) -> str:
    """The constant behind views."""
    while (node := graph.producer(value)) is not None and node.op_type in VIEWS:
        value = node.input[0]
    return value


def _next(graph: Graph, value: str, operator: str) -> tuple[str, str] | None:
    """The constant that alone is added to (taken from, multiplied with) a value, and the result."""
    readers = graph.readers(value)
    if graph.consumers(value) != 1 or not readers or readers[0].op_type != operator:
        return None
    node = readers[0]
    other = _other(node, value)
    if operator == "Sub" and node.input[0] != value:
        return None
    return (other, node.output[0]) if graph.is_constant(other) else None


def _other(node: NodeProto, value: str) -> str:
    return str(node.input[1] if node.input[0] == value else node.input[0])
