"""Timing contenders against each other on a machine that others use too.

All contenders run in one process, one block of calls each per round, in an order that rotates from round to round. One
of them is a copy of the same bytes: it needs nothing but memory, so a round in which it is slow was disturbed from
outside and is dropped. What is left is summed up by medians. Before that, a short block in which the scheduler gave
the core to somebody else is timed again: one such pause is longer than the block.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

Clock = Callable[[], float]
Call = Callable[[], object]

COPY = "copy"
"""the contender whose speed tells whether a round was disturbed"""
DISTURBED = 1.3
"""times the best copy: a round with a slower one is dropped"""
LONG, COLD = 5e-4, 5e-2
"""seconds: a longer call is a block by itself / leaves nothing of use in the caches"""
BLOCK_CALLS, BLOCK_SECONDS = 40, 2e-4
"""the least a block of short calls holds; no more, for a long block is more often interrupted than a short one"""
TRIALS = 5
"""single calls from which the length of one is judged, by the shortest: any other may have been held up"""
SLICE, ATTEMPTS = 4e-3, 8
"""seconds that a scheduler lets one program run, about: a shorter block can be had in one piece / tries at that"""
ROUNDS, PATIENCE = 7, 3
"""rounds that are kept at least / times the wanted seconds after which fewer must do"""
FEWEST, SLOW = 3, 40.0
"""rounds that must do after so many seconds of one measurement: some contenders take seconds a call"""


def interruptions() -> int:
    """How often a thread of this process had to give its core to another program; 0 where the system does not say."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass(frozen=True)
class Timing:
    """Seconds a call of each contender, by the median over the ``kept`` of ``rounds`` rounds."""

    seconds: dict[str, float]
    rounds: int
    kept: int


def alternate(
    contenders: Mapping[str, Call],
    *,
    seconds: float,
    clock: Clock = time.perf_counter,
    interrupted: Callable[[], int] = interruptions,
) -> Timing:
    """Time all contenders for about ``seconds``, longer where too many rounds are disturbed.

    A round is one block of each contender. Before a block of short calls its contender is called once untimed, so that
    it finds the caches as it leaves them itself and not as its predecessor did.

    Raises:
        ValueError: no contender is called ``copy``.
    """
    if COPY not in contenders:
        raise ValueError(f"one contender must be {COPY!r}, got {', '.join(contenders) or 'none'}")
    names = list(contenders)
    rounds: list[dict[str, float]] = []
    with _no_collection():
        blocks = {name: _Block.of(contenders[name], clock, interrupted) for name in names}
        begin = clock()
        while not _enough(rounds, clock() - begin, seconds):
            rounds.append({name: blocks[name].seconds() for name in rotated(names, len(rounds))})
    kept = undisturbed(rounds)
    return Timing(
        {name: statistics.median(r[name] for r in kept) for name in names}, rounds=len(rounds), kept=len(kept)
    )


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of one round.

    >>> [" ".join(rotated("ABCD", turn)) for turn in range(3)]
    ['A B C D', 'B C D A', 'C D A B']
    """
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def undisturbed(rounds: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The rounds whose copy took at most 1.3 times the shortest."""
    best = min(r[COPY] for r in rounds)
    return [r for r in rounds if r[COPY] <= DISTURBED * best]


def _enough(rounds: Sequence[Mapping[str, float]], spent: float, wanted: float) -> bool:
    if len(rounds) >= FEWEST and spent >= max(SLOW, PATIENCE * wanted):
        return True
    if len(rounds) < ROUNDS or spent < wanted:
        return False
    return spent >= PATIENCE * wanted or len(undisturbed(rounds)) >= ROUNDS


@dataclass(frozen=True)
class _Block:
    """How one contender is timed: ``calls`` in a row, after an untimed one where ``warm``; ``whole`` or timed again."""

    call: Call
    calls: int
    warm: bool
    whole: bool
    clock: Clock
    interrupted: Callable[[], int]

    @classmethod
    def of(cls, call: Call, clock: Clock, interrupted: Callable[[], int]) -> _Block:
        call()  # the first may load or compile something
        took, spent = math.inf, 0.0
        for _ in range(TRIALS):
            begin = clock()
            call()
            last = clock() - begin
            took, spent = min(took, last), spent + last
            if spent > COLD:
                break
        took = max(took, 1e-9)  # a clock may stand still
        # In one slice with some room, or one contender would be cleaned of interruptions and a slower one not.
        most = math.floor(SLICE / 2 / took)
        calls = 1 if took >= LONG else min(most, max(BLOCK_CALLS, math.ceil(BLOCK_SECONDS / took)))
        return cls(call, calls, took < COLD, calls * took < SLICE, clock, interrupted)

    def seconds(self) -> float:
        """Of a call."""
        for _ in range(ATTEMPTS if self.whole else 1):
            if self.warm:
                self.call()
            before, begin = self.interrupted(), self.clock()
            for _ in range(self.calls):
                self.call()
            took = (self.clock() - begin) / self.calls
            if self.interrupted() == before:
                break
        return took


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is collected before, not in the middle of somebody's block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
