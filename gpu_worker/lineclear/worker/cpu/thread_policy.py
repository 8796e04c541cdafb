"""Chooses the number of compute threads for each step, by hill climbing on measured step times.

On an idle machine one thread per core is fastest for most models. Beside a busy process it is slowest: every parallel
region waits for its last thread, and a thread whose core is taken runs milliseconds later. Small models are fastest
with one thread. The best number changes while the worker runs.

Steps of similar size share a `_HillClimber`. It measures the current number of threads over a window of steps, then
tries another number, the nearest first, and moves there if that one is clearly faster. A slower trial is charged to a
budget that grows by a fixed share of the step time, so exploration costs about that share at most. With all cores in
use the share is smaller: a new busy neighbour slows steps down so much that this alone starts a trial.
"""

from __future__ import annotations

from dataclasses import dataclass, field

EXPLORED_SHARE = 0.01
"""Share of the step time that slower trials may cost."""
EXPLORED_SHARE_OF_ALL_CORES = 0.002
"""The same share while all cores are in use."""

_WINDOW_SECONDS = 0.1  # many time slices of the kernel; one period of a CPU quota
_WINDOW_STEPS = 4
_LONG_WINDOW_SECONDS = 1.0  # ends a window with fewer steps
_GAIN = 0.95  # a trial wins if its mean is below this share of the current mean
_SLOWDOWN = 1.5  # a window slower than the previous one by this factor: another process is running
_STALL = 3.0  # slower by this factor: one step as long as a window suffices as evidence
_MAX_EXCESS_SECONDS = 0.03  # a trial ends early after costing this much, or one whole step
_MIN_CHARGE_SECONDS = 0.01  # keeps failed trials at least a second apart
_FIRST_CHARGE_SECONDS = 0.02  # largest charge of a first slow trial, which may be chance
_MAX_DEBT_SECONDS = 0.3
_LONG_STEP_TOKENS = 32  # first steps from this size on use all cores: with one, a large model may take a minute


