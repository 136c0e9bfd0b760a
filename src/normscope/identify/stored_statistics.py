"""The rule by which training moves stored statistics, from calls in a row.

A call of a norm with virtual batches updates once for each, or once by the mean of what they have: two specifications,
of which other virtual batches in one call tell the right one. To fit the first, an input holds the same virtual batch
several times, so that k updates by the fraction m are one by 1 - (1 - m)^k.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from normscope import reference
from normscope.identify.module_box import Array, ModuleBox, Outcome
from normscope.identify.parameter_axes import Placed
from normscope.identify.result import Evidence
from normscope.identify.variance_law import short
from normscope.spec import NormSpec, Running, RunningState

RULE = 1e-9
BATCHES = 3
LATE = 1e-6
"""relative: a ten thousandth of the way is known to 1e-12 of it"""
LATER = 10**4
"""calls by which a counter is put forward, to see the rule there: a warm-up is over by then"""


@dataclass(frozen=True)
class Rule:
    """How training moves stored statistics."""

    spec: NormSpec
    """with ``running``; its virtual batches are named ``v`` where each updates in turn"""
    evidence: Evidence
    error: float
    """largest difference between the tensors and the rule over all updates, relative to their size"""
    notes: tuple[str, ...] = ()
    """what was not seen"""


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
    """How stored statistics follow `BATCHES` different batches; None where no rule of the family does it."""
    rules = (_rule(box, named, stored, start) for named in _in_turn_and_at_once(spec))
    return next((rule for rule in rules if rule is not None), None)


def _in_turn_and_at_once(spec: NormSpec) -> Iterator[NormSpec]:
    """The specification, and where it has virtual batches the one by which all of them update once, by their mean."""
    yield spec
    names = {name for group in spec.pattern.left for name in group}
    if "v" in names:
        other = "k" if "k" not in names else "k0"
        sizes = {other if name == "v" else name: size for name, size in spec.sizes.items()}
        yield spec.replace(stats=re.sub(r"\bv\b", other, spec.stats), sizes=sizes)


def _rule(box: ModuleBox, spec: NormSpec, stored: Stored, start: dict[str, Array]) -> Rule | None:
    """How stored statistics follow, if this is the specification.

    The fraction m of each update is fitted to run <- (1 - m) run + m batch. Constant fractions are an exponential
    average, 1/k in the k-th update a plain one. The correction follows from the stored variance over the biased one.
    """
    random = np.random.default_rng(21)
    draws = [k + (1.0 + k) * random.standard_normal(box.shape) for k in range(BATCHES)]
    inputs, turns = zip(*(_like_virtual_batches(spec, x) for x in draws), strict=True)
    outcomes = consecutive(box.set(start), list(inputs))
    states = [stored.state(start), *(stored.state(outcome.tensors) for outcome in outcomes)]
    fractions, ratios = _fractions(spec, stored, inputs, states)
    if not all(0 <= m <= 1 + RULE for m in fractions):
        return None
    counts = [1 / m if m else np.inf for m in fractions]
    plain = all(abs(n - counts[0] - k) < 1e-6 for k, n in enumerate(counts))
    if not plain and max(fractions) - min(fractions) > RULE:
        return None
    m = min(float(np.mean(fractions)), 1.0)
    momentum = None if plain else short(1 - (1 - m) ** (1 / turns[0]))
    n = spec.bind(box.shape).set_size
    ratio = float(np.median(ratios))
    correction = max(_near_integer(n * (1 - 1 / ratio)), 0.0)
    running = Running(momentum=momentum, correction=correction, over=stored.placed.axes)
    if momentum == 0:  # nothing is stored, so nothing says how
        running = Running(momentum=0.0, over=stored.placed.axes)
    told = spec.replace(running=running)
    batches = round((counts[0] - 1) * turns[0]) if plain else 0
    error = _off(told, inputs, states, batches)
    if turns[0] > 1:  # virtual batches that are not alike
        again = consecutive(box.set(start), draws)
        seen = [stored.state(start), *(stored.state(outcome.tensors) for outcome in again)]
        error = max(error, _off(told, draws, seen, batches))
    if error > RULE:
        return None
    how = "as the plain mean over batches" if plain else f"by {momentum:g} of the way to each batch"
    stands = "unbiased" if correction == 1 else "biased" if correction == 0 else f"correction {correction:g}"
    counters = _counters(outcomes)
    if turns[0] > 1 and plain and counters and all(_step(outcomes, name) != turns[0] for name in counters):
        return (
            None  # a plain mean over virtual batches is that over batches of as many, but it counts otherwise
        )
    expected = 1 / (counts[0] + LATER) if plain else m
    if counters and abs(_fraction_later(box, spec, stored, start, outcomes) - expected) > LATE * expected:
        return None
    notes = (
        ()
        if counters or not plain
        else (f"that it stays the plain mean was watched for {BATCHES} calls only",)
    )
    counted = f"; {' and '.join(counters)} counts the updates" if counters else ""
    evidence = Evidence(
        f"{stored.mean} and {stored.var} move {how}, the stored variance {stands}{counted}",
        f"{BATCHES} training calls in a row with different batches",
        {f"fraction of call {k + 1}": m for k, m in enumerate(fractions)}
        | {"stored over biased variance": ratio, "largest error": error},
    )
    return Rule(told, evidence, error, notes)


def _off(spec: NormSpec, inputs: Sequence[Array], states: Sequence[RunningState], batches: int) -> float:
    """The largest difference of the states from the rule, over the size of what is stored."""
    state = RunningState(states[0].mean, states[0].var, batches)
    error = 0.0
    for x, after in zip(inputs, states[1:], strict=True):
        state = reference.update_running(state, x, spec)
        for ours, theirs in ((state.mean, after.mean), (state.var, after.var)):
            error = max(error, float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))))
    return error


def _fraction_later(
    box: ModuleBox, spec: NormSpec, stored: Stored, start: dict[str, Array], outcomes: Sequence[Outcome]
) -> float:
    """The fraction of the first call with every counter put forward by `LATER` calls."""
    first, second = (outcome.tensors for outcome in outcomes[:2])
    later = {name: first[name] + (LATER - 1) * (second[name] - first[name]) for name in _counters(outcomes)}
    x, _ = _like_virtual_batches(spec, 1 + 2 * np.random.default_rng(22).standard_normal(box.shape))
    (outcome,) = consecutive(box.set({**start, **later}), [x])
    (fraction,), _ = _fractions(spec, stored, [x], [stored.state(start), stored.state(outcome.tensors)])
    return fraction


def _like_virtual_batches(spec: NormSpec, x: Array) -> tuple[Array, int]:
    """The input with its first virtual batch in place of all, and how many there are."""
    bound = spec.bind(x.shape)
    names = [axis.name for axis in bound.axes]
    if "v" not in bound.kept or bound.ragged:
        return x, 1
    at = names.index("v")
    grid = x.reshape(bound.shape)
    first = np.repeat(np.take(grid, [0], axis=at), bound.shape[at], axis=at)
    return first.reshape(x.shape), bound.shape[at]


def _fractions(
    spec: NormSpec, stored: Stored, inputs: Sequence[Array], states: Sequence[RunningState]
) -> tuple[list[float], list[float]]:
    """For each call the part of the way to the batch's statistics, and the stored variance over the biased one."""
    whole = spec.replace(running=Running(momentum=1.0, correction=0, over=stored.placed.axes))
    fractions, ratios = [], []
    for x, before, after in zip(inputs, states, states[1:], strict=False):
        batch = reference.update_running(before, x, whole)
        step = batch.mean - before.mean
        m = float(np.sum((after.mean - before.mean) * step) / np.sum(step * step))
        fractions.append(m)
        ratios.append(float(np.median((before.var + (after.var - before.var) / m) / batch.var)) if m else 1.0)
    return fractions, ratios


def _counters(outcomes: Sequence[Outcome]) -> list[str]:
    """Names of single numbers that grow by the same step with every call."""
    found = []
    for name, first in outcomes[0].tensors.items():
        steps = [float((b.tensors[name] - a.tensors[name]).sum()) for a, b in pairwise(outcomes)]
        if first.size == 1 and steps[0] >= 1 and len(set(steps)) == 1:
            found.append(name)
    return found


def _step(outcomes: Sequence[Outcome], name: str) -> float:
    first, second = (outcome.tensors[name] for outcome in outcomes[:2])
    return float((second - first).sum())


def _near_integer(value: float) -> float:
    return round(value) if abs(value - round(value)) < 1e-6 else value
