"""Stored statistics in norms written by hand: tensors that the forward did not make, under a root."""

from __future__ import annotations

from typing import Any

from torch import nn

from normscope.doctor.tracing.dataflow import Node, Value

SAME = frozenset(("add", "clamp", "clamp_min", "maximum", "relu", "abs"))
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "rdiv": -1.0}
AFTER = {("stored", 0.5): "root", ("stored", -0.5): "inverse", ("root", -1.0): "inverse"}


class StoredRoots:
    """Follows values that do not depend on the data.

    ``stored`` is a vector that is no parameter, such as a running variance, up to eps and views; ``root`` its root;
    ``inverse`` one over that, times a gain or not.
    """

    def __init__(self) -> None:
        self._kinds: dict[Value, str] = {}

    def kind(self, value: Value) -> str | None:
        if value in self._kinds:
            return self._kinds[value]
        made_here = value.node is not None or value.data
        parameter = isinstance(value.held, nn.Parameter)
        return None if made_here or parameter or "float" not in value.dtype or not value.shape else "stored"

    def follow(self, node: Node, args: tuple[Any, ...]) -> None:
        """Label what a new node made of constants."""
        kinds = [self.kind(value) for value in node.inputs]
        found = next((kind for kind in kinds if kind is not None), None)
        if node.op == "div" and len(kinds) == 2 and kinds[1] == "root":
            found = "inverse"
        elif node.op in POWERS or node.op == "pow":
            exponent = POWERS.get(node.op, args[1] if len(args) > 1 else None)
            found = AFTER.get((found, exponent)) if isinstance(exponent, (int, float)) else None  # type: ignore[arg-type]
        elif node.op == "mul":
            found = found if found in ("root", "inverse") else None
        elif node.role != "view" and node.op not in SAME:
            found = None
        if found is not None:
            self._kinds[node.outputs[0]] = found
