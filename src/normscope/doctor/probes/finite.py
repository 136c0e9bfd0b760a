"""Where numbers stop being finite: in parameters, at sites, in the model's output.

A sum is finite only where no term is NaN or infinite, so one sum a tensor asks; elements are counted only where it
is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normscope.doctor.nested import named_inputs
from normscope.doctor.probes import Probe

if TYPE_CHECKING:
    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

FLOAT8_BYTES = 1


@dataclass(frozen=True)
class Bad:
    """Elements of one tensor that are no finite numbers."""

    nan: int
    infinite: int
    """-inf is not counted in a model's output: masked scores are made of it"""
    size: int


@dataclass(frozen=True)
class Place:
    """One call of one site that met or made such elements."""

    order: int
    """position among all site calls of the run"""
    call: int
    """how many-th call of this site"""
    mode: str
    """batch | running | frozen | input in this run"""
    received: Bad | None
    """in its input; None where that was finite, so that the site made them itself"""
    made: Bad
    """in its output"""


@dataclass(frozen=True)
class Finite:
    """What one run met: site name -> its first :class:`Place`, and the model's output."""

    places: dict[str, Place]
    output: Bad | None


class FiniteProbe(Probe):
    """``measured["finite"]``: run name -> :class:`Finite`, for the runs that did not raise."""

    name = "finite"
    runs = ("eval", "batch")

    def start(self, subject: Subject) -> str | None:
        self._mask = subject.mask
        self._places: dict[str, dict[str, Place]] = {"eval": {}, "batch": {}}
        self._calls = {"eval": 0, "batch": 0}
        for where, tensor in named_inputs(subject.args or (), subject.kwargs):
            if bad(tensor) is not None and not _additive_mask(tensor):
                return f"{where} holds infinities: pass finite inputs"
        return None

    def observe(self, event: Event) -> None:
        places, order = self._places[event.run], self._calls[event.run]
        self._calls[event.run] += 1
        if event.site.name in places:
            return
        made = bad(event.output, self._mask)
        if made is None:  # no norm takes NaN or infinity and gives finite numbers: the input need not be read
            return
        received = bad(event.input, self._mask)
        places[event.site.name] = Place(order, event.index, event.mode, received, made)

    def finish(self, subject: Subject) -> dict[str, Finite]:
        return {
            run: Finite(places, self._at_output(subject.outputs.get(run, [])))
            for run, places in self._places.items()
            if not subject.runs[run]
        }

    def _at_output(self, tensors: list[torch.Tensor]) -> Bad | None:
        found = (bad(tensor, self._mask, spared=-torch.inf) for tensor in tensors)
        return next((b for b in found if b is not None), None)


class FiniteParameters(Probe):
    """``measured["finite_parameters"]``: parameter name -> :class:`Bad`, in the model's order. Needs no data."""

    name = "finite_parameters"

    def finish(self, subject: Subject) -> dict[str, Bad]:
        found = ((name, bad(parameter)) for name, parameter in subject.model.named_parameters())
        return {name: b for name, b in found if b is not None}


def bad(t: torch.Tensor, mask: torch.Tensor | None = None, spared: float | None = None) -> Bad | None:
    """The elements that are NaN or infinite, at valid positions; None where there are none.

    >>> bad(torch.tensor([1.0, torch.nan, torch.inf]))
    Bad(nan=1, infinite=1, size=3)
    >>> bad(torch.tensor([1.0, -torch.inf]), spared=-torch.inf), bad(torch.tensor([3e38, 3e38]))
    (None, None)
    """
    if not (t.is_floating_point() or t.is_complex()) or t.layout != torch.strided or not t.numel():
        return None
    t = t.detach()
    if t.element_size() == FLOAT8_BYTES:  # has no arithmetic of its own
        t = t.float()
    if bool(torch.isfinite(t.sum(dtype=torch.promote_types(t.dtype, torch.float32)))):
        return None
    t = _valid(t, mask)
    nan = int(torch.isnan(t).sum())
    infinite = int(torch.isinf(t).sum()) - (0 if spared is None else int((t == spared).sum()))
    return Bad(nan, infinite, t.numel()) if nan or infinite else None


def _valid(t: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The elements at valid positions, where the tensor shows samples and positions at its ends."""
    if mask is None or t.ndim < 2 or t.shape[0] != mask.shape[0]:
        return t
    mask = mask.to(t.device)
    if t.shape[1] == mask.shape[1]:
        return t[mask]
    return t.movedim(-1, 1)[mask] if t.shape[-1] == mask.shape[1] else t


def _additive_mask(t: torch.Tensor) -> bool:
    """0 and -inf alone: what attention adds to its scores."""
    return bool(((t == 0) | (t == -torch.inf)).all())
