"""The singular values of a normalization's Jacobian at one statistic set of the user's data, without gain and bias.

Of the site's sets the one with the middle denominator is taken. y = (x - m) / s(v) has, on a set of n elements, a
symmetric Jacobian with

=====================================  ==========================  ======
direction                              singular value              times
=====================================  ==========================  ======
common shift, where it is centered     0                           1
change of scale, along the deviations  (1 - 2 v s'(v) / s) / s     1
every other                            1 / s                       the rest
=====================================  ==========================  ======

Under sqrt(v + eps) the second is eps / s^3, and 0 without eps. Stored statistics take nothing away: each channel has
its 1 / s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope.doctor.probes import Probe
from normscope.doctor.sets import denominators, sets_of, working_eps
from normscope.reference.moments import denominator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject
    from normscope.spec import NormSpec

    Array = NDArray[np.float64]

CHANNELS = 64
"""told of stored statistics, evenly over their order"""
REMOVED = 1e-12
"""of 1 / s: less is the rounding of the formula"""


@dataclass(frozen=True)
class Level:
    value: float
    times: int
    kind: str
    """``kept``; ``suppressed``, the direction of scale; ``removed``"""


@dataclass(frozen=True)
class Spectrum:
    """Singular values, the largest first."""

    mode: str
    set: str
    """which set; "" where stored statistics normalize, or there is only one"""
    size: int
    """elements of the set; channels where stored statistics normalize"""
    denominator: float
    levels: tuple[Level, ...]


class SpectrumProbe(Probe):
    """site name -> ``Spectrum``, of its first call; of live statistics where it has them."""

    name = "spectrum"
    runs = ("eval", "batch")
    rides = True

    def start(self, subject: Subject) -> str | None:
        self.found: dict[str, Spectrum] = {}
        return None

    def observe(self, event: Event) -> None:
        before = self.found.get(event.site.name)
        live = event.mode in ("batch", "input")
        if event.index or (before is not None and not (live and before.mode != event.mode)):
            return
        seen = _live(event) if live else _stored(event)
        if seen is not None:
            self.found[event.site.name] = seen

    def finish(self, subject: Subject) -> dict[str, Spectrum]:
        return self.found


def _live(event: Event) -> Spectrum | None:
    sets = sets_of(event)
    if isinstance(sets, str) or sets.size < 2:
        return None
    with np.errstate(all="ignore"):
        under_root, s = sets.under_root, sets.denominator
    varying = np.flatnonzero(sets.finite & ~sets.dead & np.isfinite(s) & (s > 0))
    if not len(varying):
        return None
    middle = int(varying[np.argsort(s[varying], kind="stable")[len(varying) // 2]])
    levels = of_set(event.spec, float(under_root[middle]), sets.eps, sets.size)
    return Spectrum(event.mode, sets.label(middle), sets.size, float(s[middle]), levels)


def of_set(spec: NormSpec, v: float, eps: float, size: int) -> tuple[Level, ...]:
    """The levels of a set of ``size`` elements with ``v`` under the root.

    >>> from normscope.spec import families
    >>> [(level.kind, level.times) for level in of_set(families.layer_norm(), 4.0, 1e-5, 8)]
    [('kept', 6), ('suppressed', 1), ('removed', 1)]
    """
    s, slope = (float(part) for part in denominator(np.float64(v), eps, spec.eps_at))
    scale = max(0.0, 1 - 2 * v * slope / s)
    centered = int(spec.center)
    rest = size - 1 - centered
    levels = [Level(1 / s, rest, "kept")] if rest else []
    if scale > REMOVED:
        levels.append(Level(scale / s, 1, "suppressed"))
    gone = centered + int(scale <= REMOVED)
    return (*levels, Level(0.0, gone, "removed")) if gone else tuple(levels)


def _stored(event: Event) -> Spectrum | None:
    stored = event.tensors.get("running_var")
    if stored is None or event.spec.scale not in ("std", "rms", "l2"):
        return None
    variance = stored.detach().double().cpu().numpy().ravel()
    s = denominators(variance, event.spec, working_eps(event.spec, event.input.dtype))
    s = np.sort(s[np.isfinite(s) & (s > 0)])
    if not len(s):
        return None
    some = s[np.linspace(0, len(s) - 1, min(len(s), CHANNELS)).astype(int)]
    return Spectrum(
        event.mode, "", len(s), float(np.median(s)), tuple(Level(float(1 / v), 1, "kept") for v in some)
    )
