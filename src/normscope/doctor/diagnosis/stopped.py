"""Values that a model cuts off from the gradient on purpose: noted in one run, held fixed in the next ones.

What autograd derives is the model with these values as constants, so that is what differences must be taken of:
``detach``, ``.data`` and numbers taken out of tensors, what is computed under ``torch.no_grad``, and the rows that an
embedding looks up for its padding. A part under reentrant checkpointing, which runs unseen and then again in the
backward pass, is run as it stands: that is the same function with the same gradient. An ``autograd.Function`` may
replace a derivative that there is not (a spike, rounding) or that is not wanted (gradient reversal); these are named.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import checkpoint as checkpointing

from normscope.doctor.nested import tensors

_CUTS = frozenset(
    {torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
)
_NUMBERS = frozenset({torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__})
_EMBEDDING = torch.nn.functional.embedding
_GUMBEL = torch.nn.functional.gumbel_softmax
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_CHECKPOINT = checkpointing.CheckpointFunction
NEAR = 1e-6
"""a shift of the input that moves every output of a function that has a derivative"""
STEPS = 0.01
"""share of outputs that may move so where a function is made of steps: those that stood at an edge"""


class _Straight:
    """Reentrant checkpointing that keeps all and recomputes nothing."""

    @staticmethod
    def apply(function: Any, preserve: Any, *args: Any) -> Any:
        if any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            return function(*args)
        again: Any = _CHECKPOINT
        return again.apply(function, preserve, *args)  # which passes no gradient then


class Stopped(TorchFunctionMode):
    """The values cut off in one run of a model, in order; ``Stopped(first)`` gives a later run those of the first."""

    def __init__(self, first: Stopped | None = None) -> None:
        super().__init__()
        self._first = first
        self.values: list[Any] = []
        """what was cut off, in order"""
        self._lent: list[tuple[torch.Tensor, int]] = []
        self._functions: dict[type, tuple[Any, ...]] = {}
        self.by: dict[str, int] = {}
        """what cut values off, and how many"""
        self.hard: list[str] = []
        """of torch itself: functions whose backward is that of another function"""

    def __enter__(self) -> Stopped:
        self._checkpoint = checkpointing.CheckpointFunction
        checkpointing.CheckpointFunction = _Straight  # type: ignore
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        try:
            super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        finally:
            checkpointing.CheckpointFunction = self._checkpoint  # type: ignore

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [tensor for _, tensor in tensors((args, kwargs)) if tensor.requires_grad]
        if not given:
            return func(*args, **kwargs)
        if func is _EMBEDDING:
            return self._embedding(func(*args, **kwargs), *args, **kwargs)
        if func is _GUMBEL and (kwargs.get("hard") or True in args[2:3]):
            self.hard.append("gumbel_softmax(hard=True)")
        cut = func in _CUTS or func in _NUMBERS
        if not cut and torch.is_grad_enabled():
            return func(*args, **kwargs)
        if self._inside_a_function():  # its forward is all cut off, and its backward stands for it
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func in _NUMBERS:
            return self._fixed(out, func)
        if not isinstance(out, torch.Tensor) or out.requires_grad or not out.is_floating_point():
            return out  # masks and indices have no gradient; a parameter written in place keeps its own
        if func in _CUTS and self._first is None and not out.is_inference():
            self._lent.append((out, out._version))
        fixed = self._fixed(out, func)
        if any(out is tensor for tensor in (*args, *kwargs.values())) and fixed is not out:
            with torch.no_grad():
                return out.copy_(fixed)
        return fixed

    def check(self) -> None:
        """Raise ``ValueError`` where the run cannot be repeated with the same constants."""
        if any(tensor._version != version for tensor, version in self._lent):
            raise ValueError("it writes into tensors that it has detached")

    def replaced(self) -> list[str]:
        """Functions whose backward is, on purpose, not the derivative of their forward."""
        return [
            *dict.fromkeys(self.hard),
            *(f"{cls.__module__}.{cls.__qualname__}" for cls in self._functions if self._stands_in(cls)),
        ]

    def _fixed(self, value: Any, func: Any) -> Any:
        """The value, noted; in a later run the one of the first."""
        place = len(self.values)
        self.values.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
        if self._first is None:
            enabled = torch.is_grad_enabled() or func in _CUTS or func in _NUMBERS
            what = (resolve_name(func) or "").split(".")[-1] or "detach" if enabled else "torch.no_grad"
            what = {"__get__": "data"}.get(what, what)
            self.by[what] = self.by.get(what, 0) + 1
            return value
        if place >= len(self._first.values):
            raise ValueError("it takes another way through its code when its parameters move")
        known = self._first.values[place]
        if isinstance(known, torch.Tensor) and known.shape != value.shape:
            raise ValueError("it takes another way through its code when its parameters move")
        return known.clone() if isinstance(known, torch.Tensor) else known

    def _embedding(
        self,
        out: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        if padding_idx is None:
            return out
        padded = input == padding_idx % weight.shape[0]
        if not padded.any():
            return out
        rows = self._fixed(out.detach(), _EMBEDDING)
        return torch.where(padded.unsqueeze(-1), rows, out)

    def _inside_a_function(self) -> bool:
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _APPLY:
                cls, args = frame.f_locals["cls"], frame.f_locals["args"]
                if not cls.__module__.startswith(("torch.", "normscope.")) and cls not in self._functions:
                    self._functions[cls] = tuple(
                        a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args
                    )
                return True
            frame = frame.f_back
        return False

    def _stands_in(self, cls: Any) -> bool:
        """Whether a function gives back its input, or is made of steps."""
        args = self._functions[cls]
        shifted = [
            a + NEAR * torch.ones_like(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in args
        ]
        with torch.no_grad():
            here = [t for _, t in tensors(cls.apply(*args)) if t.is_floating_point()]
            there = [t for _, t in tensors(cls.apply(*shifted)) if t.is_floating_point()]
        same = any(torch.equal(out, a) for out in here for a in args if isinstance(a, torch.Tensor))
        moved = sum(int((a != b).sum()) for a, b in zip(here, there, strict=True))
        return same or moved <= STEPS * sum(out.numel() for out in here)
