"""ONNX Runtime run so that values inside the graph can be looked at, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import BadInput, MissingExtra, ModelError, told
from normscope.reading.graphs.graph import sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

    Arrays = Mapping[str, NDArray[Any]]

BUDGET = 256 * 2**20
"""bytes of values that one run hands out"""
UNKNOWN = BUDGET // 8
"""bytes that a value is taken for whose size is not known before"""
BYTES = 4
"""of an element; float64 graphs may need twice the budget"""
FOLDER = "session.model_external_initializers_file_folder_path"

Look = Callable[["Arrays", Sequence[Sequence[str]]], "Iterator[Arrays]"]
"""(inputs by name, groups of values to see) -> for each run what it saw; the first holds the outputs too"""


def looker(model: ModelProto, folder: Path | None) -> Look:
    """A function that runs the graph. What it keeps between runs hides in it: a session is no part of a model's state.

    Nodes are run as they are written: the runtime's own optimizations, which merge them, are off.
    """
    stored = {tensor.name for tensor in model.graph.initializer}

    @lru_cache(maxsize=1)
    def session(names: tuple[str, ...]) -> Any:
        return _session(model, names, folder)

    def look(given: Arrays, groups: Sequence[Sequence[str]]) -> Iterator[Arrays]:
        known = sizes(model, {name: array.shape for name, array in given.items()})
        for names in batches(groups, known):
            run = session(tuple(name for name in names if name not in given and name not in stored))
            wanted = [output.name for output in run.get_outputs()]
            try:
                values = run.run(wanted, dict(given))
            except Exception as error:  # the runtime's own exception types
                raise _blamed(error, run, given) from error
            yield {**given, **dict(zip(wanted, values, strict=True))}

    return look


def _session(model: ModelProto, names: Sequence[str], folder: Path | None) -> Any:
    import onnx

    try:
        import onnxruntime
    except ImportError:
        raise MissingExtra("onnxruntime", "onnx", "running an ONNX graph") from None
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    outputs = {value.name for value in seen.graph.output}
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if folder is not None:
        options.add_session_config_entry(FOLDER, str(folder))
    try:
        return onnxruntime.InferenceSession(
            seen.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ModelError(
            f"ONNX Runtime {onnxruntime.__version__} does not load this graph: {told(error)}. Its "
            "normalizations can still be read: normscope check without --data"
        ) from error


def batches(
    groups: Sequence[Sequence[str]], known: Mapping[str, tuple[int | None, ...]]
) -> Iterator[list[str]]:
    """Groups together as long as they fit the budget; at least one batch, of the graph's outputs."""
    batch: list[str] = []
    spent = 0
    for group in groups:
        cost = sum(_bytes(known.get(name)) for name in set(group))
        if batch and spent + cost > BUDGET:
            yield batch
            batch, spent = [], 0
        batch, spent = [*batch, *(name for name in group if name not in batch)], spent + cost
    yield batch


def _bytes(size: tuple[int | None, ...] | None) -> int:
    if size is None or None in size:
        return UNKNOWN
    return BYTES * math.prod(s for s in size if s is not None)


def _blamed(error: Exception, run: Any, given: Arrays) -> BadInput:
    wanted = ", ".join(
        f"{i.name}: {i.type.removeprefix('tensor').strip('()')} {i.shape}" for i in run.get_inputs()
    )
    came = ", ".join(f"{name}: {array.dtype} {list(array.shape)}" for name, array in given.items())
    return BadInput(f"the graph takes {wanted}; it got {came}, and ONNX Runtime raised {told(error)}")
