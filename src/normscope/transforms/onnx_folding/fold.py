"""Scales of an ONNX graph become part of the layers beside them; the result is compared in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.doctor import arguments
from normscope.doctor.refusals import Refused
from normscope.doctor.wording import listed
from normscope.errors import BadInput, NormscopeError, told
from normscope.transforms.agreement import Deviation
from normscope.transforms.folding.report import FoldReport, folded
from normscope.transforms.onnx_folding.checking import Checked, check
from normscope.transforms.onnx_folding.plan import Stays, Step
from normscope.transforms.onnx_folding.validity import problem
from normscope.transforms.report import SiteChange

if TYPE_CHECKING:
    from normscope.targets.onnx_model import OnnxModel
    from normscope.transforms.onnx_folding.checking import Arrays

OLDEST = 7
"""operator set from which a batch norm says by its outputs whether it trains, and sizes broadcast as in NumPy"""
SIZES = (32, 224, 64, 16, 8)
"""tried in turn where a graph leaves sizes of its inputs open"""


def fold_graph(
    source: OnnxModel | str | Path,
    sample: Any = None,
    *,
    dry_run: bool = False,
    clone_shared: bool = False,
    moot: Sequence[str] = (),
) -> tuple[OnnxModel, FoldReport]:
    """Fold what scales each feature of a graph by stored numbers into the layers beside it.

        a = gain / sqrt(variance + epsilon),  b = bias - a mean      (BatchNormalization)
        y = a x + b                                                  (that, or Mul and Add of constants)
            behind Conv, ConvTranspose, Gemm or MatMul    W' = a W     bias' = a bias + b
            else before all layers that read it           W' = W a     bias' = bias + W b

    Computed in float64 and rounded once. Left with a reason is whatever would change the function: a convolution that
    pads with zeros behind a batch norm whose shift is not 0, a layer whose output has other readers or leaves the
    graph, weights that are shared (``clone_shared`` gives each its own), quantized, computed, or open to callers;
    nodes in training mode; nodes inside If, Loop and Scan. Everything else in the graph is kept: names, versions,
    doc strings, metadata, sizes; stored tensors that nothing reads any more are gone.

    Both graphs run on ``sample``, or on random input of the declared sizes. Every value that a layer took over, and
    every output, may move by 1e-5 of the largest (float32; 1e-10 float64, 16 units float16), or by 16 times what
    moving each number that is folded by one unit does to the original, where that is more.

    Args:
        source: a graph, or the path of its file.
        moot: options given that only modules have.

    Returns a new graph (the one given where nothing folds, or in a ``dry_run``) and a report.

    Raises:
        BadTarget: the graph cannot be read, or is broken.
        BadInput: the sample does not fit the graph, none was given and no random input does, or an option is moot.
        Refused: the graph is of an operator set below 7, or carries a training.
        MissingExtra: onnx or onnxruntime is not installed.
        ModelError: ONNX Runtime does not load the graph.
        Deviation: outputs deviate although every folded place agrees; nothing is returned.

    Jacob et al. 2018, https://arxiv.org/abs/1712.05877, section 3.2.

    >>> import numpy as np
    >>> from onnx import TensorProto as T, helper as h, numpy_helper
    >>> from normscope.targets.onnx_model import OnnxModel
    >>> value = lambda name: h.make_tensor_value_info(name, T.FLOAT, ["n", 3])
    >>> weights = {"w": np.eye(3), "g": np.ones(3), "b": np.ones(3), "m": np.zeros(3), "v": np.full(3, 4.0)}
    >>> stored = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    >>> nodes = [h.make_node("Gemm", ["x", "w"], ["h"], name="fc"),
    ...          h.make_node("BatchNormalization", ["h", *"gbmv"], ["y"], name="bn")]
    >>> graph = h.make_graph(nodes, "g", [value("x")], [value("y")], stored)
    >>> model = OnnxModel(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9))
    >>> small, report = fold_graph(model)
    >>> [node.op_type for node in small.graph.nodes], report.folds[0].into, report.left
    (['Gemm'], ('fc',), ())
    """
    from normscope.targets.onnx_model import OnnxModel  # a floor above

    if moot:
        raise BadInput(
            f"{listed(moot)}: a graph folds into a new one, which has neither optimizer nor centering"
        )
    model = OnnxModel(source) if isinstance(source, (str, Path)) else source
    _refuse(model)
    given, said = _sample(model, sample)
    before = problem(model.graph.model)
    checked = check(model, given, clone_shared=clone_shared)
    if checked.steps and not before and (after := problem(checked.model.graph.model)):
        raise Deviation(f"onnx.checker rejects the folded graph, please report it: {after}", None)
    notes = [*said, *checked.notes, *_notes(model, checked)]
    if before:
        notes.append(f"onnx.checker rejects the graph as it was, so the result was not held to it: {before}")
    report = FoldReport(
        "fold",
        tuple(map(_change, checked.planned)),
        checked.agreements,
        tuple(notes),
        dry_run=dry_run,
        folds=tuple(map(folded, checked.steps)),
    )
    return (model if dry_run else checked.model), report


def _refuse(model: OnnxModel) -> None:
    graph = model.graph
    if graph.opset < OLDEST:
        raise Refused(
            f"the graph is of operator set {graph.opset}, in which a batch norm and sizes that broadcast are written "
            f"in another way: convert it first (onnx.version_converter.convert_version(model, {OLDEST}) or later)"
        )
    if graph.model.training_info:
        raise Refused(
            "the graph carries a training, which needs its weights as they are: drop training_info first"
        )


def _sample(model: OnnxModel, sample: Any) -> tuple[Arrays, list[str]]:
    """Inputs that the graph runs on, and what to say of them."""
    if sample is not None:
        args, kwargs, _ = arguments.on_device(model, sample)
        given = model.arrays(args or (), kwargs)
        model.values(given, ())
        return given, []
    failure: NormscopeError | None = None
    for size in (None, *SIZES):
        example = model.example(size)
        if example is None:
            continue
        try:
            given = model.arrays((), example)
            model.values(given, ())
        except BadInput as error:
            failure = failure or error
            continue
        sizes = ", ".join(f"{name} {'x'.join(map(str, t.shape))}" for name, t in example.items())
        chosen = "" if size is None else ", where sizes are left open as was seen to run"
        return given, [
            f"compared on random input of the sizes that the graph declares ({sizes}{chosen}); better on data"
        ]
    why = (
        f"fails on random input: {told(failure)}" if failure else "does not say how many axes its inputs have"
    )
    raise BadInput(
        f"a fold is compared in a run, and no sample was given. The graph {why}. Give a sample, on the command line "
        "with --data FILE"
    )


def _change(one: Step | Stays) -> SiteChange:
    if isinstance(one, Stays):
        return SiteChange(one.site, one.type_name, "", one.obstacle.reason)
    operators = " and ".join(dict.fromkeys(made.op for made in one.maps))
    return SiteChange(one.site, one.found.type_name, f"part of {operators}")


def _notes(model: OnnxModel, checked: Checked) -> list[str]:
    notes = []
    if model.graph.wrote_functions_out:
        notes.append("local functions were written out in place of their calls")
    if checked.steps:
        old, new = (one.graph.model.graph for one in (model, checked.model))
        notes.append(
            f"nodes {len(old.node)} -> {len(new.node)}, stored tensors {len(old.initializer)} -> {len(new.initializer)}"
        )
    return notes
