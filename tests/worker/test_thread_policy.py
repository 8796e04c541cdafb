"""The choice of the number of compute threads, on simulated step times."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from lineclear.worker.cpu.thread_policy import ThreadPolicy, thread_counts

Cost = Callable[[int, random.Random], float]
"""Return the seconds of a step with this number of threads."""

_SLICE_SECONDS = 0.0042
"""For which a thread waits when its core is taken."""


def around(seconds: float, random_source: random.Random, spread: float = 0.04) -> float:
    return seconds * random_source.uniform(1 - spread, 1 + spread)


def large_quiet(threads: int, source: random.Random) -> float:
    return around(0.0122 if threads == 1 else 0.0085, source)


def large_beside_one(threads: int, source: random.Random) -> float:
    return around(0.0122, source) if threads == 1 else around(0.046, source, 0.5)


def small_quiet(threads: int, source: random.Random) -> float:
    return around(0.0005 if threads == 1 else 0.0008, source)


def small_beside_one(threads: int, source: random.Random) -> float:
    # Most steps with two threads are as fast as ever; some wait for a time slice.
    waits = threads > 1 and source.random() < 0.4
    return around(0.0005, source) + (_SLICE_SECONDS if waits else 0.0)


def small_beside_two(threads: int, source: random.Random) -> float:
    waits = source.random() < (0.1 if threads == 1 else 0.5)
    return around(0.0005, source) + (_SLICE_SECONDS if waits else 0.0)


class Drive:
    def __init__(self, policy: ThreadPolicy, seed: int = 1) -> None:
        self.policy, self.source = policy, random.Random(seed)

    def run(self, cost: Cost, seconds: float, num_tokens: int = 1) -> list[int]:
        chosen, spent = [], 0.0
        while spent < seconds:
            chosen.append(self.policy.choose(num_tokens))
            took = cost(chosen[-1], self.source)
            self.policy.observe(num_tokens, took)
            spent += took
        return chosen


def mean(cost: Cost, threads: int) -> float:
    source = random.Random(7)
    return sum(cost(threads, source) for _ in range(4000)) / 4000


def efficiency(cost: Cost, seconds: float, num_steps: int, most: int = 2) -> float:
    """The best fixed number's time for these steps, as a share of the time they took."""
    return num_steps * min(mean(cost, threads) for threads in range(1, most + 1)) / seconds


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("cost", "best"),
    [
        (large_quiet, 2),
        (large_beside_one, 1),
        (small_quiet, 1),
        (small_beside_one, 1),
        (small_beside_two, 1),
    ],
)
def test_converges_to_the_fastest_number(cost: Cost, best: int, seed: int) -> None:
    drive = Drive(ThreadPolicy(2), seed)
    drive.run(cost, 3.0)
    chosen = drive.run(cost, 30.0)
    assert Counter(chosen).most_common(1)[0][0] == best
    assert efficiency(cost, 30.0, len(chosen)) > 0.97  # with the noise of the simulated times


@pytest.mark.parametrize("seed", range(2))
def test_adapts_when_a_neighbour_starts_and_stops(seed: int) -> None:
    drive = Drive(ThreadPolicy(2), seed)
    drive.run(large_quiet, 10.0)
    for _ in range(3):
        drive.run(large_beside_one, 1.0)
        assert Counter(drive.run(large_beside_one, 10.0)).most_common(1)[0][0] == 1
        drive.run(large_quiet, 8.0)  # the last slow trial has to be paid off first
        assert Counter(drive.run(large_quiet, 10.0)).most_common(1)[0][0] == 2


def test_starts_with_one_thread() -> None:
    chosen = Drive(ThreadPolicy(16)).run(lambda threads, source: 0.02 if threads == 1 else 1.4, 20.0)
    assert sum(threads > 1 for threads in chosen) <= 2
    assert chosen[0] == 1


def test_first_long_step_uses_all_cores() -> None:
    """Of a large model it takes a minute with one thread."""
    policy = ThreadPolicy(16)
    assert policy.choose(256) == 16
    policy.observe(256, 3.0)
    assert policy.choose(1) == 1


def test_decodes_after_one_prompt_step_use_all_cores() -> None:
    policy = ThreadPolicy(16)
    policy.observe(256, 3.0)
    for _ in range(8):
        policy.observe(1, 0.5 / policy.choose(1))
    assert policy.choose(1) == 16


def test_idle_machine_uses_all_cores_within_half_a_second() -> None:
    assert Drive(ThreadPolicy(16)).run(of_sixteen_cores(0), 0.5)[-1] == 16


def settled_on_two() -> ThreadPolicy:
    """A policy for which two threads were faster: 8.5 ms a step instead of 12.2."""
    policy, seconds = ThreadPolicy(2), {1: 0.0122, 2: 0.0085}
    for _ in range(100):
        policy.observe(1, seconds[policy.choose(1)])
    assert policy.choose(1) == 2
    return policy


