"""One site watched all through training: who moves its running statistics, and how often.

One forward pre-hook a site that keeps statistics; it reads flags and counts. Values are compared (PyTorch moves no
version counter of running statistics) only where a pass should not move them: without gradients, or in eval mode.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normscope.doctor.session import _ALONE
from normscope.nn.accumulation import is_accumulating
from normscope.reading import read

if TYPE_CHECKING:
    from torch import Tensor

REMEMBERED = 32
"""optimizer steps that medians are taken of"""
CHECKED = 4
"""passes a stretch whose effect on the values is looked at; the others are taken to do the same"""

_graph_task = torch._C._current_graph_task_id
"""-1 outside of a backward pass"""


def in_backward() -> bool:
    """A forward that runs now is a recomputation."""
    return bool(_graph_task() != -1)


def out_of_sight() -> bool:
    """The pass is traced by a compiler, or made by a check of this thread, which undoes what it does."""
    return torch.compiler.is_compiling() or _ALONE._is_owned()  # type: ignore[attr-defined]


def nothing(*_: Any) -> None:
    """What the hook of a copied model does."""


class Hook:
    """A hook that belongs to one module: copies and pickles of the model (moving averages, checkpoints of whole
    modules) get one that does nothing, instead of a copy of the monitor."""

    def __init__(self, work: Callable[..., None] = nothing) -> None:
        self.work = work

    def __call__(self, *args: Any) -> None:
        self.work(*args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of Python's own that takes anything and does nothing: who loads the model may not have Normscope.
        return partial, (sys.audit, "normscope.Monitor")


@dataclass(frozen=True)
class Step:
    """Updates between two optimizer steps."""

    updates: int
    in_backward: int
    forwards: int
    inside: int = 0
    """forward passes of the model that the optimizer's own step made"""
    counted: int = 0
    """by the module's own counter, where calls cannot be seen"""


