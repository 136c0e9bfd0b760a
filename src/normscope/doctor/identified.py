"""Norms written by hand, identified: what they compute is found out by probing copies of their modules.

That a module looks like a norm was seen where its data was followed, so only few modules are probed. The copies are in
float64, on small inputs of the recorded number of axes; what was found is then checked at the recorded shape. From
there on such a site is as good as one that was read: every probe and every rule sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope import reference
from normscope.doctor.session import Session, is_training
from normscope.doctor.site import Site
from normscope.doctor.tracing.config import expected_eps
from normscope.doctor.tracing.readings import ModuleReading
from normscope.errors import ModelError, NormscopeError, told
from normscope.identify.float64_copy import copied
from normscope.identify.module_box import box_of_module, call_of, tensors_of
from normscope.identify.modules import identify_module
from normscope.identify.owners_hooks import own_hooks
from normscope.identify.result import Identification
from normscope.identify.tensor_paths import tensor_paths, value_shapes
from normscope.spec import NormSpec, PatternError, RunningState

SAMPLES, SHORT = 4, (3, 5)
"""sizes of the probing input: samples, and other axes whose size no parameter fixes"""
LARGE = 2**20
"""elements of an input above which fewer samples are taken, or none"""
AGREES = 1e-9
"""largest error, over the largest output, in float64"""


@dataclass(frozen=True, eq=False)
class Known:
    """What was found of one module, and where its state is."""

    answer: Identification
    paths: Mapping[str, str]
    """usual name -> path of the tensor in the module"""


@dataclass(frozen=True, eq=False)
class IdentifiedReading(ModuleReading):
    """The reading of an identified module; tensors in the shapes that the specification says."""

    paths: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    computed: Mapping[str, Tensor] = field(default_factory=dict)
    """weight or bias that is no single tensor of the module"""

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        found = dict(self.computed)
        for name, path in self.paths.items():
            tensor = tensor_at(module, path)
            shape = self.shapes.get(name, tuple(tensor.shape))
            found[name] = tensor if tuple(tensor.shape) == shape else tensor.reshape(shape)
        return found


def identify_written(session: Session, sites: Iterable[Site]) -> None:
    """Give every hand-written site its specification, modes and tensors, or the reason why it has none.

    The session's model is not run, and left as it is: modules are copied first.
    """
    known: dict[Any, Known] = {}
    found: list[tuple[Site, Known | str]] = []
    with session.protecting():  # a copy runs the user's code, which may reach what is not its own
        for site in sites:
            if site.kind == "inlined":
                shape = site.calls[0].shape if site.calls else ()
                site.reason = (
                    f"written inside a larger forward, on inputs of shape {shape}; only a norm that is a module of its "
                    "own is identified"
                )
            elif site.kind == "hand-written" and site.spec is None and not site.calls:
                site.reason = "hand-written; it is identified where inputs are given"
            elif site.kind == "hand-written" and site.spec is None:
                found.append((site, _found(site, known)))
    for site, answer in found:
        if isinstance(answer, str):
            site.reason = f"hand-written; not identified: {answer}"
        else:
            _fill(site, answer, session)


def _found(site: Site, known: dict[Any, Known]) -> Known | str:
    """What a site's module is, or why that is not known."""
    assert site.module is not None
    shape = site.calls[0].shape
    try:
        module, key = _finite(site.module), _structure(site.module, shape)
        if key in known and _still(module, known[key], probing_shapes(module, shape)[0]):
            return known[key]
        found = _identified(module, shape)
    except (NormscopeError, ValueError) as error:
        return str(error)
    except (Exception, SystemExit) as error:  # the user's code on inputs that it never saw
        return told(error)
    if isinstance(found, Known):
        known[key] = found
    return found


