"""Readers of what a norm or a layer returns that no graph of operations shows.

They write to it in place through a view, take its values out of PyTorch, or keep it after the forward. What a norm or
a layer returns is marked by the memory it lies in, and so is all that is computed from it, until the next layer or norm
makes something new.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.doctor.copy_on_write import WRITTEN_UNANNOTATED, storages_of, written_arguments
from normscope.doctor.tracing.dataflow import tensors_in

LAYERS = frozenset({"convolution", "_convolution", "linear", "addmm", "mm", "bmm", "baddbmm", "matmul"})
"""operators that a linear layer or convolution arrives at"""

_EXITS: dict[Any, str] = {
    getattr(Tensor, name): name
    for name in ("numpy", "__array__", "__dlpack__", "tolist", "data_ptr", "untyped_storage", "storage")
} | {
    Tensor.__cuda_array_interface__.__get__: "__cuda_array_interface__",
    Tensor.data.__set__: "assigning .data",  # type: ignore[attr-defined]
}
"""what is read or written behind them passes no operator"""


@dataclass(eq=False)
class Memory:
    """One storage, which is not kept alive."""

    reference: StorageWeakRef
    made_in: object
    """the call of a PyTorch function that made it, None between such calls"""
    marks: frozenset[int] = frozenset()
    """ids of the norms and of the layers' weights that its values come from"""
    weights: frozenset[int] = frozenset()
    """ids of the weights that it holds"""
    feeds: set[int] = field(default_factory=set)
    """norms that have read it: as an identity such a norm would return this very memory"""

    def expired(self) -> bool:
        return bool(self.reference.expired())  # type: ignore[no-untyped-call]


