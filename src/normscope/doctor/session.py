"""Run the user's model as often as wanted, and leave no trace in it.

Memory is put back by copy-on-write (``copy_on_write``), what tensors carry besides by ``tensor_state``, the Python
objects of the model by ``module_state``, random numbers and global switches by ``ambient``. Extra memory: the
buffers, which are small and cloned up front, and what a run really writes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

import normscope.functional  # noqa: F401 - registers operators, which a forward that is followed could not do
from normscope.distributed import alone
from normscope.doctor.ambient import Ambient, seed_everything
from normscope.doctor.copy_on_write import CopyOnWrite, EscapeWatch, Vault
from normscope.doctor.interrupts import uninterrupted
from normscope.doctor.modes import NoFunctionalDropout, has_running_state, is_training, set_training
from normscope.doctor.module_state import ObjectState
from normscope.doctor.refusals import Refused, refuse_inference_tensors, refuse_unmaterialized, unwrap
from normscope.doctor.run_output import independent
from normscope.doctor.tensor_state import HookStash, TensorState
from normscope.doctor.wording import clean_path
from normscope.errors import told

__all__ = ["CHECKSUM_LIMIT", "MODES", "Refused", "Session", "is_training"]

MODES = ("now", "eval", "batch", "train")
BUFFERS_UP_FRONT = 256 * 2**20
"""bytes of buffers, the smallest first, that are cloned before anything runs"""
_ALONE = threading.RLock()
"""random states and switches are of the whole process, and a model may be shared: one thread has a session at a time"""
FRAMES = 10_000
"""recursion limit in a run, put back after it"""
CHECKSUM_LIMIT = 2 * 2**30
"""bytes of parameters up to which a checksum (about 3 GB/s) proves that nothing escaped"""


class Session:
    """Runs of one model that leave everything about it bit for bit as it was when the session was entered.

    After each run, whether it returned, raised or was interrupted, these are as before: parameters, buffers and
    plain tensors (contents, address, ``.grad``, ``requires_grad``), the inputs, each module's ``training`` flag, its
    hooks and every other attribute (counters, caches, lists, rebound tensors), random states, autocast, grad mode
    and default dtype. Gradient hooks of parameters are silent for the length of the session.

    Args:
        model: the user's module. ``torch.compile`` and data-parallel wrappers are taken off (``session.model``).
        seed: every run starts the global random generators from it, so equal runs give equal results.

    Raises:
        Refused: lazy or meta parameters, or a model sharded by FSDP.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    >>> x = torch.randn(8, 3)
    >>> with Session(model) as session:
    ...     first = session.forward((x,), mode="train")
    ...     second = session.forward((x,), mode="train")
    >>> torch.equal(first, second), int(model[1].num_batches_tracked)
    (True, 0)
    """

    def __init__(self, model: nn.Module, *, seed: int = 0) -> None:
        self.model = unwrap(model)
        self.seed = seed
        self.unverified: list[str] = []
        """what could not be proved to be as before; complete after the session"""
        self.notes: list[str] = []
        """what a run could not do quite as asked"""
        self.modules: dict[str, nn.Module] = {
            clean_path(path): module for path, module in self.model.named_modules(remove_duplicate=False)
        }
        """every module by path, under each of its paths (of a compiled wrapper and its inside, the inside)"""
        refuse_unmaterialized(self.model)
        self.keeps_statistics: set[int] = set()
        """ids of modules found to keep running statistics under names of their own"""
        self._modes: dict[tuple[str, ...], dict[str, bool]] = {}
        self._open = False

    # -- the session's frame -------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        _ALONE.acquire()
        self._apart = alone()  # other ranks may not be checking anything
        self._apart.__enter__()
        try:
            self._record()
        except BaseException:  # __exit__ is not called where __enter__ has raised
            self._apart.__exit__(None, None, None)
            _ALONE.release()
            raise
        return self

    def _record(self) -> None:
        self._ambient = Ambient()
        self._vault = Vault()
        # a scripted module keeps its children and tensors in C++, where only these lists show them
        everything = [*self.model.modules(), *self.model.parameters(), *self.model.buffers()]
        self._objects = ObjectState(everything)
        self.unverified += self._objects.skipped
        names = _tensor_names(self.model)
        self._tensors = [TensorState(tensor) for tensor in self._objects.tensors]
        for tensor in self._objects.tensors:
            name = names.get(id(tensor), "a tensor attribute")
            if not self._vault.hold(tensor, name):
                self.unverified.append(f"{name}: its memory ({tensor.layout}) is out of reach")
        self._save_buffers()
        self._affordable = self._vault.total_bytes() <= CHECKSUM_LIMIT
        if self._affordable:
            self._vault.checksum()
        else:
            self.unverified.append(
                f"parameters ({self._vault.total_bytes() / 2**30:.1f} GiB, more than "
                f"{CHECKSUM_LIMIT / 2**30:.0f} GiB) have no checksum: a write by a C++ extension or through a raw "
                f"pointer would go unseen"
            )
        self._stashes = [HookStash(tensor) for tensor in self._objects.tensors if tensor.is_leaf]
        try:
            for stash in self._stashes:
                stash.silence()
        except BaseException:
            self._bring_hooks_back()
            raise
        self._open = True

    def __exit__(self, *exc_info: object) -> None:
        try:
            with uninterrupted():
                self._leave()
        finally:
            self._apart.__exit__(None, None, None)
            _ALONE.release()

    def _leave(self) -> None:
        self._open = False
        self._ambient.restore()
        self._restore()
        self._bring_hooks_back()
        for tensor in self._tensors:
            tensor.restore_version()
        for name in self._vault.changed():
            self.unverified.append(
                f"{name}: its memory was changed by something no operation showed (a C++ extension, a raw "
                f"pointer) and could not be put back"
            )

    def _save_buffers(self) -> None:
        """Buffers are what models write, also in ways that no operation shows; large ones wait for a write."""
        budget = BUFFERS_UP_FRONT
        for buffer in sorted(self.model.buffers(), key=torch.Tensor.numel):
            budget -= buffer.numel() * buffer.element_size()
            if budget < 0:
                break
            self._vault.save(buffer)

    def _bring_hooks_back(self) -> None:
        for stash in self._stashes:
            stash.restore()

    def _restore(self) -> None:
        self._put_back(self._objects, self._tensors, self._vault)

    def _put_back(self, objects: ObjectState, tensors: list[TensorState], vault: Vault) -> None:
        """What cannot be put back must not keep the rest from it."""
        for restore in (*objects.restores, *(tensor.restore for tensor in tensors), vault.restore):
            try:
                restore()
            except Exception as error:
                failure = f"something could not be put back: {told(error)}"
                if failure not in self.unverified:
                    self.unverified.append(failure)

    @contextmanager
    def protecting(self, *inputs: Any) -> Iterator[tuple[Vault, ...]]:
        """Whatever happens inside to the model, to ``inputs`` or to global state is undone."""
        if not self._open:
            raise RuntimeError(
                "a session runs inside `with Session(model) as session:`, and this one is not open"
            )
        given = ObjectState(inputs)
        states = [TensorState(tensor) for tensor in given.tensors]
        vault = Vault()
        for tensor in given.tensors:
            vault.hold(tensor)
        ambient = Ambient()
        try:
            vaults = (self._vault, vault)
            with CopyOnWrite(vaults), EscapeWatch(vaults, pointers=self._affordable):
                yield vaults
        finally:
            with uninterrupted():
                ambient.restore()
                self._restore()
                self._put_back(given, states, vault)
                for state in states:
                    state.restore_version()

    @property
    def extra_bytes(self) -> int:
        """Memory that the session holds: the buffers and what runs have written so far."""
        return self._vault.cloned_bytes()

    # -- runs ----------------------------------------------------------------------------------------------

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        mode: str = "now",
        grad: bool = False,
        watch: Iterable[AbstractContextManager[Any]] = (),
    ) -> Any:
        """One forward pass; its output, everything else as before.

        Args:
            mode: ``"now"``, the flags as they are; ``"eval"`` and ``"train"``, the flags that the model's own
                ``eval()`` and ``train()`` give; ``"batch"``, the flags of eval except that modules with running
                statistics that are live in training normalize by the batch. In ``"batch"`` functional dropout is
                off too. A functional batch norm follows the flag of the module that owns its running statistics:
                a module with a buffer named ``running_mean`` or ``running_var`` counts as a norm.
            grad: keep the graph. Where the model writes in place what its backward reads, use ``gradient_run``,
                which puts back only afterwards; autograd raises here.
            watch: context managers entered around the forward.

        Raises:
            Refused: inference tensors in a mode that would write them, or with ``grad``.
        """
        with self._running(args, kwargs, mode=mode, grad=grad, watch=watch) as (output, vaults):
            return independent(output, lambda tensor: any(vault.written(tensor) for vault in vaults))

    @contextmanager
    def gradient_run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        mode: str = "now",
        watch: Iterable[AbstractContextManager[Any]] = (),
    ) -> Iterator[Any]:
        """A forward pass whose output is good for ``torch.autograd.grad`` inside the ``with`` block.

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> with Session(model) as session, session.gradient_run((torch.randn(8, 3),), mode="batch") as output:
        ...     (gradient,) = torch.autograd.grad(output.square().sum(), [model[0].weight])
        >>> gradient.shape, model[0].weight.grad
        (torch.Size([4, 3]), None)
        """
        with self._running(args, kwargs, mode=mode, grad=True, watch=watch) as (output, _):
            yield output

    @contextmanager
    def _running(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        *,
        mode: str,
        grad: bool,
        watch: Iterable[AbstractContextManager[Any]],
    ) -> Iterator[tuple[Any, tuple[Vault, ...]]]:
        kwargs = {} if kwargs is None else kwargs
        flags = self._flags(mode)
        refuse_inference_tensors(self.model, mode, grad)
        with torch.inference_mode(False):
            # a forward may write its input, or save it for backward: torch allows neither for inference tensors
            args, kwargs = independent((args, kwargs), torch.Tensor.is_inference)
        with self.protecting(args, kwargs) as vaults:
            for path, flag in flags.items():
                set_training(self.modules[path], flag)
            seed_everything(self.seed)
            # following a model takes several frames where its own call takes one
            sys.setrecursionlimit(max(sys.getrecursionlimit(), FRAMES))
            with ExitStack() as around:
                around.enter_context(torch.inference_mode(False))
                around.enter_context(torch.set_grad_enabled(grad))
                # without dynamo nothing is compiled, and importing it takes a second
                if "torch._dynamo" in sys.modules:
                    around.enter_context(torch.compiler.set_stance("force_eager"))
                if mode == "batch":
                    around.enter_context(NoFunctionalDropout())
                with ExitStack() as watching:
                    for watcher in watch:
                        watching.enter_context(watcher)
                    output = self.model(*args, **kwargs)
                yield output, vaults

    # -- modes ---------------------------------------------------------------------------------------------

    def modes_after(self, *calls: str) -> dict[str, bool]:
        """The training flag of every module, by path, after the model's own ``train()`` or ``eval()``.

        The methods are really called, since a model may override them (to keep norms frozen, for instance), and
        their effects are undone. Several names are called one after the other: ``modes_after("train", "eval")``.

        >>> with Session(nn.Sequential(nn.BatchNorm1d(4)).eval()) as session:
        ...     session.modes_after("train")
        {'': True, '0': True}
        """
        if calls not in self._modes:
            with self.protecting():
                for call in calls:
                    getattr(self.model, call)()
                self._modes[calls] = {path: is_training(module) for path, module in self.modules.items()}
        return dict(self._modes[calls])

    def _flags(self, mode: str) -> dict[str, bool]:
        if mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}, got {mode!r}")
        if mode == "now":
            return {}
        if mode == "batch":
            live = self._after("train")
            return {
                path: live[path] if self._keeps_statistics(self.modules[path]) else flag
                for path, flag in self._after("eval").items()
            }
        return self._after(mode)

    def _keeps_statistics(self, module: nn.Module) -> bool:
        return has_running_state(module) or id(module) in self.keeps_statistics

    def _after(self, call: str) -> dict[str, bool]:
        """``modes_after``, or every flag alike where the model's own method raises (exported programs do)."""
        try:
            return self.modes_after(call)
        except Exception as error:
            note = f"model.{call}() raised {type(error).__name__}: flags were set one by one"
            if note not in self.notes:
                self.notes.append(note)
            return dict.fromkeys(self.modules, call == "train")


def _tensor_names(model: nn.Module) -> dict[int, str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(tensor): clean_path(name) for name, tensor in reversed(named)}
