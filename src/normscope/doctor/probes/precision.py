"""The running implementation against the float64 reference, on the activations that really occur.

Whole statistic sets are compared, at most ``ELEMENTS`` elements a call: the sets that are hardest to center, and
others chosen by the check's seed. Errors are told in standard deviations of the normalized output, so 1 means that
nothing is left. What a sound implementation may err by follows from the dtypes and the length of the reduction::

    |y - exact| <= u_out (2 |y| + |bias|) + u (4 + log2 n) |gain| (|x_hat| + |mean| / denominator)

with u the unit roundoff (half the machine epsilon) of the arithmetic and u_out of the output, n elements in a set
summed in pairs, and a handful of roundings more for centering, root, division, gain and bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from normscope import reference
from normscope.doctor.probes import Probe
from normscope.doctor.sets import Sets, denominators, sets_of, working_dtype
from normscope.spec import Running

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

CALLS = 4
ELEMENTS = 20_000
"""compared per call; a single set may be larger"""
LARGEST_SET = 1_000_000
"""a larger set is not compared"""
POINTS = 128
"""compared per set where stored statistics normalize, which treat each element alone; of 32 sets"""
TOLD = 32
"""sets whose errors are told one by one"""
FAR = 30.0
"""|mean| / denominator from which cancellation, and not the arithmetic, is the first suspect"""


@dataclass(frozen=True)
class Precision:
    """The worst call of one site, over the sets compared. Errors are in standard deviations of the output."""

    run: str
    mode: str
    input_dtype: str
    input_roundoff: float
    """half the machine epsilon of that dtype"""
    dtype: str
    """of the output"""
    output_roundoff: float
    """the same of the output's"""
    working: str
    """of the arithmetic"""
    memory_format: str
    sets: int
    """sets compared"""
    set_size: int
    error: float
    """largest error over sets that vary"""
    typical_error: float
    """root mean square of the same"""
    allowed: float
    """what rounding explains at the place of the largest error"""
    rounding: float
    """the part of it that rounding the output to its own dtype explains"""
    worst_set: str
    kappa: float
    """|mean| / standard deviation of that set"""
    amplification: float
    """|mean| / denominator of that set"""
    predicted: float
    """largest |mean| / denominator of any set, times the unit roundoff of the input's dtype: what the input's own
    rounding has taken before this site saw it"""
    predicted_set: str
    constant_error: float
    """largest |y - bias| over the constant sets compared, in units of the gain; 0 where there is none"""
    constant_allowed: float
    constant_set: str
    constant_value: float
    beyond_output: bool
    """an exact output is larger than the largest number of the output's dtype"""
    points: tuple[tuple[float, float, float], ...] = ()
    """of at most ``TOLD`` sets that vary: |mean| / denominator, largest error, what is allowed at its place"""

    @property
    def explained(self) -> float:
        """The error at the worst set that the dtypes explain: of the arithmetic, or of the input's own rounding."""
        return max(self.allowed, self.amplification * self.input_roundoff)

    @property
    def mean_explains_it(self) -> bool:
        """The largest error is at a set whose mean is far from 0, so that centering cancels digits."""
        return self.amplification >= FAR