def _finite(module: nn.Module) -> nn.Module:
    """The module, or a copy without what is not finite: a broken statistic is no reason not to know the norm."""
    if all(bool(torch.isfinite(t).all()) for t in tensors_of(module).values() if t.is_floating_point()):
        return module
    copy = copied(module, torch.float32, owners_hooks=bool(own_hooks(module)))
    with torch.no_grad():
        for tensor in tensors_of(copy).values():
            tensor[~torch.isfinite(tensor)] = 1.0
    return copy


def _identified(module: nn.Module, shape: tuple[int, ...]) -> Known | str:
    reason = ""
    for probed in probing_shapes(module, shape):
        try:
            answer = identify_module(module, torch.zeros(probed), _layout(module, probed), training=False)
        except ModelError as error:
            reason = f"called with its input alone it raised {told(error.__cause__ or error)}"
            continue
        if answer.spec is None:
            return answer.reason or f"it is a fixed affine map, {answer.fixed}"
        box = box_of_module(module, call_of(torch.zeros(probed))).in_mode(training=False)
        found = Known(answer, tensor_paths(box, answer.spec))
        if not _still(module, found, _recorded(shape, probed)):
            return f"on inputs of shape {probed} it is {answer.spec}, on inputs of the model's shape {shape} it is not"
        return found
    return reason


def _still(module: nn.Module, known: Known, shape: tuple[int, ...]) -> bool:
    """Whether a module, with its own values, computes on this shape what was found."""
    spec = known.answer.spec
    assert spec is not None
    x = np.random.default_rng(3).standard_normal(shape) * 2 + 0.5
    try:
        box = box_of_module(module, call_of(torch.zeros(shape)))
        tensors = {name: t.detach().double().numpy() for name, t in tensors_of(box.module).items()}
        values = _values(spec, known, tensors, shape)
        if values is None:
            return False
        running = None
        if spec.running is not None:
            running = RunningState(values.pop("running_mean"), values.pop("running_var"))
        for training in (True, False):
            stored = known.answer.mode == "frozen" or (known.answer.mode == "running" and not training)
            y = box.in_mode(training)(x)
            exact = reference.forward(x, spec, **values, running=running, training=not stored)
            if not np.abs(y - exact).max(initial=0.0) <= AGREES * np.abs(exact).max(initial=1e-300):
                return False
    except (NormscopeError, PatternError, ValueError, KeyError):
        return False
    return True


def _values(
    spec: NormSpec, known: Known, tensors: Mapping[str, Any], shape: Sequence[int]
) -> dict[str, Any] | None:
    """Parameters and stored statistics in the shapes that the specification says; None where one is not there."""
    bound = spec.bind(shape)
    found: dict[str, Any] = {}
    for name, wanted in value_shapes(bound).items():
        if name in known.paths:
            found[name] = tensors[known.paths[name]].reshape(wanted)
        elif name in ("weight", "bias") and getattr(known.answer, name) is not None:
            found[name] = np.asarray(getattr(known.answer, name)).reshape(wanted)
        else:
            return None
    return found


