"""The three ways over the data: each returns what every norm is to store, and the order of first calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.distributed import Moments, Ranks
from normscope.doctor.refusals import unwrap
from normscope.doctor.session import Session
from normscope.errors import BadInput
from normscope.reading import read
from normscope.transforms.chosen import Chosen
from normscope.transforms.collect import Collector, empty, statistics
from normscope.transforms.forwards import ONE_VALUE, forward
from normscope.transforms.loader import Loader


@dataclass(frozen=True, eq=False)
class Estimate:
    """What one norm is to store, float64."""

    mean: Tensor
    var: Tensor
    counter: int
    """calls that moved it, of which an instance norm keeps no count"""
    elements: int
    """of the channel that has the fewest"""
    counts: bool = True

    def write(self, module: Any) -> None:
        """Into the buffers that are there."""
        held = read(module).tensors
        new = {"running_mean": self.mean, "running_var": self.var}
        if self.counts and "num_batches_tracked" in held:
            new["num_batches_tracked"] = torch.tensor(self.counter)
        for name, value in new.items():
            # a tensor made in inference mode can only be written there
            with torch.inference_mode(held[name].is_inference()), torch.no_grad():
                held[name].copy_(value)


@dataclass(frozen=True, eq=False)
class Result:
    """Estimates by path, and why some norms have none."""

    estimates: dict[str, Estimate]
    order: list[str]
    """of first calls"""
    refused: dict[str, str]
    """path -> why the mask has no place in its input"""


Estimates = dict[str, Estimate]


def exact(model: nn.Module, sites: Sequence[Chosen], loader: Loader, ranks: Ranks) -> Result:
    """One pass by the batch; all that came into a norm, merged."""
    found = _Totals()
    _pass(model, sites, loader, ranks, "batch", found)
    kept = [site for site in sites if site.path not in found.refused]
    return Result(_estimates(kept, found, ranks), _order(found, ranks), found.refused)


def layerwise(model: nn.Module, sites: Sequence[Chosen], loader: Loader, ranks: Ranks) -> Result:
    """One pass in eval a norm, in the order of the forward; each is written into ``model`` before the next."""
    first = _Totals()
    _pass(model, sites, loader, ranks, "eval", first)
    order = _order(first, ranks)
    by_path = {site.path: site for site in sites}
    modules = dict(unwrap(model).named_modules())
    estimates: Estimates = {}
    refused = dict(first.refused)
    for path in order:
        if path in refused:
            continue
        one, found = [by_path[path]], first
        if estimates:
            found = _Totals()
            _pass(model, one, loader, ranks, "eval", found)
            refused |= found.refused
            if path in refused:
                continue
        estimates |= _estimates(one, found, ranks)
        estimates[path].write(modules[path])
    return Result(estimates, order, refused)


def ema(model: nn.Module, sites: Sequence[Chosen], loader: Loader, ranks: Ranks) -> Result:
    """One pass by the batch; each call moves the stored statistics by the norm's momentum."""
    by_path = {site.path: site for site in sites}
    found = _Averages(by_path)
    _pass(model, sites, loader, ranks, "batch", found)
    kept = {path: one for path, one in found.of.items() if path not in found.refused}
    return Result(kept, list(kept), found.refused)


METHODS: dict[str, Callable[[nn.Module, Sequence[Chosen], Loader, Ranks], Result]] = {
    "exact": exact,
    "ema": ema,
    "layerwise": layerwise,
}


MORE = 'Use method="layerwise", which runs norms in eval, or batches of at least two samples (drop_last=True)'


class _Totals:
    """Moments of all calls of each norm so far; in the order of first calls."""

    def __init__(self) -> None:
        self.of: dict[str, Moments] = {}
        self.calls: Counter[str] = Counter()
        self.refused: dict[str, str] = {}

    def take(self, path: str, moments: Moments) -> None:
        held = self.of.get(path)
        self.of[path] = moments if held is None else held.merge(moments)
        self.calls[path] += 1


class _Averages:
    """Exponential averages so far."""

    def __init__(self, sites: Mapping[str, Chosen]) -> None:
        self.of: dict[str, Estimate] = {}
        self.refused: dict[str, str] = {}
        self._sites = sites

    def take(self, path: str, moments: Moments) -> None:
        site = self._sites[path]
        old = self.of.get(path) or _stored(site)
        mean, var = statistics(moments, site)
        rate = _momentum(site, old.counter + 1)
        new_mean = (1 - rate) * old.mean + rate * mean
        new_var = _averaged_variance(site, old.var, var, rate)
        if isinstance(moments.count, Tensor):  # what no valid element came into stays
            there = (moments.count > 0).reshape(-1, *mean.shape)[0]
            new_mean, new_var = (
                torch.where(there, a, b) for a, b in ((new_mean, old.mean), (new_var, old.var))
            )
        self.of[path] = Estimate(new_mean, new_var, old.counter + 1, moments.least, _counts(site))


def _pass(
    model: nn.Module,
    sites: Sequence[Chosen],
    loader: Loader,
    ranks: Ranks,
    mode: str,
    found: _Totals | _Averages,
) -> None:
    """One pass on every rank; all stop where it fails on one, and all leave what one has refused."""
    failure: BaseException | None = None
    try:
        with Session(model) as session:
            for args, kwargs, valid in loader.masked_calls():
                watch = Collector(
                    session.model, sites, found.take, valid, refused=found.refused, by_batch=mode == "batch"
                )
                forward(session, args, kwargs, loader.batches, mode=mode, watch=(watch,))
    except ValueError as error:
        alone = str(error).startswith(ONE_VALUE)
        failure = (
            BadInput(f"batch {loader.batches} cannot be normalized by itself: {error}. {MORE}")
            if alone
            else error
        )
    except Exception as error:
        failure = error
    ranks.agree(failure)
    if not sum(ranks.gathered(loader.samples)):
        raise BadInput("data held no batch; statistics of nothing would be NaN")
    valid, masked = (
        sum(counts) for counts in zip(*ranks.gathered((loader.valid, loader.masked)), strict=True)
    )
    if masked and not valid:
        raise BadInput("mask is False everywhere: no element would count; is it inverted?")
    for refused in ranks.gathered(dict(found.refused)):
        found.refused = refused | found.refused


def _order(found: _Totals, ranks: Ranks) -> list[str]:
    """First calls on the first rank that has data, then what only others have called."""
    orders = ranks.gathered(list(found.of))
    return list(dict.fromkeys(path for order in orders for path in order))


def _estimates(sites: Sequence[Chosen], found: _Totals, ranks: Ranks) -> Estimates:
    calls: Counter[str] = sum(ranks.gathered(found.calls), Counter())
    own = [found.of.get(site.path) or empty(site) for site in sites]
    return {
        site.path: Estimate(*statistics(moments, site), calls[site.path], moments.least, _counts(site))
        for site, moments in zip(sites, ranks.merged(own), strict=True)
        if not moments.empty
    }


def _averaged_variance(site: Chosen, old: Tensor, new: Tensor, rate: float) -> Tensor:
    assert site.reading is not None
    spec = site.reading.spec
    if spec.running is None or spec.running.averages == "variance":
        return (1 - rate) * old + rate * new
    eps = spec.eps or 0.0  # sqrt(v + eps) is what moves
    moved = (1 - rate) * (old + eps).sqrt() + rate * (new + eps).sqrt()
    return (moved.square() - eps).clamp(min=0)


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
