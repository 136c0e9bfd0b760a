"""Broken graphs: one error that says so, or a fold; never another exception, never a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_nets import Net, layer

from normscope.errors import NormscopeError
from normscope.transforms import fold

pytest.importorskip("onnxruntime")


def net() -> onnx.ModelProto:
    made = Net()
    made.norm("x", "n0", 3)
    layer(made, "Conv", "n0", "h", (3, 4), 1, "vector")
    made.node("Mul", ["h", made.store("factor", 4, 1, 1)], "scaled")
    made.norm("scaled", "n", 4)
    made.node("Flatten", ["n"], "flat")
    layer(made, "Gemm", "flat", "g", (48, 2), 1, "row")
    made.norm("g", "m", 2)
    layer(made, "MatMul", "m", "y", (2, 3), 1, "vector")
    return made.model({"x": (2, 3, 6, 4)}, {"y": (2, 3)})


BYTES = net().SerializeToString()


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """Bytes changed or cut, or fields of the graph that no longer fit together."""
    if draw(st.booleans()):
        found = bytearray(BYTES[: draw(st.integers(len(BYTES) // 2, len(BYTES)))])
        for _ in range(draw(st.integers(0, 3))):
            found[draw(st.integers(0, len(found) - 1))] = draw(st.integers(0, 255))
        return bytes(found)
    model = net()
    nodes, stored = model.graph.node, model.graph.initializer
    for _ in range(draw(st.integers(1, 3))):
        node, tensor = draw(st.sampled_from(list(nodes))), draw(st.sampled_from(list(stored)))
        names = sorted({name for other in nodes for name in (*other.input, *other.output)} | {"", "nothing"})
        kind = draw(st.integers(0, 9))
        if kind == 0 and node.input:
            node.input[draw(st.integers(0, len(node.input) - 1))] = draw(st.sampled_from(names))
        elif kind == 1 and node.output:
            node.output[0] = draw(st.sampled_from(names))
        elif kind == 2:
            node.op_type = draw(
                st.sampled_from(["Conv", "BatchNormalization", "Mul", "Transpose", "Pad", "Dropout", "No"])
            )
        elif kind == 3:
            del tensor.dims[:]
            tensor.dims.extend(draw(st.lists(st.integers(-1, 5), max_size=4)))
        elif kind == 4:
            tensor.data_type = draw(st.integers(0, 30))
        elif kind == 5:
            del node.input[draw(st.integers(0, len(node.input))) :]
        elif kind == 6:
            value: Any = draw(
                st.sampled_from(
                    [0, -1, 2, [1, 1], [0, 0, 1, 1], [3, 1, 0, 2], 0.5, "SAME_UPPER", float("nan")]
                )
            )
            name = draw(
                st.sampled_from(
                    ["group", "pads", "perm", "epsilon", "alpha", "transB", "auto_pad", "strides"]
                )
            )
            node.attribute.append(onnx.helper.make_attribute(name, value))
        elif kind == 7:
            model.opset_import[0].version = draw(st.sampled_from([-1, 0, 1, 7, 9, 14, 99, 2**40]))
        elif kind == 8:
            tensor.raw_data = draw(
                st.sampled_from([b"", b"\xff" * len(tensor.raw_data), tensor.raw_data[:-1]])
            )
        else:
            nodes.extend([nodes[draw(st.integers(0, len(nodes) - 1))]])
    return model.SerializeToString()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(broken())
def test_broken_graphs(tmp_path: Path, found: bytes) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(found)
    out = tmp_path / "out.onnx"
    try:
        folded, report = fold(path)
        folded.save(out)
    except NormscopeError:
        assert not out.exists()
    else:
        if report.done:
            onnx.load(out)
        for one in report.agreements:
            assert np.isfinite(one.difference)
        out.unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]
