"""Where a model normalizes: its sites."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from normscope.doctor.graph_norm import GraphNorm
from normscope.doctor.session import Session, is_training
from normscope.doctor.site import STATE_NAMES, Call, Site
from normscope.doctor.tracing.calls import NormCall, NormCalls
from normscope.doctor.tracing.config import expected_eps
from normscope.doctor.tracing.fused import fused_norms
from normscope.doctor.tracing.graph import Graph
from normscope.doctor.tracing.neighbours import fed_by, feeds
from normscope.doctor.tracing.paths import ModuleNames
from normscope.doctor.tracing.stream import join
from normscope.reading import UnknownNormalization, read
from normscope.reading.base import qualified_name

if TYPE_CHECKING:
    from normscope.doctor.tracing.collapse import WrittenNorm
    from normscope.doctor.tracing.dataflow import Node
    from normscope.spec import NormSpec


UNIDENTIFIED = "hand-written; not identified"


def find_sites(
    session: Session, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None
) -> list[Site]:
    """Every place where the session's model normalizes, those that were called first, in order of their first call.

    Without ``args`` and ``kwargs``, the normalization modules, and those that hold a running mean and variance although
    it cannot be read what they do with them. With them, one forward in eval mode also finds
    functional calls, operators in scripted or traced modules and norms written by hand, and tells of each call its
    shape, dtype, memory format and neighbours. (A second forward, in train mode, runs only where running statistics
    are used outside of a known module, or where a module that is no site saves floating buffers: which mode takes them,
    and a norm whose evaluation has another form, can be seen in no other way.)

    Raises:
        Exception: what the model raises.

    Example:
        >>> from torch import nn
        >>> from normscope.doctor.session import Session
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> with Session(model) as session:
        ...     (site,) = find_sites(session, (torch.randn(2, 3, 8, 8),))
        >>> site.name, site.calls[0].shape, [n.path for n in site.calls[0].fed_by], site.calls[0].feeds[0].through
        ('1', (2, 4, 6, 6), ['0'], ('relu',))
    """
    names = ModuleNames(session.model)
    sites = _module_sites(names, session)
    if args is not None or kwargs is not None:
        _follow(session, names, sites, args or (), kwargs or {})
    else:
        sites |= _unread_sites(names, sites)
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
        except UnknownNormalization as error:
            if error.invalid:
                path = names.path(module) or ""
                sites[path] = Site(path, path, _kind(module), _type_name(module), module, reason=str(error))
            continue
        path = names.path(module) or ""
        sites[path] = Site(
            name=path,
            path=path,
            kind=_kind(module),
            type_name=found.type_name,
            module=module,
            aliases=names.aliases(module),
            spec=found.spec,
            tensors={key: torch.as_tensor(state) for key, state in found.tensors.items()},
            # model.train() may leave this module in eval mode, and eval() in train mode
            mode_train=found.mode_train if in_train.get(path, True) else found.mode_eval,
            mode_eval=found.mode_train if in_eval.get(path, False) else found.mode_eval,
            mode_now=found.mode_now,
            fused=key in fused,
        )
    return sites


def _kind(module: torch.nn.Module) -> str:
    return "node" if isinstance(module, GraphNorm) else "module"


def _unread_sites(names: ModuleNames, sites: dict[str, Site]) -> dict[str, Site]:
    """Modules with running statistics of their own that no reader knows; a forward would tell more of them."""
    found = {}
    for module in names.modules.values():
        path = names.path(module) or ""
        buffers = {name for name, _ in module.named_buffers(recurse=False)}
        if path not in sites and {"running_mean", "running_var"} <= buffers:
            found[path] = written_site(module, names)
    return found


def written_site(module: torch.nn.Module, names: ModuleNames) -> Site:
    """The site of a module that no reader knows."""
    path = names.path(module) or ""
    return Site(
        path, path, "hand-written", _type_name(module), module,
        aliases=names.aliases(module), reason=UNIDENTIFIED, tensors=_state(module),
    )  # fmt: skip


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
    found: list[tuple[Node, Site, Call]] = []
    stored: set[str] = set()

    def add(site: Site, node: Node, spec: NormSpec | None, mode: str, reason: str = "") -> None:
        x = node.inputs[0]
        call = Call(0, 0, x.shape, x.dtype, x.device, x.memory_format, spec, mode, reason=reason)
        found.append((node, sites.setdefault(site.name, site), call))

    def tell(call: NormCall) -> None:
        assert call.node is not None
        add(sites.get(call.name) or _called_site(call, names), call.node, call.spec, call.mode, call.reason)

    def tell_written(norm: WrittenNorm) -> None:
        site = _written_site(norm)
        norm.node.site = site.name
        if norm.stored:
            stored.add(site.name)
        add(site, norm.node, None, "running" if norm.stored else "input")

    modules = {id(site.module) for site in sites.values()}
    graph = Graph(names.held.values(), (args, kwargs), tell_written)
    session.forward(args, kwargs, mode="eval", watch=(NormCalls(names, modules, tell, graph=graph),))
    for order, (node, site, call) in enumerate(sorted(found, key=lambda item: item[0].number)):
        call.order, call.index = order, len(site.calls)
        call.fed_by, call.feeds = fed_by(node.inputs[0]), feeds(node.outputs[0])
        call.join = join(node)
        if isinstance(site.module, GraphNorm):  # its graph was not run by torch
            call.fed_by, call.feeds, call.join = site.module.fed_by, site.module.feeds, site.module.join
        if not site.calls and call.spec is not None:
            site.spec = call.spec
        site.calls.append(call)
    switching = [
        site
        for site in sites.values()
        if site.kind not in ("module", "node") and (site.has_running_state or site.name in stored)
    ]
    keeping = _keep_state(names, sites)
    if switching or keeping:
        in_train = _in_train(session, names, modules, args, kwargs)
        for site in switching:
            _set_modes(site, in_train.modes.get(site.name, site.mode_train), names)
        for norm in in_train.written:
            if norm.own_module and not norm.stored and norm.frame.path in keeping:
                _add_of_training(norm, sites, names)


def _set_modes(site: Site, mode_train: str, names: ModuleNames) -> None:
    site.mode_train = mode_train
    if mode_train == site.mode_eval == "running":  # in train as in eval
        site.mode_train = site.mode_eval = "frozen"
    holder = next(names.ancestors(site.path))
    site.mode_now = site.mode_train if is_training(holder) else site.mode_eval


def _called_site(call: NormCall, names: ModuleNames) -> Site:
    return Site(
        name=call.name,
        path=call.path,
        kind=call.kind,
        type_name=call.type_name,
        spec=call.spec,
        reason=call.reason,
        # a weight computed for this call is not the model's state, and would be kept alive
        tensors={name: tensor for name, tensor in call.tensors.items() if id(tensor) in names.held},
        mode_train=call.mode,
        mode_eval=call.mode,
        mode_now=call.mode,
    )


def _written_site(norm: WrittenNorm) -> Site:
    module = norm.frame.module
    if not norm.own_module:
        kind, name, type_name = "inlined", norm.frame.place("hand-written"), "hand-written"
    else:
        kind, name = "hand-written", norm.frame.path
        type_name = _type_name(module)
    return Site(
        name=name,
        path=norm.frame.path,
        kind=kind,
        type_name=type_name,
        module=module if norm.own_module else None,
        reason=UNIDENTIFIED,
        mode_train="running" if norm.stored else "input",
        mode_eval="running" if norm.stored else "input",
        mode_now="running" if norm.stored else "input",
        tensors=_state(module) if norm.own_module else {},
    )


def _type_name(module: torch.nn.Module) -> str:
    return str(getattr(module, "original_name", qualified_name(type(module))))


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {key: getattr(module, key, None) for key in STATE_NAMES}
    return {key: tensor for key, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _keep_state(names: ModuleNames, sites: dict[str, Site]) -> set[str]:
    """Paths of modules that are no site and save floating buffers: in evaluation they may do by these what looks like
    no norm. (Tables, such as those of rotary positions, are not saved.)"""
    return {
        path
        for module in names.modules.values()
        if (path := names.path(module)) is not None
        and path not in sites
        and any(
            buffer.is_floating_point() and name not in module._non_persistent_buffers_set
            for name, buffer in module.named_buffers(recurse=False)
        )
    }


def _add_of_training(norm: WrittenNorm, sites: dict[str, Site], names: ModuleNames) -> None:
    """A norm that shows in training alone, where its evaluation is of another form."""
    site = _written_site(norm)
    if site.name in sites:
        return
    site.mode_train, site.mode_eval = "batch", "running"
    assert site.module is not None
    site.mode_now = site.mode_train if is_training(site.module) else site.mode_eval
    site.aliases = names.aliases(site.module)
    x = norm.node.inputs[0]
    call = Call(len(sites), 0, x.shape, x.dtype, x.device, x.memory_format, None, site.mode_eval)
    call.fed_by, call.feeds, call.join = fed_by(x), feeds(norm.node.outputs[0]), join(norm.node)
    site.calls.append(call)
    sites[site.name] = site


class _InTrain(NamedTuple):
    modes: dict[str, str]
    """site -> mode, of what is not a module"""
    written: list[WrittenNorm]


def _in_train(
    session: Session, names: ModuleNames, modules: set[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _InTrain:
    """What a forward in train mode shows; nothing where the model cannot run so on these inputs."""
    modes: dict[str, str] = {}
    written: list[WrittenNorm] = []

    def tell_written(norm: WrittenNorm) -> None:
        modes[_written_site(norm).name] = "running" if norm.stored else "batch"
        written.append(norm)

    graph = Graph(names.held.values(), (args, kwargs), tell_written)
    calls = NormCalls(names, modules, lambda call: modes.update({call.name: call.mode}), graph=graph)
    with contextlib.suppress(Exception):
        session.forward(args, kwargs, mode="train", watch=(calls,))
    return _InTrain(modes, written)
