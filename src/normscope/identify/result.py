"""What identification answers: a specification with parameters, a fixed affine map, or why it is neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import printable
from normscope.spec import NormSpec

if TYPE_CHECKING:
    Array = NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """One conclusion, the probe that gave it, and the numbers that were measured."""

    conclusion: str
    """in words: ``"eps 1e-06 stands outside the root"``"""
    probe: str
    """what was done: ``"the input scaled by 2^-66 to 2^10"``"""
    numbers: Mapping[str, float | int | str | tuple[int, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        said = ", ".join(f"{name} {_number(value)}" for name, value in self.numbers.items())
        return printable(f"{self.conclusion} (from {self.probe}{': ' + said if said else ''})")


@dataclass(frozen=True)
class FixedAffine:
    """Every output is ``a * x + b`` of its own input: what a norm is where stored statistics normalize.

    Two numbers an element say nothing about the five that may stand behind them (weight, bias, mean, variance, eps).
    """

    a: Array
    """factor, with one axis for each name of ``axes``"""
    b: Array
    axes: str
    """the axes that a or b vary along, in the names of the layout; "" where both are one number"""

    def __str__(self) -> str:
        where = f"on {self.axes}" if self.axes else "the same for all elements"
        return f"y = a * x + b, {where}; a {_span(self.a)}, b {_span(self.b)}"


@dataclass(frozen=True)
class Identification:
    """The answer of `normscope.identify`; ``str`` is for reading.

    Exactly one of ``spec``, ``fixed`` and ``reason`` says what the callable is.
    """

    spec: NormSpec | None = None
    """the normalization that it is, as a function"""
    mode: str | None = None
    """which statistics normalize: ``"batch"``, ``"running"``, ``"frozen"`` or ``"input"``; None where that is open"""
    weight: Array | None = None
    """in the shape that ``spec.weight`` says; None where the specification has none"""
    bias: Array | None = None
    max_error: float | None = None
    """largest difference from the reference on fresh inputs, over the largest output of that input"""
    resolution: float | None = None
    """what a difference has to exceed to be told from rounding there; a smaller deviation may hide"""
    sizes: tuple[float, float] | None = None
    """the smallest and the largest input that it was verified on: what it does beyond was not looked at"""
    evidence: tuple[Evidence, ...] = ()
    equivalent: tuple[NormSpec, ...] = ()
    """other specifications of the same function on inputs of this shape, each with its own weight"""
    reason: str | None = None
    """why it is no normalization of this family: what contradicted it"""
    fixed: FixedAffine | None = None
    notes: tuple[str, ...] = ()
    """what could not be seen, and what should be known about the callable"""
    name: str = ""
    """the callable in words"""
    roundoff: float | None = None
    """unit roundoff of its arithmetic as the probes found it: float32 inside a function of float64 is seen"""
    half: Evidence | None = None
    """of a module: where it rounds on bfloat16 inputs, or why that was not seen"""

    def __bool__(self) -> bool:
        """Whether it is a normalization of the family."""
        return self.spec is not None

    def __str__(self) -> str:
        return self.text()

    def text(self, *, evidence: bool = True) -> str:
        """For reading; without the evidence what it is, its parameters, the error, equivalents and notes."""
        lines = [f"{self.name or 'the callable'}:"]
        if self.spec is not None:
            mode = f", mode {self.mode}" if self.mode else ""
            lines.append(f"  {self.spec}{mode}")
            for what, value in (("weight", self.weight), ("bias", self.bias)):
                if value is not None:
                    lines.append(f"  {what} {_span(value)}")
        elif self.fixed is not None:
            lines.append(f"  a fixed affine map, possibly a norm with stored statistics: {self.fixed}")
        else:
            lines.append(f"  not a normalization of this family: {self.reason}")
        if self.max_error is not None:
            told = "" if self.resolution is None else f"; below {self.resolution:.1e} it may be rounding"
            lines.append(f"  largest error on fresh inputs {self.max_error:.1e}{told}")
        if self.sizes is not None:
            lines.append(f"  verified for inputs of size {_power(self.sizes[0])} to {_power(self.sizes[1])}")
        for title, entries in (
            ("the same function", self.equivalent),
            ("because", self.evidence if evidence else ()),
        ):
            lines += [f"  {title}: {entry}" for entry in entries]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(map(printable, lines))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        arrays = {"weight": self.weight, "bias": self.bias}
        fixed = self.fixed
        return {
            "name": self.name,
            "spec": None if self.spec is None else self.spec.to_json(),
            "mode": self.mode,
            **{name: None if value is None else value.tolist() for name, value in arrays.items()},
            "max_error": self.max_error,
            "resolution": self.resolution,
            "sizes": self.sizes and list(self.sizes),
            "evidence": [
                {"conclusion": e.conclusion, "probe": e.probe, "numbers": dict(e.numbers)}
                for e in self.evidence
            ],
            "equivalent": [spec.to_json() for spec in self.equivalent],
            "reason": self.reason,
            "fixed": fixed and {"a": fixed.a.tolist(), "b": fixed.b.tolist(), "axes": fixed.axes},
            "notes": list(self.notes),
            "half": self.half and self.half.conclusion,
        }


def _power(size: float) -> str:
    """
    >>> _power(1e-6), _power(1e8)
    ('1e-6', '1e8')
    """
    digits, power = f"{size:.0e}".split("e")
    return f"{digits}e{int(power)}"


def _number(value: float | int | str | tuple[int, ...]) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _span(values: Array) -> str:
    """One number, or shape and range of several.

    >>> _span(np.array(0.5)), _span(np.array([1.0, 2.0]))
    ('0.5', 'of shape (2,), 1 to 2')
    """
    if values.size == 1:
        return f"{float(values.ravel()[0]):.6g}"
    low, high = (f"{float(v):.6g}" for v in (np.min(values), np.max(values)))
    return (
        f"of shape {values.shape}, {low} to {high}" if low != high else f"of shape {values.shape}, all {low}"
    )
