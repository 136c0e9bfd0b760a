"""What a value is in the forward that runs: x up to what changes no norm of it, or a moment of some x.

==========  ===========================================================================
label       what a value with it is, for one x
==========  ===========================================================================
``mean``    a first moment of x
``square``  x squared, elementwise
``second``  a second moment of x
``root``    a root of a second moment (a standard deviation, an RMS, a norm)
``inverse`` one over a root
==========  ===========================================================================

Labels end where a module begins: whatever made what a forward was given, for the norms inside it is an x of its own.
(Only a module that is given x and a moment of that x goes on with the norm of its caller.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from normscope.doctor.tracing import ops
from normscope.doctor.tracing.dataflow import Node, Value

WHOLE_NUMBERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


@dataclass(frozen=True, eq=False)
class Label:
    kind: str
    x: Value
    """the origin of what was reduced"""
    source: Value
    """what was reduced or squared"""
    reduction: Node


@dataclass(eq=False)
class Scope:
    """A running forward: the number of its first operation, and what it was given."""

    first: int
    given: list[Value]


class Labels:
    """Labels and origins of values, as the forward ``now`` sees them."""

    def __init__(self) -> None:
        self.now: Scope | None = None
        """the forward that runs the operation being followed"""
        self._labels: dict[Value, Label] = {}
        self._parents: dict[Value, Value] = {}
        """value -> the value that it is up to centering, constants, casts and views"""

    # -- giving them ------------------------------------------------------------------------------------------

    def give(self, value: Value, label: Label) -> None:
        self._labels[value] = label

    def inherit(self, node: Node, value: Value) -> None:
        """What a node made is what ``value`` is."""
        label = self.of(value)
        if label is not None:
            self.give(node.outputs[0], label)
        elif not self.constant(value):
            self._parents[node.outputs[0]] = value

    def inherit_label(self, node: Node, values: Iterable[Value]) -> None:
        """All that a node made is the moment that the first of the values is which is one."""
        label = next((found for value in values if (found := self.of(value)) is not None), None)
        if label is not None:
            for made in node.outputs:
                self.give(made, label)

    # -- reading them -----------------------------------------------------------------------------------------

    def of(self, value: Value) -> Label | None:
        label = self._labels.get(value)
        if label is None or not self._outside(value):
            return label
        assert self.now is not None
        others = (other for other in self.now.given if other is not value and other not in self._labels)
        x = next((other for other in others if label.x in self.same(other)), None)
        return None if x is None else replace(label, x=x)

    def constant(self, value: Value) -> bool:
        """It does not depend on the data, or is a mask: a view or cast of whole numbers or truth values."""
        if not value.data or value.dtype in WHOLE_NUMBERS:
            return True
        node = value.node
        return node is not None and node.role == "view" and self.constant(node.inputs[0])

    def whole(self, value: Value) -> bool:
        """It is no moment, and depends on the data."""
        return not self.constant(value) and self.of(value) is None

    def same(self, value: Value) -> Iterator[Value]:
        """A value and those that it is up to centering, constants, casts and views, back to the first."""
        while True:
            yield value
            parent = self._parents.get(value)
            if parent is None:
                return
            value = parent

    def origin(self, value: Value) -> Value:
        """The first of those that a value is, back to what the running forward was given."""
        for last in self.same(value):
            if self._outside(last):
                break
        return last

    def x(self, label: Label) -> Value:
        """What a moment is of, as the running forward sees it: a module inside may have taken it."""
        return self.origin(label.x)

    def before(self, value: Value) -> Value:
        """What the value is before its last step."""
        return self._parents[value]

    def given(self, value: Value) -> Value:
        """Before the casts and the centering that belong to the norm."""
        node, parent = value.node, self._parents.get(value)
        if node is None or parent is None or self._outside(value):
            return value
        centers = node.op == "sub" and any(self.of(other) is not None for other in node.inputs)
        return self.given(parent) if node.op in ops.CASTS or centers else value

    def _outside(self, value: Value) -> bool:
        """It was there before the running forward began."""
        made = value.node
        return self.now is not None and (made is None or made.number < self.now.first)
