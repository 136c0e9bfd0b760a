"""How large activations, their squares and their sums of squares get, against the dtype that holds them.

Squares exist only where a site takes statistics of its input. PyTorch's own layers square in float32 whatever they
are given; a hand-written norm squares in the dtype of its input unless it casts first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from normscope.doctor.probes import Probe
from normscope.doctor.sets import sets_of, working_dtype

if TYPE_CHECKING:
    from normscope.doctor.site import Event
    from normscope.doctor.subject import Subject

CALLS = 16


@dataclass(frozen=True)
class Ranges:
    """The widest call of one site."""

    run: str
    mode: str
    dtype: str
    """of the input"""
    working: str
    """of the arithmetic, as far as it is known"""
    squares_as_input: bool
    """the statistics are taken in the input's dtype, whatever that is"""
    largest: float
    """largest |x|; 0 where stored statistics normalize and the output is finite"""
    square: float
    """largest x^2; 0 where stored statistics normalize"""
    sum_of_squares: float
    """largest sum of squares over a statistic set; 0 where stored statistics normalize or it could not be told"""
    set_size: int
    working_max: float
    """largest number of the working dtype"""
    broken: bool
    """the input is finite and the output is not"""
    sums: bool
    """the sum of squares itself is held in the working dtype (l2), not only their mean"""

    @property
    def squares(self) -> float:
        """The largest number that the working dtype must hold on the way to the denominator."""
        return self.sum_of_squares if self.sums else self.square


class RangeOfActivations(Probe):
    """site name -> ``Ranges``."""

    name = "ranges"
    runs = ("eval", "batch")

    def start(self, subject: Subject) -> str | None:
        self.found: dict[str, Ranges] = {}
        return None

    def observe(self, event: Event) -> None:
        news = event.run == "eval" or event.mode == "batch"
        if event.index >= CALLS or not news or not event.input.is_floating_point() or not event.input.numel():
            return
        seen = _ranges(event)
        before = self.found.get(event.site.name)
        if before is None or (seen.broken, seen.square, seen.largest) > (
            before.broken,
            before.square,
            before.largest,
        ):
            self.found[event.site.name] = seen

    def finish(self, subject: Subject) -> dict[str, Ranges]:
        return self.found


def _ranges(event: Event) -> Ranges:
    x = event.input.detach()
    squared = event.mode in ("batch", "input")
    finite = _finite(event.output)
    # Where stored statistics normalize, the size of the input matters only to explain an output that is not finite.
    largest = max(abs(float(x.amax())), abs(float(x.amin()))) if squared or not finite else 0.0
    working = working_dtype(event.spec, x.dtype)
    square = total = 0.0
    size = 0
    if squared:
        sets = sets_of(event)
        square = largest**2
        if not isinstance(sets, str) and sets.finite.any():
            size = sets.size
            total = float(np.max(np.where(sets.finite, sets.variance + sets.mean**2, 0.0))) * size
    return Ranges(
        run=event.run,
        mode=event.mode,
        dtype=_name(x.dtype),
        working=_name(working),
        squares_as_input=working == x.dtype and working_dtype(event.spec, torch.float16) == torch.float16,
        largest=largest,
        square=square,
        sum_of_squares=total,
        set_size=size,
        working_max=float(torch.finfo(working).max),
        broken=bool(np.isfinite(largest)) and not finite,
        sums=event.spec.scale == "l2",
    )


def _finite(y: torch.Tensor) -> bool:
    if not y.is_floating_point() or not y.numel():
        return True
    total = float(y.sum(dtype=torch.promote_types(y.dtype, torch.float32)))
    # A finite sum holds neither NaN nor infinity; an infinite one may have overflowed by itself.
    return bool(np.isfinite(total)) or bool(torch.isfinite(y).all())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
