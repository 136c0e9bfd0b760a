"""Stored statistics: the law by which a variance enters in evaluation, and the rule by which training moves it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normscope import reference
from normscope.identify.module_box import Array, ModuleBox, Outcome
from normscope.identify.parameter_axes import Placed
from normscope.identify.result import Evidence
from normscope.spec import NormSpec, Running, RunningState

LEVELS = (0.0, 0.25, 1.0, 4.0)
"""values that a stored variance is set to"""
LAW = 1e-10
"""largest misfit of a law, relative: rounding gives 1e-15, the wrong law 1e-3"""
RULE = 1e-9
BATCHES = 3


@dataclass(frozen=True)
class Law:
    """The denominator as a function of the stored variance: gain / sqrt(v + eps), and the like."""

    gain: float
    eps: float
    eps_at: str
    evidence: Evidence


def law_of_variance(
    box: ModuleBox, name: str, shape: tuple[int, ...], inputs: tuple[Array, Array]
) -> Law | None:
    """Set a stored variance to some values and see which law the slope of the map follows; None for no law known.

    ``box`` has gains of 1, so the slope is gain / denominator.
    """
    one, other = inputs
    inverse = []
    for v in LEVELS:
        at = box.set({name: np.full(shape, v)})
        slopes = (at(one) - at(other)) / (one - other)
        inverse.append(1.0 / float(np.median(slopes)))
    at_zero, quarter, unit, four = inverse
    at_zero = at_zero if np.isfinite(at_zero) else 0.0  # without eps it is 0 / 0
    inside = _line(0.25, 1.0, 4.0, quarter**2, unit**2, four**2)
    outside = _line(0.5, 1.0, 2.0, quarter, unit, four)
    misfits = {"1/a^2 linear in v": inside[2], "1/a linear in sqrt(v)": outside[2]}
    found: tuple[float, float, str] | None = None
    if inside[2] < LAW and abs(at_zero**2 - inside[1]) <= LAW * unit**2 and inside[0] > 0:
        found = (inside[0] ** -0.5, at_zero**2 / inside[0], "variance")
    elif outside[2] < LAW and outside[0] > 0:
        eps_at = "std" if abs(at_zero - outside[1]) <= LAW * unit else "max"
        found = (1 / outside[0], at_zero / outside[0], eps_at)
    if found is None:
        return None
    gain, eps, eps_at = (_round(found[0]), _round(found[1]), found[2])
    where = {"variance": "inside the root", "std": "outside the root", "max": "as the least root"}[eps_at]
    evidence = Evidence(
        f"{name} is the stored variance, with eps {eps:g} {where}",
        f"{name} set to {', '.join(f'{v:g}' for v in LEVELS)}, and the slope a of the map read",
        {f"misfit of {what}": value for what, value in misfits.items()},
    )
    return Law(gain, eps, eps_at, evidence)


def _line(x1: float, x2: float, x3: float, y1: float, y2: float, y3: float) -> tuple[float, float, float]:
    """Slope and intercept through the outer points, and the misfit of the middle one relative to it."""
    slope = (y3 - y1) / (x3 - x1)
    intercept = y1 - slope * x1
    return slope, intercept, abs(intercept + slope * x2 - y2) / abs(y2)


def _round(value: float) -> float:
    """The number of at most 6 digits that lies within rounding of it, if there is one."""
    short = float(f"{value:.6g}")
    return short if abs(value - short) <= 1e-9 * abs(value) else value


@dataclass(frozen=True)
class Rule:
    """How training moves stored statistics."""

    running: Running
    evidence: Evidence
    error: float
    """largest difference between the tensors and the rule over all updates, relative to their size"""


@dataclass(frozen=True)
class Stored:
    """Names of the two tensors, and where they live."""

    mean: str
    var: str
    placed: Placed
    entries_mean: NDArray[np.int64]
    entries_var: NDArray[np.int64]

    def state(self, tensors: dict[str, Array], batches: int = 0) -> RunningState:
        """The two tensors in the shape that the specification says."""
        mean = tensors[self.mean].ravel()[self.entries_mean.ravel()[self.placed.places]]
        var = tensors[self.var].ravel()[self.entries_var.ravel()[self.placed.places]]
        return RunningState(mean, var, batches)


def consecutive(box: ModuleBox, inputs: list[Array]) -> list[Outcome]:
    """Calls one after the other on one module, each starting where the last one ended."""
    fork = box.fork()
    return [box.run_on(fork, x) for x in inputs]


def update_rule(box: ModuleBox, spec: NormSpec, stored: Stored, start: dict[str, Array]) -> Rule | None:
    """How stored statistics follow `BATCHES` different batches; None where no rule of the family does it.

    The fraction m of each update is fitted to run <- (1 - m) run + m mean. Constant fractions are an exponential
    average, 1/k in the k-th update a plain one. The correction follows from the stored variance over the biased one.
    """
    random = np.random.default_rng(21)
    inputs = [k + (1.0 + k) * random.standard_normal(box.shape) for k in range(BATCHES)]
    outcomes = consecutive(box.set(start), inputs)
    once = spec.replace(running=Running(momentum=1.0, correction=0, over=stored.placed.axes))
    before = stored.state(start)
    fractions, ratios = [], []
    for x, outcome in zip(inputs, outcomes, strict=True):
        after = stored.state(outcome.tensors)
        batch = reference.update_running(before, x, once)
        step = batch.mean - before.mean
        fractions.append(float(np.sum((after.mean - before.mean) * step) / np.sum(step * step)))
        if np.array_equal(after.mean, before.mean) and np.array_equal(after.var, before.var):
            fractions[-1] = 0.0
            ratios.append(1.0)
            continue
        if fractions[-1] == 0:
            return None
        target = before.var + (after.var - before.var) / fractions[-1]
        ratios.append(float(np.median(target / batch.var)))
        before = after
    counts = [1 / m if m else np.inf for m in fractions]
    plain = all(abs(n - counts[0] - k) < 1e-6 for k, n in enumerate(counts))
    constant = max(fractions) - min(fractions) < RULE
    if not (plain or constant):
        return None
    momentum = None if plain else _round(float(np.mean(fractions)))
    n = spec.bind(box.shape).set_size
    correction = _near_integer(n * (1 - 1 / float(np.median(ratios))))
    running = Running(momentum=momentum, correction=max(correction, 0.0), over=stored.placed.axes)
    state, error = stored.state(start, round(counts[0]) - 1 if plain else 0), 0.0
    told = spec.replace(running=running)
    for x, outcome in zip(inputs, outcomes, strict=True):
        state = reference.update_running(state, x, told)
        after = stored.state(outcome.tensors)
        for ours, theirs in ((state.mean, after.mean), (state.var, after.var)):
            error = max(error, float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))))
    if error > RULE:
        return None
    how = "as the plain mean over batches" if plain else f"by {momentum:g} of the way to each batch"
    stands = "unbiased" if correction == 1 else "biased" if correction == 0 else f"correction {correction:g}"
    counters = [
        name
        for name, first in outcomes[0].tensors.items()
        if first.size == 1 and all(o.tensors[name] == first + k for k, o in enumerate(outcomes))
    ]
    counted = f"; {' and '.join(counters)} counts the calls" if counters else ""
    evidence = Evidence(
        f"{stored.mean} and {stored.var} move {how}, the stored variance {stands}{counted}",
        f"{BATCHES} training calls in a row with different batches",
        {f"fraction of update {k + 1}": m for k, m in enumerate(fractions)}
        | {"stored over biased variance": float(np.median(ratios)), "largest error": error},
    )
    return Rule(told.running or running, evidence, error)


def _near_integer(value: float) -> float:
    return round(value) if abs(value - round(value)) < 1e-6 else value
