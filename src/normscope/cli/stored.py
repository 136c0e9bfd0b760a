"""A checkpoint without its code as a command's target: which options it can have, and its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import BadInput

if TYPE_CHECKING:
    from normscope.doctor.report import Report


def refuse(target: str, options: dict[str, Any]) -> None:
    """Raises BadInput for an option that needs the model's code."""
    given = [name for name, value in options.items() if value]
    if given:
        raise BadInput(
            f"{target} holds weights and no code, so {' and '.join(given)} cannot be used; name the model as "
            f"package.module:attribute, with --weights {target}"
        )


def refuse_stated(options: dict[str, float | None]) -> None:
    """Raises BadInput for a number that a model says itself."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise BadInput(
            f"{' and '.join(given)}: only of a file of weights; here the model's own code tells it"
        )


def check(
    target: str,
    *,
    select: Sequence[str] | None,
    ignore: Sequence[str] | None,
    eps: float | None,
    momentum: float | None,
    step: Callable[[str], None],
) -> Report:
    from normscope.doctor.check_state import check_state

    return check_state(
        Path(target), select=select, ignore=ignore, eps=eps, momentum=momentum, target=target, progress=step
    )
