"""Numbers that an ONNX graph holds: initializers, Constant nodes, and what a few nodes make of them.

Tensors stored beside the graph are read only from the graph's own folder, only when they are asked for, and only as
many bytes as their shape says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import BadTarget, told

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import NodeProto, TensorProto

LARGEST = 2**26
"""elements of a constant that is computed here; stored ones may be larger"""
DEPTH = 32
"""nodes between a constant and what is stored"""


class Constants:
    """The values of a graph that depend on none of its inputs.

    Args:
        stored: initializers by name.
        producers: the node that makes each value, by name.
        shapes: sizes of the values of the graph, as far as they are known; None for an unknown size.
        folder: where tensors outside of the file lie; None where there is no file.
    """

    def __init__(
        self,
        stored: Mapping[str, TensorProto],
        producers: Mapping[str, NodeProto],
        shapes: Mapping[str, tuple[int | None, ...]],
        folder: Path | None,
    ) -> None:
        self._stored = stored
        self._producers = producers
        self._shapes = shapes
        self._folder = folder
        self._known: dict[str, NDArray[Any] | None] = {}

    def get(self, name: str, depth: int = 0) -> NDArray[Any] | None:
        """The value of that name, None where it depends on the input or cannot be told."""
        if name in self._stored:
            return array_of(self._stored[name], self._folder)
        if name not in self._known and depth < DEPTH:
            node = self._producers.get(name)
            self._known[name] = None if node is None else self._made(node, depth)
        return self._known.get(name)

    def size(self, name: str) -> tuple[int, ...] | None:
        """The shape of a stored tensor, without reading it; of another constant, by computing it."""
        if name in self._stored:
            return tuple(self._stored[name].dims)
        value = self.get(name)
        return None if value is None else value.shape

    def _made(self, node: NodeProto, depth: int) -> NDArray[Any] | None:
        if node.domain not in ("", "ai.onnx"):
            return None
        attributes = values_of(node)
        if node.op_type == "Constant":
            return self._constant(attributes)
        if node.op_type == "Shape":
            return self._shape(self._shapes.get(node.input[0]), attributes)
        compute = COMPUTED.get(node.op_type)
        if compute is None:
            return None
        names = [name for name in node.input if name]
        if names != list(node.input)[: len(names)]:  # one is left out before others
            return None
        given = [self.get(name, depth + 1) for name in names]
        if any(value is None or value.size > LARGEST for value in given):
            return None
        try:
            with np.errstate(all="ignore"):
                made: NDArray[Any] | None = compute(given, attributes)
        except (ValueError, TypeError, IndexError, OverflowError, np.exceptions.AxisError):
            return None  # a graph that its own runtime would refuse
        return made

    def _constant(self, attributes: dict[str, Any]) -> NDArray[Any] | None:
        if "value" in attributes:
            return array_of(attributes["value"], self._folder)
        given = next((attributes[name] for name in WRITTEN if name in attributes), None)
        return None if given is None else np.asarray(given, np.float32 if _floats(given) else np.int64)

    @staticmethod
    def _shape(sizes: tuple[int | None, ...] | None, attributes: dict[str, Any]) -> NDArray[Any] | None:
        wanted = None if sizes is None else sizes[attributes.get("start", 0) : attributes.get("end")]
        return None if wanted is None or None in wanted else np.array(wanted, np.int64)


WRITTEN = ("value_float", "value_floats", "value_int", "value_ints")


def _floats(given: Any) -> bool:
    return isinstance(given, float) or (
        isinstance(given, (list, tuple)) and any(isinstance(v, float) for v in given)
    )


def values_of(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node by name.

    Raises:
        BadTarget: one of them is broken.
    """
    import onnx

    try:
        return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    except Exception as error:
        raise BadTarget(
            f"node {node.name or node.op_type!r} has a broken attribute: {told(error)}"
        ) from error


def array_of(tensor: TensorProto, folder: Path | None) -> NDArray[Any]:
    """The values of a stored tensor.

    Raises:
        BadTarget: it is broken, or points out of the folder of its file.
    """
    import onnx

    name = tensor.name or "a constant"
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # sizes that do not fit the bytes, types that do not exist
        raise BadTarget(f"the tensor {name} is broken: {told(error)}") from error
    count = math.prod(tensor.dims)
    path, offset, length = place_of(tensor, folder)
    if length != count * dtype.itemsize:
        raise BadTarget(
            f"the tensor {name} says {length} bytes in {path.name}, but its shape needs {count * dtype.itemsize}"
        )
    with path.open("rb") as file:
        file.seek(offset)
        return np.frombuffer(file.read(length), dtype).reshape(tuple(tensor.dims))


