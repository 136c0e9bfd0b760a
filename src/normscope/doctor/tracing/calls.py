"""Every call of a normalization while a model runs: modules, functions, and operators that a script hides.

A torch function mode sees calls as they are written, with the user's arguments. It does not see what scripted and
traced modules call: a dispatch mode below it passes their operators up again, and since the function mode steps aside
while one of its functions runs, only operators that no visible function called arrive that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.doctor.graph_norm import GraphNorm
from normscope.doctor.tracing.ops import op_name
from normscope.doctor.tracing.paths import Frame, ModuleNames, ModuleStack
from normscope.doctor.tracing.readings import ModuleReading
from normscope.doctor.tracing.residual import taken_apart
from normscope.reading import read_call
from normscope.spec.bound import evened

if TYPE_CHECKING:
    from normscope.doctor.tracing.dataflow import Node
    from normscope.doctor.tracing.graph import Graph
    from normscope.reading import CallReading
    from normscope.spec import NormSpec


MASKED = (
    "the call has a mask, lengths or a packed sequence, and which elements count is no part of a specification, so "
    "that outputs and statistics were compared with none"
)


@dataclass(eq=False)
class NormCall:
    """One call of one normalization, with the user's tensors."""

    name: str
    """the site's name"""
    path: str
    """of the norm's own module, or of the forward that the call stands in"""
    kind: str
    """module | functional | hidden"""
    type_name: str
    frame: Frame
    """the innermost forward"""
    input: Tensor
    output: Tensor
    spec: NormSpec | None
    reason: str
    """why ``spec`` is None"""
    mode: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    node: Node | None = None
    """its place in the graph, where one is built"""


