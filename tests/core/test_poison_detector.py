"""Who is suspected after a crash, who runs alone, and who is convicted."""

from __future__ import annotations

import pytest
from core.harness import Rig, answer

from lineclear.errors import DeviceOutOfMemory, PoisonRequest
from lineclear.scheduler.core.events import Failed
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.wire.messages import StepError, StepErrorKind

OUT_OF_MEMORY = StepErrorKind.OUT_OF_MEMORY


def crash(rig: Rig, loss: WorkerLoss = WorkerLoss.CRASHED) -> None:
    """The worker is lost with what is in flight, and another one joins."""
    rig.lose(loss)
    rig.join()


def slots_of(rig: Rig, name: str) -> set[int]:
    """The slot of a request, if it has one."""
    return {s.slot for s in rig.core._batch.running if s.request.request_id == name}


def run_with_poison(rig: Rig, name: str, loss: WorkerLoss = WorkerLoss.CRASHED) -> int:
    """Run until nobody lives; the worker dies at every step in which `name` has a row. How many died."""
    dead = 0
    for _ in range(200):
        if not rig.core.num_live:
            return dead
        rig.plan()
        assert rig.flights, "somebody waits and nothing will happen"
        if slots_of(rig, name) & {row.slot for row in rig.flights[0].rows}:
            dead += 1
            crash(rig, loss)
        else:
            rig.apply()
    raise AssertionError("it does not end")


def test_poison_costs_three_workers_and_nobody_elses_answer() -> None:
    rig = Rig()
    innocents = [rig.submit(f"r{i}", 6, max_tokens=12) for i in range(5)]
    rig.submit("poison", 5)
    assert run_with_poison(rig, "poison") == 3
    end = rig.end("poison")
    assert isinstance(end, Failed)
    assert isinstance(end.error, PoisonRequest)
    for request in innocents:
        assert rig.outputs(request.request_id) == answer(request)


def test_who_is_alone_anyway_gets_a_second_chance() -> None:
    rig = Rig()
    rig.submit("poison", 5)
    assert run_with_poison(rig, "poison") == 2


def test_a_request_whose_worker_is_killed_from_outside_three_times_in_a_row_lives() -> None:
    rig = Rig()
    request = rig.submit("a", 5, max_tokens=6)
    for _ in range(3):
        assert rig.plan() is not None
        crash(rig, WorkerLoss.KILLED)
    rig.run()
    assert rig.outputs("a") == answer(request)


def test_kills_from_outside_convict_at_the_fourth() -> None:
    rig = Rig()
    rig.submit("a", 5)
    assert run_with_poison(rig, "a", WorkerLoss.KILLED) == 4


def test_a_worker_that_left_says_nothing_against_anybody() -> None:
    rig = Rig()
    request = rig.submit("a", 5)
    for _ in range(10):
        assert rig.plan() is not None
        crash(rig, WorkerLoss.CLEAN)
    rig.run()
    assert rig.outputs("a") == answer(request)


def test_crashes_with_progress_between_them_isolate_nobody() -> None:
    rig = Rig()
    requests = [rig.submit(f"r{i}", 4, max_tokens=30) for i in range(3)]
    for _ in range(6):
        for _ in range(4):
            rig.step()
        assert len(rig.rows(rig.plan())) == 3
        crash(rig)
    rig.run()
    for request in requests:
        assert rig.outputs(request.request_id) == answer(request)


def test_suspects_run_one_at_a_time_and_then_all_go_on_together() -> None:
    rig = Rig()
    for i in range(3):
        rig.submit(f"r{i}", 4, max_tokens=30)
    for _ in range(2):
        rig.plan()
        crash(rig)
    # Each computes its prompt, and two positions more than it had planned when the worker was lost.
    sizes = [len(rig.rows(rig.step())) for _ in range(10)]
    assert sizes == [1] * 9 + [3]
    assert rig.counters.preemptions == 0


def test_a_suspect_takes_the_blocks_of_others_who_are_innocent_already() -> None:
    rig = Rig(worker_num_blocks=6, max_batch_size=3)
    requests = [rig.submit(f"r{i}", 7, max_tokens=14) for i in range(3)]
    rig.plan()
    crash(rig)
    rig.plan()
    crash(rig)
    rig.run()
    assert rig.counters.preemptions > 0
    for request in requests:
        assert rig.outputs(request.request_id) == answer(request)


def test_the_one_that_runs_out_of_memory_is_found_and_the_budget_is_whole_again() -> None:
    rig = Rig(target_batch_tokens=64)
    innocents = [rig.submit(f"r{i}", 6, max_tokens=20) for i in range(5)]
    rig.submit("huge", 5)
    errors = 0
    while "huge" in rig.core._live:
        plan = rig.plan()
        assert plan is not None
        if slots_of(rig, "huge") & {row.slot for row in plan.rows}:
            errors += 1
            rig.saw(rig.core.on_step_error(StepError(rig.epoch, plan.step, OUT_OF_MEMORY), rig.now))
            crash(rig, WorkerLoss.CLEAN)
        else:
            rig.apply()
    assert errors == 3
    end = rig.end("huge")
    assert isinstance(end, Failed)
    assert isinstance(end.error, DeviceOutOfMemory)
    rig.submit("long", 100, max_tokens=1)
    tokens = [sum(end - start for _, start, end in rig.rows(rig.step())) for _ in range(20)]
    assert max(tokens) == 64
    rig.run()
    for request in innocents:
        assert rig.outputs(request.request_id) == answer(request)


@pytest.mark.parametrize("ends", ["cancel", "finish"])
def test_a_suspect_that_ends_is_none_any_more(ends: str) -> None:
    rig = Rig()
    rig.submit("a", 5)
    rig.submit("b", 5)
    for _ in range(2):
        rig.plan()
        crash(rig)
    if ends == "cancel":
        rig.cancel("a")
    else:
        rig.saw(rig.core.finish("a", 0, rig.now))
    assert [s.request.request_id for s in rig.core._poison] == ["b"]
    rig.run()