def test_stall_is_handled_after_one_step() -> None:
    policy = settled_on_two()
    policy.observe(1, 0.4)
    assert policy.choose(1) == 1


def test_moderately_slow_step_changes_nothing() -> None:
    policy = settled_on_two()
    policy.observe(1, 0.09)
    chosen = []
    for _ in range(40):
        chosen.append(policy.choose(1))
        policy.observe(1, 0.0085)
    assert set(chosen) == {2}


@pytest.mark.parametrize("slow_seconds", [0.2, 0.5, 1.5])
def test_recovers_after_a_single_stalled_step(slow_seconds: float) -> None:
    drive = Drive(settled_on_two())
    drive.policy.observe(1, slow_seconds)
    drive.run(large_quiet, 1.5)
    assert set(drive.run(large_quiet, 1.0)) == {2}


def test_disturbed_trial_is_repeated() -> None:
    slow_steps = 1

    def disturbed(threads: int, source: random.Random) -> float:
        nonlocal slow_steps
        if threads == 2 and slow_steps:
            slow_steps -= 1
            return 0.3
        return large_quiet(threads, source)

    drive = Drive(ThreadPolicy(2))
    drive.run(disturbed, 7.0)
    assert set(drive.run(disturbed, 0.5)) == {2}


@pytest.mark.parametrize("seed", range(3))
def test_exploration_on_all_cores_is_cheap(seed: int) -> None:
    drive = Drive(ThreadPolicy(2), seed)
    drive.run(large_quiet, 5.0)
    chosen = drive.run(large_quiet, 60.0)
    lost = sum(threads == 1 for threads in chosen) * (0.0122 - 0.0085)
    assert lost / 60.0 < 0.005


def test_equally_fast_numbers_do_not_alternate() -> None:
    chosen = Drive(ThreadPolicy(2)).run(lambda threads, source: around(0.01, source), 60.0)
    assert sum(a != b for a, b in pairwise(chosen)) < 2 * 60  # in and out of one trial a second


def of_sixteen_cores(busy: int) -> Cost:
    """One thread too many waits for a time slice in each step; the work is shared out evenly."""

    def cost(threads: int, source: random.Random) -> float:
        waits = 16 - busy < threads
        return around(0.002 + 0.08 / threads, source) * (1.8 if waits else 1.0)

    return cost


@pytest.mark.parametrize("busy", [0, 1, 3, 6, 12])
def test_many_cores_use_about_the_free_ones(busy: int) -> None:
    drive, cost = Drive(ThreadPolicy(16)), of_sixteen_cores(busy)
    drive.run(cost, 30.0)
    chosen = drive.run(cost, 60.0)
    assert efficiency(cost, 60.0, len(chosen), 16) > 0.8


def test_step_sizes_are_measured_separately() -> None:
    drive = Drive(ThreadPolicy(2))
    for _ in range(100):
        drive.run(small_quiet, 0.1, num_tokens=1)
        drive.run(large_quiet, 0.1, num_tokens=256)
    assert Counter(drive.run(small_quiet, 5.0, num_tokens=1)).most_common(1)[0][0] == 1
    assert Counter(drive.run(large_quiet, 5.0, num_tokens=256)).most_common(1)[0][0] == 2


def test_new_size_starts_at_the_nearest_sizes_number() -> None:
    drive = Drive(ThreadPolicy(2))
    drive.run(large_beside_one, 5.0, num_tokens=8)
    assert drive.policy.choose(100) == 1


def test_new_size_is_not_explored_from_one_thread() -> None:
    """A prompt of one step is nearer in size, and says nothing yet."""
    policy = ThreadPolicy(2)
    policy.observe(33, 0.02)
    drive = Drive(policy)
    drive.run(large_quiet, 5.0, num_tokens=1)
    assert policy.choose(8) == 2


def test_sizes_follow_each_other_after_a_change() -> None:
    drive = Drive(ThreadPolicy(2))
    for _ in range(20):
        drive.run(large_quiet, 0.5, num_tokens=1)
        drive.run(large_quiet, 0.5, num_tokens=64)
    drive.run(large_beside_one, 1.0, num_tokens=1)
    assert Counter(drive.run(large_beside_one, 4.0, num_tokens=64)).most_common(1)[0][0] == 1


def test_new_limit_applies_at_once() -> None:
    drive = Drive(ThreadPolicy(8))
    for limit in (8, 2, 8):
        drive.policy.limit(limit)
        assert max(drive.run(lambda threads, source: 0.08 / threads, 5.0)) == limit


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_small_machine_has_a_candidate_per_core(most: int) -> None:
    assert thread_counts(most) == list(range(1, most + 1))


@pytest.mark.parametrize("most", [16, 24, 32, 64, 128])
def test_large_machine_has_few_candidates(most: int) -> None:
    found = thread_counts(most)
    assert found[0] == 1
    assert found[-1] == most
    assert len(found) <= 4 * most.bit_length()
    assert all(max(rung for rung in found if rung <= wanted) >= 0.66 * wanted for wanted in range(1, most + 1))
