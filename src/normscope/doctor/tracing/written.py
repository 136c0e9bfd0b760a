"""Norms written by hand, found by following data.

A norm takes a second moment of x (a variance, a mean of squares, a 2-norm), its root, and divides by it something that
is x up to centering, constant factors, casts and views. Softmax, attention, gates and losses lack one of the steps or
divide something else. A norm in eval mode has its moments stored: it subtracts one and divides by the root of another,
or multiplies by one over the root and adds what is left of both. What a value is (an x, a mean, a square, a second
moment, its root) is kept in ``labels``; the operations of a norm become one node in ``collapse``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from normscope.doctor.tracing import ops
from normscope.doctor.tracing.collapse import WrittenNorm, collapse
from normscope.doctor.tracing.dataflow import Dataflow, Node, Value, tensors_in
from normscope.doctor.tracing.labels import Label, Labels, Scope
from normscope.doctor.tracing.paths import Frame
from normscope.doctor.tracing.stored import StoredRoots

SUMS = ("mean", "sum", "nanmean", "nansum")
MOMENTS = {"var": "second", "var_mean": "second", "std": "root", "std_mean": "root", "norm": "root"}
BOUNDS = ops.words("clamp clamp_min clamp_max maximum minimum relu abs where masked_fill nan_to_num")


@dataclass(eq=False)
class _Open(Scope):
    """A running forward, and the hits in it so far."""

    hits: list[WrittenNorm] = field(default_factory=list)


class WrittenNorms:
    """Follows the operations of a dataflow."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._labels = Labels()
        self._used: set[Node] = set()
        self._normalized: dict[Value, Value] = {}
        """a norm's output -> the origin of what it normalizes"""
        self._open: dict[Frame, _Open] = {}
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
            source = next((value for value in self._labels.same(hit.input) if value in given), None)
            if source is not None and hit.output in self._labels.same(result):
                forward.hits = [replace(hit, input=source, output=result, own_module=True)]
        for hit in forward.hits:
            collapse(hit, forward.first)
        return forward.hits

    def follow(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Label what a new node made."""
        self._labels.now = self._open.get(frame)
        if not node.outputs[0].data:
            self._stored.follow(node, args)
            return
        step = _STEPS.get(node.op)
        if step is not None:
            step(self, frame, node, args, kwargs)
        elif node.role == "view":
            self._labels.inherit(node, node.inputs[0])
        elif node.role == "slice":
            self._labels.inherit_label(node, node.inputs)
        elif node.op in BOUNDS:  # x bounded by a moment of its own is an x
            self._labels.inherit_label(node, [value for value in node.inputs if _keeps_size(node, value)])

    # -- one step for each kind of operation ------------------------------------------------------------------

    def _sum(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = node.inputs[0]
        label = self._labels.of(source)
        if self._labels.constant(source):
            return
        if label is None:
            self._labels.give(node.outputs[0], Label("mean", self._labels.origin(source), source, node))
        elif label.kind == "square":
            self._labels.give(node.outputs[0], replace(label, kind="second", reduction=node))
        else:
            self._labels.give(node.outputs[0], label)

    def _moment(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = node.inputs[0]
        if self._labels.of(source) is not None:
            return
        power = kwargs.get("p", kwargs.get("ord", args[1] if node.op == "norm" and len(args) > 1 else None))
        if power not in (None, 2, "fro"):
            return
        label = Label(MOMENTS[node.op], self._labels.origin(source), source, node)
        self._labels.give(node.outputs[0], label)
        for mean in node.outputs[1:]:
            self._labels.give(mean, replace(label, kind="mean"))

    def _power(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fixed = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "rdiv": -1.0}
        exponent = fixed.get(node.op, args[1] if len(args) > 1 else kwargs.get("exponent"))
        source = node.inputs[0]
        label = self._labels.of(source)
        if label is None:
            if exponent == 2:
                self._labels.give(node.outputs[0], Label("square", self._labels.origin(source), source, node))
            return
        kinds = {
            ("second", 0.5): "root",
            ("second", -0.5): "inverse",
            ("root", -1): "inverse",
            ("mean", 2): "mean",
        }
        if isinstance(exponent, (int, float)) and (label.kind, exponent) in kinds:
            self._labels.give(node.outputs[0], replace(label, kind=kinds[label.kind, exponent]))

    def _times(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(node.inputs) == 1:
            return self._labels.inherit(node, node.inputs[0])
        for x, factor in (node.inputs[:2], node.inputs[1::-1]):
            if self._divides(x, factor, "inverse"):
                return self._hit(frame, node, x, factor)
            if self._divides_stored(frame, node, x, factor, "inverse"):
                return None
        left, right = node.inputs[:2]
        if (
            self._labels.whole(left)
            and self._labels.whole(right)
            and self._labels.origin(left) is self._labels.origin(right)
        ):
            return self._labels.give(node.outputs[0], Label("square", self._labels.origin(left), left, node))
        return self._scaled(node, left, right)

    def _product_added(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shift, x, factor = node.inputs[:3]
        for value, by in ((x, factor), (factor, x)):
            if self._divides(value, by, "inverse"):
                return self._hit(frame, node, value, by)
            if self._labels.whole(value) and not by.data and self._stored.kind(by) == "inverse":
                self._stored.divided(node.outputs[0], value, by)
                if self._shifts_stored(frame, node, node.outputs[0], shift):
                    return None
        return None

    def _divided(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(node.inputs) == 1:
            # a number divided by a tensor has the tensor second
            return (
                self._labels.inherit(node, node.inputs[0]) if args and isinstance(args[0], Tensor) else None
            )
        left, right = node.inputs[:2]
        if self._divides(left, right, "root"):
            return self._hit(frame, node, left, right)
        if self._divides_stored(frame, node, left, right, "root"):
            return None
        label = self._labels.of(right)
        if label is not None:
            if label.kind == "root" and self._labels.constant(left):
                self._labels.give(node.outputs[0], replace(label, kind="inverse"))
            return None
        return self._scaled(node, left, right)

    def _shifted(self, frame: Frame, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(node.inputs) == 1:
            return self._labels.inherit(node, node.inputs[0])
        left, right = node.inputs[:2]
        for value, other in ((left, right), (right, left)):
            label, second = self._labels.of(value), self._labels.of(other)
            if self._labels.constant(value):
                continue
            if self._shifts_stored(frame, node, value, other):
                return None
            if label is None:  # x less its mean, or plus a constant
                kept = (
                    second is not None
                    and second.kind == "mean"
                    and self._labels.x(second) in self._sources(value)
                )
            else:  # E[x^2] - E[x]^2
                kept = (
                    second is not None
                    and self._labels.x(second) is self._labels.x(label)
                    and label.kind != "mean"
                )
            if kept or self._labels.constant(other):
                return self._labels.inherit(node, value)
        return None

    def _scaled(self, node: Node, left: Value, right: Value) -> None:
        """A product with something else: constants keep what a value is, masks and counts keep its moments."""
        for value, other in ((left, right), (right, left)):
            label, second = self._labels.of(value), self._labels.of(other)
            moment = (
                label is not None
                and label.kind in ("mean", "square", "second")
                and _keeps_size(node, value)
                and self._labels.origin(other) is not self._labels.x(label)
            )
            both = (
                label is not None and second is not None and self._labels.x(label) is self._labels.x(second)
            )
            shift = both and label is not None and label.kind == "mean"
            if shift or (
                not self._labels.constant(value)
                and (self._labels.constant(other) or (moment and second is None))
            ):
                return self._labels.inherit(node, value)
        return None

    # -- hits -------------------------------------------------------------------------------------------------

    def _divides(self, x: Value, by: Value, kind: str) -> bool:
        label = self._labels.of(by)
        return (
            label is not None
            and label.kind == kind
            and self._labels.whole(x)
            and self._labels.origin(x) is self._labels.x(label)
        )

    def _sources(self, value: Value) -> tuple[Value, ...]:
        """The origin, and what was normalized where that is a norm's output: a shift by the mean may follow."""
        origin = self._labels.origin(value)
        normalized = self._normalized.get(origin)
        return (origin,) if normalized is None else (origin, self._labels.origin(normalized))

    def _hit(self, frame: Frame, node: Node, x: Value, by: Value) -> None:
        label, forward = self._labels.of(by), self._open.get(frame)
        if label is None or label.reduction in self._used or forward is None:
            return
        self._used.add(label.reduction)
        self._normalized[node.outputs[0]] = label.x
        reduced = set(self._labels.same(label.source))
        common = next(value for value in self._labels.same(x) if value in reduced)
        forward.hits.append(WrittenNorm(node, self._labels.given(common), node.outputs[0], frame))

    def _divides_stored(self, frame: Frame, node: Node, x: Value, by: Value, kind: str) -> bool:
        """A hit where x, less something stored, is divided by a root of something stored."""
        forward = self._open.get(frame)
        if forward is None or by.data or self._stored.kind(by) != kind or not self._labels.whole(x):
            return False
        for value in self._labels.same(x):
            made = value.node
            if made is not None and made.op == "sub" and self._stored.kind(made.inputs[-1]) == "stored":
                given = self._labels.given(self._labels.before(value))
                forward.hits.append(WrittenNorm(node, given, node.outputs[0], frame, stored=True))
                return True
        self._stored.divided(node.outputs[0], x, by)
        return False

    def _shifts_stored(self, frame: Frame, node: Node, product: Value, by: Value) -> bool:
        """A hit where x over a root of something stored is shifted by something else over the same root."""
        forward = self._open.get(frame)
        if forward is None or by.data or self._stored.kind(by) is None:
            return False
        for value in self._labels.same(product):
            x = self._stored.shifts(value, by)
            if x is not None:
                forward.hits.append(
                    WrittenNorm(node, self._labels.given(x), node.outputs[0], frame, stored=True)
                )
                return True
        return False


def _keeps_size(node: Node, value: Value) -> bool:
    """What is made of a moment and something larger is no moment: it is made of all of that."""
    return node.outputs[0].shape == value.shape


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
