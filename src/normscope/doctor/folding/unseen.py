"""Readers of what a norm or a layer returns, and of a layer's weight and bias, that no graph of functions shows.

They write to it in place through a view, take its values out of PyTorch, keep it after the forward, or read it where
functions are not followed: inside ``vmap`` and the transforms of ``torch.func``, where torch functions are disabled, in
another thread, through a copy. What a norm or a layer returns is marked by the memory it lies in, and so is all that is
computed from it, until the next layer or norm makes something new; and so are weights and biases and their copies.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from normscope.doctor.copy_on_write import WRITTEN_UNANNOTATED, storages_of, written_arguments
from normscope.doctor.folding.operators import LAYERS, moves, takes_no_values
from normscope.doctor.tracing.dataflow import tensors_in

_EXITS: dict[Any, str] = {
    getattr(Tensor, name): name
    for name in ("numpy", "__array__", "__dlpack__", "tolist", "data_ptr", "untyped_storage", "storage")
} | {
    Tensor.__cuda_array_interface__.__get__: "__cuda_array_interface__",
    Tensor.data.__set__: "assigning .data",  # type: ignore[attr-defined]
}
"""what is read or written behind them passes no operator"""


Notes = dict[int, list[tuple[str, frozenset[int]]]]


@dataclass(eq=False)
class Memory:
    """One storage, which is not kept alive."""

    reference: StorageWeakRef
    number: int
    """how many were known before"""
    made_in: object
    """the call of a PyTorch function that made it, None between such calls"""
    marks: frozenset[int] = frozenset()
    """ids of the norms and of the layers' weights that its values come from"""
    holds: frozenset[int] = frozenset()
    """ids of the parameters and buffers whose values it holds"""
    feeds: set[int] = field(default_factory=set)
    """norms that have read it: as an identity such a norm would return this very memory"""

    def expired(self) -> bool:
        return bool(self.reference.expired())  # type: ignore[no-untyped-call]


class _Place(threading.local):
    """Where one thread of the forward stands."""

    call: object = None

    def __init__(self) -> None:
        self.inside: list[tuple[int, int]] = []
        """norms that are running, each with how many memories were known before"""


