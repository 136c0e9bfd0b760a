"""Small ONNX graphs of a layer and batch norms, for tests of folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

KINDS = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}


class ConvTranspose(OpRun):
    """In float64 by PyTorch: the reference implementation of onnx takes no groups."""

    op_domain = ""

    def _run(
        self, x: Any, w: Any, b: Any = None, group: int = 1, pads: Any = None, strides: Any = None, **_: Any
    ) -> Any:
        held = [None if a is None else torch.tensor(a) for a in (x, w, b)]
        whole = torch.nn.functional.conv_transpose2d(*held, stride=strides or 1, groups=group)
        top, left, bottom, right = pads or (0, 0, 0, 0)
        return (whole[:, :, top : whole.shape[2] - bottom, left : whole.shape[3] - right].numpy(),)


def truth(model: ModelProto, x: Any) -> Any:
    """The first output, by the reference implementation of the operators."""
    return ReferenceEvaluator(model, new_ops=[ConvTranspose]).run(None, {"x": x})[0]


class Net:
    """Nodes and stored tensors, collected; every value is a random one."""

    def __init__(self, seed: int = 0, dtype: str = "float32") -> None:
        self.random = np.random.default_rng(seed)
        self.dtype = dtype
        self.nodes: list[NodeProto] = []
        self.stored: dict[str, np.ndarray[Any, Any]] = {}

    def store(self, name: str, *shape: int, low: float | None = None) -> str:
        """Standard normal numbers, or uniform ones from ``low`` to ``low + 1``."""
        numbers = self.random.normal(size=shape) if low is None else self.random.uniform(low, low + 1, shape)
        self.stored[name] = numbers.astype(self.dtype)
        return name

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(make_node(op, list(inputs), [output], name=f"{output}_node", **attributes))
        return output

    def norm(self, x: str, y: str, features: int, **attributes: Any) -> str:
        held = [self.store(f"{y}_{part}", features) for part in ("gain", "bias", "mean")]
        held.append(self.store(f"{y}_var", features, low=0.2))
        return self.node("BatchNormalization", [x, *held], y, **attributes)

    def model(
        self,
        inputs: dict[str, Sequence[int | str | None]],
        outputs: dict[str, Sequence[int | str | None]],
        *,
        opset: int = 17,
        ir: int = 9,
        **graph: Any,
    ) -> ModelProto:
        kind = KINDS[self.dtype]
        values = [
            [make_tensor_value_info(name, kind, list(shape)) for name, shape in part.items()]
            for part in (inputs, outputs)
        ]
        stored = [numpy_helper.from_array(array, name) for name, array in self.stored.items()]
        if ir < 4:
            values[0] += [
                make_tensor_value_info(name, kind, list(a.shape)) for name, a in self.stored.items()
            ]
        made = make_graph(self.nodes, "net", *values, stored, **graph)
        return make_model(made, opset_imports=[make_opsetid("", opset)], ir_version=ir)


def layer(
    net: Net, op: str, x: str, y: str, sizes: tuple[int, int], groups: int, bias: str, **attributes: Any
) -> tuple[int, int]:
    """One linear operator on ``x``; ``sizes``: features in and out of one group. Returns those of all."""
    inputs, outputs = (size * groups for size in sizes)
    weight = f"{y}_weight"
    if op == "Conv":
        net.store(weight, outputs, sizes[0], 3, 2)
    elif op == "ConvTranspose":
        net.store(weight, inputs, sizes[1], 3, 2)
    elif attributes.get("transB"):
        net.store(weight, outputs, inputs)
    else:
        net.store(weight, inputs, outputs)
    held = [x, weight]
    if op in ("Conv", "ConvTranspose"):
        attributes |= {"group": groups}
    if bias and op != "MatMul":
        shapes = {"vector": (outputs,), "row": (1, outputs), "number": (), "column": (2, 1)}
        held.append(net.store(f"{y}_bias", *(shapes[bias] if op == "Gemm" else (outputs,))))
    if bias and op == "MatMul":
        net.node("MatMul", held, f"{y}_product", **attributes)
        shape = {"row": (1, outputs), "number": ()}.get(bias, (outputs,))
        held = [f"{y}_product", net.store(f"{y}_bias", *shape)]
        net.node("Add", held[:: 1 if bias == "vector" else -1], y)
    else:
        net.node(op, held, y, **attributes)
    return inputs, outputs
