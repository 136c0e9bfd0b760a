"""What a failing layer computes instead: the declared specification with a convention or two changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, islice
from typing import Any

from normscope.spec import Cast, NormSpec
from normscope.spec.parts import SpecError

EPS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3)
EPS_AT = ("variance", "std", "max", "max_variance")


def alternatives(spec: NormSpec, computes: Callable[[NormSpec], bool]) -> list[str]:
    """The changes of ``spec`` under which ``computes`` says yes, as they are written in a NormSpec.

    One convention is changed, and where that is not enough two; of those, the first that fits.
    """
    single = [*_changes(spec)]
    fitting = [change for change in single if _holds(spec, change, computes)]
    if not fitting:
        pairs = ({**one, **two} for one, two in combinations(single, 2) if not one.keys() & two.keys())
        fitting = [*islice((pair for pair in pairs if _holds(spec, pair, computes)), 1)]
    return [", ".join(f"{name}={value!r}" for name, value in change.items()) for change in fitting]


def _holds(spec: NormSpec, change: dict[str, Any], computes: Callable[[NormSpec], bool]) -> bool:
    try:
        changed = spec.replace(**change)
    except SpecError:  # a combination that means nothing
        return False
    return computes(changed)


def _changes(spec: NormSpec) -> Iterator[dict[str, Any]]:
    yield {"correction": 0 if spec.correction else 1}
    yield from ({"eps_at": place} for place in EPS_AT if place != spec.eps_at)
    yield from ({"eps": eps} for eps in EPS if eps != spec.eps)
    yield from ({"scale": scale} for scale in ("std", "rms", "l2") if scale != spec.scale)
    yield {"center": not spec.center}
    yield {"center": not spec.center, "scale": "rms" if spec.center else "std"}
    if spec.weight is not None:
        yield {"weight_offset": 0.0 if spec.weight_offset else 1.0}
    if spec.cast.compute is None:
        yield {"cast": Cast(compute="float32", weight=spec.cast.weight)}
