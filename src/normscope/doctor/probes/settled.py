"""Do the two modes of a norm that was not identified agree, once its stored statistics are those of the batch?

A copy of the module is trained on one batch until its state stays as it is; by whatever rule it moves, evaluation of
that batch must then give what training gives, but for n / (n - 1) in the stored variance. The state's limit is
extrapolated from three steps (Aitken), which is exact for an exponential average of any momentum and halves the
distance of a cumulative one. Statistics of parts of the batch (ghost batches, instances) agree with the whole where all
parts are alike, so a batch of repeated samples must show the difference too.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from normscope.doctor.modes import NoFunctionalDropout
from normscope.doctor.probes import Probe
from normscope.identify.module_box import ModuleBox, as_array, box_of_module, call_of, tensors_of
from normscope.identify.module_mode import depends_on_chance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Site
    from normscope.doctor.subject import Subject

    Array = NDArray[np.float64]
    State = dict[str, Array]

ROUNDS, STAYS = 32, 1e-4
"""extrapolations, and the jump of the last, over the largest number, from which on the state is its limit"""
SAME = 1e-6
"""relative difference of outputs that rounding explains"""
LARGEST, FEW = 2**20, 4
"""elements of an input at most, since the module runs some hundred times; samples at least"""


@dataclass(frozen=True)
class Settled:
    """How far evaluation is from training at one site."""

    gap: float
    """root mean square difference over that of the output of training, state settled on the user's batch"""
    alike: float
    """the same on repeated samples; the smaller one is not due to how a batch is split"""
    before: float
    """the same on the user's batch with the state as it is"""
    moved: bool
    """a call in training moves what evaluation reads"""
    constant: bool
    """the gradient of training holds the statistics fixed though the state that normalizes there moves"""
    samples: int


class SettledProbe(Probe):
    """``measured["settled"]``: site name -> :class:`Settled`, of unidentified norms with stored statistics in eval."""

    name = "settled"
    runs = ("eval",)

    def finish(self, subject: Subject) -> dict[str, Settled]:
        sites = [site for site in subject.sites if _told_by_behaviour(site, subject.sites)]
        calls = _calls(subject, sites) if sites else {}
        found = {}
        with subject.session.protecting():
            for site in sites:
                if site.name not in calls:
                    continue
                try:
                    seen = settled(*calls[site.name], site.calls[0].shape)
                except (Exception, SystemExit):  # the user's code on inputs that it never saw
                    continue
                if seen is not None:
                    found[site.name] = seen
        return found


def _told_by_behaviour(site: Site, sites: list[Site]) -> bool:
    if site.kind not in ("hand-written", "inlined") or site.spec is not None or not site.calls:
        return False
    if site.mode_eval not in ("running", "frozen"):
        return False
    inside = f"{site.path}." if site.path else ""
    others = [s for s in sites if s is not site and s.path.startswith(inside) and s.mode_train != s.mode_eval]
    return site.kind == "hand-written" or all(
        s.spec is not None and s.kind == "module" and "(" not in s.spec.stats for s in others
    )


def _calls(subject: Subject, sites: list[Site]) -> dict[str, tuple[nn.Module, Any]]:
    """The (enclosing) module of each site and the arguments of its first call."""
    found: dict[str, tuple[nn.Module, Any]] = {}

    def keep(site: Site) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if site.name not in found and not (args and kwargs):
                found[site.name] = (module, args or kwargs)

        return hook

    with ExitStack() as hooks:
        for site in sites:
            module = site.module if site.kind == "hand-written" else subject.session.modules.get(site.path)
            if module is not None:
                handle = module.register_forward_pre_hook(keep(site), with_kwargs=True)
                hooks.callback(handle.remove)
        subject.session.forward(subject.args or (), subject.kwargs, mode="eval")
    return found


