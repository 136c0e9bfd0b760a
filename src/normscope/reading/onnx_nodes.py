"""Reader for the normalization nodes of ONNX, as the current operator set defines them.

A node alone does not say its operator set. GroupNormalization is read as of set 21 on (scale and bias per channel);
BatchNormalization of old sets is read by what it writes down (``spatial=0`` is refused, more than one output trains).
ONNX stores attributes as float32: ``epsilon`` is given as the shortest decimal that is the same float32.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from normscope.reading.base import Reader, Reading, UnknownNormalization
from normscope.spec import Cast, NormSpec, families
from normscope.spec.axes import erase, last_axes

if TYPE_CHECKING:
    from onnx import NodeProto

STASH = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # TensorProto.DataType


def _read(obj: Any, input_ndim: int | None) -> Reading | None:
    import onnx

    if not isinstance(obj, onnx.NodeProto):
        return None
    if obj.op_type == "LRN":
        _refuse(obj, "divides by a sum over a window of neighbouring channels and is outside the family")
    if obj.domain not in ("", "ai.onnx") or obj.op_type not in _READERS:
        _refuse(obj, f"of domain {obj.domain or 'ai.onnx'} is none of the operators {', '.join(_READERS)}")
    return _READERS[obj.op_type](obj, _Attributes(obj), input_ndim)


class _Attributes:
    """The attributes of a node by name, with the operator's default where it is not written."""

    def __init__(self, node: NodeProto) -> None:
        import onnx

        self._values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}

    def number(self, name: str, default: float) -> float:
        return shortest_float32(float(self._values.get(name, default)))

    def integer(self, name: str, default: int) -> int:
        return int(self._values.get(name, default))

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._values.get(name, default))


def shortest_float32(value: float) -> float:
    """The shortest decimal with the same float32: 1e-05 for the 9.999999747378752e-06 that a file holds.

    >>> shortest_float32(9.999999747378752e-06)
    1e-05
    """
    same = struct.pack("f", value)
    return next(
        short for digits in range(1, 18) if struct.pack("f", short := float(f"{value:.{digits}g}")) == same
    )


def _batch_norm(node: NodeProto, attributes: _Attributes, input_ndim: int | None) -> Reading:
    if attributes.integer("spatial", 1) == 0:
        _refuse(
            node,
            "has spatial=0, statistics per position, which operator sets from 9 on do not have. Convert the model",
        )
    spec = families.onnx_batch_normalization(
        momentum=attributes.number("momentum", 0.9), epsilon=attributes.number("epsilon", 1e-5)
    )
    by_batch = attributes.integer("training_mode", 0) == 1 or len(node.output) > 1
    mode = "batch" if by_batch else "running"
    return Reading(spec, f"onnx.{node.op_type}", {}, mode, mode, mode, ("train", "eval") if by_batch else ())


def _instance_norm(node: NodeProto, attributes: _Attributes, input_ndim: int | None) -> Reading:
    eps = attributes.number("epsilon", 1e-5)
    return _stateless(node, families.instance_norm(eps=eps, weight=True, bias=True))


def _layer_norm(node: NodeProto, attributes: _Attributes, input_ndim: int | None) -> Reading:
    axes = _trailing_axes(node, attributes.integer("axis", -1), input_ndim)
    has_bias = len(node.input) > 2 and node.input[2] != ""
    spec = families.onnx_layer_normalization(
        axes, epsilon=attributes.number("epsilon", 1e-5), bias=has_bias, stash=_stash(node, attributes)
    )
    return _stateless(node, spec)


def _rms_norm(node: NodeProto, attributes: _Attributes, input_ndim: int | None) -> Reading:
    axes = _trailing_axes(node, attributes.integer("axis", -1), input_ndim)
    eps = attributes.number("epsilon", 1e-5)
    return _stateless(node, families.rms_norm(axes, eps=eps, cast=_cast(node, attributes)))


def _group_norm(node: NodeProto, attributes: _Attributes, input_ndim: int | None) -> Reading:
    groups, eps = attributes.integer("num_groups", 0), attributes.number("epsilon", 1e-5)
    if groups < 1:
        _refuse(node, "has no num_groups, which the operator requires. Export the model again")
    return _stateless(node, families.group_norm(groups, eps=eps).replace(cast=_cast(node, attributes)))


def _lp_norm(node: NodeProto, attributes: _Attributes, input_ndim: int | None) -> Reading:
    if attributes.integer("p", 2) != 2:
        _refuse(
            node,
            f"has p={attributes.integer('p', 2)}: only p=2 divides by a root of squares and is in the family",
        )
    stats = erase((attributes.integer("axis", -1),), input_ndim)
    if stats is None:
        _refuse_axes(node, input_ndim)
    # a zero row stays zero, and no other row of float32 is as short as this
    return _stateless(node, NormSpec(stats, center=False, scale="l2", eps=2.0**-149, eps_at="max"))


def _mean_variance(node: NodeProto, attributes: _Attributes, input_ndim: int | None) -> Reading:
    stats = erase(attributes.integers("axes", (0, 2, 3)), input_ndim)
    if stats is None:
        _refuse_axes(node, input_ndim)
    return _stateless(node, families.onnx_mean_variance_normalization(stats))


def _stateless(node: NodeProto, spec: NormSpec) -> Reading:
    return Reading(spec, f"onnx.{node.op_type}")


def _cast(node: NodeProto, attributes: _Attributes) -> Cast:
    """Scale and bias are applied after casting back."""
    return Cast(compute=_stash(node, attributes), weight="after")


def _stash(node: NodeProto, attributes: _Attributes) -> str:
    """The dtype of the statistics."""
    kind = attributes.integer("stash_type", 1)
    if kind not in STASH:
        _refuse(node, f"has stash_type={kind}, which is no floating-point type")
    return STASH[kind]


def _trailing_axes(node: NodeProto, axis: int, input_ndim: int | None) -> str:
    """Names of the normalized axes: from the first one, which the node gives, to the last."""
    if input_ndim is None:
        if axis >= 0:
            _refuse_axes(node, None)
        return last_axes(-axis)
    if not -input_ndim <= axis < input_ndim:
        _refuse_axes(node, input_ndim)
    return last_axes(input_ndim - axis % input_ndim)


def _refuse_axes(node: NodeProto, input_ndim: int | None) -> NoReturn:
    if input_ndim is None:
        _refuse(node, "counts its axes from the front: pass input_ndim, the number of axes of its input")
    _refuse(node, f"names an axis that an input of {input_ndim} axes does not have")


def _refuse(node: NodeProto, why: str) -> NoReturn:
    name = f" {node.name!r}" if node.name else ""
    raise UnknownNormalization(f"onnx.{node.op_type}{name} {why}.")


_READERS: dict[str, Callable[[NodeProto, _Attributes, int | None], Reading]] = {
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
}

READER = Reader(needs="onnx", knows=tuple(f"onnx.{name}" for name in _READERS), read=_read)
