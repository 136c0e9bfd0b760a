"""The same weights under two sets of running statistics: how much the model's outputs depend on that state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.doctor import arguments
from normscope.doctor.nested import detached, tensors
from normscope.doctor.refusals import unwrap
from normscope.doctor.session import Session
from normscope.errors import BadInput, printable
from normscope.transforms.chosen import Chosen, chosen, copied

STATISTICS = ("running_mean", "running_var")
SAID = (
    "measured: how far outputs depend on which of two stated sets of statistics normalizes; it says nothing of what "
    "was learned, and not which set is right"
)


@dataclass(frozen=True)
class SiteSensitivity:
    """One norm. Differences are root mean squares, in units of that of the value under ``state_a``."""

    site: str
    output: float
    """of the norm's output, with all norms under their own set"""
    alone: float
    """of the model's output where this norm alone takes ``state_b``, and all others ``state_a``"""


@dataclass(frozen=True)
class StateSensitivity:
    """Result of `state_sensitivity`."""

    output: float
    """difference of the model's outputs under the two sets"""
    sites: tuple[SiteSensitivity, ...]
    """in the order of the model's modules"""

    def __str__(self) -> str:
        lines = [f"state sensitivity: outputs differ by {self.output:.2g} of their size"]
        for one in sorted(self.sites, key=lambda s: -s.alone):
            name = one.site or "the model itself"
            lines.append(f"  {name}: by it alone {one.alone:.2g}; its own output differs by {one.output:.2g}")
        return "\n".join(map(printable, [*lines, f"  {SAID}"]))


def state_sensitivity(
    model: nn.Module, inputs: Any, state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]
) -> StateSensitivity:
    """Run a model in eval under two sets of running statistics, and compare.

    What is measured is sensitivity to the stored state: the weights are the same in both runs.

    Args:
        model: any module with norms that store statistics; it is left as it was.
        inputs: as for `normscope.check`.
        state_a, state_b: ``running_mean`` and ``running_var`` of the norms by their state-dict names, of the shapes
            that the model has; other entries of a state dict are not read. A norm of which neither has anything keeps
            its own.

    Raises:
        BadInput: a set that lacks a statistic which the other has, one of another shape or that is not finite, or sets
            without any statistic of this model.

    >>> model = nn.Sequential(nn.BatchNorm1d(1))
    >>> a = {"0.running_mean": torch.zeros(1), "0.running_var": torch.ones(1)}
    >>> b = {"0.running_mean": torch.zeros(1), "0.running_var": torch.full((1,), 4.0)}
    >>> round(state_sensitivity(model, torch.randn(8, 1), a, b).output, 3)
    0.5
    """
    arguments.module(model)
    args, kwargs, _ = arguments.on_device(model, inputs)
    call = (args or (), kwargs)
    sites = [s for s in chosen(model) if s.reading is not None and "running_mean" in s.reading.tensors]
    taken = [site for site in sites if _stated(site, state_a, state_b)]
    if not taken:
        names = ", ".join(f"{_prefix(site)}running_mean" for site in sites[:3]) or "none"
        raise BadInput(f"neither state has a statistic of this model; its norms store {names}")
    subject = copied(unwrap(model), "run")
    modules = dict(subject.named_modules())
    first, own_first = _run(subject, modules, taken, [state_a] * len(taken), call)
    second, own_second = _run(subject, modules, taken, [state_b] * len(taken), call)
    found = []
    for at, site in enumerate(taken):
        states = [state_b if k == at else state_a for k in range(len(taken))]
        alone, _ = _run(subject, modules, taken, states, call)
        own = _difference(own_first[site.path], own_second[site.path])
        found.append(SiteSensitivity(site.name, own, _difference(first, alone)))
    return StateSensitivity(_difference(first, second), tuple(found))


def _prefix(site: Chosen) -> str:
    return f"{site.path}." if site.path else ""


def _stated(site: Chosen, *states: Mapping[str, Tensor]) -> bool:
    """Whether both sets have the statistics of a norm."""
    names = [f"{_prefix(site)}{name}" for name in STATISTICS]
    if not any(name in state for state in states for name in names):
        return False
    for word, state in zip(("state_a", "state_b"), states, strict=True):
        for name, key in zip(STATISTICS, names, strict=True):
            if key not in state:
                raise BadInput(
                    f"{word} lacks {key}, which the other set or the norm has; give both sets whole"
                )
            held, wanted = getattr(site.module, name), state[key]
            if wanted.shape != held.shape:
                raise BadInput(
                    f"{word}: {key} has shape {tuple(wanted.shape)}, and the model's has {tuple(held.shape)}"
                )
            if not bool(wanted.isfinite().all()):
                raise BadInput(f"{word}: {key} is not finite")
    return True


def _run(
    model: nn.Module,
    modules: dict[str, Any],
    sites: list[Chosen],
    states: list[Mapping[str, Tensor]],
    call: tuple[tuple[Any, ...], dict[str, Any]],
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Outputs of the model and of each norm, with each norm under the state given for it."""
    with torch.no_grad():
        for site, state in zip(sites, states, strict=True):
            for name in STATISTICS:
                getattr(modules[site.path], name).copy_(state[f"{_prefix(site)}{name}"])
    seen: dict[str, list[Tensor]] = {site.path: [] for site in sites}
    watching = _Outputs(modules, seen)
    with Session(model) as session:
        output = detached(session.forward(*call, mode="eval", watch=(watching,)))
    return output, seen


class _Outputs:
    """Context manager: keeps what each of some modules returns."""

    def __init__(self, modules: dict[str, Any], seen: dict[str, list[Tensor]]) -> None:
        self._modules, self._seen = modules, seen
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for path, found in self._seen.items():

            def kept(module: Any, args: Any, output: Any, found: list[Tensor] = found) -> None:
                found.extend(t.detach().clone() for _, t in tensors(output))

            self._handles.append(self._modules[path].register_forward_hook(kept))

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()


def _difference(before: list[Tensor], after: list[Tensor]) -> float:
    """Root mean square of the difference, in units of that before; over floating point tensors together."""
    pairs = [(a.double(), b.double()) for a, b in zip(before, after, strict=True) if a.is_floating_point()]
    size = sum(float(a.square().sum()) for a, _ in pairs)
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    if size == 0.0:
        return 0.0 if apart == 0.0 else float("inf")
    return float((apart / size) ** 0.5)
