"""Which requests are suspects after a crash, run alone, and fail as poison."""

from __future__ import annotations

from core.harness import CoreHarness, answer

from lineclear.errors import DeviceOutOfMemory, PoisonRequest
from lineclear.scheduler.core.events import Failed
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.wire.messages import StepError, StepErrorKind

OUT_OF_MEMORY = StepErrorKind.OUT_OF_MEMORY


def crash(harness: CoreHarness, loss: WorkerLoss = WorkerLoss.CRASHED) -> None:
    """Lose the worker with its steps in flight and join another one."""
    harness.lose(loss)
    harness.join()


def slots_of(harness: CoreHarness, name: str) -> set[int]:
    """Return the slot of a request, if it has one."""
    return {s.slot for s in harness.core.state.workers[harness.epoch].batch.running if s.request.request_id == name}


def run_with_poison(harness: CoreHarness, name: str, loss: WorkerLoss = WorkerLoss.CRASHED) -> int:
    """Run until every request has ended; lose the worker in each step with a row of `name`. Returns the losses."""
    losses = 0
    for _ in range(200):
        if not harness.core.num_live:
            return losses
        harness.plan()
        assert harness.flights, "requests wait and nothing is planned"
        if slots_of(harness, name) & {row.slot for row in harness.flights[0].rows}:
            losses += 1
            crash(harness, loss)
        else:
            harness.apply()
    raise AssertionError("requests do not end")


def test_poison_costs_three_workers_and_no_other_answer() -> None:
    harness = CoreHarness()
    innocents = [harness.submit(f"r{i}", 6, max_tokens=12) for i in range(5)]
    harness.submit("poison", 5)
    assert run_with_poison(harness, "poison") == 3
    assert isinstance(harness.error("poison"), PoisonRequest)
    for request in innocents:
        assert harness.outputs(request.request_id) == answer(request)


def test_request_survives_three_kills_in_a_row() -> None:
    harness = CoreHarness()
    request = harness.submit("a", 5, max_tokens=6)
    for _ in range(3):
        assert harness.plan() is not None
        crash(harness, WorkerLoss.KILLED)
    harness.run()
    assert harness.outputs("a") == answer(request)


def test_fourth_kill_is_proof() -> None:
    harness = CoreHarness()
    harness.submit("a", 5)
    assert run_with_poison(harness, "a", WorkerLoss.KILLED) == 4


def test_out_of_memory_request_is_found_and_budget_recovers() -> None:
    harness = CoreHarness(target_batch_tokens=64)
    innocents = [harness.submit(f"r{i}", 6, max_tokens=20) for i in range(5)]
    harness.submit("huge", 5)
    errors = 0
    while not any(isinstance(event, Failed) for event in harness.events):
        plan = harness.plan()
        assert plan is not None
        if slots_of(harness, "huge") & {row.slot for row in plan.rows}:
            errors += 1
            harness.record(harness.core.on_step_error(StepError(harness.epoch, plan.step, OUT_OF_MEMORY), harness.now))
            crash(harness, WorkerLoss.CLEAN)
        else:
            harness.apply()
    assert errors == 3
    assert isinstance(harness.error("huge"), DeviceOutOfMemory)
    harness.submit("long", 100, max_tokens=1)
    tokens = [sum(end - start for _, start, end in harness.rows(harness.step())) for _ in range(20)]
    assert max(tokens) == 64
    harness.run()
    for request in innocents:
        assert harness.outputs(request.request_id) == answer(request)
