"""What a worker does to its requests by leaving, by having less room, or by running out of memory, in examples."""

from __future__ import annotations

from core.harness import Rig, answer

from lineclear.errors import DeviceOutOfMemory, KvCapacityExceeded
from lineclear.scheduler.core.events import Failed, Finished
from lineclear.wire.messages import StepError, StepErrorKind

OUT_OF_MEMORY = StepErrorKind.OUT_OF_MEMORY


def test_a_lost_worker_costs_time_and_nothing_else() -> None:
    rig = Rig(pipeline_depth=2)
    requests = [rig.submit(f"r{number}", 5 + number, max_tokens=8) for number in range(3)]
    for _ in range(3):
        rig.step()
    rig.plan()
    rig.lose()
    assert rig.plan() is None
    rig.join(num_blocks=16, block_size=8)
    rig.run()
    for request in requests:
        assert rig.outputs(request.request_id) == answer(request)
        assert rig.end(request.request_id).record.recoveries == 1


def test_who_does_not_fit_the_next_worker_fails() -> None:
    rig = Rig()
    rig.submit("large", 30, max_tokens=10)
    rig.submit("small", 3, max_tokens=2)
    rig.step()
    rig.join(num_blocks=2)
    end = rig.end("large")
    assert isinstance(end, Failed)
    assert isinstance(end.error, KvCapacityExceeded)
    rig.run()
    assert isinstance(rig.end("small"), Finished)


def test_out_of_memory_halves_the_budget_until_it_fits_and_doubles_it_again() -> None:
    rig = Rig(target_batch_tokens=16, worker_num_blocks=300, worker_max_model_len=1200)
    rig.submit("old", 2, max_tokens=1000)
    for budget in (16, 8, 4):
        for _ in range(40):
            rig.step()  # all get well past the place of the last time: nobody is a suspect any more
        rig.submit(f"long{budget}", 40, max_tokens=1)
        rig.step()
        plan = rig.plan()
        assert plan is not None
        assert sum(row.num_tokens for row in plan.rows) == budget
        assert rig.core.on_step_error(StepError(rig.epoch, plan.step, OUT_OF_MEMORY), rig.now) == []
        rig.lose()
        rig.join()
    budgets = []
    for number in range(450):
        if number % 40 == 0:
            rig.submit(f"more{number}", 100, max_tokens=1)
        plan = rig.step()
        assert plan is not None
        budgets.append(sum(row.num_tokens for row in plan.rows))
    assert max(budgets[:200]) == 2
    assert max(budgets[200:400]) == 4
    assert max(budgets[400:]) == 8


def test_out_of_memory_alone_fails_the_request() -> None:
    rig = Rig()
    rig.submit("huge", 30)
    plan = rig.plan()
    assert plan is not None
    (end,) = rig.core.on_step_error(StepError(rig.epoch, plan.step, OUT_OF_MEMORY), rig.now)
    assert isinstance(end, Failed)
    assert isinstance(end.error, DeviceOutOfMemory)


def test_a_failed_step_that_is_not_the_oldest_says_nothing() -> None:
    rig = Rig()
    rig.submit("a", 3)
    plan = rig.plan()
    assert plan is not None
    assert rig.core.on_step_error(StepError(rig.epoch, plan.step + 1, OUT_OF_MEMORY), rig.now) == []
    assert rig.core.num_live == 1
