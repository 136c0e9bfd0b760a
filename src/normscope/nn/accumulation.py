"""Running statistics under gradient accumulation and activation checkpointing: one update for each optimizer step.

A norm that stores statistics moves them at every forward in training: with ``steps`` micro-batches to an optimizer step
that is ``steps`` updates by small batches, and with activation checkpointing, which runs a forward again during the
backward pass, two for each. Here the micro-batches of a step are merged, and move the statistics once:

    n = sum of n_i    mean = sum of n_i mean_i / n    m2 = sum of (m2_i + n_i (mean_i - mean)^2)
    run <- (1 - momentum) run + momentum batch,    batch = (mean, m2 / (n - 1))

exactly what one batch of them all would have moved, had it gone into the norm. (Chan, Golub and LeVeque 1979.)

What normalizes stays as it was: each micro-batch by its own statistics. Outputs and gradients are those of batches of
b, not of steps * b.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normscope.distributed import of_all, pooled, world_of
from normscope.errors import BadInput
from normscope.functional.moved import moved
from normscope.functional.outside_programs import outside_programs
from normscope.functional.shares import arithmetic
from normscope.kernels.elementary import Elementary
from normscope.nn.arguments import sizes
from normscope.nn.masking import valid
from normscope.nn.sync_batch_norm import SyncBatchNorm
from normscope.nn.time_steps import TimeSteps
from normscope.spec import NormSpec, families

TORCHS = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)
"""the forwards of torch's batch norms"""
_ACTIVE: WeakSet[nn.Module] = WeakSet()
_graph_task = torch._C._current_graph_task_id
"""-1 outside of a backward pass"""


def accumulating(model: nn.Module, steps: int = 1) -> Accumulation:
    """Let ``steps`` forwards of a model in training move its running statistics once, and recomputations not at all.

    Arguments:
        model: any module, as a whole or wrapped (DistributedDataParallel), whose forwards are the micro-batches. Batch
            norms of torch.nn and `normscope.nn`, `SyncBatchNorm` (over all ranks: one more collective for each norm and
            update) and those of spiking networks take part, masks and lengths too.
        steps: micro-batches to one optimizer step; 1 where only recomputation is to be left out.

    Returns a context manager; or call its ``remove()``. ``update()`` moves the statistics by what was seen so far,
    which is for a last step of fewer micro-batches; leaving the block does it too. A norm that is called several times
    in a forward still moves once. Evaluation, forwards that are no forward of ``model``, and single time steps
    (``step()``) are left as they are.

    A forward is a recomputation where a backward pass is running: as with both kinds of ``torch.utils.checkpoint``.
    What is normalized and all gradients stay bit for bit as they are. It costs each norm one more pass over its input.
    A model that torch.compile has compiled already does not look for hooks: begin before its first call (each norm then
    breaks the graph). Leave the block before the model is copied or saved whole; state dicts may be saved at any time.

    Raises BadInput where ``steps`` is below 1, where a norm's stored statistics are none of merged moments (batch
    renormalization, virtual batches, instance norm), and where the model is accumulating already.

    >>> model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5))
    >>> with accumulating(model, 2):
    ...     for batch in ([[1.0], [3.0]], [[5.0], [7.0]]):
    ...         _ = model(torch.tensor(batch))
    >>> model[0].running_mean.item(), model[0].num_batches_tracked.item()
    (2.0, 1)
    """
    return Accumulation(model, steps)


def is_accumulating(norm: nn.Module) -> bool:
    """Its statistics are moved by `accumulating`, not by its own forwards.

    >>> model = nn.Sequential(nn.BatchNorm1d(1))
    >>> with accumulating(model, 2):
    ...     is_accumulating(model[0])
    True
    >>> is_accumulating(model[0])
    False
    """
    return norm in _ACTIVE


