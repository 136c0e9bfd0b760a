"""A module as one specification with a mode: the bare function, its tensors, and what it stores, put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from normscope.identify.decimals import apart, shortest
from normscope.identify.module_box import Array
from normscope.identify.module_mode import InMode
from normscope.identify.module_parameters import LAST_BITS, Values, affine_values, stored_values
from normscope.identify.partition import Factor, Partition
from normscope.identify.probing import direction
from normscope.identify.remarks import EPS_WORDS
from normscope.identify.result import Evidence
from normscope.identify.spelling import spellings
from normscope.identify.stored_statistics import Stored, update_rule
from normscope.identify.tensor_roles import Role
from normscope.identify.ties import Units
from normscope.identify.variance_law import Law, law_of_variance
from normscope.spec import NormSpec, Running, RunningState

FITTED = 1e-6
"""relative: how far eps of training, fitted to about 1e-10, may be from that of evaluation"""
UNSEEN_UPDATE = "how training moves them was not seen: momentum and correction stand at their defaults"
"""of stored statistics in a module whose training is unlike any member"""


class NotOfTheFamily(Exception):
    """What a module's tensors do that no specification says. The text is the reason."""


@dataclass(frozen=True)
class Whole:
    """A specification with everything that goes into the reference."""

    values: Values
    mode: str
    stored: Stored | None
    evidence: tuple[Evidence, ...]
    notes: tuple[str, ...]
    equivalent: tuple[NormSpec, ...]

    @property
    def spec(self) -> NormSpec:
        return self.values.spec

    def replaced(self, **fields: Any) -> Whole:
        """The same with other fields of the specification."""
        return replace(self, values=replace(self.values, spec=self.spec.replace(**fields)))

    def state(self, tensors: dict[str, Array]) -> RunningState | None:
        return None if self.stored is None else self.stored.state(tensors)


def whole_of(here: InMode, there: InMode | None, other_unlike: bool, layout: str | None) -> Whole | None:
    """Put together what two modes showed; None for a fixed map without stored statistics.

    ``there`` is None where the other mode is the same function, or (``other_unlike``) where it raises or is no member.

    Raises NotOfTheFamily where a tensor does what no specification says, and NoAxes where it lives on no axes.
    """
    modes = [here] if there is None else [here, there]
    live = next((mode for mode in modes if mode.core.spec is not None), None)
    fixed = next((mode for mode in modes if mode.fixed and mode.named("mean", "nonlinear")), None)
    if here.fixed and fixed is None:
        return None
    for mode in modes:
        _require_known_roles(mode)
    if fixed is None:
        return _without_state(here, there, other_unlike, layout)
    if live is None:
        return _by_state_alone(fixed, modes, other_unlike, layout)
    return _with_state(here, live, fixed, layout)


def _without_state(here: InMode, there: InMode | None, other_unlike: bool, layout: str | None) -> Whole:
    """Statistics of the input in every mode that was seen."""
    values = affine_values(here.core, here, layout)
    mode = "batch" if values.spec.properties(here.box.shape).couples_samples else "input"
    notes = here.core.notes
    if moved := sorted({*here.moved, *(there.moved if there else ())}):
        moves, it = ("moves", "it") if len(moved) == 1 else ("move", "them")
        seen = f" of {'training' if here.training else 'evaluation'}" if other_unlike else ""
        notes = (*notes, f"{' and '.join(moved)} {moves} with each call, and no output{seen} depends on {it}")
    evidence = (*here.core.evidence, *here.tensor_evidence)
    return Whole(
        values, mode, None, evidence, notes, _units_of(values.spec, here.core.equivalent, here.box.shape)
    )


def _by_state_alone(fixed: InMode, modes: list[InMode], other_raises: bool, layout: str | None) -> Whole:
    """Stored statistics in every mode that was seen."""
    core = replace(fixed.core, spec=_by_convention(fixed, layout))
    values = affine_values(core, fixed, layout, fixed.named("mean", "nonlinear"))
    stored, law = _stored(values.spec, fixed)
    for one in modes:
        _require_still(one, stored)
    running = Running() if other_raises else Running(momentum=0.0)
    running = replace(running, over=stored.placed.axes)
    spec = values.spec.replace(eps=law.eps, eps_at=law.eps_at, gain=law.gain, running=running)
    notes: tuple[str, ...] = (
        "the axes that statistics were taken over were not seen: only stored ones were used",
    )
    if other_raises:
        notes += (UNSEEN_UPDATE,)
    mode = "running" if other_raises else "frozen"
    return Whole(replace(values, spec=spec), mode, stored, (law.evidence, *fixed.tensor_evidence), notes, ())


def _with_state(here: InMode, live: InMode, fixed: InMode, layout: str | None) -> Whole:
    """Statistics of the input in one mode, ``live``, and stored ones in the other."""
    values = affine_values(live.core, here, layout, fixed.named("mean", "nonlinear"))
    stored, law = _stored(values.spec, fixed)
    _require_still(fixed, stored)
    units = _units_of(values.spec, live.core.equivalent, live.box.shape)
    base = next((spec for spec in (values.spec, *units) if _agrees(spec, law)), None)
    if base is None:
        told = values.spec
        eps = ("of the dtype", f"{law.eps:g}") if told.eps is None else apart(told.eps, law.eps)
        gain = apart(told.gain, law.gain)
        raise NotOfTheFamily(
            "no single specification says both modes: training divides with eps "
            f"{eps[0]} {EPS_WORDS[told.eps_at]} and gain {gain[0]}, evaluation with eps {eps[1]} "
            f"{EPS_WORDS[law.eps_at]} and gain {gain[1]}"
        )
    rule = update_rule(live.box, base, stored, {**live.own, **live.generic})
    if rule is None:
        raise NotOfTheFamily(
            f"training moves {stored.mean} and {stored.var} by no known rule: neither an exponential nor a plain "
            "average of the batches' statistics"
        )
    values = replace(values, spec=rule.spec)
    evidence = (*live.core.evidence, law.evidence, rule.evidence, *fixed.tensor_evidence)
    notes = (*live.core.notes, *rule.notes)
    return Whole(values, "batch" if here is live else "running", stored, evidence, notes, ())


