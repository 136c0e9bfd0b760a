"""Verdicts, each from numbers by a stated rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal, TypeAlias

from normscope.studies.lab.intervals import Interval

Word = Literal["holds", "does not hold", "undecided"]
Number: TypeAlias = float | Interval


@dataclass(frozen=True)
class Verdict:
    """What was decided, by which rule, from which numbers. Made by the functions below, never by hand."""

    verdict: Word
    rule: str
    numbers: Mapping[str, Number]


def above(found: Interval, margin: float = 0.0) -> Verdict:
    """Holds where the whole interval is above ``margin``, does not hold where it is at or below, else undecided.

    >>> above(Interval(2.0, 1.0, 3.0, n=5)).verdict, above(Interval(2.0, 1.0, 3.0, n=5), margin=1.5).verdict
    ('holds', 'undecided')
    """
    word = _word(found.low > margin, found.high <= margin)
    return Verdict(word, f"the whole interval is above {margin:g}", {"value": found})


def below(found: Interval, margin: float = 0.0) -> Verdict:
    """Holds where the whole interval is below ``margin``, does not hold where it is at or above, else undecided.

    >>> below(Interval(-2.0, -3.0, -1.0, n=5)).verdict
    'holds'
    """
    word = _word(found.high < margin, found.low >= margin)
    return Verdict(word, f"the whole interval is below {margin:g}", {"value": found})


def within(found: Interval, margin: float) -> Verdict:
    """Holds where the whole interval is nearer to 0 than ``margin`` (alike), does not hold where it is farther.

    >>> within(Interval(0.1, -0.2, 0.3, n=5), 0.5).verdict, within(Interval(2.0, 1.0, 3.0, n=5), 0.5).verdict
    ('holds', 'does not hold')
    """
    word = _word(-margin < found.low and found.high < margin, found.low >= margin or found.high <= -margin)
    return Verdict(word, f"the whole interval is between -{margin:g} and {margin:g}", {"value": found})


def at_most(values: Sequence[float], bound: float) -> Verdict:
    """Holds where not one value is above ``bound``: for errors that have one. Undecided without a value, or with NaN.

    >>> at_most([1e-9, 2e-9], 1e-8).verdict, at_most([1.0, 2.0], 1.5).numbers
    ('holds', {'largest': 2.0, 'bound': 1.5, 'of': 2})
    """
    known = len(values) > 0 and not any(isnan(value) for value in values)
    largest = max(values) if known else float("nan")
    word = _word(known and largest <= bound, known and largest > bound)
    numbers = {"largest": float(largest), "bound": bound, "of": len(values)}
    return Verdict(word, f"{_each(values)} is at most {bound:g}", numbers)


def at_least(values: Sequence[float], bound: float) -> Verdict:
    """Holds where not one value is below ``bound``. Undecided without a value, or with NaN.

    >>> at_least([1.0, 2.0], 1.5).numbers
    {'smallest': 1.0, 'bound': 1.5, 'of': 2}
    """
    known = len(values) > 0 and not any(isnan(value) for value in values)
    smallest = min(values) if known else float("nan")
    word = _word(known and smallest >= bound, known and smallest < bound)
    numbers = {"smallest": float(smallest), "bound": bound, "of": len(values)}
    return Verdict(word, f"{_each(values)} is at least {bound:g}", numbers)


def all_of(**parts: Verdict) -> Verdict:
    """Holds where all do, does not hold where one does not, else undecided.

    >>> both = all_of(low=at_most([1.0], 2.0), high=at_most([3.0], 2.0))
    >>> both.verdict, both.numbers["high: largest"]
    ('does not hold', 3.0)
    """
    parts = {name.replace("_", " "): part for name, part in parts.items()}
    words = [part.verdict for part in parts.values()]
    word = _word(bool(words) and all(w == "holds" for w in words), "does not hold" in words)
    rule = "; ".join(f"{name}: {part.rule}" for name, part in parts.items())
    numbers = {f"{name}: {key}": value for name, part in parts.items() for key, value in part.numbers.items()}
    return Verdict(word, rule, numbers)


def _each(values: Sequence[float]) -> str:
    return "the value" if len(values) == 1 else f"each of the {len(values)} values"


def _word(holds: bool, fails: bool) -> Word:
    return "holds" if holds else "does not hold" if fails else "undecided"