class NormCalls:
    """Context manager around a forward: calls ``tell(NormCall)`` after each call of a normalization.

    Args:
        names: of the model that will run.
        modules: ids of the modules that are normalizations; what happens inside them is theirs.
        tell: may compute with torch; that is not followed.
        hidden: also follow operators of scripted and traced modules.
        keep_running: ``tensors`` hold the running statistics as they were before the call.
        graph: follows what feeds what.
    """

    def __init__(
        self,
        names: ModuleNames,
        modules: set[int],
        tell: Callable[[NormCall], None],
        *,
        hidden: bool = True,
        keep_running: bool = False,
        graph: Graph | None = None,
    ) -> None:
        self.stack = ModuleStack(names, self._entered, self._left)
        self._graph = graph
        self._names = names
        self._modules = modules
        self._tell = tell
        self._hidden = hidden
        self._keep_running = keep_running
        self._inside: Frame | None = None  # a normalization module that is running
        self._quiet = False  # while ``tell`` runs
        self._before: tuple[ModuleReading, dict[str, Tensor]] | None = None
        self._contexts = ExitStack()

    def __enter__(self) -> NormCalls:
        with ExitStack() as contexts:
            contexts.enter_context(_unfused())
            contexts.enter_context(self.stack)
            contexts.enter_context(_AsWritten(self))
            if self._hidden:
                contexts.enter_context(_PassUp())  # type: ignore[no-untyped-call]
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, trace)

    @property
    def following(self) -> bool:
        """False inside a normalization and while ``tell`` runs."""
        return self._inside is None and not self._quiet

    def _entered(self, frame: Frame, args: tuple[Any, ...]) -> None:
        if not self.following:
            return
        if id(frame.module) in self._modules:
            self._inside = frame
            self._before = None
            found = self._names.readings.read(frame.module, None)
            self._before = found, self._kept(found.tensors(frame.module), found.mode)
        elif self._graph is not None:
            self._graph.entered(frame, args)

    def _left(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if frame is self._inside:
            self._inside = None
            self._module_called(frame, args, kwargs, output)
        elif self._graph is not None and self.following:
            self._graph.left(frame, kwargs, output)
        if self._graph is not None and frame.path == "":
            self._graph.returned(output)

    def _module_called(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        given, made = normalized(args, kwargs), output.data if isinstance(output, PackedSequence) else output
        if given is None or not isinstance(made, Tensor) or self._before is None:
            return
        found, tensors = self._before
        bound = self._names.readings.read(frame.module, given.dim())
        spec = bound.spec
        # a node of a graph is called with its output beside its input
        masked = not isinstance(frame.module, GraphNorm) and masked_call(args, kwargs, spec)
        if spec is not None and found.mode in (
            "running",
            "frozen",
        ):  # each element alone, in batches of any size
            spec = evened(spec, tuple(given.shape))
        call = NormCall(
            name=frame.path,
            path=frame.path,
            kind="module",
            type_name=found.type_name,
            frame=frame,
            input=given,
            output=made,
            spec=None if masked else spec,
            reason=MASKED if masked else bound.reason,
            mode=found.mode,
            tensors=tensors,
        )
        self._told(call)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one torch function, and follow it."""
        parts = taken_apart(func, args, kwargs)
        if parts is not None:
            (add, summands), (norm, given, keywords) = parts
            total = self.called(add, summands, {})
            return self.called(norm, (total, *given), keywords), total
        name = op_name(func)
        reading = read_call(func, args, kwargs) if "norm" in name else None
        if reading is None:
            output = func(*args, **kwargs)
            if self._graph is not None:
                output = self._graph.called(self.stack.top, name, args, kwargs, output)
            return output
        tensors = self._kept(reading.tensors, reading.mode)
        output = func(*args, **kwargs)
        self._told(self._function_call(func, reading, output, tensors))
        return output

    def _function_call(
        self, func: Any, reading: CallReading, output: Any, tensors: dict[str, Tensor]
    ) -> NormCall:
        frame, hidden = self.stack.top, isinstance(func, torch._ops.OpOverload)
        spec: NormSpec | None = reading.spec
        reason = ""
        if hidden and self._maybe_instance_norm(func, reading):
            spec, reason = (
                None,
                "a batch norm of one sample, or an instance norm: its operator does not say which",
            )
        owner = self._owner(reading, hidden)
        path = frame.path if owner is None else self._names.path(owner) or ""
        return NormCall(
            name=path if owner is not None else frame.place(reading.type_name),
            path=path,
            kind="hidden" if hidden else "functional",
            type_name=reading.type_name,
            frame=frame,
            input=reading.input,
            output=output[0] if isinstance(output, (tuple, list)) else output,
            spec=spec,
            reason=reason,
            mode=reading.mode,
            tensors=tensors,
        )

    def _owner(self, reading: CallReading, hidden: bool) -> nn.Module | None:
        """The normalization module whose own call this is: one that a script holds, or one that was not called as a
        module but through its ``forward`` or its tensors."""
        tensor = reading.tensors.get("weight", reading.tensors.get("running_mean"))
        owner = self._names.owner(tensor)
        if owner is None:
            return None
        if hidden:
            passed = {id(t) for t in reading.tensors.values() if t.dim() > 0}
            own = (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
            alone = all(id(t) in passed for t in own if t.dim() > 0) and not any(
                True for _ in owner.children()
            )
            return owner if alone else None
        spec = self._names.readings.read(owner, None).spec if id(owner) in self._modules else None
        same = spec is not None and (spec.stats, spec.eps) == (reading.spec.stats, reading.spec.eps)
        return owner if same else None

    def _maybe_instance_norm(self, func: Any, reading: CallReading) -> bool:
        """Below its name, an instance norm is a batch norm of one sample with batch times channels channels."""
        own = reading.tensors.get("running_mean", reading.tensors.get("weight"))
        return (
            "native_batch_norm" in op_name(func)
            and reading.input.shape[0] == 1
            and reading.mode == "batch"
            and self._names.owner(own) is None
        )

    def _kept(self, tensors: dict[str, Tensor], mode: str) -> dict[str, Tensor]:
        """The call's tensors; running statistics that it will write are copied where they are to be kept."""
        if not self._keep_running or mode != "batch":
            return tensors
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return {k: v.clone() if k.startswith("running_") else v for k, v in tensors.items()}

    def _told(self, call: NormCall) -> None:
        if self._graph is not None:
            call.node = self._graph.normalized(call.frame, call.name, call.type_name, call.input, call.output)
        self._quiet = True
        try:
            self._tell(call)
        finally:
            self._quiet = False


def normalized(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that a module was called with; of a packed sequence its elements."""
    given = next((v for v in (*args, *kwargs.values()) if isinstance(v, (Tensor, PackedSequence))), None)
    return given.data if isinstance(given, PackedSequence) else given


def masked_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: NormSpec | None = None) -> bool:
    """Whether a module got what says which elements count, as layers of normscope.nn take it.

    Where gain and bias come with the call, so by its ``spec``, they stand beside the input, and a mask has its name.
    """
    packed = any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values()))
    beside = () if spec is not None and spec.source == "input" else args[1:3]
    told = (*beside, kwargs.get("mask"), kwargs.get("lengths"))
    return packed or any(value is not None for value in told)


class _AsWritten(TorchFunctionMode):
    """Sees each torch call as the user wrote it."""

    def __init__(self, calls: NormCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._calls.following:
            return func(*args, **(kwargs or {}))
        return self._calls.called(func, args, kwargs or {})


class _PassUp(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls each operator again, so that a function mode sees those that no visible function called."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: torch need not wrap the method below, and import its compiler for that."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _unfused() -> Iterator[None]:
    """Without the fused transformer layer, which would hide the normalizations inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
