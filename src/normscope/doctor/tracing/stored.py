"""Stored statistics in norms written by hand: tensors that the forward did not make, under a root.

==========  ===========================================================================
kind        what a value that does not depend on the data is
==========  ===========================================================================
``stored``  a vector that is no parameter, such as a running variance, up to eps and views
``root``    a root of one
``inverse`` one over that, times a gain, a running mean or not
``shift``   something less an ``inverse``: what a norm folded into x * scale + shift adds
==========  ===========================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from normscope.doctor.tracing.dataflow import Node, Value

SAME = frozenset(("add", "clamp", "clamp_min", "maximum", "relu", "abs"))
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "rdiv": -1.0}
AFTER = {("stored", 0.5): "root", ("stored", -0.5): "inverse", ("root", -1.0): "inverse"}
SHIFTS = ("inverse", "shift")


@dataclass(frozen=True, eq=False)
class Mark:
    kind: str
    variance: Value
    """the stored vector that it was made from"""


class StoredRoots:
    """Follows values that do not depend on the data, and x times one over a root."""

    def __init__(self) -> None:
        self._marks: dict[Value, Mark] = {}
        self._products: dict[Value, tuple[Value, Value]] = {}
        """x / root -> x, variance"""

    def mark(self, value: Value) -> Mark | None:
        if value in self._marks:
            return self._marks[value]
        made_here = value.node is not None or value.data
        parameter = isinstance(value.held, nn.Parameter)
        unfit = made_here or parameter or "float" not in value.dtype or not value.shape
        return None if unfit else Mark("stored", value)

    def kind(self, value: Value) -> str | None:
        mark = self.mark(value)
        return None if mark is None else mark.kind

    def follow(self, node: Node, args: tuple[Any, ...]) -> None:
        """Mark what a new node made of constants."""
        marks = [mark for value in node.inputs if (mark := self.mark(value)) is not None]
        if not marks:
            return
        # a frozen norm's gain and bias are vectors that are no parameters, too
        found = next((mark for mark in marks if mark.kind != "stored"), marks[0])
        kind = self._made(node, args, found)
        if kind is not None:
            self._marks[node.outputs[0]] = replace(found, kind=kind)

    def _made(self, node: Node, args: tuple[Any, ...], found: Mark) -> str | None:
        if node.role == "view" or (node.role == "slice" and _whole(node)):
            return found.kind
        if node.op == "div" and len(node.inputs) == 2:
            return "inverse" if self.kind(node.inputs[1]) == "root" else None
        if node.op in POWERS or node.op == "pow":
            exponent = POWERS.get(node.op, args[1] if len(args) > 1 else None)
            return AFTER.get((found.kind, exponent)) if isinstance(exponent, (int, float)) else None
        if node.op in ("add", "sub", "neg") and found.kind in SHIFTS:
            return "shift"
        if node.op == "mul":
            return found.kind if found.kind in ("root", "inverse") else None
        return found.kind if node.op in SAME else None

    def divided(self, product: Value, x: Value, by: Value) -> None:
        """A product of x and an ``inverse``, or x over a ``root``."""
        mark = self.mark(by)
        if mark is not None:
            self._products[product] = x, mark.variance

    def shifts(self, product: Value, by: Value) -> Value | None:
        """The x of a product to which the shift of the same norm is added, None where it is another's."""
        mark, (x, variance) = self.mark(by), self._products.get(product, (None, None))
        return x if mark is not None and mark.kind in SHIFTS and mark.variance is variance else None


def _whole(node: Node) -> bool:
    """A slice that takes all, such as ``v[:, None, None]``."""
    return math.prod(node.inputs[0].shape) == math.prod(node.outputs[0].shape)
