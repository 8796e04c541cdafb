"""How many compute threads the next step gets: hill climbing on measured step times.

On a quiet machine a thread for each core is fastest for most models. Beside a busy process it is the slowest choice:
every parallel region waits for its last thread, and a thread whose core is taken runs some milliseconds later. Small
models are fastest with one thread anyway. Which case holds changes while the worker runs.

Steps of similar size share a `_Climber`. It measures the current number of threads over a window of steps, then tries
another number over another window, the nearest first, and moves there if that one is clearly faster. A trial that was
slower is paid from a budget that grows by a fixed share of the step time: exploration costs about that share at most.
With all cores in use the share is small: a neighbour that begins then makes steps much slower, which starts a trial.
"""

from __future__ import annotations

from dataclasses import dataclass, field

EXPLORED_SHARE = 0.01
"""Share of the step time that slower trials may cost."""
EXPLORED_SHARE_OF_ALL_CORES = 0.002
"""The same while all cores are in use."""

_WINDOW_SECONDS = 0.1  # many time slices of the kernel, and a period of a CPU quota
_WINDOW_STEPS = 4
_LONG_WINDOW_SECONDS = 1.0  # enough with fewer steps
_GAIN = 0.95  # a trial wins below this share of the current mean
_SURGE = 1.5  # a window slower by this factor than the one before: something else runs now
_COLLAPSE = 3.0  # slower by this factor: a single step as long as a window is enough to see it
_MOST_EXCESS_SECONDS = 0.03  # a trial ends early when it has cost this much, or a whole step
_LEAST_CHARGE_SECONDS = 0.01  # trials without a winner are at least a second apart
_FIRST_CHARGE_SECONDS = 0.02  # at most, of a first slow trial: it may have been chance
_MOST_DEBT_SECONDS = 0.3
_LONG_STEP_TOKENS = 32  # from here on a first step begins with all cores: of a large model it may take a minute on one


class ThreadPolicy:
    """Chooses a number of threads from 1 to `most` for each step. Pure: it reads no clock and starts no thread."""

    def __init__(self, most: int) -> None:
        self._rungs = rungs(most)
        self._climbers: dict[int, _Climber] = {}

    def choose(self, num_tokens: int) -> int:
        """The number of threads for a step of so many tokens."""
        climber = self._climber(num_tokens)
        return self._rungs[climber.rung if climber.trial is None else climber.trial]

    def observe(self, num_tokens: int, seconds: float) -> None:
        """The step that was last chosen for took so long."""
        size = num_tokens.bit_length()
        moved = self._climber(num_tokens).observe(seconds, len(self._rungs))
        for other_size, other in self._climbers.items():
            if moved and other_size != size:
                other.expect(moved)

    def limit(self, most: int) -> None:
        """Choose from 1 to `most` from now on. Measurements of other limits are forgotten."""
        if self._rungs[-1] != most:
            self._rungs = rungs(most)
            self._climbers.clear()

    def _climber(self, num_tokens: int) -> _Climber:
        size = num_tokens.bit_length()
        if size not in self._climbers:
            known = [other for other, climber in self._climbers.items() if not climber.begins]
            if known:
                nearest = self._climbers[min(known, key=lambda other: abs(other - size))]
                self._climbers[size] = _Climber(nearest.rung, begins=False)
            else:
                self._climbers[size] = _Climber(0 if num_tokens < _LONG_STEP_TOKENS else len(self._rungs) - 1)
        return self._climbers[size]


def rungs(most: int) -> list[int]:
    """Numbers of threads to choose from, ascending: dense near 1 and near `most`, sparse between.

    With k of `most` cores busy, the best number is about `most` - k; a rung is at it or not far below.
    """
    sparse = {factor << exponent for factor in (1, 3) for exponent in range(most.bit_length())}
    return sorted({most, *(n for n in sparse if n < most), *(most - n for n in sparse if n < most)})


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
    def full(self) -> bool:
        enough = self.steps >= _WINDOW_STEPS and self.seconds - self.longest_seconds >= _WINDOW_SECONDS
        return enough or self.seconds >= _LONG_WINDOW_SECONDS

    @property
    def mean(self) -> float:
        """Of a step, without the longest one: a single slow step says nothing about the next ones."""
        return (self.seconds - self.longest_seconds) / (self.steps - 1) if self.steps > 1 else self.seconds


