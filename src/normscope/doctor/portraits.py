"""What was measured of each site, as plain data that a report carries and a page draws.

Lists are bounded by the probes that made them, and numbers keep ``DIGITS`` significant digits, so a report stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from normscope.doctor.probes.denominator_histogram import PER_DECADE
from normscope.doctor.report import plain

if TYPE_CHECKING:
    from normscope.doctor.probes.channel_statistics import ChannelStatistics
    from normscope.doctor.probes.companions import Companions
    from normscope.doctor.probes.denominator_histogram import Histogram
    from normscope.doctor.probes.effective_samples import EffectiveSamples
    from normscope.doctor.probes.precision import Precision
    from normscope.doctor.probes.sensitivity import Sensitivity
    from normscope.doctor.probes.spectrum import Spectrum
    from normscope.doctor.probes.statistics import SetStatistics
    from normscope.doctor.subject import Subject

DIGITS = 5


def measurements(subject: Subject) -> dict[str, dict[str, Any]]:
    """Site name -> what was measured there; a key is absent where its probe saw nothing.

    Keys: ``denominators``, ``statistics``, ``channels``, ``conditioning``, ``effective_samples``, ``sensitivity``,
    ``spectrum``; the fields of each are those of ``render/report-schema.json``.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, probe, tell in TOLD:
        for name, measured in subject.measured.get(probe, {}).items():
            told = tell(measured)
            if told is not None:
                found.setdefault(name, {})[key] = short(plain(told))
    companions: Companions | None = subject.measured.get("companions")
    for name, coupling in ({} if companions is None else companions.batch).items():
        if "sensitivity" in found.get(name, {}):
            found[name]["sensitivity"]["measured"] = short(coupling.strength if coupling.responsible else 0.0)
    return {site.name: found[site.name] for site in subject.sites if site.name in found}


def short(value: Any) -> Any:
    """Plain data with every number rounded to ``DIGITS`` significant digits.

    >>> short({"a": [0.123456789, 3, "x"]})
    {'a': [0.12346, 3, 'x']}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    return [short(item) for item in value] if isinstance(value, list) else value


def _denominators(modes: dict[str, Histogram]) -> list[dict[str, Any]]:
    return [
        {
            "mode": h.mode,
            "run": h.run,
            "eps": h.eps,
            "floor": h.floor,
            "sets": h.sets,
            "smallest": h.smallest,
            "held": h.held,
            "per_decade": PER_DECADE,
            "first": min(h.bins),
            "counts": [h.bins[k] for k in range(min(h.bins), max(h.bins) + 1)],
        }
        for h in modes.values()
    ]


def _statistics(calls: list[SetStatistics]) -> list[dict[str, Any]]:
    """By mode, the first call of each."""
    first: dict[str, SetStatistics] = {}
    for call in calls:
        first.setdefault(call.mode, call)
    names = (
        "mode",
        "run",
        "shape",
        "set_size",
        "sets",
        "live",
        "variance",
        "eps_tenth",
        "eps_all",
        "constant",
        "kappa",
    )
    return [{name: getattr(call, name) for name in names} for call in first.values()]


def _channels(c: ChannelStatistics) -> dict[str, Any]:
    names = ("channels", "samples", "index", "batch_mean", "batch_var", "running_mean", "running_var")
    return {name: getattr(c, name) for name in names}


def _conditioning(p: Precision) -> dict[str, Any]:
    names = ("mode", "run", "working", "error", "typical_error", "allowed", "predicted", "kappa", "worst_set")
    told = {name: getattr(p, name) for name in names}
    told |= {"input_dtype": p.input_dtype, "output_dtype": p.dtype}
    return told | {"points": p.points}


def _effective_samples(e: EffectiveSamples) -> dict[str, Any] | None:
    if e.reason:
        return None
    return {
        "samples": e.samples,
        "elements": e.elements,
        "effective": e.effective,
        "per_sample": e.per_sample,
    }


def _sensitivity(s: Sensitivity) -> dict[str, Any]:
    return {
        "mode": s.mode,
        "coupled": s.coupled,
        "samples": s.samples,
        "matrix": s.matrix,
        "reason": s.reason,
    }


def _spectrum(s: Spectrum) -> dict[str, Any]:
    levels = groupby((short(level.value), level.kind, level.times) for level in s.levels)
    told = [
        {"value": value, "times": times * len(list(alike)), "kind": kind}
        for (value, kind, times), alike in levels
    ]
    return {"mode": s.mode, "set": s.set, "size": s.size, "denominator": s.denominator, "levels": told}


TOLD: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("statistics", "statistics", _statistics),
    ("denominators", "denominator_histogram", _denominators),
    ("channels", "channel_statistics", _channels),
    ("conditioning", "precision", _conditioning),
    ("effective_samples", "effective_samples", _effective_samples),
    ("sensitivity", "sensitivity", _sensitivity),
    ("spectrum", "spectrum", _spectrum),
)
"""key, probe, how its measurement of one site is told"""
