"""Norms written by hand, found by following data.

A norm takes a second moment of x (a variance, a mean of squares, a 2-norm), its root, and divides by it something that
is x up to centering, constant factors, casts and views. Softmax, attention, gates and losses lack one of the steps or
divide something else. A norm in eval mode has its moments stored: it subtracts one and divides by the root of another,
or multiplies by one over the root and adds what is left of both.

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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from normscope.doctor.tracing import ops
from normscope.doctor.tracing.dataflow import Dataflow, Node, Value, tensors_in
from normscope.doctor.tracing.paths import Frame
from normscope.doctor.tracing.stored import StoredRoots

WHOLE = ("bool", "uint8", "int8", "int16", "int32", "int64")
SUMS = ("mean", "sum", "nanmean", "nansum")
MOMENTS = {"var": "second", "var_mean": "second", "std": "root", "std_mean": "root", "norm": "root"}
BOUNDS = ops.words("clamp clamp_min clamp_max maximum minimum relu abs where masked_fill nan_to_num")


@dataclass(frozen=True, eq=False)
class Label:
    kind: str
    x: Value
    """the origin of what was reduced"""
    source: Value
    """what was reduced or squared"""
    reduction: Node


@dataclass(eq=False)
class WrittenNorm:
    """A hit: the node that divides, and the value that is normalized."""

    node: Node
    input: Value
    output: Value
    frame: Frame
    stored: bool = False
    """it normalizes by statistics that were there before"""
    own_module: bool = False


@dataclass(eq=False)
class _Open:
    """What a running forward was given, and the hits in it so far."""

    first: int
    given: list[Value]
    hits: list[WrittenNorm] = field(default_factory=list)


class WrittenNorms:
    """Follows the operations of a dataflow."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._labels: dict[Value, Label] = {}
        self._parents: dict[Value, Value] = {}
        """value -> the value that it is up to centering, constants, casts and views"""
        self._used: set[Node] = set()
        self._normalized: dict[Value, Value] = {}
        """a norm's output -> the origin of what it normalizes"""
        self._open: dict[Frame, _Open] = {}
        self._now: _Open | None = None
        """the forward that runs the operation being followed"""
        self._stored = StoredRoots()

    def entered(self, frame: Frame, args: tuple[Any, ...]) -> None:
        given = [self._flow.value(tensor) for tensor in tensors_in(args)]
        self._open[frame] = _Open(len(self._flow.nodes), given)

    def left(self, frame: Frame, kwargs: dict[str, Any], output: Any) -> list[WrittenNorm]:
        """The norms in a forward that has returned. One that is all that the module does is its own module."""
        forward = self._open.pop(frame, None)
        if forward is None or not forward.hits:
            return []
        if len(forward.hits) == 1 and isinstance(output, Tensor):
            hit, result = forward.hits[0], self._flow.value(output)
            given = {*forward.given, *(self._flow.value(tensor) for tensor in tensors_in(kwargs.values()))}
            source = next((value for value in self._same(hit.input) if value in given), None)
            if source is not None and hit.output in self._same(result):
                forward.hits = [replace(hit, input=source, output=result, own_module=True)]
        for hit in forward.hits:
            _collapse(hit, forward.first)
        return forward.hits

    def follow(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Label what a new node made."""
        self._now = self._open.get(frame)
        if not node.outputs[0].data:
            self._stored.follow(node, args)
            return
        step = _STEPS.get(node.op)
        if step is not None:
            step(self, frame, node, args, kwargs)
        elif node.role == "view":
            self._inherit(node, node.inputs[0])
        elif node.role == "slice" or node.op in BOUNDS:
            self._inherit_label(node)

    # -- one step for each kind of operation ------------------------------------------------------------------

    def _sum(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = node.inputs[0]
        label = self._label_of(source)
        if self._constant(source):
            return
        if label is None:
            self._label(node, Label("mean", self._origin(source), source, node))
        elif label.kind == "square":
            self._label(node, replace(label, kind="second", reduction=node))
        else:
            self._label(node, label)

    def _moment(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = node.inputs[0]
        if self._label_of(source) is not None:
            return
        power = kwargs.get("p", kwargs.get("ord", args[1] if node.op == "norm" and len(args) > 1 else None))
        if power not in (None, 2, "fro"):
            return
        label = Label(MOMENTS[node.op], self._origin(source), source, node)
        self._label(node, label)
        for mean in node.outputs[1:]:
            self._labels[mean] = replace(label, kind="mean")

    def _power(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fixed = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "rdiv": -1.0}
        exponent = fixed.get(node.op, args[1] if len(args) > 1 else kwargs.get("exponent"))
        source = node.inputs[0]
        label = self._label_of(source)
        if label is None:
            if exponent == 2:
                self._label(node, Label("square", self._origin(source), source, node))
            return
        kinds = {
            ("second", 0.5): "root",
            ("second", -0.5): "inverse",
            ("root", -1): "inverse",
            ("mean", 2): "mean",
        }
        if isinstance(exponent, (int, float)) and (label.kind, exponent) in kinds:
            self._label(node, replace(label, kind=kinds[label.kind, exponent]))

    def _times(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(node.inputs) == 1:
            return self._inherit(node, node.inputs[0])
        for x, factor in (node.inputs[:2], node.inputs[1::-1]):
            if self._divides(x, factor, "inverse"):
                return self._hit(frame, node, x, factor)
            if self._divides_stored(frame, node, x, factor, "inverse"):
                return None
        left, right = node.inputs[:2]
        if self._whole(left) and self._whole(right) and self._origin(left) is self._origin(right):
            return self._label(node, Label("square", self._origin(left), left, node))
        return self._scaled(node, left, right)

    def _product_added(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shift, x, factor = node.inputs[:3]
        for value, by in ((x, factor), (factor, x)):
            if self._whole(value) and not by.data and self._stored.kind(by) == "inverse":
                self._stored.divided(node.outputs[0], value, by)
                if self._shifts_stored(frame, node, node.outputs[0], shift):
                    return

    def _divided(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(node.inputs) == 1:
            # a number divided by a tensor has the tensor second
            return self._inherit(node, node.inputs[0]) if args and isinstance(args[0], Tensor) else None
        left, right = node.inputs[:2]
        if self._divides(left, right, "root"):
            return self._hit(frame, node, left, right)
        if self._divides_stored(frame, node, left, right, "root"):
            return None
        label = self._label_of(right)
        if label is not None:
            if label.kind == "root" and self._constant(left):
                self._label(node, replace(label, kind="inverse"))
            return None
        return self._scaled(node, left, right)

    def _shifted(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(node.inputs) == 1:
            return self._inherit(node, node.inputs[0])
        left, right = node.inputs[:2]
        for value, other in ((left, right), (right, left)):
            label, second = self._label_of(value), self._label_of(other)
            if self._constant(value):
                continue
            if self._shifts_stored(frame, node, value, other):
                return None
            if label is None:  # x less its mean, or plus a constant
                kept = (
                    second is not None and second.kind == "mean" and self._x(second) in self._sources(value)
                )
            else:  # E[x^2] - E[x]^2
                kept = second is not None and self._x(second) is self._x(label) and label.kind != "mean"
            if kept or self._constant(other):
                return self._inherit(node, value)
        return None

    def _scaled(self, node: Node, left: Value, right: Value) -> None:
        """A product with something else: constants keep what a value is, masks and counts keep its moments."""
        for value, other in ((left, right), (right, left)):
            label, second = self._label_of(value), self._label_of(other)
            moment = label is not None and label.kind in ("mean", "square", "second")
            both = label is not None and second is not None and self._x(label) is self._x(second)
            shift = both and label is not None and label.kind == "mean"
            if shift or (
                not self._constant(value) and (self._constant(other) or (moment and second is None))
            ):
                return self._inherit(node, value)
        return None

    # -- labels -----------------------------------------------------------------------------------------------

    def _constant(self, value: Value) -> bool:
        """It does not depend on the data, or is a mask: a view or cast of whole numbers or truth values."""
        if not value.data or value.dtype in WHOLE:
            return True
        node = value.node
        return node is not None and node.role == "view" and self._constant(node.inputs[0])

    def _whole(self, value: Value) -> bool:
        return not self._constant(value) and self._label_of(value) is None

    def _divides(self, x: Value, by: Value, kind: str) -> bool:
        label = self._label_of(by)
        return (
            label is not None and label.kind == kind and self._whole(x) and self._origin(x) is self._x(label)
        )

    def _label_of(self, value: Value) -> Label | None:
        """What a value is in the forward that runs."""
        label = self._labels.get(value)
        if label is None or not self._outside(value):
            return label
        assert self._now is not None
        others = (other for other in self._now.given if other is not value and other not in self._labels)
        x = next((other for other in others if label.x in self._same(other)), None)
        return None if x is None else replace(label, x=x)

    def _outside(self, value: Value) -> bool:
        """It was there before the running forward began."""
        made = value.node
        return self._now is not None and (made is None or made.number < self._now.first)

    def _label(self, node: Node, label: Label) -> None:
        self._labels[node.outputs[0]] = label

    def _inherit(self, node: Node, value: Value) -> None:
        label = self._label_of(value)
        if label is not None:
            self._label(node, label)
        elif not self._constant(value):
            self._parents[node.outputs[0]] = value

    def _inherit_label(self, node: Node) -> None:
        label = next((found for value in node.inputs if (found := self._label_of(value)) is not None), None)
        if label is not None:
            for made in node.outputs:
                self._labels[made] = label

    def _same(self, value: Value) -> Iterator[Value]:
        """A value and those that it is up to centering, constants, casts and views, back to the first."""
        while True:
            yield value
            parent = self._parents.get(value)
            if parent is None:
                return
            value = parent

    def _sources(self, value: Value) -> tuple[Value, ...]:
        """The origin, and what was normalized where that is a norm's output: a shift by the mean may follow."""
        origin = self._origin(value)
        normalized = self._normalized.get(origin)
        return (origin,) if normalized is None else (origin, self._origin(normalized))

    def _origin(self, value: Value) -> Value:
        """The first of those that a value is, back to what the running forward was given."""
        for last in self._same(value):
            if self._outside(last):
                break
        return last

    def _x(self, label: Label) -> Value:
        """What a moment is of, as the running forward sees it: a module inside may have taken it."""
        return self._origin(label.x)

    def _hit(self, frame: Frame, node: Node, x: Value, by: Value) -> None:
        label, forward = self._label_of(by), self._open.get(frame)
        if label is None or label.reduction in self._used or forward is None:
            return
        self._used.add(label.reduction)
        self._normalized[node.outputs[0]] = label.x
        reduced = set(self._same(label.source))
        common = next(value for value in self._same(x) if value in reduced)
        forward.hits.append(WrittenNorm(node, self._given(common), node.outputs[0], frame))

    def _divides_stored(self, frame: Frame, node: Node, x: Value, by: Value, kind: str) -> bool:
        """A hit where x, less something stored, is divided by a root of something stored."""
        forward = self._open.get(frame)
        if forward is None or by.data or self._stored.kind(by) != kind or not self._whole(x):
            return False
        for value in self._same(x):
            made = value.node
            if made is not None and made.op == "sub" and self._stored.kind(made.inputs[-1]) == "stored":
                given = self._given(self._parents[value])
                forward.hits.append(WrittenNorm(node, given, node.outputs[0], frame, stored=True))
                return True
        self._stored.divided(node.outputs[0], x, by)
        return False

    def _shifts_stored(self, frame: Frame, node: Node, product: Value, by: Value) -> bool:
        """A hit where x over a root of something stored is shifted by something else over the same root."""
        forward = self._open.get(frame)
        if forward is None or by.data or self._stored.kind(by) is None:
            return False
        for value in self._same(product):
            x = self._stored.shifts(value, by)
            if x is not None:
                forward.hits.append(WrittenNorm(node, self._given(x), node.outputs[0], frame, stored=True))
                return True
        return False

    def _given(self, value: Value) -> Value:
        """Before the casts and the centering that belong to the norm."""
        node, parent = value.node, self._parents.get(value)
        if node is None or parent is None or self._outside(value):
            return value
        centers = node.op == "sub" and any(self._label_of(other) is not None for other in node.inputs)
        return self._given(parent) if node.op in ops.CASTS or centers else value


def _collapse(hit: WrittenNorm, first: int) -> None:
    """Make one node of the graph out of a norm's operations, so that neighbours see a norm."""
    node, x, y = hit.node, hit.input, hit.output
    inside = {y.node} if y.node is not None else set()
    pending = list(inside)
    while pending:
        for value in pending.pop().inputs:
            maker = value.node
            if value is not x and maker is not None and maker.number >= first and maker not in inside:
                inside.add(maker)
                pending.append(maker)
    x.readers = [n for n in x.readers if n not in inside or _read_outside(n, inside)]
    node.role, node.inputs, node.outputs, node.axes = "norm", (x,), (y,), ()
    x.readers.append(node)
    y.node = node
    y.features = x.features if x.shape == y.shape else None


def _read_outside(node: Node, inside: set[Node]) -> bool:
    """A part of the norm whose result is used elsewhere too."""
    return any(made.output or any(reader not in inside for reader in made.readers) for made in node.outputs)


_STEPS = {
    **dict.fromkeys(SUMS, WrittenNorms._sum),
    **dict.fromkeys(MOMENTS, WrittenNorms._moment),
    **dict.fromkeys(("pow", "square", "sqrt", "rsqrt", "reciprocal", "rdiv"), WrittenNorms._power),
    "mul": WrittenNorms._times,
    "div": WrittenNorms._divided,
    "add": WrittenNorms._shifted,
    "sub": WrittenNorms._shifted,
    "addcmul": WrittenNorms._product_added,
}