@dataclass(slots=True)
class _Climber:
    """The search for one size of step."""

    rung: int
    trial: int | None = None
    """The rung that is being tried."""
    direction: int = -1
    """In which a neighbouring rung is tried first."""
    num_tried: int = 0
    """Trials in a row without a winner: the next one is further away, because the nearest rung may be as slow."""
    doubted: bool = False
    """Steps with more threads have been slow lately. Before that a slow trial is charged little."""
    budget_seconds: float = 0.0
    level_seconds: float = 0.0
    """Mean step time of the last whole window on the current rung; 0: not measured yet."""
    begins: bool = True
    """Nothing has been tried yet."""
    window: _Window = field(default_factory=_Window)
    settling: bool = True
    """The next step is the first one on its rung. It may create threads and primitives, and is not judged."""

    def observe(self, seconds: float, num_rungs: int) -> int:
        """Account for a step. The direction in which the rung moved, 0 if it did not."""
        if self.trial is None:
            share = EXPLORED_SHARE_OF_ALL_CORES if self.rung == num_rungs - 1 else EXPLORED_SHARE
            self.budget_seconds = min(self.budget_seconds + share * seconds, 0.0)
        if self.settling:
            self.settling = False
            excess = seconds - self.level_seconds
            if self.trial is not None and self._collapsed(seconds):
                self._fail(excess)
            elif self.trial is not None:
                self.budget_seconds -= min(max(excess, 0.0), _MOST_EXCESS_SECONDS)
            return 0
        self.window.add(seconds)
        if self.trial is not None:
            return self._judge(self.trial, num_rungs)
        if self._collapsed(seconds):
            self._measure(seconds, num_rungs)
        elif self.window.full:
            self._measure(self.window.mean, num_rungs)
        return 0

    def expect(self, direction: int) -> None:
        """Steps of another size became faster in this direction: try the same soon."""
        self.direction, self.num_tried = direction, 0
        self.budget_seconds = max(self.budget_seconds, -_LEAST_CHARGE_SECONDS / 2)

    def _collapsed(self, seconds: float) -> bool:
        return seconds > max(_WINDOW_SECONDS, _COLLAPSE * self.level_seconds) and self.level_seconds > 0

    def _measure(self, level_seconds: float, num_rungs: int) -> None:
        """Steps on the current rung take so long now."""
        before, self.level_seconds, self.window = self.level_seconds, level_seconds, _Window()
        if before and level_seconds > before * _SURGE and self.rung > 0:
            self.direction, self.num_tried, self.budget_seconds, self.doubted = -1, 0, 0.0, True
        if self.budget_seconds >= 0.0:
            self._try(num_rungs)

    def _try(self, num_rungs: int) -> None:
        others = [rung for rung in range(num_rungs) if rung != self.rung]
        if others:
            if self.begins:  # a worker starts with one thread; on a quiet machine all of them are usually best
                others = [others[-1]]
            others.sort(key=lambda rung: (abs(rung - self.rung), (self.rung - rung) * self.direction))
            self.trial, self.settling, self.begins = others[self.num_tried % len(others)], True, False
            self.num_tried += 1

    def _judge(self, trial: int, num_rungs: int) -> int:
        excess = self.window.seconds - self.window.steps * self.level_seconds
        too_slow = excess > max(_MOST_EXCESS_SECONDS, self.level_seconds)
        if not too_slow and not self.window.full:
            return 0
        if too_slow or self.window.mean >= self.level_seconds * _GAIN:
            self._fail(excess)
            return 0
        self.direction = 1 if trial > self.rung else -1
        self.rung, self.level_seconds, self.num_tried = trial, self.window.mean, 0
        self.trial, self.window, self.settling = None, _Window(), False
        self.doubted &= self.direction < 0
        if 0 <= trial + self.direction < num_rungs:
            self._try(num_rungs)  # on, as long as it gets faster
        else:
            self.budget_seconds -= _LEAST_CHARGE_SECONDS  # where it came from was slower just now
        return self.direction

    def _fail(self, excess: float) -> None:
        """End a trial that was not faster and had cost `excess` seconds."""
        most = _MOST_DEBT_SECONDS if self.doubted else _FIRST_CHARGE_SECONDS
        self.budget_seconds -= min(max(excess, _LEAST_CHARGE_SECONDS), most)
        self.budget_seconds = max(self.budget_seconds, -_MOST_DEBT_SECONDS)
        self.doubted = True
        self.trial, self.window, self.settling = None, _Window(), True
