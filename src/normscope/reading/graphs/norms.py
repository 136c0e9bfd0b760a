"""Every normalization of an ONNX graph: operators, those written as many nodes, and those inside If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from normscope.reading import UnknownNormalization, read
from normscope.reading.graphs.decomposed import ROOTS, written_norm
from normscope.reading.graphs.graph import Graph
from normscope.reading.graphs.merged import merged_norm
from normscope.spec import NormSpec, SpecError, families

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import NodeProto

RMS = "SimplifiedLayerNormalization"
"""ONNX Runtime's name for RMSNormalization, which it writes into graphs that it optimized"""
MERGED = "onnx nodes (batch norm)"
PER_CHANNEL = 21
"""operator set from which GroupNormalization has a scale and bias for every channel, not for every group"""


@dataclass(frozen=True)
class NodeNorm:
    """One normalization of a graph."""

    name: str
    """the node's name, or that of the value it makes; unique in the model"""
    type_name: str
    spec: NormSpec | None
    reason: str
    """why ``spec`` is None"""
    mode: str
    """batch | running | input"""
    graph: Graph = field(repr=False)
    input: str
    """the value that is normalized"""
    output: str
    parameters: dict[str, str] = field(default_factory=dict)
    """weight, bias, running_mean, running_var -> name of a constant of the graph"""

    @property
    def reachable(self) -> bool:
        """It stands in the main graph, whose values can be looked at in a run."""
        return self.graph.outer is None

    def array(self, name: str) -> NDArray[Any]:
        """A parameter as it is applied: the axes of size 1 that only align it with the input are taken out."""
        value = self.graph.constant(self.parameters[name])
        assert value is not None
        return value if value.ndim <= 1 else value.squeeze()


def node_norms(graph: Graph) -> list[NodeNorm]:
    """In order of the nodes; those of inner graphs after those of the graph around them.

    Raises:
        BadTarget: a node or a stored tensor is broken.

    >>> from onnx import helper as h, TensorProto as T
    >>> values = [h.make_tensor_value_info(n, T.FLOAT, s) for n, s in (("x", [2, 8]), ("w", [8]), ("y", [2, 8]))]
    >>> node = h.make_node("LayerNormalization", ["x", "w"], ["y"], name="norm")
    >>> model = h.make_model(h.make_graph([node], "g", values[:2], values[2:]))
    >>> [(norm.name, norm.spec.stats, norm.spec.source) for norm in node_norms(Graph(model))]
    [('norm', '... d -> ...', 'input')]
    """
    taken: dict[str, int] = {}
    found = []
    for norm in _found(graph):
        taken[norm.name] = taken.get(norm.name, 0) + 1
        again = taken[norm.name]
        found.append(norm if again == 1 else replace(norm, name=f"{norm.name}#{again}"))
    return found


def _found(graph: Graph) -> Iterator[NodeNorm]:
    for node in graph.nodes:
        if node.op_type.endswith("Normalization") or node.op_type == "LRN":
            yield _operator(graph, node)
        elif node.op_type in ROOTS and node.domain in ("", "ai.onnx"):
            norm = _written(graph, node)
            if norm is not None:
                yield norm
    for body in graph.bodies():
        yield from _found(body)


def _written(graph: Graph, node: NodeProto) -> NodeNorm | None:
    try:
        merged = merged_norm(graph, node)
        found = written_norm(graph, node)
    except (SpecError, IndexError, ValueError):  # eps below 0; a node without the inputs that it needs
        return None
    if merged is not None:
        x, y = merged.input, merged.output
        return NodeNorm(_name(node), MERGED, merged.spec, "", "running", graph, x, y, merged.parameters)
    if found is None:
        return None
    given = {name: value for name, value in (("weight", found.weight), ("bias", found.bias)) if value}
    kind = {"std": "layer norm", "rms": "RMS norm", "l2": "L2 norm"}[found.spec.scale]
    type_name = f"onnx nodes ({kind})"
    return NodeNorm(_name(node), type_name, found.spec, "", "input", graph, found.input, found.output, given)


