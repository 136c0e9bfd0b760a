"""What is said beside the specification: eps in words, sets without spread, axes that hide."""

from __future__ import annotations

import numpy as np

from normscope.identify.fit import Fit
from normscope.identify.probing import Prober
from normscope.identify.scan import Scan
from normscope.spec import NormSpec

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
        f.conclude("no eps is to be seen", scales)
        return
    place = EPS_WORDS[spec.eps_at]
    value = "the machine epsilon" if spec.eps is None else f"{spec.eps:.6g}"
    f.conclude(f"eps is {value}, {place}", scales, relative_error=best.error, measured_root=best.root_eps)


def constant_input(f: Prober, shape: tuple[int, ...], spec: NormSpec) -> None:
    """What becomes of sets without spread: 0 / 0 without eps."""
    level = 0.5 if spec.center else 0.0
    nan = bool(np.isnan(f(np.full(shape, level))).any())
    f.conclude(
        "a set without spread gives NaN" if nan else "a set without spread gives the bias",
        f"a constant input of {level:g}",
    )
    if spec.eps == 0 and not nan:
        f.notes.append(
            "no eps shows down to the smallest inputs, yet a set without spread gives no NaN: eps is too small to be "
            "seen, or 0 / 0 is caught"
        )
    if spec.eps != 0 and nan:
        f.notes.append("a set without spread gives NaN although there is an eps")


def say_hidden(f: Prober, shape: tuple[int, ...], example: tuple[int, ...]) -> None:
    for dim, size in enumerate(shape):
        if size == 1:
            f.notes.append(
                f"axis {dim} has one element in the example and takes no more: whether statistics run over it cannot "
                "be seen"
            )
        elif example[dim] == 1:
            f.notes.append(f"axis {dim}, of one element in the example, was probed with {size}")