def probing_shapes(module: nn.Module, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Small inputs first: sizes that no tensor of the module has are cut; then only the samples; then as recorded."""
    fixed = {size for tensor in tensors_of(module).values() for size in tensor.shape if size > 1}
    if not fixed and len(shape) > 1:
        fixed = {shape[1] if len(shape) > 3 else shape[-1]}
    small = list(shape)
    short = iter(SHORT * len(shape))
    for axis in range(1, len(shape)):
        if shape[axis] not in fixed:
            small[axis] = min(shape[axis], next(short))
    if len(shape) > 1:
        small[0] = SAMPLES
    fewer = (SAMPLES, *shape[1:]) if len(shape) > 1 else shape
    found = list(dict.fromkeys((tuple(small), fewer, shape)))
    return [tried for tried in found if prod(tried) <= LARGE] or found[:1]


def _recorded(shape: tuple[int, ...], probed: tuple[int, ...]) -> tuple[int, ...]:
    """The recorded shape, of fewer samples where it is large; where one sample is, what was probed must do."""
    few = max(2, LARGE // max(1, prod(shape[1:]))) if len(shape) > 1 else shape[0]
    fewer = (min(shape[0], few), *shape[1:])
    return fewer if prod(fewer) <= 2 * LARGE else probed


def _layout(module: nn.Module, shape: tuple[int, ...]) -> str:
    """Names of the axes: samples first, ``c`` where a vector of the module has the size, else where it usually is."""
    ndim = len(shape)
    if ndim < 2:
        return "c"
    vectors = {max(t.shape, default=1) for t in tensors_of(module).values() if t.numel() > 1}
    usual = ndim - 1 if ndim == 3 else 1
    order = [usual, *(axis for axis in range(ndim - 1, 0, -1) if axis != usual)]
    channel = next((axis for axis in order if shape[axis] in vectors), usual)
    others = iter({3: ("l",), 4: ("h", "w"), 5: ("s", "h", "w")}.get(ndim, [f"s{i}" for i in range(ndim)]))
    return " ".join(["b", *("c" if axis == channel else next(others) for axis in range(1, ndim))])


def _structure(module: nn.Module, shape: tuple[int, ...]) -> Any:
    """What two modules have in common that differ in the values of their tensors alone."""
    plain = (bool, int, float, str, type(None), tuple)
    settings = tuple(
        sorted(
            (path, name, repr(value))
            for path, part in module.named_modules()
            for name, value in vars(part).items()
            if not name.startswith("_") and name != "training" and isinstance(value, plain)
        )
    )
    tensors = tuple((name, tuple(t.shape)) for name, t in tensors_of(module).items())
    return type(module), settings, tensors, tuple(shape[1:])


def tensor_at(module: nn.Module, path: str) -> Tensor:
    """The tensor of a module at a dotted path."""
    owner, _, name = path.rpartition(".")
    tensor = getattr(module.get_submodule(owner), name)
    assert isinstance(tensor, Tensor)
    return tensor


def _fill(site: Site, known: Known, session: Session) -> None:
    """The site as if it had been read."""
    answer, module = known.answer, site.module
    assert answer.spec is not None
    assert module is not None
    live = {"running": "batch"}.get(answer.mode or "input", answer.mode or "input")
    in_eval = answer.mode or "input"
    shapes = value_shapes(answer.spec.bind(site.calls[0].shape))
    computed = {}
    for name in ("weight", "bias"):
        value = getattr(answer, name)
        if value is not None and name not in known.paths:
            computed[name] = torch.as_tensor(np.asarray(value).reshape(shapes[name]), dtype=torch.float32)
    paths = {name: path for name, path in known.paths.items() if name in shapes}

    def reading(ndim: int | None, training: bool) -> IdentifiedReading:
        assert answer.spec is not None
        fits = ndim is None or ndim == len(site.calls[0].shape)
        return IdentifiedReading(
            answer.spec if fits else None,
            "" if fits else f"identified on inputs of {len(site.calls[0].shape)} axes",
            site.type_name,
            live if training else in_eval,
            (),
            paths=paths,
            shapes=shapes,
            computed=computed,
        )

    flags = {call: _flag(session, call, site.path, call == "train") for call in ("train", "eval")}
    site.spec, site.reason, site.identified = answer.spec, "", answer
    site.mode_train = live if flags["train"] else in_eval
    site.mode_eval = live if flags["eval"] else in_eval
    site.mode_now = live if is_training(module) else in_eval
    site.tensors = reading(None, False).tensors(module)
    if answer.spec.running is not None:
        session.keeps_statistics.add(id(module))
    if site._names is not None:
        site._names.readings.identified[id(module)] = reading
        site.expected_eps = expected_eps(site, site._names)
    for call in site.calls:
        if len(call.shape) == len(site.calls[0].shape):
            call.spec, call.mode = answer.spec, site.mode_eval


def _flag(session: Session, call: str, path: str, usual: bool) -> bool:
    try:
        return session.modes_after(call).get(path, usual)
    except (Exception, SystemExit):  # the model's own train() or eval()
        return usual