def _operator(graph: Graph, node: NodeProto) -> NodeNorm:
    x, y = (node.input[0] if node.input else ""), (node.output[0] if node.output else "")
    try:
        norm = _read(graph, node, x, y)
    except (UnknownNormalization, SpecError, IndexError) as error:
        why = str(error) if not isinstance(error, IndexError) else "lacks inputs that its operator needs"
        return NodeNorm(_name(node), f"onnx.{node.op_type}", None, why, "input", graph, x, y)
    if norm.spec is None or not norm.parameters:
        return norm
    constant = {name: value for name, value in norm.parameters.items() if graph.is_constant(value)}
    computed = {"weight", "bias"} & (set(norm.parameters) - set(constant))
    spec = norm.spec.replace(source="input") if computed else norm.spec
    if norm.mode == "running" and not {"running_mean", "running_var"} <= set(constant):
        why = "its mean and variance are computed in the graph, not stored"
        return replace(norm, spec=None, reason=why, parameters=constant)
    return replace(norm, spec=spec, parameters=constant)


NAMES = ("weight", "bias", "running_mean", "running_var")


def _read(graph: Graph, node: NodeProto, x: str, y: str) -> NodeNorm:
    if node.op_type == RMS:
        spec = _simplified(graph, node)
        return NodeNorm(_name(node), f"onnx.{RMS}", spec, "", "input", graph, x, y, {"weight": node.input[1]})
    reading = read(node, input_ndim=graph.rank(x))
    given = {name: value for name, value in zip(NAMES, node.input[1:], strict=False) if value}
    norm = NodeNorm(_name(node), reading.type_name, reading.spec, "", reading.mode_now, graph, x, y, given)
    if node.op_type == "GroupNormalization" and graph.opset < PER_CHANNEL:
        return replace(norm, spec=reading.spec.replace(weight="g", bias="g"))
    if node.op_type == "InstanceNormalization":
        return _as_group_norm(norm) or norm
    return norm


def _simplified(graph: Graph, node: NodeProto) -> NormSpec:
    """The reading of RMSNormalization, whose attributes it shares."""
    import onnx

    same = onnx.NodeProto()
    same.CopyFrom(node)
    same.op_type, same.domain = "RMSNormalization", ""
    return read(same, input_ndim=graph.rank(node.input[0])).spec


def _as_group_norm(norm: NodeNorm) -> NodeNorm | None:
    """(N, C, ...) seen as (N, G, rest), an instance norm of G channels without gain, and back: a group norm.

    Gain and bias, (C, 1, ...), follow as a multiplication and an addition; without positions, (N, C), they are (C,).
    """
    graph = norm.graph
    before, after = graph.producer(norm.input), graph.readers(norm.output)
    if before is None or before.op_type != "Reshape" or len(after) != 1 or after[0].op_type != "Reshape":
        return None
    sizes, x, y = graph.constant(before.input[1]), before.input[0], after[0].output[0]
    plain = all(
        (value := graph.constant(norm.parameters[name])) is not None and bool((value == wanted).all())
        for name, wanted in (("weight", 1.0), ("bias", 0.0))
    )
    ndim = graph.rank(x)
    if sizes is None or sizes.size != 3 or sizes[2] != -1 or not plain or ndim is None or ndim < 2:
        return None
    channels, samples = (graph.shapes[x][1], graph.shapes[x][0])
    groups = int(sizes[1])
    if groups < 1 or sizes[0] not in (0, samples) or channels is None or channels % groups:
        return None
    assert norm.spec is not None
    given = {}
    for name, operator in (("weight", "Mul"), ("bias", "Add")):
        followed = _per_channel(graph, y, operator, channels, ndim)
        if followed is not None:
            given[name], y = followed
    spec = families.group_norm(groups, eps=norm.spec.eps, weight="weight" in given, bias="bias" in given)
    return replace(norm, type_name="onnx nodes (group norm)", spec=spec, input=x, output=y, parameters=given)


def _per_channel(graph: Graph, value: str, operator: str, channels: int, ndim: int) -> tuple[str, str] | None:
    """The constant of one number a channel that is multiplied or added next, and the result."""
    readers = graph.readers(value)
    if graph.consumers(value) != 1 or not readers or readers[0].op_type != operator:
        return None
    node = readers[0]
    other = node.input[1] if node.input[0] == value else node.input[0]
    wanted = (channels, *(1,) * (ndim - 2))
    sizes = graph.constant_shape(other)
    return (other, node.output[0]) if sizes in (wanted, (1, *wanted)) else None


def _name(node: NodeProto) -> str:
    return node.name or next((name for name in node.output if name), node.op_type)
