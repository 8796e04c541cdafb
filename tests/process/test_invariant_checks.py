"""How often the engine checks its core."""

from __future__ import annotations

import math

import pytest

from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.engine.engine_loop import InvariantChecks
from lineclear.scheduler.engine.engine_stats import EngineCounters

_STEP_SECONDS = 0.001


class Engine:
    """A clock that checks move forward by `check_seconds`, and the counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every_steps: int, check_seconds: float) -> None:
        self.now, self._check_seconds = 0.0, check_seconds
        self.counters = EngineCounters()
        core = Scheduler(CoreLimits(max_batch_size=4))
        self.checks = InvariantChecks(core, every_steps, self.counters, lambda: self.now)
        monkeypatch.setattr(invariants, "check", self._check)

    def _check(self, core: Scheduler, *, with_waiting_prompts: bool) -> None:
        self.now += self._check_seconds

    def run(self, num_steps: int, *, is_idle: bool) -> int:
        """Apply results, one in each millisecond; return the number of checks so far."""
        for _ in range(num_steps):
            self.checks.result_applied()
            self.checks.check_if_due(self.now, is_idle=is_idle)
            self.now += _STEP_SECONDS
        return self.counters.checks


@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.parametrize("check_seconds", [0.0005, 0.005, 0.1])
def test_checks_take_at_most_one_part_in_fifty_of_the_time(
    monkeypatch: pytest.MonkeyPatch, check_seconds: float, is_idle: bool
) -> None:
    """With a check after each step at most, a share of the time would grow with the pool without bound."""
    engine = Engine(monkeypatch, 1, check_seconds)
    count = engine.run(20_000, is_idle=is_idle)
    share = engine.counters.check_seconds / engine.now
    assert 0.018 < share < 0.021, share
    assert count > 1
    assert engine.counters.check_seconds == pytest.approx(count * check_seconds)


def test_cheap_checks_follow_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Engine(monkeypatch, 64, 0.0001).run(640, is_idle=False) == 10
    assert Engine(monkeypatch, 0, 0.0001).run(640, is_idle=True) == 0


def test_check_that_was_put_off_is_made_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 64, 0.01)
    assert engine.checks.next_check() == math.inf
    assert engine.run(1, is_idle=True) == 1
    assert engine.checks.next_check() == math.inf
    assert engine.run(1, is_idle=True) == 1
    assert engine.now < engine.checks.next_check() <= engine.now + 0.5
    engine.now = engine.checks.next_check()
    engine.checks.check_if_due(engine.now, is_idle=True)
    assert engine.counters.checks == 2
    assert engine.checks.next_check() == math.inf
