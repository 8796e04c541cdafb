"""The toy worker of a simulated run: computes plans, and leaves non-finite values where a device would."""

from __future__ import annotations

from collections import deque

from simulation.invariant_error import require
from simulation.scenario import Capacity, Scenario, is_bad
from support.toy_runner import ToyRunner, ToyStep

from lineclear.wire.messages import LoadAdapter, RowOutput, StepError, StepPlan, StepResult

POISON_CELL = -2
"""Content of cells after non-finite logits. Reading such a cell changes the answer."""


class TaintingRunner(ToyRunner):
    """Writes POISON_CELL into all cells of a row with non-finite logits and behind it, as a device leaves NaN."""

    def launch(self, plan: StepPlan) -> ToyStep:
        """Run the plan, then taint."""
        flight = super().launch(plan)
        outputs = [row for row in plan.rows if row.output is not RowOutput.NONE]
        for index in flight.result().bad_rows:
            row, size = outputs[index], self.block_size
            blocks = self.slots[row.slot].blocks
            for position in range(row.start, len(blocks) * size):
                self.cells[blocks[position // size]][position % size] = POISON_CELL
            if self.num_state_snapshots is not None:
                self.states[row.slot][1 + row.start :] = [POISON_CELL] * row.num_tokens
        for blocks, start in self.bad_drafts:
            for position in range(start, len(blocks) * self.block_size):
                self.cells[blocks[position // self.block_size]][position % self.block_size] = POISON_CELL
        return flight

    def continued(self, state: list[int], cells: list[int]) -> list[int]:
        """Return the state of a slot; non-finite values stay in it, and those of cells enter it."""
        both = list(zip(state, cells, strict=True))
        require(all(a == b or POISON_CELL in (a, b) for a, b in both), "I32", "a row continues from its own state")
        return [POISON_CELL if POISON_CELL in (a, b) else a for a, b in both]


class Worker:
    """A toy worker with queues of plans and results in flight."""

    def __init__(self, epoch: int, capacity: Capacity, scenario: Scenario, model: str, num_swap_blocks: int) -> None:
        num_state_snapshots = scenario.state_snapshots if scenario.has_state else None
        self.runner = TaintingRunner(
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            num_slots=capacity.num_slots,
            max_model_len=capacity.max_model_len,
            vocab_size=scenario.vocab_size,
            max_step_tokens=capacity.max_step_tokens,
            is_bad=lambda context: is_bad(context, scenario.bad_per_mille),
            model=model,
            late_per_mille=scenario.late_per_mille,
            num_swap_blocks=num_swap_blocks,
            swap_seconds=scenario.swap_seconds,
            num_state_snapshots=num_state_snapshots,
        )
        self.hello = self.runner.hello(epoch)
        self.plans: deque[StepPlan | LoadAdapter] = deque()  # and the messages between them
        self.results: deque[StepResult | StepError | None] = deque()  # None: the worker crashes
        self.is_slow = False
        self.is_cut_off = False  # no further plan can reach it; the results of earlier ones can still arrive
        self.preparing: dict[int, str] = {}  # grammars to compile, by number of the message
        self.prepared: set[str] = set()
        self.broken = False  # a step failed: no further step is computed

    def next_plan(self) -> StepPlan | None:
        """Handle the messages before the next plan; return the plan, if there is one."""
        while self.plans:
            message = self.plans.popleft()
            if isinstance(message, StepPlan):
                return message
            self.runner.load_adapter(message.index, message.key)
        return None