class Unseen:
    """What happened in one forward to the outputs of norms and layers."""

    def __init__(self, model: nn.Module, norms: set[int]) -> None:
        self._model, self._norms = model, norms
        self._memory: dict[int, Memory] = {}
        self._found: dict[int, list[tuple[str, frozenset[int]]]] = {}
        """mark -> what happened, and inside which norms"""
        self._stale: dict[int, str] = {}
        """norm -> what has overwritten its input since"""
        self._aliased: dict[int, str] = {}
        self._inside: list[int] = []
        self._call: object = None
        self._returned: list[Memory] = []
        self._graph = False
        """outputs hold on to activations, for a backward pass"""
        self._names = {id(module): path or "the model" for path, module in model.named_modules()}
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() > 1:
                for memory in self._at(tensor):
                    memory.weights |= {id(tensor)}

    def of_layer(self, weight: Tensor | None, norm: nn.Module) -> str:
        """Who sees the layer's output beside ``norm``; "" where nobody does. ``{}`` stands for the output."""
        return next((text for text, inside in self._found.get(id(weight), ()) if id(norm) not in inside), "")

    def of_norm(self, norm: nn.Module, *, identity: bool) -> str:
        """Who sees the norm's output; with ``identity``, also where handing on its input would be something else."""
        found = self._found.get(id(norm))
        return found[0][0] if found else self._aliased.get(id(norm), "") if identity else ""

    # -- in a forward --------------------------------------------------------------------------------------

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator, and mark what it makes."""
        op = str(getattr(func, "__name__", func)).split(".")[0]
        read = [] if _takes_no_values(op) else list(self._memories(args, kwargs))
        marks = frozenset[int]().union(*(memory.marks for memory in read))
        weights = frozenset[int]().union(*(memory.weights for memory in read))
        written = list(self._written(func, args, kwargs))
        for norm in marks & self._stale.keys():
            self._aliased.setdefault(
                norm, f"its input is overwritten by {self._stale[norm]} while {{}} is still read"
            )
        for memory in written:
            if (
                self._call is None or memory.made_in is not self._call
            ):  # what a function does inside is its own
                self._note(memory.marks, f"{op} writes into {{}} in place")
            self._stale |= dict.fromkeys(memory.feeds, op)
        output = func(*args, **kwargs)
        made = list(self._memories(output))
        if not made and not written and isinstance(output, (bool, int, float, complex)):
            self._note(marks, f"Python reads values of {{}} ({op.strip('_')})")
        layer = op in LAYERS and bool(weights)
        for memory in (*made, *written):
            memory.marks = weights if layer else memory.marks | marks
            memory.weights = frozenset() if layer else memory.weights | weights
        return output

    def called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call one PyTorch function, or method of a tensor."""
        if func in _EXITS:
            for memory in self._memories(args[0]):
                self._note(memory.marks, f"{_EXITS[func]} takes {{}} out of sight")
        self._call = object()
        try:
            return func(*args, **kwargs)
        finally:
            self._call = None

    def enters(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._norms:
            self._inside.append(id(module))
        self._hooks_see(module, args)

    def returns(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made = list(self._memories(output))
        if id(module) in self._norms:
            self._inside.pop()
            for memory in made:
                memory.marks, memory.weights = frozenset({id(module)}), frozenset()
            for memory in self._memories(args, kwargs):
                if memory not in made:
                    memory.feeds.add(id(module))
        self._hooks_see(module, output)
        if module is self._model:
            self._returned = made
            self._graph = any(tensor.requires_grad for tensor in tensors_in((output,)))

    def finish(self) -> None:
        """Whatever is still there after the forward, and was not returned, somebody keeps."""
        if not self._alive():
            return
        gc.collect()  # what only refers to itself is gone
        names = self._kept_as()
        for memory in self._alive():
            if memory in names:
                self._note(memory.marks, f"the model keeps {{}} as {names[memory]} after the forward")
            elif not self._graph:
                self._note(memory.marks, "something keeps {} after the forward")

    # -- helpers -------------------------------------------------------------------------------------------

    def _note(self, marks: frozenset[int], text: str) -> None:
        one = text, frozenset(self._inside)
        for mark in marks:
            found = self._found.setdefault(mark, [])
            if one not in found:
                found.append(one)

    def _hooks_see(self, module: nn.Module, tensors: Any) -> None:
        if module._forward_hooks or module._forward_pre_hooks:
            name = self._names.get(id(module), type(module).__name__)
            for memory in self._memories(tensors):
                self._note(memory.marks, f"the forward hooks of {name} see {{}}")

    def _alive(self) -> list[Memory]:
        return [
            memory
            for memory in self._memory.values()
            if memory.marks and memory not in self._returned and not memory.expired()
        ]

    def _kept_as(self) -> dict[Memory, str]:
        names: dict[Memory, str] = {}
        for path, module in self._model.named_modules():
            for name, held in (*vars(module).items(), *module._buffers.items()):
                items = held.values() if isinstance(held, dict) else held
                for item in items if isinstance(held, (dict, list, tuple, set)) else (held,):
                    if isinstance(item, Tensor):
                        for memory in self._at(item):
                            names[memory] = f"{path}.{name}" if path else name
        return names

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Memory]:
        for position, name in written_arguments(func):
            if name in WRITTEN_UNANNOTATED:  # not in evaluation
                continue
            yield from self._memories(args[position] if position < len(args) else kwargs.get(name))

    def _memories(self, *nested: Any) -> Iterator[Memory]:
        for tensor in tensors_in(nested):
            yield from self._at(tensor)

    def _at(self, tensor: Tensor) -> list[Memory]:
        with torch._C.DisableTorchFunction():
            try:
                storages = list(storages_of(tensor))
            except (NotImplementedError, RuntimeError):  # torch gives no access to it
                return []
        return [
            # the reference keeps the address from being used again
            self._memory.setdefault(storage._cdata, Memory(StorageWeakRef(storage), self._call))  # type: ignore[no-untyped-call]
            for storage in storages
        ]


def _takes_no_values(op: str) -> bool:
    """It follows a tensor's shape only."""
    return op.startswith("new_") or op.endswith("_like")


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes a second

    def __init__(self, unseen: Unseen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unseen = unseen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._unseen.ran(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, unseen: Unseen) -> None:
        super().__init__()
        self._unseen = unseen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._unseen.called(func, args, kwargs or {})


@contextmanager
def watching(unseen: Unseen) -> Iterator[None]:
    """Around one forward of the model."""
    with ExitStack() as around:
        for handle in (
            register_module_forward_pre_hook(unseen.enters),
            register_module_forward_hook(unseen.returns, with_kwargs=True),
        ):
            around.callback(handle.remove)
        around.enter_context(_Operators(unseen))
        around.enter_context(_Functions(unseen))
        yield
    unseen.finish()