def settled(module: nn.Module, example: Any, site_shape: tuple[int, ...]) -> Settled | None:
    """How far evaluation of a module is from its training; None where it cannot be told. The module is not written.

    ``site_shape``: shape of what is normalized, where the module does more than that.
    """
    call = call_of(example)
    x = as_array(call.example)
    if x.ndim < 2 or x.size > LARGEST or len(x) < FEW:
        return None
    box = box_of_module(module, call)
    train, still = box.in_mode(training=True), box.in_mode(training=False)
    for part in train.module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
    with NoFunctionalDropout():
        if depends_on_chance(train) or depends_on_chance(still):
            return None
        before = _gap(train, still, x, {})
        if before <= SAME:
            return None
        own = {name: as_array(tensor) for name, tensor in tensors_of(train.module).items()}
        state = {name: own[name] for name in train.moved(x)[1]}
        if not any(name in state for name in _floating(train)):
            told = _remembers(train, still, x)
            return None if told else Settled(before, before, before, False, False, len(x))
        # one sample has spread where a set has positions; else two have
        alike = x[np.arange(len(x)) % (1 if prod(site_shape[2:]) > 1 else 2)]
        limits = [_limit(train, state, one) for one in (x, alike)]
        if limits[0] is None or limits[1] is None:
            return None
        gap, parts = _gap(train, still, x, limits[0]), _gap(train, still, alike, limits[1])
        follows = _apart(train(x), train.set(limits[0])(x)) > SAME
        return Settled(gap, parts, before, True, follows and _straight(train, x), len(x))


def _floating(box: ModuleBox) -> set[str]:
    return {name for name, tensor in tensors_of(box.module).items() if tensor.is_floating_point()}


def _remembers(train: ModuleBox, still: ModuleBox, x: Array) -> bool:
    """Whether training changes evaluation by what is no tensor of the module."""
    fork = train.fork()
    for _ in range(3):
        train.output_of(fork, x)
    return _apart(still(x), still.output_of(fork.eval(), x)) > SAME


def _limit(train: ModuleBox, state: State, x: Array) -> State | None:
    """The state that training on this batch ends in; None where it does not settle."""
    numbers = _floating(train) & set(state)
    size = {name: _size(state[name]) for name in numbers}
    for _ in range(ROUNDS):
        one = _after(train, state, x)
        two = _after(train, one, x)
        limit = {**two, **{name: _aitken(state[name], one[name], two[name]) for name in numbers}}
        jump = max(
            float(np.abs(limit[name] - state[name]).max()) / max(size[name], _size(limit[name]))
            for name in numbers
        )
        state = limit
        if jump <= STAYS:
            return state
    return None


def _after(train: ModuleBox, state: State, x: Array) -> State:
    tensors = train.set(state).run(x).tensors
    return {name: tensors[name] for name in state}


def _aitken(zero: Array, one: Array, two: Array) -> Array:
    """The limit of a geometric sequence, number by number; what is none goes on as it is. What is
    positive stays so, or 0."""
    first, second = one - zero, two - one
    with np.errstate(all="ignore"):
        limit = zero + first * (first / (first - second))
    geometric = np.isfinite(limit) & (np.abs(second) < np.abs(first))
    return np.where(geometric, np.where(two > 0, np.maximum(limit, 0.0), limit), two)


def _gap(train: ModuleBox, still: ModuleBox, x: Array, state: State) -> float:
    return _apart(train.set(state)(x), still.set(state)(x))


def _apart(one: Array, other: Array) -> float:
    """Root mean square difference over that of the first."""
    return float(np.sqrt(np.mean((other - one) ** 2))) / _size(one)


def _size(values: Array) -> float:
    return max(float(np.sqrt(np.mean(values**2))), 1e-300)


def _straight(train: ModuleBox, x: Array) -> bool:
    """Whether autograd takes each output of training for a straight function of its own input alone."""
    random = torch.Generator().manual_seed(0)
    leaf = torch.from_numpy(x.copy()).requires_grad_()
    with torch.enable_grad():
        output = train.apply(train.fork(), leaf)
    if output.shape != leaf.shape:
        return False
    weights = torch.randn(output.shape, dtype=output.dtype, generator=random)
    plain, weighted = (
        torch.autograd.grad((output * by).sum(), leaf, retain_graph=True)[0]
        for by in (torch.ones_like(weights), weights)
    )
    return bool(plain.abs().max() > 0) and torch.allclose(plain * weights, weighted, rtol=1e-6, atol=1e-12)