def place_of(tensor: TensorProto, folder: Path | None) -> tuple[Path, int, int]:
    """File, offset and length of a tensor outside of the graph's file.

    Raises:
        BadTarget: the file is missing, shorter than that, or not inside ``folder`` (an absolute path, ``..``, a link).
    """
    import onnx

    name, told_of = tensor.name or "a constant", {entry.key: entry.value for entry in tensor.external_data}
    location = told_of.get("location", "")
    if folder is None:
        raise BadTarget(f"the tensor {name} lies in the file {location!r}: give the path of the graph's file")
    path = (folder / location).resolve()
    if not location or Path(location).is_absolute() or not path.is_relative_to(folder.resolve()):
        raise BadTarget(
            f"the tensor {name} asks for the file {location!r}, which is not inside {folder}: weights are read only "
            "from the folder of the graph"
        )
    if not path.is_file():
        raise BadTarget(f"the tensor {name} lies in {path}, which is not there: keep it beside the graph")
    dtype, held = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), path.stat().st_size
    try:
        offset = int(told_of.get("offset") or 0)
        length = int(told_of.get("length") or math.prod(tensor.dims) * dtype.itemsize)
    except ValueError:
        offset, length = -1, -1
    if min(offset, length, *tensor.dims) < 0 or offset + length > held:
        raise BadTarget(
            f"the tensor {name} says it lies at offset {told_of.get('offset', 0)} of {path.name} with "
            f"{told_of.get('length', 'no')} bytes, but that file has {held}"
        )
    return path, offset, length


Given = list[Any]


def _axes(given: Given, attributes: dict[str, Any]) -> tuple[int, ...]:
    axes = given[1] if len(given) > 1 else attributes["axes"]
    return tuple(int(axis) for axis in axes)


def _reshape(given: Given, attributes: dict[str, Any]) -> NDArray[Any]:
    sizes = [int(size) for size in given[1]]
    if not attributes.get("allowzero", 0):
        sizes = [given[0].shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return np.asarray(given[0].reshape(sizes))


def _unsqueeze(given: Given, attributes: dict[str, Any]) -> NDArray[Any]:
    return np.expand_dims(given[0], _axes(given, attributes))


def _squeeze(given: Given, attributes: dict[str, Any]) -> NDArray[Any]:
    every = len(given) < 2 and "axes" not in attributes
    return np.asarray(np.squeeze(given[0], None if every else _axes(given, attributes)))


def _cast(given: Given, attributes: dict[str, Any]) -> NDArray[Any]:
    import onnx

    return np.asarray(given[0].astype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"])))


def _filled(given: Given, attributes: dict[str, Any]) -> NDArray[Any] | None:
    sizes = tuple(int(size) for size in given[0])
    value = array_of(attributes["value"], None) if "value" in attributes else np.zeros(1, np.float32)
    return np.full(sizes, value.reshape(-1)[0]) if _small(sizes) else None


def _expand(given: Given, attributes: dict[str, Any]) -> NDArray[Any] | None:
    sizes = np.broadcast_shapes(given[0].shape, tuple(int(size) for size in given[1]))
    return np.broadcast_to(given[0], sizes) if _small(sizes) else None


def _tile(given: Given, attributes: dict[str, Any]) -> NDArray[Any] | None:
    sizes = [int(a) * int(b) for a, b in zip(given[0].shape, given[1], strict=True)]
    return np.tile(given[0], given[1]) if _small(sizes) else None


def _slice(given: Given, attributes: dict[str, Any]) -> NDArray[Any] | None:
    if len(given) < 3:  # operator sets below 10
        return None
    starts, ends, *more = ([int(i) for i in one] for one in given[1:])
    axes = more[0] if more else range(len(starts))
    steps = more[1] if len(more) > 1 else [1] * len(starts)
    cuts = [slice(None)] * given[0].ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        cuts[axis] = slice(start, end, step)
    return np.asarray(given[0][tuple(cuts)])


def _small(sizes: Any) -> bool:
    return all(size >= 0 for size in sizes) and math.prod(sizes) <= LARGEST


COMPUTED: dict[str, Callable[[Given, dict[str, Any]], Any]] = {
    "Identity": lambda given, _: given[0],
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Cast": _cast,
    "ConstantOfShape": _filled,
    "Expand": _expand,
    "Tile": _tile,
    "Transpose": lambda given, a: np.transpose(given[0], a.get("perm")),
    "Gather": lambda given, a: np.take(given[0], given[1], axis=a.get("axis", 0)),
    "Concat": lambda given, a: np.concatenate(given, axis=a["axis"]),
    "ReduceProd": lambda given, _: np.prod(given[0], dtype=given[0].dtype),
    "Add": lambda given, _: given[0] + given[1],
    "Sub": lambda given, _: given[0] - given[1],
    "Mul": lambda given, _: given[0] * given[1],
    "Div": lambda given, _: given[0] / given[1] if given[0].dtype.kind == "f" else given[0] // given[1],
    "Sqrt": lambda given, _: np.sqrt(given[0]),
    "Reciprocal": lambda given, _: np.reciprocal(given[0]) if given[0].dtype.kind == "f" else None,
    "Pow": lambda given, _: np.power(given[0], given[1]) if given[0].dtype.kind == "f" else None,
    "Neg": lambda given, _: -given[0],
}
