"""Which scales of a graph fold into which linear maps, and why the other normalizations stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from normscope.doctor.folding.linear_map import LinearMap
from normscope.doctor.folding.obstacles import Obstacle, both
from normscope.reading.graphs.norms import MERGED, node_norms
from normscope.transforms.onnx_folding.layers import Layer
from normscope.transforms.onnx_folding.scales import (
    WRITTEN,
    Scale,
    batch_norm,
    composed,
    constant_beside,
    per_feature,
)
from normscope.transforms.onnx_folding.surroundings import Behind, Surroundings

if TYPE_CHECKING:
    from onnx import NodeProto

    from normscope.reading.graphs.graph import Graph
    from normscope.reading.graphs.norms import NodeNorm


@dataclass(frozen=True, eq=False)
class Step:
    """One scale that folds."""

    found: Scale
    layers: tuple[Layer, ...]
    where: str
    """before (the layer feeds the scale) | after"""
    centered: None = None

    @property
    def site(self) -> str:
        return self.found.site

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        return tuple(layer.map for layer in self.layers)

    @property
    def scale(self) -> Tensor:
        return self.found.scale

    @property
    def shift(self) -> Tensor:
        return self.found.shift

    @property
    def zero_variance(self) -> int:
        return self.found.zero_variance


@dataclass(frozen=True, eq=False)
class Stays:
    """One normalization that is left."""

    site: str
    type_name: str
    obstacle: Obstacle


def plan(graph: Graph, *, clone_shared: bool, refused: Mapping[str, str]) -> list[Step | Stays]:
    """Every normalization of the graph, and each scale written as Mul and Add that folds, in the order of its nodes.

    ``refused``: site -> why it is not to fold, whatever the graph looks like.

    Raises:
        BadTarget: the graph is broken.
    """
    around = Surroundings(graph, clone_shared=clone_shared)
    norms = node_norms(graph)
    # a batch norm of many nodes is a scale written as Mul and Add
    by_output = {norm.output: norm for norm in norms if norm.reachable and norm.type_name != MERGED}
    found: list[Step | Stays] = []
    gone: set[str] = set()
    for node in graph.nodes:
        made = node.output[0] if node.output else ""
        if (norm := by_output.get(made)) is not None:
            one: Step | Stays | None = _norm(norm, around, refused)
        elif made in gone or node.op_type not in ("Mul", "Div"):
            continue
        else:
            one = _written(graph, node, around, refused)
        if one is not None:
            found.append(one)
        if isinstance(one, Step):
            gone |= {output for _, output in one.found.nodes}
    return found + [_norm(norm, around, refused) for norm in norms if not norm.reachable]


def _norm(norm: NodeNorm, around: Surroundings, refused: Mapping[str, str]) -> Step | Stays:
    found = Obstacle(refused[norm.name]) if norm.name in refused else batch_norm(norm)
    step = found if isinstance(found, Obstacle) else _folded(found, around)
    return Stays(norm.name, norm.type_name, step) if isinstance(step, Obstacle) else step


def _folded(found: Scale, around: Surroundings) -> Step | Obstacle:
    behind = around.behind(found.input)
    if isinstance(behind, Behind) and (behind.axis != 1 or behind.layer.outputs != found.scale.numel()):
        behind = Obstacle(f"its channels are not the features that {behind.layer.map.path} makes")
    if isinstance(behind, Behind):
        around.take(found.output, behind)
        return Step(_with_additions(found, behind), (behind.layer,), "before")
    ahead = around.ahead(found.output, 1, float(found.shift.abs().max()), found.scale.numel())
    return both(behind, ahead) if isinstance(ahead, Obstacle) else Step(found, ahead, "after")


def _written(graph: Graph, node: NodeProto, around: Surroundings, refused: Mapping[str, str]) -> Step | None:
    """A multiplication right behind a layer, with the multiplications and additions that follow it."""
    site = node.name or node.output[0]
    beside = constant_beside(graph, node)
    if beside is None or site in refused:
        return None
    behind = around.behind(beside[0])
    if isinstance(behind, Obstacle) or (graph.scalar(beside[1]) is not None and behind.layer.outputs > 1):
        return None  # one number for all features is no norm's
    ends: list[tuple[str, str]] = []
    a, b = np.ones(behind.layer.outputs), np.zeros(behind.layer.outputs)
    value = beside[0]
    following: NodeProto | None = node
    while following is not None and (beside := constant_beside(graph, following)) is not None:
        ndim = graph.rank(value)
        c = per_feature(graph, beside[1], behind.axis, ndim, behind.layer.outputs)
        if c is None:
            break
        a, b = composed(following, c, a, b)
        ends.append((value, following.output[0]))
        value = following.output[0]
        following = graph.readers(value)[0] if graph.consumers(value) == 1 and graph.readers(value) else None
    if not ends or not np.isfinite(a).all() or not np.isfinite(b).all():
        return None
    found = Scale(site, WRITTEN, tuple(ends), torch.from_numpy(a), torch.from_numpy(b))
    around.take(found.output, behind)
    return Step(_with_additions(found, behind), (behind.layer,), "before")


def _with_additions(found: Scale, behind: Behind) -> Scale:
    """a (x + offset) + b: what is added on the way goes along."""
    shift = found.shift + found.scale * torch.from_numpy(behind.offset)
    return replace(found, nodes=behind.additions + found.nodes, shift=shift)