class Accumulation:
    """Result of `accumulating`."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        (self.steps,) = sizes("accumulating", "steps", steps, "Give the micro-batches of one optimizer step.")
        self.seen = 0
        """micro-batches since the last update"""
        self._norms = {m: (name, _spec(name, m)) for name, m in model.named_modules() if _stores(m)}
        if any(norm in _ACTIVE for norm in self._norms):
            raise BadInput(
                "a norm takes part in one accumulation at a time; got a model of which one does already. Leave the "
                "block of the other (remove()) first."
            )
        _ACTIVE.update(self._norms)
        self._tables: dict[nn.Module, list[Tensor]] = {}
        self._now: dict[nn.Module, list[Tensor]] = {}
        self._running = False
        self._held: set[nn.Module] = set()
        self._handles = [model.register_forward_pre_hook(self._begin)]
        for norm in self._norms:
            self._handles += [
                norm.register_forward_pre_hook(self._hold),
                norm.register_forward_hook(self._take, with_kwargs=True, always_call=True),
            ]
        self._handles += [  # after the norm's, which may be the model itself
            model.register_forward_hook(self._complete),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def update(self) -> None:
        """Move the running statistics by the micro-batches since the last update, and begin the next."""
        tables, self._tables, self.seen = self._tables, {}, 0
        for norm, seen in tables.items():
            name, spec = self._norms[norm]
            _move(name, norm, spec, of_all(torch.stack(seen)))

    def remove(self) -> None:
        """Update by what is left, and let every norm move its own statistics again."""
        try:
            self.update()
        finally:
            self._leave()

    def __enter__(self) -> Accumulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.remove()
        else:
            self._leave()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        for norm in self._held:
            norm.track_running_stats = True  # type: ignore[assignment]
        self._held.clear()
        _ACTIVE.difference_update(self._norms)

    # Hooks of the model: what one micro-batch is ----------------------------------------------------------------

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._running = not _recomputing()
        self._now = {}

    def _complete(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._running or not (model.training or self._now):
            return
        for norm, tables in self._now.items():
            self._tables.setdefault(norm, []).extend(tables)
        self.seen += 1
        if self.seen == self.steps:
            self.update()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._running, self._now = False, {}

    # Hooks of a norm: it stores nothing itself while it runs ------------------------------------------------------

    def _hold(self, norm: Any, args: Any) -> None:
        if norm.training and norm.track_running_stats and (self._running or _recomputing()):
            self._held.add(norm)
            norm.track_running_stats = False

    def _take(self, norm: Any, args: Any, kwargs: Any, output: Any) -> None:
        if norm not in self._held:
            return
        self._held.discard(norm)
        norm.track_running_stats = True
        if output is not None and self._running and not _recomputing():  # None: it raised
            spec = self._norms[norm][1]
            given = signature(type(norm).forward).bind(norm, *args, **kwargs).arguments
            self._now.setdefault(norm, []).append(_moments(norm, spec, given))


def _recomputing() -> bool:
    return bool(_graph_task() != -1)


def _stores(module: Any) -> bool:
    """Whether training moves statistics that are stored."""
    held = getattr(module, "running_mean", None)
    return isinstance(held, Tensor) and getattr(module, "track_running_stats", False) is True


def _spec(name: str, norm: Any) -> NormSpec:
    """What is normalized together. Raises BadInput where merged moments are not what the norm stores."""
    spec = getattr(norm, "spec", None)
    if spec is None and type(norm).forward in TORCHS:
        spec = families.batch_norm()
    if not isinstance(spec, NormSpec) or spec.running is None or not _merges(spec, spec.running.renorm):
        raise BadInput(
            f"accumulating merges the moments of batch norms; got {name or 'the model itself'}, a "
            f"{type(norm).__name__}, which stores something else. Replace it, or set its track_running_stats=False."
        )
    return spec


def _merges(spec: NormSpec, renorm: Any) -> bool:
    kept = spec.pattern.kept
    by_set = spec.running_axes.split() == list(kept) and not {"b", "v"} & set(kept)
    return by_set and spec.scale == "std" and renorm is None and not spec.whiten and spec.remainder == "error"


@outside_programs
@torch.no_grad()
def _moments(norm: nn.Module, spec: NormSpec, given: dict[str, Any]) -> Tensor:
    """(3, sets): count, mean and sum of squared deviations of what the norm was called with."""
    input = list(given.values())[1]
    mask, lengths = given.get("mask"), given.get("lengths")
    x: Tensor = input.data if isinstance(input, PackedSequence) else input
    counts = None
    if mask is not None or lengths is not None:
        by_step: Callable[..., Tensor | None] | None = norm._counts if isinstance(norm, TimeSteps) else None
        counts = by_step(x, mask, lengths) if by_step else valid(type(norm).__name__, x, mask, lengths)
    return arithmetic(Elementary.of(x.detach(), spec, counts)).share().table


@outside_programs
@torch.no_grad()
def _move(name: str, norm: Any, spec: NormSpec, table: Tensor) -> None:
    group = getattr(norm, "process_group", None)
    if isinstance(norm, (SyncBatchNorm, nn.SyncBatchNorm)) and world_of(group) > 1:
        table = pooled(table, group)
    counter, fraction = norm.num_batches_tracked, norm.momentum
    if fraction is None:  # without a counter nothing moves, as in torch
        fraction = 0.0 if counter is None else 1 / (1 + int(counter))
    correction = getattr(norm, "running_correction", 1)
    whose = name or "the model itself"
    some = moved(
        norm.running_mean, norm.running_var, table, fraction, correction, whose, "all micro-batches of a step"
    )
    if counter is not None:
        counter.add_(some)
