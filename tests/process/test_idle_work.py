"""Idle work: the runner prepares for later steps while no plan arrives, without delaying one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import zmq
from support.engine_harness import eventually, short_directory
from support.sockets import bare_context
from support.time_limits import PATIENCE_SECONDS
from support.toy_runner import ToyRunner, ToyStep

from lineclear.process.private_dir import SocketDir, private_socket_dir
from lineclear.wire.codec import encode
from lineclear.wire.messages import ControlMessage, Rejoin, StepPlan
from lineclear.worker.loop.scheduler_link import PlanSocket, Waker
from lineclear.worker.loop.step_loop import LoopLimits, _EpochEnd, _Loop

IDLE = 0.25
"""Seconds, of a clock that these tests do not look at."""


@pytest.fixture
def sockets() -> Iterator[SocketDir]:
    path = short_directory()
    yield private_socket_dir(path)
    shutil.rmtree(path)


class Preparing(ToyRunner):
    """Has `left` slices to prepare after each plan; `done` is what happened, in order."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.done: list[str] = []
        self._left, self._more = left, left

    def idle_work(self) -> bool:
        self._more -= 1
        self.done.append("slice")
        return self._more > 0

    def launch(self, plan: StepPlan) -> ToyStep:
        self._more = self._left
        self.done.append("plan")
        return super().launch(plan)


class Script:
    """Returns the messages of a script, None for a timeout, and records the timeouts."""

    def __init__(self, *orders: ControlMessage | StepPlan | None) -> None:
        self.waits: list[float | None] = []
        self._orders = iter(orders)

    def receive(self, patience_seconds: float | None = None) -> ControlMessage | StepPlan | None:
        self.waits.append(patience_seconds)
        return next(self._orders)


def play(sockets: SocketDir, runner: Preparing, script: Script) -> None:
    loop = _Loop(runner, sockets, LoopLimits(idle_seconds=IDLE))
    try:
        plans: PlanSocket = script  # type: ignore[assignment]
        assert loop._run_plans(plans) is _EpochEnd.REJOIN
        loop._collector.wait_idle()
    finally:
        loop.close()


def test_idle_work_runs_slice_by_slice_after_a_pause(sockets: SocketDir) -> None:
    runner, script = Preparing(3), Script(None, None, None, Rejoin(1))
    play(sockets, runner, script)
    assert runner.done == ["slice"] * 3
    assert script.waits == [IDLE, 0.0, 0.0, None], "once all is prepared, whatever comes is waited for in the kernel"


def test_plan_interrupts_idle_work(sockets: SocketDir) -> None:
    runner, script = Preparing(2), Script(None, StepPlan(1, 1), StepPlan(1, 2), None, None, Rejoin(1))
    play(sockets, runner, script)
    assert runner.done == ["slice", "plan", "plan", "slice", "slice"]
    assert script.waits == [IDLE, 0.0, IDLE, IDLE, 0.0, None], "between plans as long as at first"


def is_sent(scheduler: zmq.Socket[bytes], plan: StepPlan) -> bool:
    """Whether the worker of the plan's epoch is connected, so that it is on its way."""
    try:
        scheduler.send_multipart([plan.epoch.to_bytes(8, "little"), encode(plan)])
    except zmq.ZMQError:  # there is no route
        return False
    return True


def test_plan_socket_times_out_or_returns_at_once(sockets: SocketDir) -> None:
    bell = Waker()
    with bare_context() as context, context.socket(zmq.ROUTER) as scheduler:
        scheduler.set(zmq.ROUTER_MANDATORY, 1)
        scheduler.set(zmq.SNDTIMEO, int(PATIENCE_SECONDS * 1000))
        scheduler.bind(f"ipc://{sockets.plan}")
        plans = PlanSocket(context, sockets, 7, bell, 1 << 20)
        try:
            assert plans.receive(0.0) is None
            assert plans.receive(0.01) is None
            eventually(lambda: is_sent(scheduler, StepPlan(7, 1)), what="a connection")
            assert plans.receive(PATIENCE_SECONDS) == StepPlan(7, 1)
            bell.wake()
            assert plans.receive(None) is None, "and the bell still wakes it"
        finally:
            plans.close()
            bell.close()
