"""What the layers that torch does not have, and RMSNorm, ask of their arguments; each error says the fix."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from normscope.errors import BadInput


def sizes(layer: str, name: str, given: int | Sequence[int], fix: str) -> tuple[int, ...]:
    """``given`` as a tuple of sizes.

    Raises BadInput where there is none, or one is no integer of 1 or more.

    >>> sizes("RMSNorm", "normalized_shape", 8, ""), sizes("RMSNorm", "normalized_shape", [4, 8], "")
    ((8,), (4, 8))
    """
    try:
        found = tuple(operator.index(n) for n in (given if isinstance(given, Sequence) else (given,)))
    except TypeError:
        found = ()
    if not found or min(found) < 1:
        raise BadInput(
            f"{layer} needs every size in {name} to be an integer of 1 or more; got {given!r}. {fix}"
        )
    return found


def positive_eps(layer: str, eps: Any) -> float:
    """``eps`` as a number.

    Raises BadInput where it is not finite and above 0.
    """
    number = float(eps)
    if not 0.0 < number < float("inf"):
        raise BadInput(
            f"{layer} needs an eps above 0, without which a set of zeros divides 0 by 0; got {eps!r}. "
            "Use 1e-6, or leave it out for the default."
        )
    return number


def floating(layer: str, x: Tensor) -> None:
    """Raise BadInput where ``x`` is not floating point, whose output would be rounded to whole numbers."""
    if not x.is_floating_point():
        raise BadInput(f"{layer} takes a floating point input; got {x.dtype}. Use x.float().")


def on_axis_1(layer: str, x: Tensor, channels: int, positions: str = "...") -> None:
    """Raise BadInput unless ``x`` has that many channels on axis 1, and of ``positions`` such as ``"H, W"`` as many."""
    axes = x.dim() if positions == "..." else 2 + len(positions.split(", "))
    if x.dim() < 2 or x.dim() != axes or x.shape[1] != channels:
        raise BadInput(
            f"{layer} was made for inputs (N, {channels}, {positions}); got an input of shape {tuple(x.shape)}. "
            "Move the channels to axis 1 (x.movedim), or make the layer for x.shape[1]."
        )


def last_sizes(layer: str, x: Tensor, wanted: tuple[int, ...]) -> None:
    """Raise BadInput unless ``x`` ends in axes of the sizes ``wanted``."""
    if tuple(x.shape[-len(wanted) :]) != wanted:
        axes = "last axis has size" if len(wanted) == 1 else "last axes have sizes"
        said = ", ".join(map(str, wanted))
        raise BadInput(
            f"{layer} was made for an input whose {axes} {said}; got an input of shape {tuple(x.shape)}. "
            "Move the features to the end (x.movedim), or make the layer for x.shape[-1]."
            if len(wanted) == 1
            else f"{layer} was made for an input whose {axes} {said}; got an input of shape {tuple(x.shape)}. "
            f"Move the features to the end (x.movedim), or make the layer for x.shape[-{len(wanted)}:]."
        )