class ThreadPolicy:
    """Chooses from 1 to `max_threads` threads for each step. Pure: it reads no clock and sets no threads."""

    def __init__(self, max_threads: int) -> None:
        self._counts = thread_counts(max_threads)
        self._climbers: dict[int, _HillClimber] = {}

    def choose(self, num_tokens: int) -> int:
        """Return the number of threads for a step of `num_tokens`."""
        climber = self._climber(num_tokens)
        return self._counts[climber.index if climber.trial is None else climber.trial]

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of the last chosen step."""
        size = num_tokens.bit_length()
        moved = self._climber(num_tokens).observe(seconds, len(self._counts))
        for other_size, other in self._climbers.items():
            if moved and other_size != size:
                other.expect(moved)

    def limit(self, max_threads: int) -> None:
        """Choose from 1 to `max_threads` from now on. A changed limit discards all measurements."""
        if self._counts[-1] != max_threads:
            self._counts = thread_counts(max_threads)
            self._climbers.clear()

    def _climber(self, num_tokens: int) -> _HillClimber:
        size = num_tokens.bit_length()
        if size not in self._climbers:
            measured = [other for other, climber in self._climbers.items() if not climber.is_new]
            if measured:
                nearest = self._climbers[min(measured, key=lambda other: abs(other - size))]
                self._climbers[size] = _HillClimber(nearest.index, is_new=False)
            else:
                self._climbers[size] = _HillClimber(0 if num_tokens < _LONG_STEP_TOKENS else len(self._counts) - 1)
        return self._climbers[size]


def thread_counts(max_threads: int) -> list[int]:
    """Return candidate numbers of threads, ascending: dense near 1 and near `max_threads`, sparse between.

    With k cores busy, the best number is about `max_threads` - k; a candidate equals it or is slightly below.
    """
    sparse = {factor << exponent for factor in (1, 3) for exponent in range(max_threads.bit_length())}
    return sorted(
        {max_threads, *(n for n in sparse if n < max_threads), *(max_threads - n for n in sparse if n < max_threads)}
    )


@dataclass(slots=True)
class _Window:
    seconds: float = 0.0
    steps: int = 0
    longest_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.steps += 1
        self.longest_seconds = max(self.longest_seconds, seconds)

    @property
    def is_full(self) -> bool:
        enough = self.steps >= _WINDOW_STEPS and self.seconds - self.longest_seconds >= _WINDOW_SECONDS
        return enough or self.seconds >= _LONG_WINDOW_SECONDS

    @property
    def mean(self) -> float:
        """Mean step time without the longest step: a single slow step does not predict the next ones."""
        return (self.seconds - self.longest_seconds) / (self.steps - 1) if self.steps > 1 else self.seconds


@dataclass(slots=True)
class _HillClimber:
    """Search state for one size of steps."""

    index: int
    """Index of the current candidate."""
    trial: int | None = None
    """Index of the candidate on trial."""
    direction: int = -1
    """Which neighbour is tried first."""
    num_tried: int = 0
    """Consecutive failed trials. The next trial is further away, because the nearest candidate may be as slow."""
    was_slow: bool = False
    """Steps with more threads were slow recently. Before that, a slow trial is charged little."""
    budget_seconds: float = 0.0
    mean_seconds: float = 0.0
    """Mean step time of the last full window at the current index; 0: not measured."""
    is_new: bool = True
    """No trial has started yet."""
    window: _Window = field(default_factory=_Window)
    is_first_step: bool = True
    """The next step is the first at its index. It may create threads and oneDNN primitives, so it is not measured."""

    def observe(self, seconds: float, num_counts: int) -> int:
        """Record a step. Returns the direction in which the index moved, or 0."""
        if self.trial is None:
            share = EXPLORED_SHARE_OF_ALL_CORES if self.index == num_counts - 1 else EXPLORED_SHARE
            self.budget_seconds = min(self.budget_seconds + share * seconds, 0.0)
        if self.is_first_step:
            self.is_first_step = False
            excess = seconds - self.mean_seconds
            if self.trial is not None and self._is_stalled(seconds):
                self._reject_trial(excess)
            elif self.trial is not None:
                self.budget_seconds -= min(max(excess, 0.0), _MAX_EXCESS_SECONDS)
            return 0
        self.window.add(seconds)
        if self.trial is not None:
            return self._judge(self.trial, num_counts)
        if self._is_stalled(seconds):
            self._finish_window(seconds, num_counts)
        elif self.window.is_full:
            self._finish_window(self.window.mean, num_counts)
        return 0

    def expect(self, direction: int) -> None:
        """Try this direction soon, because steps of another size became faster in it."""
        self.direction, self.num_tried = direction, 0
        self.budget_seconds = max(self.budget_seconds, -_MIN_CHARGE_SECONDS / 2)

    def _is_stalled(self, seconds: float) -> bool:
        return seconds > max(_WINDOW_SECONDS, _STALL * self.mean_seconds) and self.mean_seconds > 0

    def _finish_window(self, mean_seconds: float, num_counts: int) -> None:
        """End a window at the current index with this mean."""
        before, self.mean_seconds, self.window = self.mean_seconds, mean_seconds, _Window()
        if before and mean_seconds > before * _SLOWDOWN and self.index > 0:
            self.direction, self.num_tried, self.budget_seconds, self.was_slow = -1, 0, 0.0, True
        if self.budget_seconds >= 0.0:
            self._start_trial(num_counts)

    def _start_trial(self, num_counts: int) -> None:
        others = [index for index in range(num_counts) if index != self.index]
        if others:
            if self.is_new:  # starts at one thread; on an idle machine all cores are usually best
                others = [others[-1]]
            others.sort(key=lambda index: (abs(index - self.index), (self.index - index) * self.direction))
            self.trial, self.is_first_step, self.is_new = others[self.num_tried % len(others)], True, False
            self.num_tried += 1

    def _judge(self, trial: int, num_counts: int) -> int:
        excess = self.window.seconds - self.window.steps * self.mean_seconds
        too_slow = excess > max(_MAX_EXCESS_SECONDS, self.mean_seconds)
        if not too_slow and not self.window.is_full:
            return 0
        if too_slow or self.window.mean >= self.mean_seconds * _GAIN:
            self._reject_trial(excess)
            return 0
        self.direction = 1 if trial > self.index else -1
        self.index, self.mean_seconds, self.num_tried = trial, self.window.mean, 0
        self.trial, self.window, self.is_first_step = None, _Window(), False
        self.was_slow &= self.direction < 0
        if 0 <= trial + self.direction < num_counts:
            self._start_trial(num_counts)  # continue in the direction of the gain
        else:
            self.budget_seconds -= _MIN_CHARGE_SECONDS  # the previous index was slower just now
        return self.direction

    def _reject_trial(self, excess: float) -> None:
        """End a trial that was not faster and charge its `excess` seconds."""
        max_threads = _MAX_DEBT_SECONDS if self.was_slow else _FIRST_CHARGE_SECONDS
        self.budget_seconds -= min(max(excess, _MIN_CHARGE_SECONDS), max_threads)
        self.budget_seconds = max(self.budget_seconds, -_MAX_DEBT_SECONDS)
        self.was_slow = True
        self.trial, self.window, self.is_first_step = None, _Window(), True
