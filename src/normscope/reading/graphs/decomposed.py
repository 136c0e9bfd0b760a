"""Normalizations that exporters write as many small nodes: y = (x - mean) / sqrt(mean((x - mean)^2) + eps) and its kin.

The search starts at the root of a mean of squares and looks both ways: up to what is squared, down to what is divided
by the root, and on to a gain and a bias. What does not fit exactly is left alone: a square root is not yet a norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from normscope.reading.graphs.affine import Gain, affine_after, gain_before, names_of
from normscope.reading.graphs.constants import values_of
from normscope.reading.graphs.graph import Graph
from normscope.reading.onnx_nodes import STASH, shortest_float32
from normscope.spec import Cast, NormSpec

if TYPE_CHECKING:
    from onnx import NodeProto

ROOTS = ("Sqrt", "Pow", "ReduceL2")
WHOLE = 1e-4
"""how far n / (n - 1), written in float32, may be off"""


@dataclass(frozen=True)
class Written:
    """A normalization made of several nodes; ``weight`` and ``bias`` are names of constants of the graph."""

    spec: NormSpec
    input: str
    output: str
    weight: str = ""
    bias: str = ""


@dataclass(frozen=True)
class _Root:
    """sqrt(factor * reduce(square of ``squared``) + eps), or what stands in its place."""

    squared: str
    axes: tuple[int, ...]
    mean: bool
    factor: float
    eps: float
    eps_at: str
    value: str
    inverse: bool
    """``value`` is one over the root"""


def written_norm(graph: Graph, node: NodeProto) -> Written | None:
    """The normalization that this node is the root of, None where it is none.

    ``node``: a Sqrt, a Pow by 0.5 or -0.5, or a ReduceL2.
    """
    root = _root(graph, node)
    if root is None:
        return None
    x = _centered(graph, root.squared, root.axes)
    center = x is not None
    x = root.squared if x is None else x
    divided = _divided(graph, root, x)
    if divided is None:
        return None
    root, number, output = divided
    ndim = next((r for r in (graph.rank(x), graph.rank(graph.origin(x)), graph.rank(output)) if r), None)
    gain, number = gain_before(graph, number, ndim, root.axes)
    by_mean = _centered(graph, number, root.axes)
    if by_mean is None and graph.origin(number) != graph.origin(x):
        return None
    scale, correction = _scale(graph, root, x, center)
    if scale is None or (scale != "std" and by_mean is not None) or (scale == "std" and by_mean is None):
        return None
    return _with_affine(graph, root, scale, correction, ndim, graph.origin(x), output, gain)


def _root(graph: Graph, node: NodeProto) -> _Root | None:
    inverse = False
    if node.op_type == "ReduceL2":
        axes = _axes(graph, node)
        return (
            None
            if axes is None
            else _Root(node.input[0], axes, False, 1.0, 0.0, "variance", node.output[0], False)
        )
    if node.op_type == "Pow":
        exponent = graph.scalar(node.input[1])
        if exponent not in (0.5, -0.5):
            return None
        inverse = exponent == -0.5
    value, eps, eps_at = node.input[0], 0.0, "variance"
    if (found := _with_number(graph, value, ("Add",))) is not None:
        value, eps = found
    elif (found := _with_number(graph, value, ("Max", "Clip"))) is not None:
        (value, eps), eps_at = found, "max_variance"
    factor = 1.0
    while (scaled := _scaled(graph, value)) is not None:
        value, number = scaled
        factor *= number
    reduced = graph.maker(value)
    if reduced is None or reduced.op_type not in ("ReduceMean", "ReduceSum", "ReduceSumSquare"):
        return None
    axes, squared = _axes(graph, reduced), reduced.input[0]
    if reduced.op_type != "ReduceSumSquare":
        found_square = _square_of(graph, squared)
        if found_square is None:
            return None
        squared = found_square
    if axes is None:
        return None
    mean = reduced.op_type == "ReduceMean"
    return _Root(squared, axes, mean, factor, eps, eps_at, node.output[0], inverse)


def _axes(graph: Graph, node: NodeProto) -> tuple[int, ...] | None:
    """The axes a reduction runs over, counted from the end where the rank is known; None where it is unknown or they
    are dropped."""
    values = values_of(node)
    if values.get("keepdims", 1) != 1:
        return None
    axes = values.get("axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        constant = graph.constant(node.input[1])
        axes = None if constant is None else constant.reshape(-1).tolist()
    if not axes:
        return None
    ndim = graph.rank(node.input[0])
    if ndim is None:
        return tuple(sorted(axes)) if all(axis < 0 for axis in axes) else None
    if not all(-ndim <= axis < ndim for axis in axes):
        return None
    return tuple(sorted(axis % ndim - ndim for axis in axes))


def _with_number(graph: Graph, value: str, operators: Sequence[str]) -> tuple[str, float] | None:
    """x and c of x + c, max(x, c) or clip(x, c)."""
    node = graph.maker(value)
    if node is None or node.op_type not in operators:
        return None
    if node.op_type == "Clip":
        low = values_of(node).get("min") if len(node.input) < 2 else graph.scalar(node.input[1])
        unbounded = "max" not in values_of(node) and not any(node.input[2:])
        return (node.input[0], float(low)) if low is not None and unbounded else None
    for one, other in ((0, 1), (1, 0)):
        if len(node.input) == 2 and (number := graph.scalar(node.input[other])) is not None:
            return node.input[one], number
    return None


def _scaled(graph: Graph, value: str) -> tuple[str, float] | None:
    """x and c of x * c or x / c."""
    node = graph.maker(value)
    if node is None or node.op_type not in ("Mul", "Div"):
        return None
    if node.op_type == "Div":
        number = graph.scalar(node.input[1])
        return None if not number else (node.input[0], 1 / number)
    return _with_number(graph, value, ("Mul",))


def _dtype(graph: Graph, value: str) -> str:
    """The dtype that nodes compute in: the input's own, unless a cast stands before them."""
    while (node := graph.producer(value)) is not None and node.op_type in ("Cast", "Identity", "Sub"):
        if node.op_type == "Cast":
            return STASH.get(values_of(node).get("to", 0), "input")
        value = node.input[0]
    return "input"