class Unseen:
    """What happened in one forward to the outputs of norms and layers, and to what layers hold."""

    def __init__(self, model: nn.Module, norms: set[int]) -> None:
        self._model, self._norms = model, norms
        self._memory: dict[int, Memory] = {}
        self._found: Notes = {}
        """mark -> what happened, and inside which norms"""
        self._read: Notes = {}
        """the same of operators that read it, which what they are read for tells better"""
        self._stale: dict[int, str] = {}
        """norm -> what has overwritten its input since"""
        self._aliased: dict[int, str] = {}
        self._uses: dict[int, list[str]] = {}
        """parameter -> the operators that read it"""
        self._exits: dict[int, str] = {}
        """parameter -> what took its values out of sight"""
        self._layers: dict[int, set[int]] = {}
        """norm -> weights of the layers that read its output"""
        self._at_work = _Place()
        self._returned: list[Memory] = []
        self._graph = False
        """outputs hold on to activations, for a backward pass"""
        self._names = {id(module): path or "the model" for path, module in model.named_modules()}
        held = (*model.parameters(), *model.buffers())
        self._weights = {id(tensor) for tensor in held if tensor.dim() > 1}
        for tensor in held:
            for memory in self._at(tensor):
                memory.holds |= {id(tensor)}

    def of_held(self, tensor: Tensor) -> str:
        """Who reads a layer's weight or bias beside the layer; "" where nobody does. ``{}`` stands for it."""
        if id(tensor) in self._exits:
            return self._exits[id(tensor)]
        uses = self._uses.get(id(tensor), ())
        if len(uses) < 2:
            return ""
        others = [op for op in uses if op not in LAYERS]
        return (
            f"{others[0].strip('_')} reads {{}} too"
            if others
            else f"{{}} is used {len(uses)} times in a forward"
        )

    def of_layer(self, weight: Tensor | None, norm: nn.Module) -> str:
        """Who sees the layer's output beside ``norm``; "" where nobody does. ``{}`` stands for the output."""
        found = (*self._found.get(id(weight), ()), *self._read.get(id(weight), ()))
        return next((text for text, inside in found if id(norm) not in inside), "")

    def of_norm(self, norm: nn.Module, weights: set[int], *, identity: bool) -> str:
        """Who sees the norm's output beside the layers with ``weights`` (ids); with ``identity``, also where handing on
        its input would be something else."""
        found = self._found.get(id(norm)) or self._read.get(id(norm))
        if found:
            return found[0][0]
        if self._layers.get(id(norm), set()) - weights:
            return "a layer that no function shows reads {}"
        return self._aliased.get(id(norm), "") if identity else ""

    # -- in a forward --------------------------------------------------------------------------------------

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator, and mark what it makes."""
        op = str(getattr(func, "__name__", func)).split(".")[0]
        read = [] if takes_no_values(op) else list(self._memories(args, kwargs))
        marks = frozenset[int]().union(*(memory.marks for memory in read))
        holds = frozenset[int]().union(*(memory.holds for memory in read))
        written = list(self._written(func, args, kwargs))
        for norm in marks & self._stale.keys():
            self._aliased.setdefault(
                norm, f"its input is overwritten by {self._stale[norm]} while {{}} is still read"
            )
        for memory in written:
            self._wrote(op, memory)
        output = func(*args, **kwargs)
        made = list(self._memories(output))
        if not made and not written and isinstance(output, (bool, int, float, complex)):
            self._note(marks, f"Python reads values of {{}} ({op.strip('_')})")
        layer = op in LAYERS and bool(holds & self._weights)
        biased = op in ("add", "add_") and bool(holds) and self._made_here(read)
        if not moves(func, op):
            for one in holds:
                self._uses.setdefault(one, []).append(op)
            norms = marks & self._norms if layer else frozenset()
            for norm in norms:
                self._layers.setdefault(norm, set()).update(holds & self._weights)
            if not biased:
                self._note(marks - norms, f"{op.strip('_')} reads {{}}", self._read)
        for memory in (*made, *written):
            memory.marks = holds & self._weights if layer else memory.marks | marks
            memory.holds = frozenset() if layer or biased else memory.holds | holds
        return output

    def called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call one PyTorch function, or method of a tensor."""
        if func in _EXITS:
            self.leaves(args[0], _EXITS[func])
        self._at_work.call = object()
        try:
            return func(*args, **kwargs)
        finally:
            self._at_work.call = None

    def leaves(self, tensor: Tensor, how: str) -> None:
        """Values of the tensor are read, or written, by no operator."""
        for memory in self._memories(tensor):
            text = f"{how} takes {{}} out of sight"
            self._note(memory.marks, text)
            self._exits |= dict.fromkeys(memory.holds - self._exits.keys(), text)

    def enters(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._norms:
            self._at_work.inside.append((id(module), len(self._memory)))
        self._hooks_see(module, args)

    def returns(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made = list(self._memories(output))
        if id(module) in self._norms:
            self._at_work.inside.pop()
            for memory in made:
                memory.marks, memory.holds = frozenset({id(module)}), frozenset()
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

    def _wrote(self, op: str, memory: Memory) -> None:
        """What a function or a norm does to what it has made itself is its own."""
        here = self._at_work
        if here.call is None or memory.made_in is not here.call:
            own = frozenset(norm for norm, known in here.inside if memory.number >= known)
            self._note(memory.marks, f"{op} writes into {{}} in place", inside=own)
            if not memory.holds:  # statistics and counters are its own too
                others = frozenset(norm for norm, _ in here.inside) - own
                self._note(others, f"{op} inside it writes into what it is given", inside=frozenset())
        self._stale |= dict.fromkeys(memory.feeds, op)

    def _made_here(self, read: list[Memory]) -> bool:
        """All that has marks was made by the function that is running: a linear layer adds its bias."""
        call = self._at_work.call
        return call is not None and all(memory.made_in is call for memory in read if memory.marks)

    def _note(
        self,
        marks: frozenset[int],
        text: str,
        into: Notes | None = None,
        *,
        inside: frozenset[int] | None = None,
    ) -> None:
        one = text, frozenset(norm for norm, _ in self._at_work.inside) if inside is None else inside
        for mark in marks:
            found = (self._found if into is None else into).setdefault(mark, [])
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
            self._memory.setdefault(
                storage._cdata,
                Memory(StorageWeakRef(storage), len(self._memory), self._at_work.call),  # type: ignore[no-untyped-call]
            )
            for storage in storages
        ]
