"""What onnx.checker says of a graph whose weights may lie beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normscope.errors import told

if TYPE_CHECKING:
    from onnx import ModelProto


def problem(model: ModelProto) -> str:
    """Why onnx.checker rejects a graph, "" where it is valid.

    Tensors beside the graph are taken for inputs: where they lie is not looked at.
    """
    import onnx

    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    graph = checked.graph
    declared = {value.name for value in graph.input}
    for i in range(len(graph.initializer) - 1, -1, -1):
        tensor = graph.initializer[i]
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            if tensor.name not in declared:
                value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                graph.input.append(value)
            del graph.initializer[i]
    try:
        onnx.checker.check_model(checked)
    except Exception as error:  # also of messages too large to be checked in memory
        return told(error)
    return ""
