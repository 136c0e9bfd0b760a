"""What whitening layers ask of their arguments, and of the sets that they whiten over."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from normscope.errors import BadInput
from normscope.kernels.elementary import Elementary
from normscope.spec import NormSpec


def large_enough(layer: str, spec: NormSpec, input: Tensor, mask: Tensor | None, fix: str) -> None:
    """Raise BadInput where a covariance can have no inverse: centered, n elements leave it a rank of n - 1 at most.

    Nothing to ask where eps is above 0, which makes every covariance regular. ``fix`` is what helps besides an eps.
    """
    if spec.eps != 0.0 or not input.numel():
        return
    view = Elementary.of(input, spec, mask)
    (k,) = [axis.size for axis in view.axes if axis.name == spec.whiten]
    if view.mask is None:
        least = prod([axis.size for axis in view.axes if not axis.kept])
    else:
        counts = view.total(view.mask)
        least = int(counts.masked_fill(counts == 0, k + 1).min())  # a set without an element whitens nothing
    if least <= k:
        raise BadInput(
            f"{layer} with eps=0 needs more elements a set than the {k} it whitens together, or their covariance has "
            f"no inverse; got {least} in an input of shape {tuple(input.shape)}. Give an eps such as 1e-5, or {fix}."
        )


def divided(layer: str, channels: int, name: str, by: int) -> int:
    """``channels`` over ``by``. Raises BadInput where that is no whole number."""
    if channels % by:
        raise BadInput(
            f"{layer} takes a {name} that divides the number of channels; got {by} for {channels} channels. Those are "
            f"{', '.join(str(n) for n in range(1, channels + 1) if channels % n == 0)}."
        )
    return channels // by


def eps_or_zero(layer: str, eps: Any) -> float:
    """``eps`` as a number. Raises BadInput where it is negative or not finite."""
    number = float(eps)
    if not 0.0 <= number < float("inf"):
        raise BadInput(
            f"{layer} needs an eps of 0 or more, which it adds to the diagonal; got {eps!r}. Leave it at 1e-5."
        )
    return number


def choice(layer: str, name: str, given: Any, known: Sequence[str]) -> str:
    """``given``. Raises BadInput where it is none of ``known``."""
    if given not in known:
        raise BadInput(f"{layer} takes a {name} of {' or '.join(map(repr, known))}; got {given!r}.")
    return str(given)
