"""The two sides of a comparison, each as functions of an array: in training, in evaluation, in half precision.

A module is run as a copy in float64 with casts to float32 redirected, a specification by the reference, anything else
as it is, in its own precision. Nothing that was handed in is run itself where it could change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope import reference
from normscope.errors import BadInput, ModelError, NormscopeError, told
from normscope.identify.compare_result import HALVES
from normscope.spec import NormSpec, RunningState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.identify.box import Box
    from normscope.identify.module_box import ModuleBox

    Array = NDArray[np.float64]
    Values = Mapping[str, Array]

STORED = ("running_mean", "running_var")


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
    """it is a fixed map, as a norm in evaluation is, and takes no part in training"""
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

    def half(self, x: Array, mode: str, values: Values | None = None) -> Array | None:
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

    def half(self, x: Array, mode: str, values: Values | None = None) -> Array | None:
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
        out: Array = y.double().numpy()
        return out

    def _given(self, values: Values | None) -> Values:
        return values if values is not None else self.held or {}


@dataclass(frozen=True)
class BoxSide(Side):
    """A callable as it is."""

    box: Box | None = None
    in_half: Callable[[Array, str], Array] | None = None
    """a function of tensors, called with those of a half type"""

    def output(self, x: Array, mode: str, values: Values | None = None) -> Array:
        assert self.box is not None
        try:
            return self.box(x)
        except Exception as error:
            raise ModelError(f"{self.name} raised on an input of shape {x.shape}: {told(error)}") from error

    def half(self, x: Array, mode: str, values: Values | None = None) -> Array | None:
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

    def half(self, x: Array, mode: str, values: Values | None = None) -> Array | None:
        return self._halves(mode)[0].set(self._settings(values))(x)

    def exact(self, x: Array, mode: str, values: Values | None = None) -> Array:
        return self._halves(mode)[1].set(self._settings(values))(x)

    def _halves(self, mode: str) -> tuple[ModuleBox, ModuleBox]:
        """A copy in the half type, and one in float64 that holds what the other does."""
        import torch

        from normscope.identify.module_box import box_of_module

        if mode not in self._made:
            half = box_of_module(self.original, self.boxes["eval"].call, getattr(torch, HALVES[mode].dtype))
            both = half, box_of_module(half.module, half.call)
            self._made[mode] = tuple(box.in_mode(HALVES[mode].training) for box in both)
        return self._made[mode]

    @cached_property
    def _made(self) -> dict[str, Any]:
        return {}

    def _settings(self, values: Values | None) -> dict[str, Array]:
        return {self.paths[name]: value for name, value in (values or {}).items() if name in self.paths}


def side_of(obj: Any, example: Any, layout: str | None, which: str) -> Side:
    """What was handed in as a side of a comparison, on inputs like ``example``.

    Raises BadInput where it is no specification and cannot be called.
    """
    if isinstance(obj, NormSpec):
        return SpecSide(f"spec ({obj.stats})", obj, settable=True)
    if _is_module(obj):
        return _module_side(obj, example, layout)
    from normscope.identify import box_of, identify

    if not callable(obj) and not hasattr(obj, "run"):
        raise BadInput(
            f"compare takes specifications, modules and callables; {which} is a {type(obj).__name__}. Pass the layer "
            "itself, or what it computes as a NormSpec."
        )
    box = box_of(obj, example)
    found = identify(obj, example, layout=layout)
    held = {name: value for name in ("weight", "bias") if (value := getattr(found, name)) is not None}
    return BoxSide(
        box.name,
        found.spec,
        _why(found),
        held if found.spec is not None else None,
        fixed=found.fixed is not None,
        roundoff=max(box.roundoff, found.roundoff or 0.0),
        note=getattr(box, "note", ""),
        box=box,
        in_half=_in_half(obj, example, box),
    )


def _in_half(fn: Any, example: Any, box: Box) -> Callable[[Array, str], Array] | None:
    """The function on tensors of a half type, where its box calls it with tensors; what wraps arrays does not."""
    from normscope.identify.adapters import torch_functions
    from normscope.identify.box import Boxed

    if not isinstance(box, Boxed) or box.function.__module__ != torch_functions.__name__:
        return None
    import torch

    device = getattr(example, "device", None)

    def call(x: Array, dtype: str) -> Array:
        with torch.no_grad():
            y = fn(torch.tensor(x, dtype=getattr(torch, dtype), device=device))
        out: Array = y.detach().cpu().double().numpy()
        return out

    return call


def _module_side(module: Any, example: Any, layout: str | None) -> Side:
    from normscope.identify.module_box import box_of_module, call_of, tensors_of
    from normscope.identify.tensor_paths import tensor_paths, value_shapes
    from normscope.reading import UnknownNormalization, read

    box = box_of_module(module, call_of(example))
    copy, shape = box.module, tuple(box.call.example.shape)
    tensors = tensors_of(copy)
    spec, reason, half_words = None, "", ""
    try:
        reading = read(copy, input_ndim=len(shape))
    except (UnknownNormalization, ValueError):
        spec, reason, half_words = _identified(module, example, layout)
        paths = {} if spec is None else tensor_paths(box.in_mode(training=False), spec)
    else:
        spec = reading.spec
        named = {
            name: path for path, t in tensors.items() for name, held in reading.tensors.items() if held is t
        }
        paths = {name: named[name] for name in ("weight", "bias", *STORED) if name in named}
    values = {name: tensors[path].detach().double().numpy().copy() for name, path in paths.items()}
    if spec is not None:
        wanted = value_shapes(spec.bind(shape))
        values = {
            n: v.reshape(wanted[n]) for n, v in values.items() if n in wanted and v.size == prod(wanted[n])
        }
    return ModuleSide(
        type(module).__name__,
        spec,
        reason,
        values,
        settable=_all_named(spec, paths),
        boxes={"train": box.in_mode(True), "eval": box.in_mode(False)},
        paths=paths,
        original=module,
        half_words=half_words,
    )


def _identified(module: Any, example: Any, layout: str | None) -> tuple[NormSpec | None, str, str]:
    """The specification of a module that no reader knows, or why there is none, and its arithmetic in bfloat16. In
    evaluation, where stored statistics act, if it runs there."""
    from normscope.identify import identify

    reason = ""
    for training in (False, True):
        try:
            found = identify(module, example, layout=layout, training=training)
        except ModelError as error:
            reason = str(error)
            continue
        return found.spec, _why(found), "" if found.half is None else found.half.conclusion
    return None, reason, ""


def _all_named(spec: NormSpec | None, paths: Mapping[str, str]) -> bool:
    """Everything that the specification says it holds was found in the module."""
    if spec is None:
        return False
    needed = {name for name in ("weight", "bias") if getattr(spec, name) is not None}
    needed |= set(STORED) if spec.running is not None else set()
    return needed <= set(paths)


def _why(found: Any) -> str:
    if found.spec is not None:
        return ""
    return str(found.reason or f"it is a fixed affine map ({found.fixed})")


def _state(values: Values) -> RunningState | None:
    if not set(STORED) <= set(values):
        return None
    return RunningState(values["running_mean"], values["running_var"])


def _is_module(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.nn.Module)


def fits(side: Side, x: Array, values: Values | None) -> str:
    """ "" where the side takes an input in one of its modes, else why not."""
    why = ""
    for mode in ("eval", "train"):
        try:
            y = side.output(x, mode, values)
        except (NormscopeError, ValueError, ArithmeticError) as error:
            why = str(error)
            continue
        return "" if y.shape == x.shape else f"it returns shape {y.shape} for an input of shape {x.shape}"
    return why


def shape_of(example: Any) -> tuple[int, ...]:
    """The shape of an example. Raises BadInput where it is neither an array, a tensor nor sizes."""
    from normscope.identify.box import is_shape

    if not hasattr(example, "shape") and not is_shape(example):
        raise BadInput(
            f"an example is an array, a tensor or the sizes of one; got a {type(example).__name__}. Wrap a layer that "
            "takes more than one argument in a function of one."
        )
    return tuple(int(n) for n in getattr(example, "shape", example))
