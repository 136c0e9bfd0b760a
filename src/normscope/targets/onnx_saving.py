"""An ONNX graph written to a file that the user named: whole, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from normscope.errors import BadInput
from normscope.reading.graphs.constants import place_of
from normscope.targets.onnx_files import LARGEST

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

ALIGNED = 4096
"""bytes that a tensor beside the graph starts at a multiple of, so that a runtime can map it"""
CHUNK = 2**24
"""bytes copied at once"""


def write(model: ModelProto, folder: Path | None, file: Path) -> None:
    """The graph, in a folder beside ``file`` first; weights that lie beside it in ``folder`` go to ``file.data``.

    Raises:
        BadInput: ``file.data`` holds weights of this graph, or the graph is too large for one file.
        BadTarget: weights beside the graph are gone or broken.
    """
    data = file.with_name(f"{file.name}.data")
    outside = any(_is_outside(tensor) for tensor in _tensors(model.graph))
    _refuse(model, folder, data)
    room = Path(tempfile.mkdtemp(prefix=f".{file.name}.", dir=file.resolve().parent))
    try:
        written = _beside(model, folder, room / data.name) if outside else model
        (room / file.name).write_bytes(written.SerializeToString())
        if outside:
            (room / data.name).replace(data)
        (room / file.name).replace(file)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _refuse(model: ModelProto, folder: Path | None, data: Path) -> None:
    for tensor in _tensors(model.graph):
        if _is_outside(tensor) and place_of(tensor, folder)[0] == data.resolve():
            raise BadInput(f"{data} holds weights of the graph itself: write to another file or folder")
    size = model.ByteSize()
    if size > LARGEST:
        raise BadInput(
            f"the graph and its new weights have {size} bytes, more than one file can hold ({LARGEST}): save the "
            "original with its weights beside it (onnx.save(model, path, save_as_external_data=True))"
        )


def _beside(model: ModelProto, folder: Path | None, data: Path) -> ModelProto:
    """A copy whose tensors beside the graph lie in one file, which is written."""
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    with data.open("wb") as file:
        for tensor in _tensors(made.graph):
            if _is_outside(tensor):
                path, offset, length = place_of(tensor, folder)
                file.write(b"\0" * (-file.tell() % ALIGNED))
                start = file.tell()
                with path.open("rb") as source:
                    source.seek(offset)
                    _copy(source, file, length)
                del tensor.external_data[:]
                for key, value in (("location", data.name), ("offset", start), ("length", length)):
                    tensor.external_data.add(key=key, value=str(value))
    return made


def _copy(source: BinaryIO, file: BinaryIO, length: int) -> None:
    while length > 0:
        part = source.read(min(CHUNK, length))
        if not part:
            raise EOFError("the file of weights became shorter while it was copied")
        file.write(part)
        length -= len(part)


def _is_outside(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == type(tensor).EXTERNAL)


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Every tensor of a graph and of the bodies in it."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _in_attributes(node)


def _in_attributes(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _tensors(body)
