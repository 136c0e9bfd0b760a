"""Step 1: axes and broadcasting, on a tiny tensor that one can compute by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from normscope import reference
from normscope.doctor.diagnosis.alone import Alone
from normscope.doctor.diagnosis.step import Case, Step, told
from normscope.doctor.sets import denominators
from normscope.doctor.wording import label, listed, number, plural
from normscope.spec import RunningState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

TITLE = "axes and broadcasting"
CODES = "NS103 NS202 NS101 NS102"
"""rules that judge axes: whose statistics, over what, of how many"""
AGREES = 1e-5
"""of the largest output: a norm that casts to float32 inside its float64 copy still agrees"""


@dataclass(frozen=True)
class Trial:
    """One site on a tensor of zeros with a single 1."""

    alone: Alone
    line: str
    moved: tuple[int, ...]
    """axes along which one element of the input moves outputs"""
    error: float | None
    """largest difference from the reference, of the largest output; None without a specification"""


def step(case: Case) -> Step:
    trials = [_trial(alone) for alone in case.alone]
    finding = case.worst(CODES)
    wrong = max(
        (t for t in trials if t.error is not None and not t.error <= AGREES),
        key=lambda t: t.error if t.error == t.error else np.inf,  # type: ignore[arg-type,return-value]
        default=None,
    )
    site = wrong.alone.site.name if wrong else finding.site if finding else ""
    shown = next((t for t in trials if t.alone.site.name == site), None) or (trials[0] if trials else None)
    seen = []
    if shown is not None:
        seen += [shown.line, _spread(shown)]
    checked = [t.error for t in trials if t.error is not None]
    if checked:
        seen.append(
            f"{plural(len(checked), 'site')} of {len(case.subject.sites)} ran alone, to compare with the formula: "
            f"largest difference {number(max(checked))} of the output."
        )
    if case.apart:
        seen.append(f"not run alone: {listed(list(case.apart))}.")
    todo = ""
    if wrong is not None:
        follows = (
            f"{label(wrong.alone.site)} does not compute its specification {wrong.alone.spec}: its axes or the "
            "broadcasting of a parameter are wrong."
        )
        todo = (
            "correct the axes (keepdim=True, and the shape of weight and bias) until the numbers above agree"
        )
    elif finding is not None:
        follows, todo = told(finding), finding.fix
    elif not trials:
        follows = "no site runs alone, so nothing was computed by hand."
    elif not checked:
        follows = "no specification is known here: compare the axes above with those that were meant."
    else:
        follows = (
            "statistics run over the axes that the specifications name, and weights stand where they belong."
        )
    ok = None if not checked and finding is None else wrong is None and finding is None
    return Step(
        1,
        TITLE,
        "each norm by itself, in float64, on a tensor of zeros with a single 1; then one element of a random tensor "
        "was changed to see which outputs move",
        tuple(seen),
        follows,
        ok,
        site,
        todo,
    )


def _trial(alone: Alone) -> Trial:
    place = tuple(size // 2 for size in alone.shape)
    single = torch.zeros(alone.shape, dtype=torch.float64)
    single[place] = 1.0
    with torch.no_grad():
        out = alone(single).numpy()
    line, error = _by_hand(alone, single.numpy(), out, place)
    return Trial(alone, line, _moved(alone, place), error)


def _by_hand(alone: Alone, x: Array, out: Array, place: tuple[int, ...]) -> tuple[str, float | None]:
    shape = tuple(alone.shape)
    start = (
        f"{label(alone.site)} ({alone.site.type_name}), zeros of shape {shape} with a single 1 at {place}: "
    )
    spec = alone.spec
    if spec is None or spec.scale not in ("std", "rms", "l2"):
        return f"{start}the 1 becomes {number(float(out[place]))}.", None
    weight, bias = alone.array("weight"), alone.array("bias")
    mean, var = alone.array("running_mean"), alone.array("running_var")
    state = RunningState(mean, var) if alone.stored and mean is not None and var is not None else None
    try:
        truth = reference.forward(x, spec, weight, bias, running=state, training=state is None)
        plain = float(reference.forward(x, spec, running=state, training=state is None)[place])
    except ValueError as refused:
        return f"{start}the 1 becomes {number(float(out[place]))} ({refused}).", None
    # sets of zeros are 0/0 where eps is 0, in the formula too: that is step 5's
    off = np.where(np.isnan(out) & np.isnan(truth), 0.0, np.abs(out - truth))
    error = float(off.max()) / max(float(np.nanmax(np.abs(truth), initial=0.0)), 1e-300)
    if state is not None:
        how = f"by the stored statistics it becomes {number(plain)}"
    else:
        bound = spec.bind(shape)
        n = bound.set_size
        at = 1 / n if spec.center else 0.0
        squares = (n - 1) / n if spec.center else 1.0
        divisor = {"std": n - spec.correction, "rms": n, "l2": 1}[spec.scale]
        spread = squares / divisor if divisor > 0 else float("nan")
        eps = np.finfo(np.float64).eps if spec.eps is None else spec.eps
        below = float(denominators(np.asarray([spread]), spec, float(eps))[0])
        word = {"std": "variance", "rms": "mean square", "l2": "sum of squares"}[spec.scale]
        over = ", ".join(str(dim) for dim in sorted({axis.dim for axis in bound.axes if not axis.kept}))
        along = "axis" if over.isdigit() else "axes"
        mean_text = f"mean 1/{n} = {number(at)}, " if spec.center else ""
        how = (
            f"its set has {plural(n, 'element')} ({along} {over}), {mean_text}{word} {number(spread)}, denominator "
            f"{number(below)} with eps {number(float(eps))}, so it becomes (1 - {number(at)}) / {number(below)} = "
            f"{number(plain)}"
        )
    affine = (
        "" if weight is None and bias is None else f", with weight and bias {number(float(truth[place]))}"
    )
    return f"{start}{how}{affine}; the module gives {number(float(out[place]))}.", error


def _moved(alone: Alone, place: tuple[int, ...]) -> tuple[int, ...]:
    x = torch.randn(alone.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    changed = x.clone()
    changed[place] += 1.0
    with torch.no_grad():
        before, after = alone(x), alone(changed)
    moved = ((after - before).abs() > 1e-9 * before.abs().max()).nonzero().tolist()
    return tuple(d for d in range(len(place)) if len({where[d] for where in moved}) > 1)


def _spread(trial: Trial) -> str:
    name = label(trial.alone.site)
    if not trial.moved:
        return f"one changed element moves no other output of {name}."
    axes = ", ".join(map(str, trial.moved))
    samples = "; axis 0 holds the samples, so they are mixed" if 0 in trial.moved else ""
    word = "axes" if len(trial.moved) > 1 else "axis"
    return f"one changed element moves outputs of {name} along {word} {axes}{samples}."
