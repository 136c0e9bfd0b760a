"""Step 3: the distribution of denominators, near zero first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor import runs
from normscope.doctor.diagnosis.step import Case, Step, told
from normscope.doctor.probes import Probe
from normscope.doctor.sets import Sets, denominators, sets_of, working_eps
from normscope.doctor.wording import listed, number, percent, plural

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

    Array = NDArray[np.float64]

TITLE = "denominators"
CODES = "NS406 NS404 NS402 NS401 NS403 NS405 NS314"
NEAR_ZERO = 1e-3
"""of the median denominator of a site: one set whose gradient is a thousand times that of the others"""
SHOWN = 3


@dataclass(frozen=True)
class Spread:
    """Denominators of one site."""

    site: str
    sets: int
    least: float
    """of the sets with spread"""
    where: str
    low: float
    """1 % quantile"""
    median: float
    largest: float
    floor: float
    """what eps alone makes"""
    constant: int
    stored: bool

    @property
    def varies(self) -> bool:
        """Some set has spread, so there are denominators to speak of."""
        return self.stored or self.constant < self.sets

    @property
    def ratio(self) -> float:
        return self.least / self.median if self.median > 0 else 1.0

    @property
    def near_zero(self) -> bool:
        return self.ratio < NEAR_ZERO or not np.isfinite(self.largest)

    def line(self) -> str:
        what = "stored channels" if self.stored else "sets"
        least = f"least {number(self.least)}" + (f" ({self.where})" if self.where else "")
        text = (
            f"{self.site or 'the model'}: {self.sets} {what}; {least}, 1 % {number(self.low)}, median "
            f"{number(self.median)}, largest {number(self.largest)}; eps alone makes {number(self.floor)}"
        )
        return text + (f"; {plural(self.constant, 'set')} without any spread." if self.constant else ".")


class _Denominators(Probe):
    name = "explained_denominators"
    runs = ("eval", "batch")

    def start(self, subject: Subject) -> str | None:
        self.found: dict[str, Spread] = {}
        return None

    def observe(self, event: Event) -> None:
        name = event.site.name
        if (name in self.found and self.found[name].varies) or event.spec.scale not in ("std", "rms", "l2"):
            return
        if event.mode in ("running", "frozen"):
            if event.run == "eval" and event.site.mode_train == "batch":
                return  # in training its denominators are those of the batch
            var = event.tensors.get("running_var")
            if var is not None:
                eps = working_eps(event.spec, event.input.dtype)
                values: Array = var.detach().double().cpu().numpy().ravel()
                self.found[name] = _spread(
                    name, denominators(values, event.spec, eps), None, event, stored=True
                )
            return
        sets = sets_of(event)
        if isinstance(sets, Sets):
            spread = _spread(name, sets.denominator, sets, event, stored=False)
            if spread.varies or name not in self.found:  # a loop's first call may be on a state of zeros
                self.found[name] = spread

    def finish(self, subject: Subject) -> dict[str, Spread]:
        return self.found


def step(case: Case) -> Step:
    reasons = runs.run_probes(case.subject, [_Denominators])
    found: list[Spread] = list(case.subject.measured.get("explained_denominators", {}).values())
    found.sort(key=lambda spread: (not spread.near_zero, spread.ratio))
    finding = case.worst(CODES)
    low = next((spread for spread in found if spread.near_zero), None)
    first = [s for s in found if finding is not None and s.site == finding.site] if low is None else [low]
    shown = (first + [s for s in found if s not in first])[:SHOWN]
    seen = [spread.line() for spread in shown]
    if len(found) > SHOWN:
        seen.append(
            f"and {plural(len(found) - SHOWN, 'more site')}, where the least is nearer to the median."
        )
    seen += [f"not measured: {why}" for why in reasons.values()]
    todo = ""
    if finding is not None:
        follows, todo = told(finding), finding.fix
    elif low is not None and not np.isfinite(low.largest):
        follows = f"denominators of {low.site or 'the model'} are not all finite on this batch."
        todo = "look for the first value that is not finite: in the inputs, or beyond the range of the dtype (NS404)"
    elif low is not None:
        follows = (
            f"a set of {low.site or 'the model'} ({low.where}) has {percent(low.ratio)} of the usual denominator: its "
            f"gradient is {number(1 / low.ratio)} times that of the others, and one such sample can throw a step."
        )
        todo = "look at that sample (blank, padded, or dead units before the norm), mask it, or take a larger eps"
    elif not found:
        follows = "no denominator could be measured."
    else:
        follows = f"no denominator comes near zero ({listed([s.site or 'the model' for s in shown])} looked at first)."
    return Step(
        3,
        TITLE,
        "the denominators of all statistic sets on this batch, as training forms them, the smallest first",
        tuple(seen),
        follows,
        None if not found and finding is None else finding is None and low is None,
        finding.site if finding is not None else low.site if low is not None else "",
        todo,
    )


def _spread(name: str, values: Array, sets: Sets | None, event: Event, *, stored: bool) -> Spread:
    eps = working_eps(event.spec, event.input.dtype)
    floor = float(denominators(np.zeros(1), event.spec, eps)[0])
    live = np.ones(len(values), dtype=bool) if sets is None else ~sets.dead
    chosen = values[live & np.isfinite(values)]
    if not len(chosen):
        chosen = np.asarray([floor])
    least = float(chosen.min())
    lowest = np.flatnonzero(live & (values == least))
    where = sets.label(int(lowest[0])) if sets is not None and len(lowest) else ""
    return Spread(
        name,
        len(values),
        least,
        where,
        float(np.quantile(chosen, 0.01)),
        float(np.median(chosen)),
        float("nan") if not np.isfinite(values).all() else float(chosen.max()),
        floor,
        int((~live).sum()),
        stored,
    )