class PrecisionOfOutput(Probe):
    """site name -> ``Precision``."""

    name = "precision"
    runs = ("eval", "batch")

    def start(self, subject: Subject) -> str | None:
        self.random = np.random.default_rng(subject.seed)
        self.found: dict[str, Precision] = {}
        return None

    def observe(self, event: Event) -> None:
        news = event.run == "eval" or event.mode == "batch"
        if event.index >= CALLS or not news or event.output.shape != event.input.shape:
            return
        if not event.output.is_floating_point() or event.spec.source == "input":
            return
        if event.mode == "batch" and event.spec.properties().training_reads_state:
            return  # by limits that move with a counter
        seen = self._compare(event)
        before = self.found.get(event.site.name)
        if seen is not None and (before is None or _badness(seen) > _badness(before)):
            self.found[event.site.name] = seen

    def _compare(self, event: Event) -> Precision | None:
        sets = sets_of(event)
        if isinstance(sets, str) or sets.size > LARGEST_SET:
            return None
        hardness = _hardness(event, sets)
        chosen = self._choose(hardness, sets, _stored(event))
        if not len(chosen):
            return None
        return _precision(event, sets, chosen, hardness)

    def _choose(self, hardness: Array, sets: Sets, stored: bool) -> NDArray[np.int64]:
        """The hardest set that varies, the hardest that is constant, and others by chance."""
        usable = np.flatnonzero(np.isfinite(hardness))
        groups = [usable] if stored else [usable[~sets.dead[usable]], usable[sets.dead[usable]]]
        hardest = [group[np.argmax(hardness[group])] for group in groups if len(group)]
        room = max(0, (32 if stored else ELEMENTS // sets.size) - len(hardest))
        others = np.setdiff1d(usable, hardest)
        some = self.random.choice(others, min(room, len(others)), replace=False)
        return np.array([*hardest, *some], dtype=np.int64)

    def finish(self, subject: Subject) -> dict[str, Precision]:
        return self.found


def _badness(seen: Precision) -> float:
    return max(
        seen.error / max(seen.allowed, 1e-300), seen.constant_error / max(seen.constant_allowed, 1e-300)
    )


def _stored(event: Event) -> bool:
    return event.mode in ("running", "frozen")


def _running(event: Event, sets: Sets, which: NDArray[np.int64]) -> tuple[Array, Array]:
    """Stored mean and variance of some sets, (len(which),) each; the state lives on kept axes."""
    found = []
    for name in ("running_mean", "running_var"):
        values: Array = event.tensors[name].detach().double().cpu().numpy()
        rows = sets.spread(values, event.spec.running_axes, which)
        found.append(np.broadcast_to(rows, (len(which), 1))[:, 0])
    return found[0], found[1]


def _hardness(event: Event, sets: Sets) -> Array:
    """|mean| / denominator of every set, with the statistics that normalize it."""
    if not _stored(event):
        return sets.amplification
    every = np.arange(sets.bound.sets)
    mean, variance = _running(event, sets, every)
    with np.errstate(all="ignore"):
        return np.abs(mean) / denominators(variance, event.spec, sets.eps)


def rows_spec(spec: NormSpec, eps: float, *, stored: bool) -> NormSpec:
    """The same normalization of a table with one set a row, without gain and bias."""
    return spec.replace(
        stats="k n -> k",
        ndim=None,
        sample_axis="",
        sizes={},
        remainder="error",
        weight=None,
        bias=None,
        weight_offset=0.0,
        gain=1.0,
        eps=eps,
        running=Running() if stored else None,
    )


def _precision(event: Event, sets: Sets, chosen: NDArray[np.int64], hardness: Array) -> Precision | None:
    spec, stored = event.spec, _stored(event)
    points = slice(None, POINTS) if stored else slice(None)
    x, y = (sets.take(tensor, chosen, thinned=stored)[:, points] for tensor in (event.input, event.output))
    state = reference.RunningState(*_running(event, sets, chosen)) if stored else None
    hat = reference.forward(x, rows_spec(spec, sets.eps, stored=stored), running=state, training=not stored)
    gain = sets.gain(event.tensors.get("weight"), chosen)[:, points]
    bias = sets.bias(event.tensors.get("bias"), chosen)[:, points]
    exact = gain * hat + bias
    if not np.isfinite(exact).all():
        return None  # nothing to compare with: an infinite gain, or a variance that is no number
    working = working_dtype(spec, event.input.dtype)
    u, u_out, u_in = (torch.finfo(d).eps / 2 for d in (working, event.output.dtype, event.input.dtype))
    reach = hardness[chosen][:, None]
    steps = 4 + np.log2(max(2, sets.size))
    rounding = u_out * (2 * np.abs(exact) + np.abs(bias))
    allowed = rounding + u * steps * np.abs(gain) * (np.abs(hat) + reach)
    error = np.abs(y - exact)
    error[~np.isfinite(error)] = np.inf

    varies = np.ones(len(chosen), dtype=bool) if stored else ~sets.dead[chosen]
    unit = float(np.sqrt(np.mean((gain * hat)[varies] ** 2))) if varies.any() else 0.0
    if unit == 0.0:
        unit = float(np.sqrt(np.mean(gain**2)))
    if unit == 0.0:
        return None  # all gains are zero: the output is the bias, whatever the statistics are
    live = _worst(error, allowed, rounding, varies, unit)
    still = _worst(error, allowed, rounding, ~varies, float(np.sqrt(np.mean(gain**2))))
    hardest, place = int(chosen[0]), int(chosen[live.row])
    with np.errstate(all="ignore"):
        kappa = float(np.abs(x[live.row].mean()) / x[live.row].std()) if spec.center else 0.0
    return Precision(
        run=event.run,
        mode=event.mode,
        input_dtype=_name(event.input.dtype),
        input_roundoff=u_in,
        dtype=_name(event.output.dtype),
        output_roundoff=u_out,
        working=_name(working),
        memory_format=_layout(event),
        sets=len(chosen),
        set_size=sets.size,
        error=live.error,
        typical_error=live.typical,
        allowed=live.allowed,
        rounding=live.rounding,
        worst_set=sets.label(place),
        kappa=kappa,
        amplification=float(hardness[place]),
        predicted=float(hardness[hardest]) * u_in if varies.any() else 0.0,
        predicted_set=sets.label(hardest),
        constant_error=still.error,
        constant_allowed=still.allowed,
        constant_set=sets.label(int(chosen[still.row])),
        constant_value=float(x[still.row, 0]),
        beyond_output=bool(np.abs(exact).max() > torch.finfo(event.output.dtype).max),
        points=_points(hardness[chosen], error / unit, allowed / unit, varies),
    )


def _points(
    hardness: Array, error: Array, allowed: Array, rows: NDArray[np.bool_]
) -> tuple[tuple[float, float, float], ...]:
    some = np.flatnonzero(rows)[:TOLD]
    at = error[some].argmax(1)
    table = np.stack([hardness[some], error[some, at], allowed[some, at]], axis=1)
    return tuple((float(a), float(b), float(c)) for a, b, c in table)


@dataclass(frozen=True)
class _Worst:
    row: int = 0
    error: float = 0.0
    typical: float = 0.0
    allowed: float = 0.0
    rounding: float = 0.0


def _worst(error: Array, allowed: Array, rounding: Array, rows: NDArray[np.bool_], unit: float) -> _Worst:
    """The largest error over some rows, with what is allowed there."""
    if not rows.any():
        return _Worst()
    among = np.where(rows[:, None], error, -1.0)
    row, column = np.unravel_index(int(np.argmax(among)), among.shape)
    return _Worst(
        row=int(row),
        error=float(error[row, column]) / unit,
        typical=float(np.sqrt(np.mean(error[rows] ** 2))) / unit,
        allowed=float(allowed[row, column]) / unit,
        rounding=float(rounding[row, column]) / unit,
    )


def _layout(event: Event) -> str:
    """The memory format that the tracing forward saw at this call; "" where it made fewer calls."""
    calls = event.site.calls
    return calls[event.index].memory_format if event.index < len(calls) else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
