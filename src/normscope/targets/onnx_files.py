"""``.onnx`` files: read without trust, and without the weights that no normalization needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from normscope.errors import BadTarget, MissingExtra, told
from normscope.reading.graphs.constants import place_of
from normscope.reading.graphs.graph import Graph, inlined
from normscope.targets.onnx_text import in_text

if TYPE_CHECKING:
    from onnx import ModelProto

LARGEST = 2**31 - 1
"""bytes of a protobuf message; larger weights lie beside the file"""


def read_graph(source: str | Path | ModelProto) -> Graph:
    """The graph of a file or of a model in memory. Weights that lie in other files stay there.

    Raises:
        BadTarget: it is no ONNX model, is broken, or asks for files outside of its folder.
        MissingExtra: the onnx package is not installed.
    """
    try:
        import onnx
    except ImportError:
        raise MissingExtra("onnx", "onnx", "reading an ONNX graph") from None
    if isinstance(source, onnx.ModelProto):
        return _graph(source, None, name_of(source))
    path = Path(source)
    if not path.is_file():
        raise BadTarget(f"there is no file {path}")
    if path.stat().st_size > LARGEST:
        raise BadTarget(
            f"{path} has {path.stat().st_size} bytes, more than a protobuf message can hold ({LARGEST}): it is broken, "
            "or was written without save_as_external_data=True"
        )
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # the exception types of the protobuf implementations
        raise BadTarget(f"{path} is broken or no ONNX file: {told(error)}") from error
    return _graph(model, path.parent, str(path))


def name_of(source: str | Path | ModelProto) -> str:
    """For messages."""
    return str(source) if isinstance(source, (str, Path)) else "the model"


def _graph(model: ModelProto, folder: Path | None, name: str) -> Graph:
    import onnx

    if not model.graph.node or not model.opset_import:
        lacks = "nodes" if model.opset_import else "an operator set"
        raise BadTarget(f"{name} is no ONNX model: it has no graph with {lacks}")
    with readable(name):
        graph = Graph(inlined(in_text(model)), folder=folder)
        graph.wrote_functions_out = bool(model.functions)
        for tensor in graph.stored.values():
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                place_of(tensor, folder)
    return graph


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Whatever a broken graph makes fail inside is a BadTarget: its nodes may lack inputs."""
    try:
        yield
    except BadTarget as error:
        raise BadTarget(f"{name}: {error}") from error
    except Exception as error:  # nothing of the file is run
        raise BadTarget(f"{name} is broken: {told(error)}") from error
