"""The recording of steps: in the worker's loop, and on the way between caller and worker."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from support.toy_runner import ToyRunner
from support.worker_peer import hello

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.step_profiles import StepProfiles
from lineclear.scheduler.engine.worker_session import Lost
from lineclear.wire.messages import Profile, Profiled, StepPlan
from lineclear.worker.loop import step_profiler
from lineclear.worker.loop.runner_interface import Runner
from lineclear.worker.loop.step_profiler import StepProfiler


class Recorder:
    def __init__(self, log: list[str], trace: bytes | None = b"trace") -> None:
        self._log, self._trace = log, trace

    def launch(self, plan: StepPlan) -> Any:
        self._log.append(f"recorded {plan.step}")

    def write(self) -> int:
        self._log.append("written")
        return len(self._log)

    def stop(self) -> bytes:
        self._log.append("stopped")
        if self._trace is None:
            raise OSError("no space")
        return self._trace


class Recorded(ToyRunner):
    """A runner that notes how its steps are launched."""

    def __init__(self, trace: bytes | None = b"trace") -> None:
        super().__init__()
        self.log: list[str] = []
        self._trace = trace

    def launch(self, plan: StepPlan) -> Any:
        self.log.append(f"plain {plan.step}")

    def recorder(self, runner: Runner) -> Recorder:
        assert runner is self
        if self._trace == b"":
            raise RuntimeError("a profiler is running")
        return Recorder(self.log, self._trace)


def profiler(runner: Recorded) -> tuple[StepProfiler, list[Profiled]]:
    sent: list[Profiled] = []
    return StepProfiler(runner, runner.recorder, sent.append), sent


def launch(profiler: StepProfiler, *steps: int) -> None:
    for step in steps:
        profiler.launch(StepPlan(1, step, ()))


def test_records_as_many_steps_as_asked() -> None:
    runner = Recorded()
    found, sent = profiler(runner)
    launch(found, 1)
    found.follow(Profile(1, 2))
    launch(found, 2, 3, 4)
    assert runner.log == ["plain 1", "recorded 2", "written", "recorded 3", "stopped", "plain 4"]
    found.follow(Profile(1, 0))  # over already
    assert sent == [Profiled(1, 2, b"trace")]


def test_ends_early_and_starts_anew() -> None:
    runner = Recorded()
    found, sent = profiler(runner)
    found.follow(Profile(1, 5))
    launch(found, 1)
    found.follow(Profile(1, 0))
    found.follow(Profile(1, 5))
    found.follow(Profile(1, 0))
    assert sent[0] == Profiled(1, 1, b"trace")
    assert (sent[1].trace, "no step ran" in sent[1].problem) == (b"", True)
    found.follow(Profile(1, 5))
    found.abandon()
    launch(found, 2)
    assert (len(sent), runner.log[-2:]) == (2, ["stopped", "plain 2"])


def test_ends_with_the_steps_so_far_before_the_trace_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profiler, "_FULL_TRACE_BYTES", 3)
    runner = Recorded()
    found, sent = profiler(runner)
    found.follow(Profile(1, 1000))
    launch(found, 1, 2, 3)
    assert runner.log == ["recorded 1", "written", "recorded 2", "written", "stopped", "plain 3"]
    assert sent == [Profiled(1, 2, b"trace")]


def test_a_trace_that_cannot_be_written_fails_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "write", Mock(side_effect=OSError("no space")))
    runner = Recorded()
    found, sent = profiler(runner)
    found.follow(Profile(1, 1000))
    launch(found, 1, 2)
    assert runner.log == ["recorded 1", "stopped", "plain 2"]
    assert [("cannot write the trace: OSError" in answer.problem, answer.trace) for answer in sent] == [(True, b"")]


@pytest.mark.parametrize(
    ("trace", "problem"),
    [(None, "cannot write the trace: OSError"), (b"", "cannot record steps: RuntimeError"), (b"12345", "limit is 4;")],
)
def test_problems_are_answers(trace: bytes | None, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profiler, "MAX_TRACE_BYTES", 4)
    found, sent = profiler(Recorded(trace))
    found.follow(Profile(1, 1))
    launch(found, 1, 2)
    assert [(answer.trace, problem in answer.problem) for answer in sent] == [(b"", True)]


class Link:
    def __init__(self) -> None:
        self.sent: list[Profile] = []
        self.is_full = False

    def send_control(self, message: Profile) -> bool:
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full


class Station:
    """StepProfiles with workers 0 and 1, which have the epochs 10 and 11."""

    def __init__(self) -> None:
        self.link = Link()
        joined = [SimpleNamespace(epoch=10 + index, index=index) for index in (0, 1)]
        workers: Any = SimpleNamespace(joined=joined, joined_epochs=frozenset((10, 11)))
        self.profiles = StepProfiles(cast("Any", self.link), workers)

    def start(self, num_steps: int = 5, worker: int = 0) -> Future[Profiled]:
        done: Future[Profiled] = Future()
        self.profiles.ask(num_steps, worker, done, 0.0)
        return done


def test_an_answer_reaches_its_caller() -> None:
    s = Station()
    done = s.start(worker=1)
    s.profiles.answered(Profiled(10, 9, b"of another epoch"), 0.0)
    assert "for another call" in s.start().result(0).problem
    s.profiles.answered(Profiled(11, 5, b"trace"), 0.0)
    assert (done.result(0).trace, s.link.sent) == (b"trace", [Profile(11, 5)])
    assert not s.start().done()


def test_callers_are_told_why_nothing_is_recorded() -> None:
    s = Station()
    assert "worker 2 is not joined" in s.start(worker=2).result(0).problem
    s.link.is_full = True
    assert "cannot be reached" in s.start().result(0).problem
    s.link.is_full = False
    done = s.start()
    s.profiles.worker_lost(Lost(hello(11), "killed", WorkerLoss.KILLED, False, False), 0.0)
    assert not done.done()
    s.profiles.worker_lost(Lost(hello(10), "killed", WorkerLoss.KILLED, False, False), 0.0)
    assert "the worker was lost: killed" in done.result(0).problem


def test_an_end_reaches_a_worker_that_has_no_room_for_it() -> None:
    s = Station()
    done = s.start()
    s.profiles.ask(0, 0, Future(), 0.0)  # of a call that does not record
    assert not s.profiles.ending
    s.profiles.ask(0, 0, done, 0.0)
    s.link.is_full = True
    s.profiles.send_end(0.0)
    assert s.profiles.ending
    s.link.is_full = False
    s.profiles.send_end(0.0)
    assert (s.link.sent[-1], s.profiles.ending) == (Profile(10, 0), set())


def test_an_end_that_was_not_sent_does_not_end_the_next_recording() -> None:
    s = Station()
    s.profiles.ask(0, 0, s.start(), 0.0)
    s.profiles.answered(Profiled(10, 5, b"trace"), 0.0)
    s.start()
    s.profiles.send_end(0.0)
    assert s.link.sent == [Profile(10, 5), Profile(10, 5)]
