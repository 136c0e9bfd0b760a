"""The singular values of a normalization's Jacobian at one statistic set of the user's data.

Of the site's sets the one with the middle denominator is taken, and of its elements at most ``ELEMENTS``, by the
check's seed, which are normalized as a set of their own, without gain and bias. A set of n elements has n singular
values: with centering one is 0, the direction of a common shift; that of the deviations themselves, a change of
scale, keeps eps / s^3 of itself where eps stands under the root; all others are 1 / s. Stored statistics take away
nothing: all are 1 / s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from normscope import reference
from normscope.doctor.probes import Probe
from normscope.doctor.probes.precision import rows_spec
from normscope.doctor.sets import denominators, sets_of, working_eps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

    Array = NDArray[np.float64]

ELEMENTS = 64
REMOVED = 1e-9
"""of the largest singular value: less is rounding"""


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one set's Jacobian, the largest first."""

    mode: str
    set: str
    """which one; "" where stored statistics normalize"""
    set_size: int
    """elements of the whole set"""
    elements: int
    """elements that were taken"""
    denominator: float
    """of the elements taken"""
    values: Array
    kinds: tuple[str, ...]
    """of each value: ``kept``, ``suppressed`` (the direction of scale), ``removed``"""


class SpectrumProbe(Probe):
    """site name -> ``Spectrum``, of its first call; of live statistics where it has them."""

    name = "spectrum"
    runs = ("eval", "batch")
    rides = True

    def start(self, subject: Subject) -> str | None:
        self.random = np.random.default_rng(subject.seed)
        self.found: dict[str, Spectrum] = {}
        return None

    def observe(self, event: Event) -> None:
        before = self.found.get(event.site.name)
        live = event.mode in ("batch", "input")
        if event.index or (before is not None and not (live and before.mode != event.mode)):
            return
        seen = self._live(event) if live else _stored(event)
        if seen is not None:
            self.found[event.site.name] = seen

    def _live(self, event: Event) -> Spectrum | None:
        sets = sets_of(event)
        if isinstance(sets, str) or sets.size < 2:
            return None
        varying = np.flatnonzero(sets.finite & ~sets.dead)
        if not len(varying):
            return None
        middle = varying[np.argsort(sets.denominator[varying], kind="stable")[len(varying) // 2]]
        row = sets.take(sets.x, np.array([middle]))[0]
        if len(row) > ELEMENTS:
            row = row[np.sort(self.random.choice(len(row), ELEMENTS, replace=False))]
        spec = rows_spec(event.spec, sets.eps, stored=False)
        jacobian = reference.jacobian(row[None], spec)[0, :, 0, :]
        if not np.isfinite(jacobian).all() or row.min() == row.max():
            return None
        _, values, directions = np.linalg.svd(jacobian)
        deviations = row - row.mean() if event.spec.center else row
        scale = (directions @ (deviations / np.linalg.norm(deviations))) ** 2
        removed = values <= REMOVED * values[0]
        kinds = np.where(
            removed, "removed", np.where((scale > 0.5) & (values < 0.5 * values[0]), "suppressed", "kept")
        )
        square = float(np.mean(deviations**2)) * (len(row) if event.spec.scale == "l2" else 1)
        if event.spec.scale == "std":
            square *= len(row) / (len(row) - event.spec.correction)
        s = float(denominators(np.array([square]), event.spec, sets.eps)[0])
        return Spectrum(
            event.mode,
            sets.label(int(middle)),
            sets.size,
            len(row),
            s,
            np.where(removed, 0.0, values),
            tuple(kinds.tolist()),
        )

    def finish(self, subject: Subject) -> dict[str, Spectrum]:
        return self.found


def _stored(event: Event) -> Spectrum | None:
    """One value for each stored variance: every channel keeps all directions, at 1 / s."""
    stored = event.tensors.get("running_var")
    if stored is None or event.spec.scale not in ("std", "rms", "l2"):
        return None
    variance = stored.detach().double().cpu().numpy().ravel()
    s = denominators(variance, event.spec, working_eps(event.spec, event.input.dtype))
    s = np.sort(s[np.isfinite(s) & (s > 0)])
    if not len(s):
        return None
    some = s[np.linspace(0, len(s) - 1, min(len(s), ELEMENTS)).astype(int)]
    return Spectrum(event.mode, "", 0, len(some), float(np.median(s)), 1 / some, ("kept",) * len(some))