def _stored(spec: NormSpec, fixed: InMode) -> tuple[Stored, Law]:
    stored = stored_values(spec, fixed)
    if stored is None:
        does = {"mean": "is subtracted", "nonlinear": "bends the slope"}
        parts = [f"{role.name} {does[role.kind]}" for role in fixed.named("mean", "nonlinear")]
        raise NotOfTheFamily(
            "each output is a straight line in its own input, and a specification makes that of one stored mean and "
            f"one stored variance; here {' and '.join(parts)}"
        )
    inputs = direction(fixed.box.shape, 105), direction(fixed.box.shape, 106)
    law = law_of_variance(fixed.neutral, stored.var, fixed.roles[stored.var].shape, inputs)
    if isinstance(law, str):
        raise NotOfTheFamily(law)
    return stored, law


def _require_still(mode: InMode, stored: Stored) -> None:
    """Raises NotOfTheFamily where calls that normalize by stored statistics move them."""
    if moved := [name for name in (stored.mean, stored.var) if name in mode.moved]:
        raise NotOfTheFamily(
            f"{'training' if mode.training else 'evaluation'} normalizes by stored statistics and moves "
            f"{' and '.join(moved)} too: no specification says that"
        )


def _require_known_roles(mode: InMode) -> None:
    """Raises NotOfTheFamily for the first tensor that a specification has no place for."""
    for gain in mode.gains.values():
        if gain.offset is None:
            numbers = ", ".join(f"{name} {value:.6g}" for name, value in gain.evidence.numbers.items())
            raise NotOfTheFamily(f"{gain.evidence.conclusion} ({numbers})")
    word = "training" if mode.training else "evaluation"
    for role in mode.named("mixed"):
        raise NotOfTheFamily(
            f"one output depends on several numbers of {role.name}, where a weight, a bias or a stored statistic gives "
            "it one"
        )
    if not mode.fixed and (reason := reads_what_it_moves(mode)):
        raise NotOfTheFamily(reason)
    for role in () if mode.fixed else mode.named("mean"):
        raise NotOfTheFamily(
            f"{role.name} is added with a negative sign in {word}, where statistics of the input normalize: a bias is "
            "added as it is"
        )
    for role in () if mode.fixed else mode.named("nonlinear"):
        raise NotOfTheFamily(
            f"{role.name} bends the output of {word}, as a learned eps or exponent does: it is no weight, bias, stored "
            "mean or stored variance"
        )


def _units_of(
    spec: NormSpec, equivalent: tuple[NormSpec, ...], shape: tuple[int, ...]
) -> tuple[NormSpec, ...]:
    """The same function by other conventions for the denominator, each with a weight or gain of its own."""
    found = [
        spec.replace(
            scale=other.scale,
            correction=other.correction,
            eps=other.eps,
            eps_at=other.eps_at,
            gain=spec.gain if spec.weight is not None else _gain_in_units_of(other, spec, shape),
        )
        for other in equivalent
    ]
    return tuple(one for one in dict.fromkeys(found) if one != spec)


def _gain_in_units_of(other: NormSpec, spec: NormSpec, shape: tuple[int, ...]) -> float:
    """The fixed gain that goes with another measure of the spread: over sqrt(k v) it is sqrt(k) times as large."""
    n = spec.bind(shape).set_size
    mine, theirs = (Units(one.scale, int(one.correction), "").ratio(n) for one in (spec, other))
    return shortest(spec.gain * sqrt(theirs / mine), LAST_BITS)


def reads_what_it_moves(mode: InMode) -> str:
    """Why a module whose output depends on statistics that the call itself moves is not identified; "" for others."""
    names = [role.name for role in mode.roles.values() if role.kind != "none" and role.name in mode.moved]
    if not names:
        return ""
    return (
        f"its output depends on {' and '.join(names)}, which the call itself moves, and on statistics of the input, as "
        "in batch renormalization"
    )


def _agrees(spec: NormSpec, law: Law) -> bool:
    """Whether training and evaluation divide by one function of the variance; a floor may be written in two ways."""
    if spec.eps is None:
        return False
    (eps, at), (stored, stored_at) = _as_floor(spec.eps, spec.eps_at), _as_floor(law.eps, law.eps_at)
    return (
        abs(spec.gain - law.gain) <= FITTED * abs(law.gain)
        and abs(eps - stored) <= FITTED * stored
        and (at == stored_at or stored == 0)
    )


def _as_floor(eps: float, eps_at: str) -> tuple[float, str]:
    return (sqrt(eps), "max") if eps_at == "max_variance" else (eps, eps_at)


def _by_convention(fixed: InMode, layout: str | None) -> NormSpec:
    """Where only stored statistics are used: they are kept on the axes that they vary along."""
    shape = fixed.box.shape
    roles = fixed.named("mean", "nonlinear")
    dims = tuple(
        (Factor(size, size == 1 or any(_varies_along(role, dim) for role in roles)),)
        for dim, size in enumerate(shape)
    )
    return next(spellings(Partition(shape, dims), layout, {})).spec


def _varies_along(role: Role, dim: int) -> bool:
    entries = role.entries
    return entries is not None and bool((entries != entries.take([0], axis=dim)).any())
