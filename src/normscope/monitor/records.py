"""From watches and looks to the record that rules read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normscope.doctor.training_record import RankGap, SiteTraining, TrainingRecord
from normscope.monitor.watch import Watch
from normscope.reading import UnknownNormalization, read

if TYPE_CHECKING:
    from normscope.doctor.probes.effective_samples import EffectiveSamples
    from normscope.doctor.site import Site
    from normscope.doctor.tracing.paths import ModuleNames
    from normscope.monitor.site_look import SiteLook


def watches(
    sites: Iterable[Site],
    names: ModuleNames,
    held: Callable[[Site], Callable[[], Mapping[str, torch.Tensor]]] | None = None,
) -> tuple[dict[str, Watch], list[str]]:
    """A watch for each module that keeps statistics, and the names of those that take no hooks.

    ``held``: what a site stores, under the usual names, where only identification tells.
    """
    found, unseen = {}, []
    for site in sites:
        module = site.module or names.modules.get(id(_at(names, site.path)))
        if not site.has_running_state or module is None:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            unseen.append(site.name)
            continue
        found[site.name] = Watch(
            site.name, module, _updates(module), _witness(site, names), held and held(site)
        )
    return found, unseen


def counters(watched: Mapping[str, Watch]) -> dict[str, int]:
    """Each module's own count of its updates; 0 where it keeps none."""
    held = {name: getattr(watch.module, "num_batches_tracked", None) for name, watch in watched.items()}
    return {name: int(tensor) if isinstance(tensor, torch.Tensor) else 0 for name, tensor in held.items()}


def record(
    sites: Iterable[Site],
    watched: Mapping[str, Watch],
    looks: Mapping[str, SiteLook],
    effective: Mapping[str, EffectiveSamples],
    gaps: Mapping[str, tuple[RankGap, ...]],
    **run: Any,
) -> TrainingRecord:
    """All that was seen so far."""
    found = {}
    for site in sites:
        watch, look, values = watched.get(site.name), looks.get(site.name), effective.get(site.name)
        fields: dict[str, Any] = {} if watch is None else _counts(watch)
        if look is not None:
            fields |= {"samples": look.samples, "elements": look.elements}
            fields["repeated"] = look.repeated if watch is not None else None
            fields["added"] = look.added
        if values is not None and not values.reason:
            fields["effective"] = values.effective
        if isinstance(site.module, nn.Module):
            fields["synchronized"] = _synchronized(site.module)
        found[site.name] = SiteTraining(**fields, ranks=gaps.get(site.name, ()))
    return TrainingRecord(sites=found, **run)


def _counts(watch: Watch) -> dict[str, Any]:
    return {
        "steps": watch.whole,
        "per_step": watch.typical("updates"),
        "in_backward": watch.typical("in_backward"),
        "forwards": watch.typical("forwards"),
        "inside": watch.typical("inside"),
        "counted_only": watch.counted_only,
        "accumulated": watch.accumulated,
        "with_grad": watch.total_with_grad,
        "without_grad": watch.without_grad,
        "stretches": watch.stretches,
        "in_eval": watch.in_eval,
        "recalibrated": watch.recalibrated,
        "follows": watch.follows,
        "shift": watch.shift,
        "log_var": watch.log_var,
    }


def _updates(module: nn.Module) -> tuple[str, ...]:
    """In which mode a forward moves the statistics. Of a module that cannot be read nothing is known: values tell."""
    try:
        return read(module).updates
    except UnknownNormalization:
        return "train", "eval"


def _synchronized(module: nn.Module) -> bool:
    try:
        return read(module).synchronized
    except UnknownNormalization:
        return False


def _witness(site: Site, names: ModuleNames) -> list[torch.Tensor]:
    """The site's own parameters, else two of the smallest module around it that has any. Biases begin at 0, where a
    slow average shows in float32 long before it does at a gain of 1."""
    for module in names.ancestors(site.path):
        found: list[torch.Tensor] = list(islice(module.parameters(), 2))
        if found:
            return found
    return []


def _at(names: ModuleNames, path: str) -> nn.Module | None:
    return next(names.ancestors(path), None)
