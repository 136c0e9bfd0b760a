"""Step 5: constant and nearly constant input, against the eps that is declared, in training and in evaluation.

Where stored statistics normalize in evaluation, they are set to those of that input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import numpy as np
import torch

from normscope import reference
from normscope.doctor.diagnosis.alone import Alone, in_evaluation
from normscope.doctor.diagnosis.step import Case, Step, told
from normscope.doctor.modes_apart import GAP
from normscope.doctor.sets import denominators
from normscope.doctor.wording import label, listed, number, plural
from normscope.errors import told as error_told
from normscope.spec import RunningState

TITLE = "constant input and eps"
CODES = "NS104 NS106 NS105"
EVALUATION = " in evaluation"
LEVELS = (0.0, 1.0, 1000.0)
TINY = 1e-3
"""standard deviation of nearly constant input, in units of the smaller of eps and its root"""
NAMES = ("eps", "epsilon", "variance_epsilon")
"""attributes in which modules declare their eps"""
WORDS = {"variance": "under the root", "std": "beside the root", "max": "as the least root"}
FACTOR = 1.6
"""in logarithms, five times: where axes and weights are not known the size is rough, and conventions differ by the root
of eps, thirty times for 1e-3"""


@dataclass(frozen=True)
class Constant:
    """One site on constant and on nearly constant input."""

    name: str
    eps: float | None
    """as declared"""
    broken: str
    """what was not finite, "" where all was"""
    declared: float | None = None
    """denominator of nearly constant input by the declared eps"""
    measured: float | None = None
    meaning: str = ""
    """where eps must stand to give what was measured"""
    when: str = ""
    """" in evaluation", "" in training"""

    @property
    def deviates(self) -> bool:
        if self.declared is None or self.measured is None:
            return False
        return abs(log(self.measured / self.declared)) >= FACTOR

    def line(self) -> str:
        if self.broken:
            return f"{self.name}{self.when}: {self.broken}."
        if self.measured is None or self.declared is None:
            return f"{self.name}{self.when}: finite on constant input; its eps is not declared."
        return (
            f"{self.name}{self.when}: finite on constant input; nearly constant input is divided by "
            f"{number(self.measured)}, by its eps {number(self.eps or 0.0)} it should be "
            f"{number(self.declared)}{self.meaning}."
        )


def step(case: Case) -> Step:
    found, failures = [], []
    for alone in case.alone:
        if alone.stored:
            continue
        for one in (alone, in_evaluation(alone)):
            when = "" if one is alone else EVALUATION
            try:
                if isinstance(one, Alone):
                    found.append(replace(_constant(one), when=when))
                elif one is not None:
                    failures.append(f"{label(alone.site)}{when} ({one})")
            except (Exception, SystemExit) as error:
                failures.append(f"{label(alone.site)}{when} ({error_told(error)})")
    finding = case.worst(CODES, but=lambda f: GAP in f.evidence)
    bad = [c for c in found if c.broken] + [c for c in found if c.deviates and not c.broken]
    shown = bad or [c for c in found if finding is not None and c.name == finding.site] or found
    seen = [c.line() for c in shown[:2]]
    if len(found) > len(shown[:2]):
        names = {one.name for one in found}
        deviating = {one.name for one in bad}
        many = f"{len(deviating)} of them not as declared" if bad else "all as declared"
        stored = sum(one.when == EVALUATION for one in found)
        both = f", {stored} in evaluation too" if stored else ""
        seen.append(f"{plural(len(names), 'norm')} tried{both}, {many}.")
    if failures:
        seen.append(f"not tried: {listed(failures, 2)}.")
    todo = ""
    if bad:
        first = bad[0]
        follows = (
            f"a constant set (blank input, dead units, padding) makes {first.name} return{first.when} what no "
            "optimizer survives."
            if first.broken
            else f"{first.name} does not add its eps{first.when} where the convention puts it, so nearly constant sets "
            f"are multiplied by {number(1 / first.measured) if first.measured else 'infinity'}, not by "
            f"{number(1 / first.declared) if first.declared else 'infinity'}."
        )
        known = finding is not None and (finding.site or "the model") == first.name
        todo = (
            finding.fix
            if known and finding is not None
            else "divide by torch.sqrt(var + eps), which has value and gradient at 0, or use torch's own norm"
        )
    elif finding is not None:
        follows, todo = told(finding), finding.fix
    elif not found:
        follows = "no norm could be tried alone."
    else:
        follows = "constant input gives finite outputs and gradients, and eps does what it is declared to do."
    return Step(
        5,
        TITLE,
        f"each norm by itself on constant input at {', '.join(number(level) for level in LEVELS)}, with gradients, and "
        "on input whose spread is far below eps; in evaluation with such statistics stored",
        tuple(seen),
        follows,
        None if not found and finding is None else not bad and finding is None,
        bad[0].name if bad else finding.site if finding is not None else "",
        todo,
    )


def _constant(alone: Alone) -> Constant:
    name, spec = label(alone.site), alone.spec
    eps = spec.eps if spec is not None and alone.site.kind == "module" else _declared(alone)
    generator = torch.Generator().manual_seed(0)
    for level in LEVELS:
        alone.store(level, 0.0)
        x = torch.full(alone.shape, level, dtype=torch.float64, requires_grad=True)
        out = alone(x)
        (gradient,) = torch.autograd.grad(
            (out * torch.randn(out.shape, dtype=torch.float64, generator=generator)).sum(), x
        )
        for what, values in (("output", out), ("gradient", gradient)):
            if not bool(values.isfinite().all()):
                kind = "NaN" if bool(values.isnan().any()) else "infinite"
                return Constant(name, eps, f"input {number(level)} everywhere gives an {what} that is {kind}")
    if eps is None or eps <= 0 or (spec is not None and spec.scale not in ("std", "rms", "l2")):
        return Constant(name, eps, "")
    spread = TINY * min(eps, eps**0.5)
    x = spread * torch.randn(alone.shape, dtype=torch.float64, generator=generator)
    alone.store(0.0, spread**2)
    with torch.no_grad():
        moved = alone(x) - alone(torch.zeros_like(x))
    places = {at: _denominator(alone, eps, at, spread) for at in WORDS}
    # what was found out about a norm written by hand is what it does, not what it declares
    known = spec is not None and spec.eps_at in places and alone.site.kind == "module"
    declared = spec.eps_at if known and spec is not None else "variance"
    expected = _expected(alone, x, eps, declared, places[declared], spread)
    measured = places[declared] * expected / max(float(moved.square().mean().sqrt()), 1e-300)
    nearest = min(places, key=lambda at: abs(log(places[at] / measured)))
    same = abs(log(places[declared] / measured)) < FACTOR
    if same:
        measured = places[declared]
    meaning = "" if same or nearest == declared else f"; that is eps {WORDS[nearest]}"
    return Constant(name, eps, "", places[declared], measured, meaning)


def _expected(alone: Alone, x: torch.Tensor, eps: float, at: str, below: float, spread: float) -> float:
    """Root mean square of what nearly constant input should become; of input over denominator where axes and weights
    are not known."""
    if alone.spec is None:
        return float(x.square().mean().sqrt()) / below
    spec = alone.spec.replace(eps=eps, eps_at=at)
    running = None
    if alone.evaluating:
        variance = alone.array("running_var")
        assert variance is not None
        running = RunningState(np.zeros_like(variance), np.full_like(variance, spread**2))
    out = reference.forward(
        x.numpy(), spec, alone.array("weight"), running=running, training=not alone.evaluating
    )
    return float(np.sqrt(np.mean(out**2)))


def _denominator(alone: Alone, eps: float, at: str, spread: float) -> float:
    if alone.spec is not None and at == alone.spec.eps_at and alone.site.kind == "module":
        return float(denominators(np.asarray([spread**2]), alone.spec, eps)[0])
    return {"variance": float(np.sqrt(spread**2 + eps)), "std": spread + eps, "max": max(spread, eps)}[at]


def _declared(alone: Alone) -> float | None:
    for name in NAMES:
        value = getattr(alone.module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None
