"""An ONNX graph written to a file that the user named: whole, or not at all."""

from __future__ import annotations

import hashlib
import re
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
OURS = r"\.[0-9a-f]{16}\.data"
"""what follows the name of a graph in that of its weights"""


def write(model: ModelProto, folder: Path | None, file: Path) -> None:
    """The graph, in a folder beside ``file`` first; weights that lie beside it in ``folder`` go to a file of their own.

    That file is called ``FILE.*.data``, by its content: the graph that is there keeps its weights until the new one
    takes its place in one step, and only then they go.

    Raises:
        BadInput: the graph is too large for one file.
        BadTarget: weights beside the graph are gone or broken.
    """
    _refuse(model)
    used = {place_of(tensor, folder)[0] for tensor in _tensors(model.graph) if _is_outside(tensor)}
    room = Path(tempfile.mkdtemp(prefix=f".{file.name}.", dir=file.resolve().parent))
    try:
        written, data = _beside(model, folder, room / file.name) if used else (model, None)
        (room / file.name).write_bytes(written.SerializeToString())
        if data is not None:
            used.add(file.resolve().with_name(data.name))
            data.replace(file.with_name(data.name))
        left = _written_before(file) - used
        (room / file.name).replace(file)
        for old in left:
            old.unlink(missing_ok=True)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _written_before(file: Path) -> set[Path]:
    """Files of weights, by their names of ours, that the graph which is there reads."""
    import onnx

    beside = file.resolve().parent
    ours = re.compile(re.escape(file.name) + OURS)
    if not any(ours.fullmatch(path.name) for path in beside.iterdir()):
        return set()
    there = onnx.ModelProto()
    try:
        there.ParseFromString(file.read_bytes())
    except Exception:  # no graph, or none that is whole: nothing says whose the weights are
        return set()
    entries = (entry for tensor in _tensors(there.graph) for entry in tensor.external_data)
    names = {entry.value for entry in entries if entry.key == "location"}
    return {beside / name for name in names if ours.fullmatch(name)}


def _refuse(model: ModelProto) -> None:
    size = model.ByteSize()
    if size > LARGEST:
        raise BadInput(
            f"the graph and its new weights have {size} bytes, more than one file can hold ({LARGEST}): save the "
            "original with its weights beside it (onnx.save(model, path, save_as_external_data=True))"
        )


def _beside(model: ModelProto, folder: Path | None, graph: Path) -> tuple[ModelProto, Path]:
    """A copy whose tensors beside the graph lie in one file, which is written next to ``graph``, and that file."""
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    moved = []
    part = graph.with_name("weights")
    with part.open("wb") as file:
        for tensor in _tensors(made.graph):
            if _is_outside(tensor):
                path, offset, length = place_of(tensor, folder)
                file.write(b"\0" * (-file.tell() % ALIGNED))
                moved.append((tensor, file.tell(), length))
                with path.open("rb") as source:
                    source.seek(offset)
                    _copy(source, file, length)
    data = part.rename(graph.with_name(f"{graph.name}.{_digest(part)}.data"))
    for tensor, start, length in moved:
        del tensor.external_data[:]
        for key, value in (("location", data.name), ("offset", start), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
    return made, data


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            found.update(part)
    return found.hexdigest()[:16]


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
