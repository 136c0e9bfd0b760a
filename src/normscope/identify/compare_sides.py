"""The two sides of a comparison, each as functions of an array: in training, in evaluation, in half precision.

A module is run as a copy in float64 with casts to float32 redirected, a specification by the reference, anything else
as it is, in its own precision. Nothing that was handed in is run itself where it could change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from normscope import reference
from normscope.errors import ModelError, told
from normscope.identify.compare_result import HALVES
from normscope.spec import NormSpec, RunningState

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from normscope.identify.box import Box
    from normscope.identify.module_box import ModuleBox

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]

STORED = ("running_mean", "running_var")


class HalfOutput(NamedTuple):
    """What came back for an input of a half type."""

    y: Array
    dtype: str
    """of the output, which may be another one"""


@dataclass(frozen=True)
class Side:
    """One of the two. ``values`` None: as it is; else parameters and stored statistics by their usual names."""

    name: str
    spec: NormSpec | None = None
    reason: str = ""
    """why there is no spec"""
    held: dict[str, Array] | None = None
    """the values that it holds by their usual names; None where it holds none of its own (a specification), or where
    they cannot be reached"""
    settable: bool = False
    """it takes ``values``"""
    fixed: bool = False
    """it is a fixed map, as a norm in evaluation is"""
    frozen: bool = False
    """stored statistics normalize in training too, and do not move"""
    trains: bool = False
    """it is called otherwise in training, also where it is a fixed map in evaluation"""
    roundoff: float = 2.0**-53
    note: str = ""
    """what to know about how it is called"""
    half_words: str = ""
    """what identification saw of its arithmetic in bfloat16"""

    def output(self, x: Array, mode: str, values: Values | None = None) -> Array:
        raise NotImplementedError

    def stored(self, x: Array, values: Values | None = None) -> dict[str, Array]:
        """The stored statistics after one call in training; empty where there are none."""
        return {}

    def half(self, x: Array, mode: str, values: Values | None = None) -> HalfOutput | None:
        """The output in a mode of half precision, everything in that type; None where that cannot be asked."""
        return None

    def exact(self, x: Array, mode: str, values: Values | None = None) -> Array:
        """What `half` would be without any rounding on the way, for values that are numbers of the half type."""
        return self.output(x, "train" if HALVES[mode].training else "eval", values)


@dataclass(frozen=True)
class SpecSide(Side):
    """A specification, computed by the reference."""

    def output(self, x: Array, mode: str, values: Values | None = None) -> Array:
        v = self._given(values)
        assert self.spec is not None
        return reference.forward(
            x, self.spec, v.get("weight"), v.get("bias"), running=_state(v), training=mode != "eval"
        )

    def stored(self, x: Array, values: Values | None = None) -> dict[str, Array]:
        assert self.spec is not None
        state = _state(self._given(values))
        if self.spec.running is None or self.spec.whiten or state is None:
            return {}
        after = reference.update_running(state, x, self.spec)
        return {"running_mean": np.asarray(after.mean), "running_var": np.asarray(after.var)}

    def half(self, x: Array, mode: str, values: Values | None = None) -> HalfOutput | None:
        import torch

        from normscope.functional import normalize

        dtype = getattr(torch, HALVES[mode].dtype)

        def rounded(value: Array | None) -> torch.Tensor | None:
            return None if value is None else torch.from_numpy(np.array(value)).to(dtype)

        v = self._given(values)
        assert self.spec is not None
        state = {name: torch.from_numpy(np.array(v[name])).float() for name in STORED if name in v}
        running = RunningState(state["running_mean"], state["running_var"]) if state else None
        given = rounded(x)
        assert given is not None
        training = self.spec.running is None or HALVES[mode].training
        y = normalize(
            given,
            self.spec,
            rounded(v.get("weight")),
            rounded(v.get("bias")),
            running=running,
            training=training,
        )
        return half_output(y)

    def _given(self, values: Values | None) -> Values:
        return values if values is not None else self.held or {}


@dataclass(frozen=True)
class BoxSide(Side):
    """A callable as it is."""

    box: Box | None = None
    in_training: Box | None = None
    """of one that is called otherwise there"""
    in_half: Callable[[Array, str], HalfOutput] | None = None
    """a function of tensors, called with those of a half type"""

    def output(self, x: Array, mode: str, values: Values | None = None) -> Array:
        box = self.in_training if mode == "train" and self.in_training is not None else self.box
        assert box is not None
        try:
            return box(x)
        except Exception as error:
            raise ModelError(f"{self.name} raised on an input of shape {x.shape}: {told(error)}") from error

    def half(self, x: Array, mode: str, values: Values | None = None) -> HalfOutput | None:
        if self.in_half is None:
            return None
        try:
            return self.in_half(x, HALVES[mode].dtype)
        except Exception as error:
            raise ModelError(f"{self.name} raised on {HALVES[mode].dtype} ({told(error)})") from error


@dataclass(frozen=True)
class ModuleSide(Side):
    """A torch module, by copies."""

    boxes: dict[str, ModuleBox] = field(default_factory=dict)
    """for ``train`` and ``eval``"""
    paths: dict[str, str] = field(default_factory=dict)
    """usual name -> path of the tensor in the module"""
    original: Any = None

    def output(self, x: Array, mode: str, values: Values | None = None) -> Array:
        return self.boxes[mode].set(self._settings(values))(x)

    def stored(self, x: Array, values: Values | None = None) -> dict[str, Array]:
        tensors = self.boxes["train"].set(self._settings(values)).run(x).tensors
        return {name: tensors[self.paths[name]] for name in STORED if name in self.paths}

    def half(self, x: Array, mode: str, values: Values | None = None) -> HalfOutput | None:
        import torch

        box = self._halves(mode)[0].set(self._settings(values))
        with torch.no_grad():
            return half_output(box.apply(box.fork(), torch.from_numpy(np.array(x)).to(box.dtype)))

    def exact(self, x: Array, mode: str, values: Values | None = None) -> Array:
        return self._halves(mode)[1].set(self._settings(values))(x)

    def _halves(self, mode: str) -> tuple[ModuleBox, ModuleBox]:
        """A copy in the half type, and one in float64 that holds what the other does."""
        import torch

        from normscope.identify.module_box import box_of_module

        if mode not in self._made:
            half = box_of_module(self.original, self.boxes["eval"].call, getattr(torch, HALVES[mode].dtype))
            wide = box_of_module(half.module, half.call)
            training = HALVES[mode].training
            self._made[mode] = half.in_mode(training), wide.in_mode(training)
        return self._made[mode]

    @cached_property
    def _made(self) -> dict[str, tuple[ModuleBox, ModuleBox]]:
        return {}

    def _settings(self, values: Values | None) -> dict[str, Array]:
        return {self.paths[name]: value for name, value in (values or {}).items() if name in self.paths}


@dataclass(frozen=True)
class Both:
    """Two sides on inputs of one shape; their specifications as the first reads its input."""

    a: Side
    b: Side
    spec_a: NormSpec | None
    spec_b: NormSpec | None
    shape: tuple[int, ...]

    @property
    def settable(self) -> bool:
        return self.a.settable and self.b.settable


def half_output(y: torch.Tensor) -> HalfOutput:
    """An output with its dtype."""
    return HalfOutput(y.detach().cpu().double().numpy(), str(y.dtype).removeprefix("torch."))


def _state(values: Values) -> RunningState | None:
    if not set(STORED) <= set(values):
        return None
    return RunningState(values["running_mean"], values["running_var"])
