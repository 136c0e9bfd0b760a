"""The alternating timer, on a clock that only the contenders move."""

import gc

import pytest

from normscope.bench.timing import (
    ATTEMPTS,
    BLOCK_CALLS,
    FEWEST,
    ROUNDS,
    SLICE,
    alternate,
    rotated,
    undisturbed,
)


class Clock:
    """Seconds that pass while contenders run; ``calls`` says who ran, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contender(self, name, *costs):
        """Takes these seconds, call by call, the last for ever."""
        left = list(costs)

        def call() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def never() -> int:
    """No interruptions, whatever the machine that runs the test does."""
    return 0


def blocks(calls):
    """Who ran, each run of calls of one contender once."""
    return [name for at, name in enumerate(calls) if at == 0 or calls[at - 1] != name]


def test_median_of_long_calls():
    clock = Clock()
    # Seven calls before the first round: one that may compile, up to five trials that end after 0.05 s, so 1 + 1 here,
    # and none untimed before a block. Then rounds of 1, 9, 1, 9, 1, 1, 1 seconds: the median is 1.
    ours = clock.contender("ours", 1, 1, 1, 9, 1, 9, 1)
    copy = clock.contender("copy", 1)
    timing = alternate({"ours": ours, "copy": copy}, seconds=0.5, clock=clock, interrupted=never)
    assert timing.seconds == {"ours": 1, "copy": 1}
    assert (timing.rounds, timing.kept) == (ROUNDS, ROUNDS)


def test_a_disturbed_round_counts_for_nobody():
    clock = Clock()
    # In most rounds the machine is slow for both; what is reported is the quiet speed of both.
    slow, quiet = [2.0] * 4, [1.0] * 20
    copy = clock.contender("copy", 1, 1, *slow, *quiet)
    ours = clock.contender("ours", 2, 2, *(2 * s for s in slow), 2)
    timing = alternate({"copy": copy, "ours": ours}, seconds=0.5, clock=clock, interrupted=never)
    assert timing.seconds == {"copy": 1, "ours": 2}
    # It ended with the time it may spend, 3 * 0.5 s, long over, and not enough kept.
    assert (timing.rounds, timing.kept) == (ROUNDS, ROUNDS - 4)


def test_goes_on_until_enough_rounds_are_kept():
    clock = Clock()
    copy = clock.contender("copy", 1, 1, *[2.0] * 4, 1)
    timing = alternate({"copy": copy}, seconds=9, clock=clock, interrupted=never)
    assert timing.kept == ROUNDS
    assert timing.rounds == ROUNDS + 4


def test_disturbed_rule():
    rounds = [{"copy": 1.0}, {"copy": 1.3}, {"copy": 1.31}, {"copy": 5.0}]
    assert undisturbed(rounds) == [{"copy": 1.0}, {"copy": 1.3}]


def test_everyone_goes_first_in_turn():
    clock = Clock()
    names = ["a", "b", "copy"]
    alternate({name: clock.contender(name, 1) for name in names}, seconds=0.5, clock=clock, interrupted=never)
    timed = clock.calls[2 * len(names) :]  # after the call that may compile and the one that is judged by
    assert timed == [name for turn in range(ROUNDS) for name in rotated(names, turn)]
    assert [timed[turn * 3] for turn in range(3)] == names


def test_short_calls_run_in_blocks_after_one_that_warms_the_caches():
    clock = Clock()
    took = 1e-5
    timing = alternate(
        {n: clock.contender(n, took) for n in ("a", "copy")}, seconds=1e-9, clock=clock, interrupted=never
    )
    assert timing.seconds == pytest.approx({"a": took, "copy": took}, rel=1e-9)
    trials = 2 * 6
    assert len(clock.calls) - trials == ROUNDS * 2 * (1 + BLOCK_CALLS)
    assert blocks(clock.calls[trials:])[:4] == ["a", "copy", "a", "copy"]


def test_blocks_of_slower_calls_fit_into_one_slice_too():
    clock = Clock()
    took = 2e-4
    always = iter(range(10**6)).__next__
    alternate({"copy": clock.contender("copy", took)}, seconds=1e-9, clock=clock, interrupted=always)
    calls = (len(clock.calls) - 6) // (
        ROUNDS * ATTEMPTS
    ) - 1  # each block is tried again, after one untimed call
    assert calls == SLICE / 2 / took == 10


def test_one_trial_that_was_held_up_does_not_decide():
    clock = Clock()
    held_up = clock.contender("a", 1e-5, 1e-3, 1e-5)
    alternate(
        {"a": held_up, "copy": clock.contender("copy", 1e-5)}, seconds=1e-9, clock=clock, interrupted=never
    )
    assert clock.calls.count("a") == 6 + ROUNDS * (1 + BLOCK_CALLS)


def test_a_short_block_that_was_interrupted_is_timed_again():
    clock = Clock()
    steps = []  # one entry a question; the second block is interrupted once, between its two questions

    def interrupted() -> int:
        steps.append(1)
        return len(steps) >= 4

    contender = clock.contender("copy", 1e-5)
    alternate({"copy": contender}, seconds=1e-9, clock=clock, interrupted=interrupted)
    assert len(clock.calls) == 6 + (ROUNDS + 1) * (1 + BLOCK_CALLS)


def test_blocks_that_are_always_interrupted_count_in_the_end():
    clock = Clock()
    always = iter(range(10**6)).__next__
    timing = alternate({"copy": clock.contender("copy", 1e-5)}, seconds=1e-9, clock=clock, interrupted=always)
    assert timing.rounds == ROUNDS
    assert len(clock.calls) == 6 + ROUNDS * ATTEMPTS * (1 + BLOCK_CALLS)


def test_a_long_block_is_never_timed_again():
    clock = Clock()
    always = iter(range(10**6)).__next__
    alternate({"copy": clock.contender("copy", 1)}, seconds=0.5, clock=clock, interrupted=always)
    assert len(clock.calls) == 2 + ROUNDS


def test_of_calls_that_take_very_long_fewer_rounds_must_do():
    clock = Clock()
    costs = {"ours": 1, "eager": 20, "copy": 1}
    contenders = {name: clock.contender(name, cost) for name, cost in costs.items()}
    timing = alternate(contenders, seconds=0.5, clock=clock, interrupted=never)
    assert timing.seconds == costs
    assert timing.rounds == timing.kept == FEWEST


def test_garbage_waits():
    seen = []
    alternate({"copy": lambda: seen.append(gc.isenabled())}, seconds=1e-9)
    assert not any(seen)
    assert gc.isenabled()


def test_without_a_copy():
    with pytest.raises(ValueError, match=r"^one contender must be 'copy', got ours, eager$"):
        alternate({"ours": int, "eager": int}, seconds=1)
