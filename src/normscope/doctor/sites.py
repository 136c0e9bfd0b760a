"""Where a model normalizes: its sites, and watching them in later runs."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from normscope.doctor.site import Call, Event, Site
from normscope.doctor.tracing.calls import NormCall, NormCalls
from normscope.doctor.tracing.config import expected_eps
from normscope.doctor.tracing.fused import fused_norms
from normscope.doctor.tracing.paths import ModuleNames
from normscope.reading import UnknownNormalization, read

if TYPE_CHECKING:
    from normscope.doctor.session import Session


def find_sites(
    session: Session, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None
) -> list[Site]:
    """Every place where the session's model normalizes, those that were called first, in order of their first call.

    Without ``args`` and ``kwargs``, the normalization modules. With them, one forward in eval mode also finds
    functional calls, operators in scripted or traced modules and norms written by hand, and tells of each call its
    shape, dtype, memory format and neighbours. (A second forward, in train mode, runs only where a functional call
    has running statistics: its mode is an argument and can be seen in no other way.)

    Raises what the model raises.
    """
    names = ModuleNames(session.model)
    sites = _module_sites(names, session)
    if args is not None or kwargs is not None:
        _follow(session, names, sites, args or (), kwargs or {})
    for site in sites.values():
        site._names = names
        site.expected_eps = expected_eps(site, names)
    return sorted(sites.values(), key=lambda site: site.calls[0].order if site.calls else math.inf)


def _module_sites(names: ModuleNames, session: Session) -> dict[str, Site]:
    fused = fused_norms(names.model)
    in_train, in_eval = _flags(session, "train"), _flags(session, "eval")
    sites: dict[str, Site] = {}
    for key, module in names.modules.items():
        try:
            found = read(module)
        except UnknownNormalization:
            continue
        path = names.path(module) or ""
        sites[path] = Site(
            name=path,
            path=path,
            kind="module",
            type_name=found.type_name,
            module=module,
            aliases=names.aliases(module),
            spec=found.spec,
            tensors=found.tensors,
            # model.train() may leave this module in eval mode, and eval() in train mode
            mode_train=found.mode_train if in_train.get(path, True) else found.mode_eval,
            mode_eval=found.mode_train if in_eval.get(path, False) else found.mode_eval,
            mode_now=found.mode_now,
            fused=key in fused,
        )
    return sites


def _flags(session: Session, call: str) -> dict[str, bool]:
    try:
        return session.modes_after(call)
    except Exception:  # the model's own train() or eval(); that of an exported program raises
        return {}


def _follow(
    session: Session,
    names: ModuleNames,
    sites: dict[str, Site],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """One forward in eval mode: fills the calls of ``sites`` and adds those that are not modules."""
    held = {id(tensor) for tensor in (*names.model.parameters(), *names.model.buffers())}
    order = itertools.count()

    def tell(call: NormCall) -> None:
        site = sites.get(call.name)
        if site is None:
            site = sites[call.name] = _called_site(call, held)
        if not site.calls and call.spec is not None:
            site.spec = call.spec
        site.calls.append(_call(call, len(site.calls), next(order)))

    modules = {id(site.module) for site in sites.values()}
    calls = NormCalls(names, modules, tell)
    session.forward(args, kwargs, mode="eval", watch=(calls,))
    switching = [site for site in sites.values() if site.kind != "module" and site.has_running_state]
    if switching:
        in_train = _modes_in_train(session, names, modules, args, kwargs)
        for site in switching:
            site.mode_train = in_train.get(site.name, site.mode_train)
            training = any(module.training for module in itertools.islice(names.ancestors(site.path), 1))
            site.mode_now = site.mode_train if training else site.mode_eval


def _called_site(call: NormCall, held: set[int]) -> Site:
    return Site(
        name=call.name,
        path=call.frame.path,
        kind=call.kind,
        type_name=call.type_name,
        spec=call.spec,
        reason=call.reason,
        # a weight computed for this call is not the model's state, and would be kept alive
        tensors={name: tensor for name, tensor in call.tensors.items() if id(tensor) in held},
        mode_train=call.mode,
        mode_eval=call.mode,
        mode_now=call.mode,
    )


def _call(call: NormCall, index: int, order: int) -> Call:
    given = call.input
    return Call(
        index=index,
        order=order,
        shape=tuple(given.shape),
        dtype=str(given.dtype).removeprefix("torch."),
        device=str(given.device),
        memory_format=memory_format(given),
        spec=call.spec,
        mode=call.mode,
    )


def memory_format(tensor: torch.Tensor) -> str:
    """contiguous | channels_last | channels_last_3d | other."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "other"
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "channels_last_3d"
    return "other"


def _modes_in_train(
    session: Session, names: ModuleNames, modules: set[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, str]:
    """Modes of functional calls in a forward in train mode; none where the model cannot run so on these inputs."""
    modes: dict[str, str] = {}
    calls = NormCalls(names, modules, lambda call: modes.update({call.name: call.mode}))
    with contextlib.suppress(Exception):
        session.forward(args, kwargs, mode="train", watch=(calls,))
    return modes


@contextmanager
def watch(sites: Sequence[Site], run: str, callback: Callable[[Event], None]) -> Iterator[None]:
    """Context manager around a later forward: ``callback(Event)`` at each call of each site with a known spec.

    The event's tensors are the user's own (detached unless gradients are on); running statistics are as they were
    before the call. Autocast is off in the callback, and what it computes is not followed. What the callback raises
    comes out of the model's forward.
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
        with torch.autocast(call.input.device.type, enabled=False):
            callback(event)

    kinds = {site.kind for site in known.values()}
    # a module whose spec is unknown is still a normalization: what it calls inside is no site of its own
    modules = {id(site.module) for site in sites if site.kind == "module"}
    with NormCalls(
        names, modules, tell, functions=kinds != {"module"}, hidden="hidden" in kinds, keep_running=True
    ):
        yield
