"""A normalization of a graph that another runtime runs, as a module of the PyTorch model that stands for the graph.

The model around it runs the graph and calls each of these with what was seen there, input and output. So a graph is
watched, measured and judged as every model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from normscope.reading import Reading, UnknownNormalization

if TYPE_CHECKING:
    from normscope.doctor.site import Join, Neighbour
    from normscope.spec import NormSpec


class GraphNorm(torch.nn.Module):
    """One normalization of a graph.

    Args:
        type_name: of the node, for people: ``onnx.BatchNormalization``.
        spec: None where it cannot be told, with the ``reason``.
        mode: batch | running | input; a graph has no train and eval, so it holds in both.
        tensors: weight, bias, running_mean, running_var: those that the graph stores.
        fed_by, feeds: its neighbours in the graph.
        join: the end of the pre-norm branch that it begins, where it begins one.

    Shapes: the two tensors of a call, the input and the output of the node, are of any shape.

    >>> import normscope as ns
    >>> norm = GraphNorm("onnx.LayerNormalization", ns.families.layer_norm(weight=False, bias=False))
    >>> ns.spec_of(norm).eps
    1e-05
    """

    def __init__(
        self,
        type_name: str,
        spec: NormSpec | None,
        reason: str = "",
        mode: str = "input",
        tensors: Mapping[str, torch.Tensor] | None = None,
        fed_by: tuple[Neighbour, ...] = (),
        feeds: tuple[Neighbour, ...] = (),
        join: Join | None = None,
    ) -> None:
        super().__init__()
        self.original_name = type_name
        self.spec = spec
        self.reason = reason
        self.mode = "frozen" if mode == "running" else mode
        self.held = tuple(tensors or ())
        for name, tensor in (tensors or {}).items():
            self.register_buffer(name, tensor)
        self.fed_by = fed_by
        self.feeds = feeds
        self.join = join

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y

    def __normscope__(self, input_ndim: int | None) -> Reading:
        if self.spec is None:
            raise UnknownNormalization(self.reason, invalid=True)
        tensors = {name: getattr(self, name) for name in self.held}
        return Reading(self.spec, self.original_name, tensors, self.mode, self.mode, self.mode)
