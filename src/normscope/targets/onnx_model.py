"""An ONNX graph as a PyTorch module: its forward runs ONNX Runtime, and its children are the graph's normalizations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from normscope.doctor.graph_norm import GraphNorm
from normscope.errors import BadInput, BadTarget, NormscopeError
from normscope.reading.graphs.graph import Graph, sizes
from normscope.reading.graphs.norms import NodeNorm, node_norms
from normscope.targets import Loaded
from normscope.targets.onnx_files import name_of, read_graph, readable
from normscope.targets.onnx_neighbours import Neighbours
from normscope.targets.onnx_run import batches, looker
from normscope.targets.onnx_stream import Streams

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

SAMPLES = 2
"""samples of a random input where the graph leaves their number open"""


def load(target: str, weights: Path | None = None) -> Loaded:
    """The target of a command."""
    if weights is not None:
        raise BadTarget(f"{target} holds its own weights: leave --weights {weights} out")
    model = OnnxModel(target)
    loaded = Loaded(model)
    loaded.declared = lambda: _trial(model)
    return loaded


def _trial(model: OnnxModel) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Random inputs that the graph was seen to run on."""
    example = model.example()
    if example is None:
        sizes = ", ".join(model.input_names)
        return (
            None,
            f"the graph leaves sizes of its inputs open ({sizes}), so it was read and not run: pass --data FILE",
        )
    try:
        with torch.no_grad():
            model(**example)
    except NormscopeError as error:
        return None, f"the graph was read and not run: {error}"
    told = ", ".join(f"{name} {'x'.join(map(str, t.shape))}" for name, t in example.items())
    return (
        example,
        f"the graph runs on random input of the sizes it declares ({told}); pass --data FILE for more",
    )