class Watch:
    """Counts of one module. ``with_grad`` and the like are of the stretch since the last optimizer step.

    Args:
        name: of the site.
        module: it, with ``running_mean`` or ``running_var``.
        updates: in which of "train" and "eval" a forward moves the statistics, as far as that is known.
        witness: parameters that tell whether the weights move.
        held: what the module stores, under the usual names; None where its attributes or a reader tell.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        updates: tuple[str, ...],
        witness: Sequence[Tensor],
        held: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.name, self.module = name, module
        self._in_train, self._in_eval = "train" in updates, "eval" in updates
        self._cumulative = _momentum(module) is None
        self.witness = list(witness)
        self._held = held
        self._weights: list[Tensor] | None = None
        self.steps: deque[Step] = deque(maxlen=REMEMBERED)
        self.whole = 0  # steps that updated it
        self.total_with_grad = self.without_grad = self.in_eval = self.recalibrated = self.stretches = 0
        self.accumulated = False
        """`normscope.nn.accumulating` moved it"""
        self.shift = self.log_var = 0.0
        self._pending: tuple[Tensor, Tensor] | None = None
        self._partial = False
        self._clear()

    def _clear(self) -> None:
        self.with_grad = self.recomputed = 0
        self._unasked = self._compared = self._moved = 0
        self.called = self.merged = self._recalibrating = False
        self._first: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, Tensor] | None = None

    # -- the hook ------------------------------------------------------------------------------------------

    def hooks(self) -> list[Any]:
        """Put them on; the handles take them off."""
        handles = [self.module.register_forward_pre_hook(Hook(self.before))]
        if self._in_eval:
            # Of these, values alone tell: they are compared at once, before anybody else can change them.
            handles.append(self.module.register_forward_hook(Hook(lambda *_: self.settle())))
        return handles

    def before(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook. The common way through it is five tests and an addition."""
        if out_of_sight():
            return
        self.called = True
        if self._pending is not None:
            self.settle()
        if module.training and is_accumulating(module):  # moves later, as its own counter tells
            self.merged = True
            return
        if module.training and torch.is_grad_enabled():
            if self._in_train:
                if _graph_task() != -1:
                    self.recomputed += 1
                else:
                    self.with_grad += 1
        elif self._in_train if module.training else self._in_eval:
            self._suspect(module)

    def _suspect(self, module: nn.Module) -> None:
        """A pass that should not move the statistics: what they are before it, to compare with what they are after."""
        now = self._values()
        if self._first is None:
            self._first = now
            reset = self.total_with_grad > 0 and not bool(now[0].any()) and bool((now[1] == 1).all())
            self._recalibrating = reset or (not self._cumulative and _momentum(module) is None)
            if self._weights is None:
                self._weights = [parameter.detach().clone() for parameter in self.witness]
        self._pending = now

    def settle(self) -> None:
        """After the last suspicious pass: did it move the statistics?"""
        before, self._pending = self._pending, None
        if before is None:
            return
        if self._compared < CHECKED:
            after = self._values()
            self._compared += 1
            self._moved += not (torch.equal(before[0], after[0]) and torch.equal(before[1], after[1]))
        if not self._moved:
            return
        self._last = self._values()
        if self._recalibrating:
            self.recalibrated += 1
        elif self.module.training:
            self._unasked += 1
        else:
            self.in_eval += 1

    # -- between steps -------------------------------------------------------------------------------------

    def close(self, forwards: int, counted: int = 0, inside: int = 0, *, whole: bool = True) -> None:
        """An optimizer step has come (or the end, which is not ``whole``)."""
        self.settle()
        # reentrant checkpointing runs first without gradients, then again in the backward pass
        checkpointed = min(self._unasked, max(0, self.recomputed - self.with_grad))
        unasked = self._unasked - checkpointed
        asked = self.with_grad + checkpointed
        updates = asked + self.recomputed
        self.total_with_grad += asked + (self.recomputed if not asked else 0) + self.merged
        self.accumulated |= self.merged
        if whole and not self._partial and (updates or counted):
            self.steps.append(Step(updates or counted, self.recomputed, forwards, inside, counted))
            self.whole += 1
        if unasked:
            self.without_grad += unasked
            self.stretches += 1
        if (unasked or self.in_eval) and self._first is not None and self._last is not None:
            shift, log_var = distance(self._first, self._last, float(getattr(self.module, "eps", 0.0) or 0.0))
            self.shift, self.log_var = max(self.shift, shift), max(self.log_var, log_var)
        self._partial = False
        self._clear()

    def forget_unasked(self) -> None:
        """Passes so far were none of a training."""
        self.settle()
        self._unasked = 0
        self._first = self._last = None

    def forget_steps(self) -> None:
        """What was taken for steps were none, and the one that ends now was not seen whole."""
        self.steps.clear()
        self.whole = 0
        self._partial = True

    def typical(self, of: str) -> float:
        return float(median(getattr(step, of) for step in self.steps)) if self.steps else 0.0

    @property
    def counted_only(self) -> bool:
        return any(step.counted for step in self.steps)

    @property
    def follows(self) -> bool:
        """Its parameters have moved since it first ran without gradients, and it never ran with them."""
        if self.total_with_grad or self._weights is None:
            return False
        pairs = zip(self._weights, self.witness, strict=True)
        return any(not torch.equal(before, now.detach().to(before)) for before, now in pairs)

    def _values(self) -> tuple[Tensor, Tensor]:
        module = self.module
        mean, var = getattr(module, "running_mean", None), getattr(module, "running_var", None)
        if self._held is not None or (mean is None and var is None):
            # it says itself what it stores under other names, or that was found out
            held = self._held() if self._held is not None else read(module).tensors
            mean, var = held.get("running_mean"), held.get("running_var")
        mean = torch.zeros_like(var) if mean is None else mean  # type: ignore[arg-type]
        var = torch.ones_like(mean) if var is None else var
        return mean.detach().clone(), var.detach().clone()


def distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], eps: float) -> tuple[float, float]:
    """Root mean square of the shift of the means in units of the denominator, and the largest |log ratio| of
    variance + eps, over the channels that are finite and alive.

    >>> zero, one = torch.zeros(2), torch.ones(2)
    >>> shift, log_var = distance((zero, one), (2 * one, 4 * one), 0.0)
    >>> shift, round(math.exp(log_var), 9)
    (2.0, 4.0)
    """
    (mean, var), (mean_now, var_now) = ([t.double().flatten() for t in pair] for pair in (one, other))
    live = (var > 0) & (var_now > 0)
    for value in (mean, mean_now, var, var_now):
        live &= torch.isfinite(value)
    if not bool(live.any()):
        return 0.0, 0.0
    shift = ((mean_now - mean)[live].square() / (var[live] + eps)).mean().sqrt()
    ratio = ((var_now[live] + eps) / (var[live] + eps)).log().abs().max()
    return float(shift), float(ratio)


def _momentum(module: nn.Module) -> float | None:
    momentum: float | None = getattr(module, "momentum", math.nan)
    return momentum
