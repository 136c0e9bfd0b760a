"""Intervals, verdicts and fingerprints: words follow from numbers, and a run from its code."""

from __future__ import annotations

import importlib
import sys
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normscope.errors import BadInput
from normscope.studies import Interval, Table, above, all_of, at_least, at_most, below, within
from normscope.studies.lab.figures import means
from normscope.studies.lab.fingerprint import code_fingerprint
from normscope.studies.lab.intervals import interval


def test_the_interval_is_that_of_all_resamples() -> None:
    """Of 3 values there are 27 resamples: the least and the largest mean have a chance of 1/27 = 3.7 % each, more than
    the 2.5 % cut off at either end."""
    values = [0.1, 0.4, 1.0]
    means = [np.mean(chosen) for chosen in product(values, repeat=3)]
    found = interval(values)
    assert (found.low, found.high) == (pytest.approx(min(means)), pytest.approx(max(means)))
    assert found == interval(values), "another interval in the same process"


def test_the_interval_covers_as_often_as_it_says() -> None:
    """20 normal values: a percentile bootstrap's 95 % are near 92.5 %; 300 trials have a standard error of 1.5 %."""
    generator = np.random.default_rng(0)
    drawn = [interval(generator.standard_normal(20).tolist()) for _ in range(300)]
    assert 0.925 - 0.06 < np.mean([i.low <= 0 <= i.high for i in drawn]) <= 0.925 + 0.06


def test_an_arm_without_the_measure_is_not_drawn() -> None:
    table = Table([{"arm": "a", "seed": s, "x": 1.0} for s in (0, 1)] + [{"arm": "b", "seed": 0, "y": 2.0}])
    assert [row["arm"] for row in means(table, "x", "arm")] == ["a"]


def test_pairs_take_off_what_a_seed_does_to_both_arms() -> None:
    hard = [0.0, 10.0, 20.0, 30.0]
    rows = [
        {"arm": arm, "seed": s, "error": h + (arm == "b") + 0.01 * s}
        for s, h in enumerate(hard)
        for arm in "ab"
    ]
    found = Table(rows[:-1]).difference("error", {"arm": "b"}, {"arm": "a"})  # the last seed has no pair
    assert (found.mean, found.low, found.high, found.n) == (
        pytest.approx(1),
        pytest.approx(1),
        pytest.approx(1),
        3,
    )
    with pytest.raises(BadInput) as unknown:
        Table(rows).interval("loss", arm="a")
    assert str(unknown.value) == "there is no column 'loss' in the results; there are arm, seed, error"


NOTHING = Interval(float("nan"), float("nan"), float("nan"), 1)


@pytest.mark.parametrize(
    ("verdict", "word"),
    [
        (above(Interval(1, 0.5, 2, 5)), "holds"),
        (above(Interval(1, -0.5, 2, 5)), "undecided"),
        (above(Interval(-1, -2, 0, 5)), "does not hold"),
        (above(NOTHING), "undecided"),
        (below(Interval(-1, -2, -0.5, 5)), "holds"),
        (below(Interval(1, 0, 2, 5)), "does not hold"),
        (within(Interval(0, -0.2, 0.4, 5), 0.5), "holds"),
        (within(Interval(0, -0.2, 0.6, 5), 0.5), "undecided"),
        (within(Interval(-1, -2, -0.6, 5), 0.5), "does not hold"),
        (within(NOTHING, 0.5), "undecided"),
        (at_most([], 1), "undecided"),
        (at_most([0.5, float("nan")], 1), "undecided"),
        (at_most([0.5, float("inf")], 1), "does not hold"),
        (at_least([1.0, 2.0], 1), "holds"),
        (all_of(), "undecided"),
        (all_of(a=at_most([1], 2), b=above(NOTHING)), "undecided"),
        (all_of(a=above(NOTHING), b=at_most([3], 2)), "does not hold"),
    ],
)
def test_the_word_follows(verdict: Any, word: str) -> None:
    assert verdict.verdict == word


CODE = '''
from normscope.studies import Decision, Measure, Study, at_most
from normscope.studies.lab.training import stream

WIDTH = 3
BOUND = 1.0


def helper(x):
    return x * WIDTH


def measure(cell, seed, scale):
    """What it does."""
    return {"value": helper(cell["a"])}


def bounded(table):
    return at_most(table.values("value"), BOUND)


STUDY = Study("s", "T", "Q", "I", "H", "M", (Measure("value"),), lambda scale: [{"a": 1}], measure,
              (Decision("d", "It is.", bounded),), "L")
'''


def test_only_what_measures_is_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    numbers = count()

    def fingerprint(old: str = "", new: str = "") -> str:
        assert old in CODE
        name = f"fingerprinted_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(CODE.replace(old, new) if old else CODE)
        importlib.invalidate_caches()
        try:
            return code_fingerprint(importlib.import_module(name).STUDY)
        finally:
            del sys.modules[name]

    same = fingerprint()
    assert fingerprint() == same
    assert fingerprint("BOUND = 1.0", "BOUND = 2.0") == same
    assert fingerprint('"""What it does."""', '"""Another word."""  # and a remark') == same
    assert fingerprint('"Q"', '"Another question?"') == same
    assert fingerprint("WIDTH = 3", "WIDTH = 4") != same
    assert fingerprint("return x * WIDTH", "return x + WIDTH") != same
    assert fingerprint('[{"a": 1}]', '[{"a": 2}]') != same
    # The shared loop counts for a study that trains, and only for it.
    assert fingerprint("return x * WIDTH", "stream(0, '')\n    return x * WIDTH") != fingerprint(
        "from normscope.studies.lab.training import stream", "def stream(*a): ..."
    )