class OnnxModel(torch.nn.Module):
    """An ONNX graph that can be checked like a model: ``ns.check(ns.OnnxModel("model.onnx"), x)``.

    Every normalization is a child, by the name of its node: operators, those written as many nodes, and those inside
    If, Loop and Scan (these are read, but not looked at in a run). The forward runs the graph with ONNX Runtime on the
    CPU, several times where its values do not fit into 256 MiB at once, and hands each child its input and output.

    Args:
        source: path of an ``.onnx`` file, an ``onnx.ModelProto``, or a `Graph`. Weights in other files are read only
            from the file's own folder, and only those of normalizations.

    Shapes and dtypes of the forward are those of the graph; inputs are passed in its order, or by name.

    Raises:
        BadTarget: no ONNX model, a broken one, or one that asks for files outside of its folder.
        MissingExtra: onnx (for a forward: onnxruntime) is not installed.
        BadInput: from the forward, for inputs that do not fit.

    Example:
        >>> from onnx import TensorProto as T, helper as h, numpy_helper
        >>> value = lambda name: h.make_tensor_value_info(name, T.FLOAT, ["n", 3])
        >>> ones = numpy_helper.from_array(np.ones(3, np.float32), "ones")
        >>> node = h.make_node("LayerNormalization", ["x", "ones"], ["y"], name="norm", epsilon=1e-6)
        >>> graph = h.make_graph([node], "g", [value("x")], [value("y")], [ones])
        >>> model = OnnxModel(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9))
        >>> model.norm.spec.eps, model(torch.tensor([[1.0, 2.0, 3.0]])).shape
        (1e-06, torch.Size([1, 3]))
    """

    def __init__(self, source: str | Path | ModelProto | Graph) -> None:
        super().__init__()
        graph = source if isinstance(source, Graph) else read_graph(source)
        with readable("the graph" if isinstance(source, Graph) else name_of(source)):
            norms = node_norms(graph)
            neighbours = Neighbours(graph, norms)
            streams = Streams(graph, neighbours, norms)
            for norm in norms:  # names of nodes hold dots, which add_module refuses
                self._modules[norm.name] = _child(norm, neighbours, streams)
            self._example = _example(graph)
        self.input_names = tuple(graph.inputs)
        self.output_names = tuple(graph.outputs)
        self._groups = tuple((norm.name, norm.input, norm.output) for norm in norms if norm.reachable)
        self._look = looker(graph.model, graph.folder)
        self._held: Callable[[], Graph] = lambda: graph  # like the session, no part of the state
        self.eval()

    @property
    def graph(self) -> Graph:
        """The graph, its local functions written out; ``graph.model`` is the ``onnx.ModelProto``."""
        return self._held()

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        given = self.arrays(args, kwargs)
        outputs: tuple[torch.Tensor, ...] | None = None
        left = list(self._groups)
        for seen in self._look(given, [group[1:] for group in self._groups]):
            if outputs is None:
                outputs = tuple(_tensor(seen[name]) for name in self.output_names)
            ready = [group for group in left if group[1] in seen and group[2] in seen]
            left = [group for group in left if group not in ready]
            for name, x, y in ready:
                self._modules[name](_tensor(seen[x]), _tensor(seen[y]))  # type: ignore[misc]
        assert outputs is not None
        return outputs[0] if len(outputs) == 1 else outputs

    def example(self, size: int | None = None) -> dict[str, torch.Tensor] | None:
        """Random input as the graph declares it, two samples where their number is open; ``size`` wherever else a size
        is open, None without it."""
        generator = torch.Generator().manual_seed(0)
        found = {}
        for name, declared, dtype in self._example or ():
            if size is None and None in declared[1:]:
                return None
            sizes = tuple(s or (size if i and size else SAMPLES) for i, s in enumerate(declared))
            real = dtype.is_floating_point
            numbers = (
                torch.randn(sizes, generator=generator)
                if real
                else torch.randint(2, sizes, generator=generator)
            )
            found[name] = numbers.to(dtype)
        return found or None

    def arrays(
        self, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]
    ) -> dict[str, NDArray[Any]]:
        """Inputs as ONNX Runtime takes them, by name.

        Raises:
            BadInput: they do not fit.
        """
        return {name: _array(tensor) for name, tensor in self._named(args, dict(kwargs)).items()}

    def values(self, given: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Values of the main graph by name, and its outputs, in one run on ``given``."""
        (seen,) = self._look(given, [names])
        return {name: _tensor(seen[name]) for name in (*self.output_names, *names)}

    def portions(self, given: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[list[str]]:
        """``names`` in portions whose values fit into 256 MiB; one at least."""
        known = sizes(self.graph.model, {name: array.shape for name, array in given.items()})
        return list(batches([(name,) for name in names], known))

    def save(self, file: str | Path) -> None:
        """Write the graph: whole, or not at all. Weights beside it are copied to ``FILE.*.data``.

        Raises:
            BadInput: the graph's own weights lie there, or the graph is too large for one file.
            BadTarget: weights beside the graph are gone or broken.
        """
        from normscope.targets.onnx_saving import write

        write(self.graph.model, self.graph.folder, Path(file))

    def _named(
        self, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        given = {**dict(zip(self.input_names, args, strict=False)), **kwargs}
        if len(args) > len(self.input_names) or set(given) != set(self.input_names):
            raise BadInput(
                f"the graph takes {', '.join(self.input_names) or 'nothing'}; it got "
                f"{len(args)} by position and {', '.join(kwargs) or 'none'} by name"
            )
        return given


def _child(norm: NodeNorm, neighbours: Neighbours, streams: Streams) -> GraphNorm:
    return GraphNorm(
        norm.type_name,
        norm.spec,
        norm.reason,
        norm.mode,
        {name: _tensor(norm.array(name)) for name in norm.parameters},
        neighbours.fed_by(norm) if norm.reachable else (),
        neighbours.feeds(norm) if norm.reachable else (),
        streams.join(norm) if norm.reachable else None,
    )


def _example(graph: Any) -> tuple[tuple[str, tuple[int | None, ...], torch.dtype], ...] | None:
    """Name, sizes (None where one is open) and type of each input; None where even their number is."""
    import onnx

    found = []
    for value in graph.proto.input:
        if value.name not in graph.inputs:
            continue
        size = graph.shapes.get(value.name)
        try:
            dtype = torch.from_numpy(
                np.zeros(0, onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            ).dtype
        except (KeyError, TypeError):
            return None
        if size is None:
            return None
        found.append((value.name, tuple(s if s and s > 0 else None for s in size), dtype))
    return tuple(found)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype == torch.bfloat16:
        came = getattr(tensor, "dtype", type(tensor).__name__)
        raise BadInput(f"ONNX Runtime takes tensors of a type that NumPy has; got {came}")
    return tensor.detach().cpu().contiguous().numpy()


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    if array.dtype.name == "bfloat16":  # ml_dtypes, which torch does not know
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError as error:
        raise BadTarget(
            f"a normalization holds numbers of type {array.dtype}, which PyTorch has not"
        ) from error
