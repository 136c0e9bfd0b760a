"""Watching the sites of a model in later runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from normscope.doctor.site import Event, Site
from normscope.doctor.tracing.calls import NormCall, NormCalls


@contextmanager
def _unwatched(device: str) -> Iterator[None]:
    """What is computed inside is the doctor's own: the modes that follow the model, which cost half of it, are off."""
    autocast = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), autocast:
        yield


def _identified(site: Site) -> bool:
    """A hand-written norm with a module of its own that is known by now: its calls are those of that module."""
    return site.kind == "hand-written" and site.spec is not None


@contextmanager
def watch(sites: Sequence[Site], run: str, callback: Callable[[Event], None]) -> Iterator[None]:
    """Context manager around a later forward: ``callback(Event)`` at each call of each site with a known spec.

    The event's tensors are the user's own (detached unless gradients are on); running statistics are as they were
    before the call. Autocast is off in the callback, and what it computes is not followed.

    Raises:
        Exception: what the callback raises, out of the model's forward.

    Example:
        >>> from torch import nn
        >>> from normscope.doctor.session import Session
        >>> from normscope.doctor.sites import find_sites
        >>> with Session(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))) as session:
        ...     sites = find_sites(session, (torch.randn(2, 3),))
        ...     watching = watch(sites, "eval", lambda event: print(event.site.name, tuple(event.input.shape)))
        ...     _ = session.forward((torch.randn(5, 3),), mode="eval", watch=(watching,))
        1 (5, 4)
    """
    known = {site.name: site for site in sites if site.spec is not None}
    names = next((site._names for site in known.values() if site._names is not None), None)
    if names is None:
        yield
        return
    counts: Counter[str] = Counter()

    def tell(call: NormCall) -> None:
        site = known.get(call.name)
        if site is None or call.spec is None:
            return
        grad = torch.is_grad_enabled()
        event = Event(
            run=run,
            site=site,
            index=counts[call.name],
            spec=call.spec,
            mode=call.mode,
            input=call.input if grad else call.input.detach(),
            output=call.output if grad else call.output.detach(),
            tensors=call.tensors,
        )
        counts[call.name] += 1
        with _unwatched(call.input.device.type):
            callback(event)

    hidden = any(site.kind == "hidden" for site in known.values())
    # a module whose spec is unknown is still a normalization: what it calls inside is no site of its own
    modules = {id(site.module) for site in sites if site.kind in ("module", "node") or _identified(site)}
    with NormCalls(names, modules, tell, hidden=hidden, keep_running=True):
        yield
