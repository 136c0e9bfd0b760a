"""Whether equal calls give equal answers; if not, whether chance or memory is behind it. And the precision inside."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from itertools import pairwise
from math import sqrt

import numpy as np

from normscope.identify.box import ROUNDOFF, Array
from normscope.identify.probing import Contradiction, Prober, direction

LAST_BITS = 16
"""roundings by which equal calls may differ: sums of several threads in another order"""


STEP = 15
"""octaves below the input of the steps of a line: their fourth power is below the roundings of float64"""
FLOAT64_NOISE = 1e-11
"""of the output: float64 leaves some 1e-15 at ordinary inputs, float32 anywhere inside some 1e-8"""


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Put the global random generators (Python, NumPy, torch where it is loaded) back afterwards, and grad mode."""
    torch = sys.modules.get("torch")
    grad = torch.is_grad_enabled() if torch else True
    saved = random.getstate(), np.random.get_state()  # noqa: NPY002  the one that other people's code draws from
    devices = list(range(torch.cuda.device_count())) if torch and torch.cuda.is_initialized() else []
    try:
        if torch is None:
            yield
        else:
            with torch.random.fork_rng(devices=devices):
                yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])  # noqa: NPY002
        if torch:
            torch.set_grad_enabled(grad)  # an interrupt may have come between entering and leaving no_grad


def on_this_rank() -> AbstractContextManager[None]:
    """What is called within waits for no other rank; a process without torch has none."""
    if "torch" not in sys.modules:
        return nullcontext()
    found: AbstractContextManager[None] = import_module("normscope.identify.by_itself").by_itself()
    return found


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def require_repeatable(f: Prober, shape: tuple[int, ...]) -> None:
    """Raises Contradiction where the answer to one input changes, with what is behind it as far as that shows."""
    x, other = direction(shape, 1), direction(shape, 2)
    first = f(x)
    f(3 * other + 1)
    second, third = f(x), f(x)
    between, moved = _apart(f, second, third), _apart(f, first, second)
    if not between and not moved:
        f.first = f.first or (x, first)
        f.conclude("deterministic", "equal inputs, with another in between", calls=4)
        return
    if not between:
        raise Contradiction(
            "it has state that other inputs change: one input gives the same twice in a row, and something else "
            f"after another input (by up to {moved:.2g} of the largest output)"
        )
    _seed()
    one = f(x)
    _seed()
    if not _apart(f, one, f(x)):
        raise Contradiction(
            f"it is random: equal inputs give outputs that differ by up to {between:.2g} of the largest, and the same "
            "ones once the global random generators are seeded"
        )
    steps = [f(x) for _ in range(14)][-9:]  # an average of what it saw has come close by then
    sizes = [float(np.abs(b - a).max()) for a, b in pairwise(steps)]
    shrinks = all(later < 0.99 * sooner for sooner, later in pairwise(sizes))
    what = (
        f"it has state that every call moves, less each time (by {sizes[0]:.2g}, then {sizes[1]:.2g}), as running "
        "statistics do"
        if shrinks
        else f"equal inputs give outputs that differ by up to {between:.2g} of the largest, with seeded generators "
        "too: it has state, or a random generator of its own"
    )
    raise Contradiction(what)


def require_as_at_first(f: Prober) -> None:
    """Raises Contradiction where the first input gives something else after all others: what was seen is two things."""
    if f.first is None:
        return
    x, first = f.first
    calls = f.calls
    if apart := _apart(f, first, f(x)):
        raise Contradiction(
            f"it has state that calls move: one input gave another output at first than after {calls} calls (by "
            f"{apart:.2g} of the largest)"
        )


def _apart(f: Prober, a: Array, b: Array) -> float:
    """Largest difference over the largest output; 0 where it is in the last bits. NaN equals NaN."""
    known = np.isfinite(a) & np.isfinite(b)
    if (known != np.isfinite(a)).any() or (known != np.isfinite(b)).any():
        return 1.0
    largest = float(np.abs(np.where(known, a, 0)).max(initial=0)) or 1.0
    apart = float(np.abs(np.where(known, a - b, 0)).max(initial=0)) / largest
    return 0.0 if apart <= LAST_BITS * f.roundoff else apart


def find_precision(f: Prober, shape: tuple[int, ...]) -> None:
    """Set ``f.roundoff`` to that of the arithmetic inside: a callable of float64 may cast its input to float32.

    Raises Contradiction where the input is cast to half precision, in which nothing can be told apart.
    """
    rng = np.random.default_rng(3)
    x = rng.standard_normal(shape)
    y = f(x)
    for dtype, gap in (("float16", 2.0**-9), ("bfloat16", 2.0**-6), ("float32", 2.0**-22)):
        coarse = _rounded(x, dtype)
        if f.roundoff >= ROUNDOFF.get(dtype, 1.0) or not np.array_equal(y, f(coarse)):
            continue
        # a step function is blind to small changes too, and so are sets of two elements: those of a few units of the
        # dtype have to be seen
        nudged = f(coarse * (1 + gap * rng.choice([-1.0, 1.0], shape)))
        if np.mean(np.abs(nudged - y) > gap / 64 * np.abs(y)) < 0.5:
            continue
        if dtype != "float32":
            raise Contradiction(
                f"it rounds its input to {dtype}: an input and its {dtype} roundings give the same to the bit. In half "
                "precision normalizations cannot be told apart; pass it in float32"
            )
        f.roundoff = ROUNDOFF[dtype]
        f.conclude(
            "computes in float32 inside", "an input and its float32 roundings give the same to the bit"
        )


def require_float32_shown(f: Prober, shape: tuple[int, ...]) -> None:
    """Raises Contradiction where a callable of float64 rounds like float64 throughout: what is off is not rounding.

    Fourth differences along a line: a smooth function leaves ``h^4`` and the roundings of single outputs, which
    follow no line (a table of differences tells the noise of a function: Hamming, Numerical Methods, 1962).
    """
    x, other = direction(shape, 5), direction(shape, 6)
    steps = [f(x + k * 2.0**-STEP * other) for k in range(5)]
    largest = float(np.abs(steps).max()) or 1.0
    noise = (
        float(np.abs(np.diff(steps, 4, axis=0)).max()) / sqrt(70) / largest
    )  # the sum of the squares of 1 4 6 4 1
    if not noise > FLOAT64_NOISE:
        raise Contradiction("it rounds like float64")
    f.conclude("computes partly in float32 inside", "fourth differences along a line", noise=noise)


def _rounded(x: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return np.asarray(x.astype(dtype), dtype=np.float64)
    # the upper half of a float32, rounded to nearest even
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.asarray(bits.view(np.float32), dtype=np.float64)
