"""Statistic sets on the user's data: spread, denominators, shrinkage by eps, constant sets, conditioning.

A set that is normalized by its own statistics is measured where that happens: sites without running statistics in
the eval run, live batch norms in the batch run. Where stored statistics normalize, their own numbers are described.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.doctor.probes import Probe
from normscope.doctor.sets import Sets, denominators, sets_of, working_eps

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

CALLS = 16
"""calls of one site that are looked at; a site in a loop over time steps may have thousands"""


@dataclass(frozen=True)
class SetStatistics:
    """The sets of one call of one site. Shares are of the sets at valid positions with finite statistics.

    ``shrinkage`` is the root over the denominator, ``sqrt(v / (v + eps))`` for eps inside the root: the standard
    deviation of the normalized values, 1 where eps does not matter.
    """

    run: str
    mode: str
    """batch | input | running | frozen"""
    shape: tuple[int, ...]
    set_size: int
    """elements per set; 0 where stored statistics normalize"""
    sets: int
    live: int
    """sets with any spread (any size, without centering)"""
    variance: tuple[float, float, float]
    """what stands under the root without eps, over live sets: 5 %, 50 %, 95 % quantile; NaN without a live set"""
    shrinkage: tuple[float, float, float]
    """5 %, 50 %, 95 % quantile over live sets"""
    eps_tenth: float
    """share of live sets where eps is more than a tenth of the variance"""
    eps_all: float
    """share of live sets where eps is more than the variance"""
    smallest: str
    """the live set with the smallest variance"""
    constant: float
    """share of sets without any spread (all zero, without centering)"""
    constant_set: str
    """the constant set of largest magnitude; "" where there is none"""
    constant_value: float
    constant_gain: float
    """largest |gain| over a constant set's elements"""
    kappa: tuple[float, float]
    """|mean| / standard deviation over live sets: median and largest; 0 where no mean is subtracted"""
    kappa_set: str
    """the set with the largest kappa"""
    calls: int = 1
    """calls whose sets are counted"""

    def over_calls(self, calls: Sequence[SetStatistics]) -> SetStatistics:
        """This call's numbers with the counts and shares of the sets of all calls: one call in a loop is not the loop.

        Stored statistics normalize every call alike: their sets are counted once.
        """
        same = [call for call in calls if call.mode == self.mode and call.set_size]
        if not self.set_size or len(same) < 2:
            return self
        sets, live = sum(call.sets for call in same), sum(call.live for call in same)

        def share(name: str) -> float:
            return float(sum(getattr(call, name) * call.live for call in same) / max(live, 1))

        constant = sum(call.constant * call.sets for call in same) / sets
        return replace(
            self,
            sets=sets,
            live=live,
            constant=constant,
            eps_tenth=share("eps_tenth"),
            eps_all=share("eps_all"),
            calls=len(same),
        )


class Statistics(Probe):
    """site name -> one ``SetStatistics`` for each call looked at."""

    name = "statistics"
    runs = ("eval", "batch")

    def start(self, subject: Subject) -> str | None:
        self.mask: torch.Tensor | None = subject.mask
        self.found: dict[str, list[SetStatistics]] = {}
        self.run_of: dict[tuple[str, str], str] = {}
        return None

    def observe(self, event: Event) -> None:
        # A mode is measured in the first run that shows it: the batch run brings news of batch statistics only.
        first = self.run_of.setdefault((event.site.name, event.mode), event.run)
        if event.index >= CALLS or first != event.run:
            return
        stored = event.mode in ("running", "frozen")
        measured = _stored(event) if stored else _of_sets(event, self.mask)
        if measured is not None:
            self.found.setdefault(event.site.name, []).append(measured)

    def finish(self, subject: Subject) -> dict[str, list[SetStatistics]]:
        return self.found


def _of_sets(event: Event, mask: torch.Tensor | None) -> SetStatistics | None:
    sets = sets_of(event)
    if isinstance(sets, str):
        return None
    known = sets.finite & sets.valid(mask)
    if not known.any():
        return None
    live, constant = known & ~sets.dead, known & sets.dead
    with np.errstate(all="ignore"):
        kappa = np.where(live & event.spec.center, np.abs(sets.mean) / np.sqrt(sets.variance), 0.0)
    worst = int(np.argmax(kappa))
    loudest = int(np.argmax(np.where(constant, np.abs(sets.mean), -1.0)))
    return SetStatistics(
        run=event.run,
        mode=event.mode,
        shape=tuple(event.input.shape),
        set_size=sets.size,
        sets=int(known.sum()),
        live=int(live.sum()),
        **_roots(sets.under_root, sets.denominator, live, sets.label),
        constant=float(constant.sum() / known.sum()),
        constant_set=sets.label(loudest) if constant.any() else "",
        constant_value=float(sets.mean[loudest]) if constant.any() else 0.0,
        constant_gain=_largest_gain(event, sets, constant),
        kappa=(float(np.median(kappa[live])), float(kappa[worst])) if live.any() else (0.0, 0.0),
        kappa_set=sets.label(worst) if live.any() else "",
    )


def _stored(event: Event) -> SetStatistics | None:
    """The same of stored statistics, whose sets are the entries of the running variance."""
    variance = event.tensors.get("running_var")
    if variance is None or event.spec.scale not in ("std", "rms", "l2"):
        return None
    return of_stored(
        event.spec,
        variance.detach().double().cpu().numpy().ravel(),
        working_eps(event.spec, event.input.dtype),
        run=event.run,
        mode=event.mode,
        shape=tuple(event.input.shape),
    )


def of_stored(
    spec: NormSpec, variance: Array, eps: float, *, run: str, mode: str, shape: tuple[int, ...]
) -> SetStatistics | None:
    """Stored variances as sets. A variance of exactly 0 is a matter of the checkpoint, and no live set."""
    known = np.isfinite(variance) & (variance >= 0)
    if not known.any():
        return None
    live = known & (variance > 0)
    return SetStatistics(
        run=run,
        mode=mode,
        shape=shape,
        set_size=0,
        sets=int(known.sum()),
        live=int(live.sum()),
        **_roots(variance, denominators(variance, spec, eps), live, lambda index: f"c={index}"),
        constant=float((known & ~live).sum() / known.sum()),
        constant_set="",
        constant_value=0.0,
        constant_gain=0.0,
        kappa=(0.0, 0.0),
        kappa_set="",
    )


def _roots(
    under_root: Array, denominator: Array, live: NDArray[np.bool_], label: Callable[[int], str]
) -> dict[str, Any]:
    """The fields that compare the variance with eps."""
    live = live & np.isfinite(under_root)
    if not live.any():
        nan = (float("nan"),) * 3
        return {"variance": nan, "shrinkage": nan, "eps_tenth": 0.0, "eps_all": 0.0, "smallest": ""}
    shrinkage = np.sqrt(under_root[live]) / denominator[live]
    return {
        "variance": _quantiles(under_root[live]),
        "shrinkage": _quantiles(shrinkage),
        # v / (v + eps) where eps is a tenth of v, and all of it
        "eps_tenth": float((shrinkage**2 < 1 / 1.1).mean()),
        "eps_all": float((shrinkage**2 < 1 / 2).mean()),
        "smallest": label(int(np.argmin(np.where(live, under_root, np.inf)))),
    }


def _quantiles(values: Array) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
    return float(low), float(middle), float(high)


def _largest_gain(event: Event, sets: Sets, which: NDArray[np.bool_]) -> float:
    if not which.any():
        return 0.0
    some = np.flatnonzero(which)[:64]
    return float(np.abs(sets.gain(event.tensors.get("weight"), some)).max())
