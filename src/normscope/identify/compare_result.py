"""What a comparison says: the same or not, every difference by field with its size, and an input that shows it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normscope.errors import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@dataclass(frozen=True)
class Half:
    """A mode in half precision."""

    dtype: str
    training: bool
    spacing: float
    """between 1 and the next number"""


HALVES = {
    "bfloat16": Half("bfloat16", False, 2.0**-7),
    "float16": Half("float16", False, 2.0**-10),
    "bfloat16 in training": Half("bfloat16", True, 2.0**-7),
}
MODES = ("train", "eval", "update", *HALVES)
WORDS = {
    "train": "output in training",
    "eval": "output in evaluation",
    "update": "stored statistics after a training step",
    "bfloat16": "output in bfloat16",
    "float16": "output in float16",
    "bfloat16 in training": "output in bfloat16, in training",
    "parameters": "only where the same stored numbers are loaded into both",
}
"""what a mode compares"""
DTYPE = "dtype of the output"
BY_FIELD = "by field, each alone and with parameters put in for it (together they may change less, or more)"


@dataclass(frozen=True)
class Difference:
    """One field of the specifications, or one stored tensor, in which the two differ."""

    field: str
    """a field of `NormSpec` (``eps``, ``eps_at``, ``running.momentum``), ``axes`` for the statistic sets, or the
    values of a tensor (``weight values``, ``running_mean values``); ``arithmetic in half precision`` for two that are
    one function of real numbers and round differently on the way, ``dtype of the output`` where one returns another
    dtype for an input of a half type, ``statistics in training`` where one normalizes by stored ones there too, and
    ``beyond the specifications`` where no field tells it"""
    a: str
    b: str
    size: float
    """largest change that this field alone makes, over the inputs tried, in the unit of the output (of the stored
    statistics for ``update``); NaN where it cannot be told alone"""
    mode: str
    """where it shows: ``train``, ``eval``, ``both`` (of these), ``update``, a mode of half precision (``bfloat16``,
    ``float16``, ``bfloat16 in training``), or ``parameters``: the functions are the same, and equal stored numbers mean
    different ones"""

    def __str__(self) -> str:
        change = "" if math.isnan(self.size) else f"; alone it changes {self._what} by up to {self.size:.3g}"
        return printable(f"{self.field}: {self.a} against {self.b}{change}")

    @property
    def _what(self) -> str:
        if self.mode == "both":
            return "the output"
        return (
            "the output, only where the same stored numbers are loaded into both,"
            if (self.mode == "parameters")
            else f"the {WORDS[self.mode]}"
        )


@dataclass(frozen=True, eq=False)
class Counterexample:
    """An input on which the two differ, made as small and plain as it can be."""

    x: Array
    y_a: Array
    """what the first gives; for ``update`` the stored tensor after one training step"""
    y_b: Array
    mode: str
    """``train``, ``eval``, ``update``, ``bfloat16`` or ``float16`` (in evaluation), ``bfloat16 in training``: the input
    and all values are then numbers of that type"""
    quantity: str = "output"
    """``output``, ``running_mean`` or ``running_var``"""
    values_a: Mapping[str, Array] = field(default_factory=dict)
    """parameters and stored statistics put into the first for it; empty where it was taken as it is"""
    values_b: Mapping[str, Array] = field(default_factory=dict)

    @property
    def difference(self) -> float:
        """Largest difference of two elements; infinite where one is a number and the other is not."""
        return largest_difference(self.y_a, self.y_b)

    @property
    def place(self) -> tuple[int, ...] | None:
        """Index of the element that differs most; None where the shapes are different."""
        import numpy as np

        if self.y_a.shape != self.y_b.shape or not self.y_a.size:
            return None
        most = np.argmax(_apart(self.y_a, self.y_b))
        return tuple(int(n) for n in np.unravel_index(most, self.y_a.shape))

    def __str__(self) -> str:
        """Both outputs around the element that differs most, and the input there."""
        at = self.place
        lines = [f"{name} {_shown(y, at)}" for name, y in (("x", self.x), ("a", self.y_a), ("b", self.y_b))]
        for side, values in (("a", self.values_a), ("b", self.values_b)):
            if values:
                said = ", ".join(f"{name} {_shown(value, None)}" for name, value in values.items())
                lines.append(f"with {said} in {side}")
        return "\n".join(map(printable, lines))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Whether two normalizations are one function. ``bool`` is True only where that was decided.

    Attributes:
        same: True where all of `modes` are the same, which holds for the dtypes of `dtypes`; False where one is not,
            also bfloat16 alone (two that round in another order are one function of real numbers, and not
            interchangeable); None where it could not be decided (`notes` say why).
        differences: every difference by field, those that matter most first. Where `same` is True only those that
            are a convention of storage (``mode="parameters"``).
        counterexample: the input on which they differ most, made small; None where none was found.
        modes: what was compared -> same or not: ``train``, ``eval``, ``update`` (of stored statistics), and where both
            run there and are the same in full precision ``bfloat16``, ``float16``, ``bfloat16 in training``.
        largest: what was compared -> largest difference that was seen, over all inputs and the counterexample, with
            the values of the parameters that show it. No sum of the sizes of `differences`: each of these is the change
            that one field makes alone, with parameters that are put in for it, and several may cancel.
        notes: what else to know: conditions under which they would agree, what could not be compared.
        precision: of the modes that name no dtype: ``float64``, or ``float32`` where one of the two computes in it.
    """

    name_a: str
    name_b: str
    same: bool | None
    differences: tuple[Difference, ...] = ()
    counterexample: Counterexample | None = None
    modes: Mapping[str, bool | None] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    spec_a: Any = None
    spec_b: Any = None
    notes: tuple[str, ...] = ()
    precision: str = "float64"

    def __bool__(self) -> bool:
        return self.same is True

    @property
    def dtypes(self) -> dict[str, bool | None]:
        """dtype -> the same function there, or not, or undecided; a dtype that is not named was not compared."""
        found: dict[str, list[bool | None]] = {}
        for mode, same in self.modes.items():
            found.setdefault(HALVES[mode].dtype if mode in HALVES else self.precision, []).append(same)
        return {
            dtype: False if False in answers else None if None in answers else True
            for dtype, answers in found.items()
        }

    def __str__(self) -> str:
        verdict = {True: "the same function", False: "not the same function", None: "undecided"}[self.same]
        apart = [dtype for dtype, same in self.dtypes.items() if same is False]
        if apart and self.dtypes.get(self.precision) is True:
            fields = {d.field for d in self.differences if d.mode in HALVES}
            how = "with outputs of two dtypes" if fields == {DTYPE} else "rounded differently"
            verdict = f"the same function of real numbers, {how} in {' and '.join(apart)}"
        lines = [f"{self.name_a} and {self.name_b}: {verdict}"]
        lines += [f"  a: {self.spec_a or 'not known'}", f"  b: {self.spec_b or 'not known'}"]
        for mode, same in self.modes.items():
            said = {True: "the same", False: "different", None: "undecided"}[same]
            seen = f", by up to {self.largest[mode]:.3g}" if same is False and mode in self.largest else ""
            lines.append(f"  {WORDS[mode]}: {said}{seen}")
        if any(not math.isnan(difference.size) for difference in self.differences):
            lines.append(f"  {BY_FIELD}:")
        lines += [f"  - {difference}" for difference in self.differences]
        lines += [f"  note: {said}" for said in self.notes]
        if self.counterexample is not None:
            found = self.counterexample
            where = "" if found.place is None else f" at [{', '.join(map(str, found.place))}]"
            seen = f"{WORDS[found.mode]}, {found.quantity}, off by {found.difference:.3g}{where}"
            lines.append(f"  counterexample, made small ({seen})")
            lines += [f"    {line}" for line in str(found).splitlines()]
        return "\n".join(map(printable, lines))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; NaN and infinities as strings."""
        shown = self.counterexample
        return {
            "schema": 1,
            "a": self.name_a,
            "b": self.name_b,
            "same": self.same,
            "modes": dict(self.modes),
            "dtypes": self.dtypes,
            "largest": {mode: _plain(value) for mode, value in self.largest.items()},
            "spec_a": None if self.spec_a is None else self.spec_a.to_json(),
            "spec_b": None if self.spec_b is None else self.spec_b.to_json(),
            "differences": [
                {"field": d.field, "a": d.a, "b": d.b, "size": _plain(d.size), "mode": d.mode}
                for d in self.differences
            ],
            "counterexample": None
            if shown is None
            else {
                "mode": shown.mode,
                "quantity": shown.quantity,
                "difference": _plain(shown.difference),
                "x": _plain(shown.x.tolist()),
                "y_a": _plain(shown.y_a.tolist()),
                "y_b": _plain(shown.y_b.tolist()),
                "values_a": {name: _plain(value.tolist()) for name, value in shown.values_a.items()},
                "values_b": {name: _plain(value.tolist()) for name, value in shown.values_b.items()},
            },
            "notes": list(self.notes),
        }


def largest_difference(a: Array, b: Array) -> float:
    """Largest |a - b|; NaN beside NaN and equal infinities are no difference, NaN beside a number is infinite.

    >>> import numpy as np
    >>> largest_difference(np.array([1.0, np.nan]), np.array([1.5, np.nan]))
    0.5
    """
    return float(_apart(a, b).max(initial=0.0)) if a.shape == b.shape else math.inf


def _apart(a: Array, b: Array) -> Array:
    import numpy as np

    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.where(same, 0.0, np.abs(a - b))
    apart: Array = np.where(np.isnan(off), np.inf, off)
    return apart


def _shown(value: Array, at: tuple[int, ...] | None, most: int = 16, window: int = 6) -> str:
    """Small arrays in full; of larger ones the shape and the numbers around ``at``, with their indices, or the range.

    >>> import numpy as np
    >>> _shown(np.arange(40.0).reshape(2, 20), (1, 9))
    'of shape (2, 20), [1, 6:12]: 26, 27, 28, 29, 30, 31'
    """
    import numpy as np

    if value.size <= most:
        return np.array2string(value, separator=", ", threshold=most + 1).replace("\n", "")
    if at is None or len(at) != value.ndim or any(n >= size for n, size in zip(at, value.shape, strict=True)):
        return f"of shape {value.shape}: {float(value.min()):.6g} to {float(value.max()):.6g}"
    along = max(axis for axis, size in enumerate(value.shape) if size > 1)
    start = max(0, min(at[along] - window // 2, value.shape[along] - window))
    stop = min(start + window, value.shape[along])
    others = at[:along] + at[along + 1 :]
    numbers = np.moveaxis(value, along, -1)[others][start:stop]
    index = ", ".join(f"{start}:{stop}" if axis == along else str(n) for axis, n in enumerate(at))
    return f"of shape {value.shape}, [{index}]: {', '.join(f'{float(v):.6g}' for v in numbers)}"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
