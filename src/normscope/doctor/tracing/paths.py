"""Where in the model execution is: the names of its modules, and a stack of those that are running."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from normscope.doctor.tracing.readings import Readings
from normscope.doctor.wording import clean_path


class ModuleNames:
    """Every module of a model with its path, as the user wrote it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.readings = Readings()
        self.modules: dict[int, nn.Module] = {}
        """by id"""
        self.held: dict[int, torch.Tensor] = {}
        """parameters and buffers by id; kept, since those of a scripted module are made anew when nobody keeps them"""
        self._owners: dict[int, nn.Module] = {}
        self._names: dict[int, list[str]] = {}
        self._by_path: dict[str, nn.Module] = {}
        for raw, module in model.named_modules(remove_duplicate=False):
            if "_orig_mod" in module._modules:
                continue  # a compiled wrapper; the module inside bears the name
            path = clean_path(raw)
            self.modules[id(module)] = module
            self._by_path[path] = module
            names = self._names.setdefault(id(module), [])
            if path not in names:
                names.append(path)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self.held[id(tensor)] = tensor
                self._owners.setdefault(id(tensor), module)

    def path(self, module: nn.Module) -> str | None:
        """The first name of a module, None where it is not of this model."""
        names = self._names.get(id(module))
        return names[0] if names else None

    def aliases(self, module: nn.Module) -> tuple[str, ...]:
        return tuple(self._names[id(module)][1:])

    def owner(self, tensor: torch.Tensor | None) -> nn.Module | None:
        """The module that holds a parameter or buffer."""
        return self._owners.get(id(tensor))

    def ancestors(self, path: str) -> Iterator[nn.Module]:
        """Modules from the one at ``path`` up to the model."""
        while True:
            if path in self._by_path:
                yield self._by_path[path]
            if not path:
                return
            path = path.rpartition(".")[0]


@dataclass(eq=False)
class Frame:
    """One execution of one module's forward."""

    path: str
    module: nn.Module
    counts: Counter[str] = field(default_factory=Counter)
    """how often each label was asked for in this execution"""

    def place(self, label: str) -> str:
        """Name of a call in this forward: ``path:label``, and ``#2`` on the second of its kind."""
        self.counts[label] += 1
        count = self.counts[label]
        name = f"{self.path}:{label}" if self.path else label
        return name if count == 1 else f"{name}#{count}"


Entered = Callable[[Frame, tuple[Any, ...]], None]
Left = Callable[[Frame, tuple[Any, ...], dict[str, Any], Any], None]
"""frame, args, kwargs and output of a module's call; the output is None where the forward raised"""


class ModuleStack:
    """Context manager that keeps the stack of running modules of one model.

    It uses PyTorch's hooks for all modules, which leave no trace on any module and also see scripted ones (these
    refuse hooks of their own). Modules outside the model are ignored.
    """

    def __init__(self, names: ModuleNames, entered: Entered | None = None, left: Left | None = None) -> None:
        self.names = names
        self._entered = entered
        self._left = left
        self._frames = [Frame("", names.model)]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._quiet = warnings.catch_warnings()

    @property
    def top(self) -> Frame:
        return self._frames[-1]

    def __enter__(self) -> ModuleStack:
        self._quiet.__enter__()
        # a compiled wrapper says that it will call them once more for itself; its own call is ignored here
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
            # PyTorch forgets to drop this entry of a removed hook
            nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._quiet.__exit__(kind, error, trace)
        del self._frames[1:]

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        path = self.names.path(module)
        if path is None:
            return
        frame = Frame(path, module)
        self._frames.append(frame)
        if self._entered is not None:
            self._entered(frame, args)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """PyTorch passes (kwargs, output), or the output alone (None) where the forward raised."""
        depth = len(self._frames) - 1
        while depth > 0 and self._frames[depth].module is not module:
            depth -= 1
        if depth == 0:
            return
        frame = self._frames[depth]
        del self._frames[depth:]
        if self._left is not None:
            kwargs, output = rest if len(rest) == 2 else ({}, None)
            self._left(frame, args, kwargs, output)
