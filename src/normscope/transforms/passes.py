"""The three ways over the data: each returns what every norm is to store, and the order of first calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normscope.distributed import Moments, Ranks
from normscope.doctor.refusals import unwrap
from normscope.doctor.session import Session
from normscope.errors import BadInput
from normscope.transforms.chosen import Chosen
from normscope.transforms.collect import Collector, empty, statistics
from normscope.transforms.loader import Loader


@dataclass(frozen=True, eq=False)
class Estimate:
    """What one norm is to store, float64."""

    mean: Tensor
    var: Tensor
    counter: int
    """batches, of which an instance norm keeps no count"""
    elements: int
    counts: bool = True

    def write(self, module: Any) -> None:
        """Into the buffers that are there."""
        module.running_mean.copy_(self.mean)
        module.running_var.copy_(self.var)
        if self.counts and getattr(module, "num_batches_tracked", None) is not None:
            module.num_batches_tracked.fill_(self.counter)


Estimates = dict[str, Estimate]
Result = tuple[Estimates, list[str]]


def exact(model: nn.Module, sites: Sequence[Chosen], loader: Loader, ranks: Ranks) -> Result:
    """One pass by the batch; all that came into a norm, merged."""
    found = _Totals(sites)
    _together(ranks, loader, partial(_run, model, sites, loader, "batch", found.take))
    return _estimates(sites, found, loader, ranks), _order(found, ranks)


def layerwise(model: nn.Module, sites: Sequence[Chosen], loader: Loader, ranks: Ranks) -> Result:
    """One pass in eval a norm, in the order of the forward; each is written into ``model`` before the next."""
    first = _Totals(sites)
    _together(ranks, loader, partial(_run, model, sites, loader, "eval", first.take))
    order = _order(first, ranks)
    by_path = {site.path: site for site in sites}
    modules = dict(unwrap(model).named_modules())
    estimates: Estimates = {}
    for path in order:
        one = [by_path[path]]
        found = first if path == order[0] else _Totals(one)
        if found is not first:
            _together(ranks, loader, partial(_run, model, one, loader, "eval", found.take))
        estimates |= _estimates(one, found, loader, ranks)
        with torch.no_grad():
            estimates[path].write(modules[path])
    return estimates, order


def ema(model: nn.Module, sites: Sequence[Chosen], loader: Loader, ranks: Ranks) -> Result:
    """One pass by the batch; each call moves the stored statistics by the norm's momentum."""
    by_path = {site.path: site for site in sites}
    estimates: Estimates = {}

    def take(path: str, moments: Moments) -> None:
        site = by_path[path]
        old = estimates.get(path) or _stored(site)
        mean, var = _statistics(site, moments)
        rate = _momentum(site, old.counter + 1)
        estimates[path] = Estimate(
            (1 - rate) * old.mean + rate * mean,
            (1 - rate) * old.var + rate * var,
            old.counter + 1,
            moments.count,
            _counts(site),
        )

    _together(ranks, loader, partial(_run, model, sites, loader, "batch", take))
    return estimates, list(estimates)


METHODS: dict[str, Callable[[nn.Module, Sequence[Chosen], Loader, Ranks], Result]] = {
    "exact": exact,
    "ema": ema,
    "layerwise": layerwise,
}


class _Totals:
    """Moments of all calls of each norm so far; in the order of first calls."""

    def __init__(self, sites: Sequence[Chosen]) -> None:
        self.of: dict[str, Moments] = {}
        self._wanted = {site.path for site in sites}

    def take(self, path: str, moments: Moments) -> None:
        held = self.of.get(path)
        self.of[path] = moments if held is None else held.merge(moments)


def _run(
    model: nn.Module,
    sites: Sequence[Chosen],
    loader: Loader,
    mode: str,
    take: Callable[[str, Moments], None],
) -> None:
    with Session(model) as session:
        for args, kwargs in loader.calls():
            session.forward(args, kwargs, mode=mode, watch=(Collector(session.model, sites, take),))


def _together(ranks: Ranks, loader: Loader, work: Callable[[], None]) -> None:
    """Do it on every rank, and stop on all where it fails on one."""
    failure: BaseException | None = None
    try:
        work()
    except Exception as error:
        failure = error
    ranks.agree(failure)
    if not sum(ranks.gathered(loader.samples)):
        raise BadInput("data held no batch; statistics of nothing would be NaN")


def _order(found: _Totals, ranks: Ranks) -> list[str]:
    """First calls on the first rank that has data, then what only others have called."""
    orders = ranks.gathered(list(found.of))
    return list(dict.fromkeys(path for order in orders for path in order))


def _estimates(sites: Sequence[Chosen], found: _Totals, loader: Loader, ranks: Ranks) -> Estimates:
    batches = sum(ranks.gathered(loader.batches))
    own = [found.of.get(site.path) or _nothing(site) for site in sites]
    estimates = {}
    for site, moments in zip(sites, ranks.merged(own), strict=True):
        if moments.count:
            estimates[site.path] = Estimate(
                *_statistics(site, moments), batches, moments.count, _counts(site)
            )
    return estimates


def _nothing(site: Chosen) -> Moments:
    assert site.reading is not None
    return empty(site.reading)


def _statistics(site: Chosen, moments: Moments) -> tuple[Tensor, Tensor]:
    assert site.reading is not None
    return statistics(moments, site.reading)


def _stored(site: Chosen) -> Estimate:
    assert site.reading is not None
    held = site.reading.tensors
    counter = int(held["num_batches_tracked"]) if "num_batches_tracked" in held else 0
    return Estimate(
        held["running_mean"].detach().double().cpu(), held["running_var"].detach().double().cpu(), counter, 0
    )


def _counts(site: Chosen) -> bool:
    return not isinstance(site.module, nn.modules.instancenorm._InstanceNorm)


def _momentum(site: Chosen, batch: int) -> float:
    """Of the batch with this number; the plain average where a norm has no momentum."""
    assert site.reading is not None
    running = site.reading.spec.running
    if running is None or running.momentum is None:
        return 1.0 / batch
    return float(running.momentum)
