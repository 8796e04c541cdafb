"""The standby worker: promoted when the worker ends, replaced when it ends itself, and never in anybody's way."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from support.toy_worker import ToyOptions
from support.world import World, eventually, request, supervised

from lineclear.scheduler import supervisor as supervisor_module
from lineclear.scheduler import worker_process
from lineclear.scheduler.supervisor import Supervisor, SupervisorLimits
from lineclear.standby import PROMOTED, READY, Standby, StandbyLine

OPTIONS = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.004)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start standbys without a pause."""
    monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(worker_process, "_STANDBY_MIN_BACKOFF_SECONDS", 0.01)


def ready_standby(supervisor: Supervisor) -> int:
    eventually(lambda: supervisor.standby_pid is not None, what="a standby")
    pid = supervisor.standby_pid
    assert pid is not None
    return pid


def kill(pid: int | None, number: signal.Signals = signal.SIGKILL) -> None:
    assert pid is not None
    os.kill(pid, number)


def test_the_standby_takes_over_and_another_one_is_kept() -> None:
    with World(options=OPTIONS) as world:

        def body(supervisor: Supervisor) -> None:
            world.wait_joined()
            streams = [world.submit(request(number, max_tokens=400)) for number in range(4)]
            for number in range(2, 5):
                standby = ready_standby(supervisor)
                kill(supervisor.pid)
                world.wait_joined(number)
                assert supervisor.pid == standby
            world.wait_ended(streams)
            for stream in streams:
                stream.check(world.options.vocab_size)

        supervisor = supervised(world, body, SupervisorLimits(max_crashes=3), standby=True)
        assert supervisor.num_starts == 4


def test_a_standby_that_dies_costs_no_stream_and_no_budget() -> None:
    with World(options=OPTIONS) as world:

        def body(supervisor: Supervisor) -> None:
            world.wait_joined()
            worker = supervisor.pid
            stream = world.submit(request(1, max_tokens=400))
            killed = set()
            for _ in range(3):
                killed.add(standby := ready_standby(supervisor))
                kill(standby)
                eventually(lambda standby=standby: supervisor.standby_pid != standby)  # type: ignore[misc]
            assert len(killed) == 3
            world.wait_ended([stream])
            stream.check(world.options.vocab_size)
            assert supervisor.pid == worker

        supervised(world, body, SupervisorLimits(max_crashes=0), standby=True)
        assert world.give_ups == []


def test_a_standby_that_hangs_is_killed_and_a_new_worker_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_PROMOTION_SECONDS", 0.2)
    with World(options=OPTIONS) as world:

        def body(supervisor: Supervisor) -> None:
            world.wait_joined()
            stream = world.submit(request(1, max_tokens=400))
            world.wait(lambda: len(stream.tokens) > 4)
            hung = ready_standby(supervisor)
            kill(hung, signal.SIGSTOP)
            kill(supervisor.pid)
            world.wait_joined(2)
            assert supervisor.pid != hung
            world.wait_ended([stream])
            stream.check(world.options.vocab_size)

        # One end is survived: the worker's. That of the standby does not count.
        supervised(world, body, SupervisorLimits(max_crashes=1), standby=True)
        assert world.give_ups == []


def test_a_worker_that_dies_while_its_standby_still_imports_is_replaced_by_it() -> None:
    with World(options=OPTIONS) as world:

        def body(supervisor: Supervisor) -> None:
            world.wait_joined()
            stream = world.submit(request(1, max_tokens=400))
            keeper = supervisor._standby
            assert keeper is not None
            eventually(lambda: keeper.pid is not None)
            standby = keeper.pid
            kill(supervisor.pid)
            world.wait_joined(2)
            assert supervisor.pid == standby
            world.wait_ended([stream])
            stream.check(world.options.vocab_size)

        supervised(world, body, standby=True)


def claimed(line: StandbyLine, monkeypatch: pytest.MonkeyPatch) -> Standby:
    """The other end of the line, as a process that has inherited it finds it."""
    (name,) = line.environment()
    monkeypatch.setenv(name, str(os.dup(line.inherited)))
    standby = Standby.claim()
    assert standby is not None
    return standby


def test_imports_run_at_a_low_priority_and_what_follows_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    line = StandbyLine()
    standby = claimed(line, monkeypatch)
    assert not line.environment().keys() & os.environ.keys()  # a child of the standby is none
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found: list[int] = []
    standby.run_in_background(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert found == [10]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    line.promote()
    standby.wait_until_promoted()
    assert line.receive() == READY + PROMOTED
    line.close()


def test_what_imports_raise_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    line = StandbyLine()
    standby = claimed(line, monkeypatch)

    def fail() -> None:
        raise ImportError("no")

    with pytest.raises(ImportError):
        standby.run_in_background(fail)
    line.close()


def test_without_a_line_a_process_is_no_standby() -> None:
    assert Standby.claim() is None
