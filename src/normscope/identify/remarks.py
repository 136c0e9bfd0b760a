"""What is said beside the specification: eps in words, sets without spread, axes that hide."""

from __future__ import annotations

import numpy as np

from normscope.identify.box import ROUNDOFF
from normscope.identify.fit import Fit
from normscope.identify.probing import Prober
from normscope.identify.scan import Scan
from normscope.identify.ties import eps_error
from normscope.spec import NormSpec

SEEN = 1e-3
"""of the output: what eps has to change to be looked for"""
LARGE = 16
"""roundings that the largest error of some hundred outputs rarely reaches"""
EPS_WORDS = {
    "variance": "inside the root",
    "std": "outside the root",
    "max": "as the least root",
    "max_variance": "as the least value under the root",
}
"""where eps stands"""


def say_eps(f: Prober, s: Scan, best: Fit, spec: NormSpec) -> None:
    scales = f"inputs of the size 2^{min(s.found)} to 2^{max(s.found)}"
    if best.root_eps == 0:
        inside, outside = _out_of_sight(s)
        f.conclude("no eps is to be seen", scales, hidden_inside_the_root=inside, hidden_outside=outside)
        return
    place = EPS_WORDS[spec.eps_at]
    value = "the machine epsilon" if spec.eps is None else f"{spec.eps:.6g}"
    f.conclude(f"eps is {value}, {place}", scales, relative_error=best.error, measured_root=best.root_eps)


def _out_of_sight(s: Scan) -> tuple[float, float]:
    """About the largest eps, inside the root and outside, that changes the smallest outputs that stand out by less
    than `SEEN`."""
    root = 2.0 ** min(k for k in s.found if s.measurable(k)) * float(np.sqrt(np.mean(s.pairs[0].x ** 2)))
    return 2 * SEEN * root**2, SEEN * root


def say_resolution(f: Prober, best: Fit, error: float) -> None:
    """What float32 leaves open: eps, and an error that is large for it."""
    if f.roundoff < ROUNDOFF["float32"]:
        return
    if best.root_eps:
        power = 2 if best.form == "variance" else 1
        f.notes.append(
            f"its arithmetic is float32: eps is known to {power * eps_error(best, 2 * f.roundoff):.0e} of itself, and "
            "any eps within that computes the same"
        )
    if error > LARGE * f.roundoff:
        f.notes.append(
            f"the largest error, {error:.1e}, is more than single roundings of float32 leave ({f.roundoff:.0e}): sums "
            "that cancel, as in E[x^2] - mean^2, or a small deviation from the specification"
        )


def constant_input(f: Prober, s: Scan, shape: tuple[int, ...], spec: NormSpec) -> None:
    """What becomes of sets without spread: 0 / 0 without eps."""
    level = 0.5 if spec.center else 0.0
    nan = bool(np.isnan(f(np.full(shape, level))).any())
    f.conclude(
        "a set without spread gives NaN" if nan else "a set without spread gives the bias",
        f"a constant input of {level:g}",
    )
    if spec.eps == 0 and not nan:
        inside, outside = _out_of_sight(s)
        f.notes.append(
            "no eps shows down to the smallest inputs, yet a set without spread gives no NaN: eps is too small to be "
            f"seen (below about {inside:.0e} inside the root or {outside:.0e} outside), or 0 / 0 is caught"
        )
    if spec.eps != 0 and nan:
        f.notes.append("a set without spread gives NaN although there is an eps")


def say_hidden(f: Prober, shape: tuple[int, ...], example: tuple[int, ...], *, bound: bool) -> None:
    """``bound``: at another shape it was another function."""
    if bound:
        f.notes.append(
            "what was found at a shape of more elements along short axes, or fewer along long ones, does not hold at "
            f"{example}: something in it depends on the size. What is told here holds at that shape"
        )
    more = "is another function with more" if bound else "takes no more"
    for dim, size in enumerate(shape):
        if size == 1:
            f.notes.append(
                f"axis {dim} has one element in the example and {more}: whether statistics run over it cannot "
                "be seen"
            )
        elif example[dim] == 1:
            f.notes.append(f"axis {dim}, of one element in the example, was probed with {size}")
