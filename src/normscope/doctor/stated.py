"""The eps that a hand-written norm holds as an attribute, beside the eps of what it computes.

The attribute stands for the constant in whatever way a forward writes it: as it is, or squared under a root, and of a
sum of squares, or of their mean, as many times larger or smaller as a set has elements.
"""

from __future__ import annotations

from math import inf, isclose, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normscope.doctor.site import Site
    from normscope.spec import NormSpec

NAMES = ("eps", "epsilon", "variance_epsilon")
CLOSE = 0.5
"""two constants that far apart, relatively, are the same: the factors of an unbiased variance are in it"""


def other_eps(site: Site, spec: NormSpec) -> float | None:
    """The eps that a site's module holds; None where it holds none, or where the function has it.

    >>> from types import SimpleNamespace as Some
    >>> from normscope.spec import NormSpec
    >>> site = Some(module=Some(eps=1e-6), calls=[Some(shape=(4, 16))])
    >>> def held(**conventions): return other_eps(site, NormSpec("... d -> ...", **conventions))
    >>> held(eps=1e-6), held(eps=1e-12), held(eps=1e-6 / 16, center=False, scale="rms")
    (None, None, None)
    >>> held(eps=1e-3), held(eps=1e-3, eps_at="max"), held(eps=0.0)
    (1e-06, None, 1e-06)
    """
    held = next((found for name in NAMES if (found := _held(site.module, name))), 0.0)
    if not held or spec.eps is None or not site.calls:
        return None
    elements = spec.bind(site.calls[0].shape).set_size
    size = elements if spec.scale == "l2" else 1 / elements
    meant = [held, held * sqrt(size)]
    if spec.eps_at in ("variance", "max_variance"):
        meant = [held, held * held, held * size]
    elif spec.eps_at == "max":  # max(sqrt(v), eps) is sqrt(max(v, eps^2))
        meant += [sqrt(held), sqrt(held * size)]
    return None if any(isclose(spec.eps, value, rel_tol=CLOSE) for value in meant) else held


def _held(module: object, name: str) -> float:
    """A positive number under this name; 0 where there is none, or where the user's own property raises."""
    try:
        value = getattr(module, name, None)
        number = float(value) if isinstance(value, (int, float)) and value is not True else 0.0
    except (Exception, SystemExit):
        return 0.0
    return number if 0 < number < inf else 0.0
