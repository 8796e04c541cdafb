"""What requests and the token budget do after out-of-memory steps."""

from __future__ import annotations

from core.harness import CoreHarness

from lineclear.errors import DeviceOutOfMemory
from lineclear.scheduler.core.events import Failed
from lineclear.wire.messages import StepError, StepErrorKind

OUT_OF_MEMORY = StepErrorKind.OUT_OF_MEMORY


def test_out_of_memory_halves_and_restores_the_budget() -> None:
    harness = CoreHarness(
        target_batch_tokens=16, worker_num_blocks=300, worker_max_model_len=1200, target_inter_token_latency_seconds=0.0
    )
    harness.submit("old", 2, max_tokens=1000)
    for budget in (16, 8, 4):
        for _ in range(40):
            harness.step()  # all pass their clear_position: no suspects are left
        harness.submit(f"long{budget}", 40, max_tokens=1)
        harness.step()
        plan = harness.plan()
        assert plan is not None
        assert sum(row.num_tokens for row in plan.rows) == budget
        assert harness.core.on_step_error(StepError(harness.epoch, plan.step, OUT_OF_MEMORY), harness.now) == []
        harness.lose()
        harness.join()
    budgets = []
    for number in range(450):
        if number % 40 == 0:
            harness.submit(f"more{number}", 100, max_tokens=1)
        plan = harness.step()
        assert plan is not None
        budgets.append(sum(row.num_tokens for row in plan.rows))
    assert max(budgets[:200]) == 2
    assert max(budgets[200:400]) == 4
    assert max(budgets[400:]) == 8


def test_out_of_memory_alone_fails_the_request() -> None:
    harness = CoreHarness()
    harness.submit("huge", 30)
    plan = harness.plan()
    assert plan is not None
    (end,) = harness.core.on_step_error(StepError(harness.epoch, plan.step, OUT_OF_MEMORY), harness.now)
    assert isinstance(end, Failed)
    assert isinstance(end.error, DeviceOutOfMemory)


def test_step_error_not_of_oldest_step_is_ignored() -> None:
    harness = CoreHarness()
    harness.submit("a", 3)
    plan = harness.plan()
    assert plan is not None
    assert harness.core.on_step_error(StepError(harness.epoch, plan.step + 1, OUT_OF_MEMORY), harness.now) == []
    assert harness.core.num_live == 1