def _square_of(graph: Graph, value: str) -> str | None:
    node = graph.maker(value)
    if node is None:
        return None
    if node.op_type == "Pow":
        return str(node.input[0]) if graph.scalar(node.input[1]) == 2 else None
    twice = node.op_type == "Mul" and graph.origin(node.input[0]) == graph.origin(node.input[1])
    return str(node.input[0]) if twice else None


def _centered(graph: Graph, value: str, axes: tuple[int, ...]) -> str | None:
    """x of x - mean(x) over these axes."""
    node = graph.maker(value)
    if node is None or node.op_type != "Sub":
        return None
    mean = graph.maker(node.input[1])
    same = mean is not None and graph.origin(mean.input[0]) == graph.origin(node.input[0])
    if mean is None or not same or mean.op_type != "ReduceMean" or _axes(graph, mean) != axes:
        return None
    return str(node.input[0])


def _divided(graph: Graph, root: _Root, x: str) -> tuple[_Root, str, str] | None:
    """The root with an eps behind it, what it divides, and the quotient; None where it divides nothing, or twice."""
    value = root.value
    for node in _after(graph, value, ("Add", "Max", "Clip", "Expand", "Reciprocal", "Div", "Pow")):
        if node.op_type in ("Add", "Max", "Clip") and not root.inverse:
            found = _with_number(graph, node.output[0], (node.op_type,))
            if found is not None and root.eps == 0:
                at = "std" if node.op_type == "Add" else "max"
                return _divided(graph, replace(root, eps=found[1], eps_at=at, value=node.output[0]), x)
        elif node.op_type == "Expand":
            return _divided(graph, replace(root, value=node.output[0]), x)
        elif not root.inverse and _one_over(graph, node, value):
            return _divided(graph, replace(root, value=node.output[0], inverse=True), x)
    by = "Mul" if root.inverse else "Div"
    found_by = [node for node in _after(graph, value, (by,)) if _other(graph, node, value) is not None]
    if len(found_by) != 1:
        return None
    other = _other(graph, found_by[0], value)
    assert other is not None
    return root, other, found_by[0].output[0]


def _after(graph: Graph, value: str, operators: Sequence[str]) -> list[NodeProto]:
    """Readers of a value, through casts and identities."""
    found = []
    for node in graph.readers(value):
        if node.op_type in ("Cast", "Identity") and node.output[0] != value:
            found += _after(graph, node.output[0], operators)
        elif node.op_type in operators:
            found.append(node)
    return found


def _one_over(graph: Graph, node: NodeProto, value: str) -> bool:
    if node.op_type == "Reciprocal":
        return True
    if node.op_type == "Pow":
        return graph.scalar(node.input[1]) == -1
    return (
        node.op_type == "Div"
        and graph.origin(node.input[1]) == graph.origin(value)
        and graph.scalar(node.input[0]) == 1
    )


def _other(graph: Graph, node: NodeProto, value: str) -> str | None:
    """What the root divides in this node, or what is multiplied by one over it."""
    ends = [graph.origin(name) == graph.origin(value) for name in node.input]
    if ends == [False, True]:
        return str(node.input[0])
    return str(node.input[1]) if ends == [True, False] and node.op_type == "Mul" else None


def _scale(graph: Graph, root: _Root, x: str, center: bool) -> tuple[str | None, float]:
    """What is divided by (std, rms, l2; None where it is none of them), and the correction of the variance."""
    sizes = graph.shapes.get(x) or graph.shapes.get(graph.origin(x))
    count = None
    if sizes is not None and all(sizes[axis] for axis in root.axes):
        count = math.prod(int(sizes[axis] or 0) for axis in root.axes)
    # the sum of squares, in units of the mean of squares
    factor = root.factor if root.mean else None if count is None else root.factor * count
    if factor is not None and abs(factor - 1) < WHOLE:
        return ("std" if center else "rms"), 0
    if center:
        unbiased = factor is not None and count is not None and count > 1
        return ("std", 1) if unbiased and abs(factor * (count - 1) / count - 1) < WHOLE else (None, 0)  # type: ignore[operator]
    return ("l2", 0) if not root.mean and root.factor == 1 else (None, 0)


def _with_affine(
    graph: Graph,
    root: _Root,
    scale: str,
    correction: float,
    ndim: int | None,
    x: str,
    output: str,
    gain: Gain | None,
) -> Written | None:
    """With the gain and the bias that follow; None where the rank decides on the axes and is unknown."""
    affine = affine_after(graph, output, root.axes, ndim, scalar=scale != "std", gain=gain)
    names = names_of(root.axes, ndim, affine.on_weight, affine.on_bias)
    if names is None:
        return None
    stats, weight, bias = names
    spec = NormSpec(
        stats, weight=weight, bias=bias, center=scale == "std", scale=scale, correction=correction,
        eps=shortest_float32(root.eps), eps_at=root.eps_at,
        cast=Cast(_dtype(graph, root.squared), "after" if affine.cast else "before"),
    )  # fmt: skip
    return Written(spec, x, affine.output, affine.weight, affine.bias)
