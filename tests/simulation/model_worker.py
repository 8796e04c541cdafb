"""The toy worker of a simulated run: computes what it is told to, and soils what a device would soil."""

from __future__ import annotations

from collections import deque

from simulation.scenario import Capacity, is_bad
from support.toy import ToyFlight, ToyRunner

from lineclear.wire.messages import StepError, StepPlan, StepResult

POISON = -2
"""What cells of a sequence hold whose logits were not finite. Reading one changes the answer of whoever reads it."""


class SoiledRunner(ToyRunner):
    """Leaves poison where a sequence whose logits were not finite wrote, and behind, as a device leaves NaN."""

    def launch(self, plan: StepPlan) -> ToyFlight:
        """Run the plan; then soil."""
        flight = super().launch(plan)
        sampling = [row for row in plan.rows if row.sample]
        for index in flight.result().bad_rows:
            row, size = sampling[index], self.block_size
            blocks = self.slots[row.slot].blocks
            for position in range(row.start, len(blocks) * size):
                self.cells[blocks[position // size]][position % size] = POISON
        return flight


class Worker:
    """A toy worker behind two pipes: plans sent to it, results on their way back."""

    def __init__(self, epoch: int, capacity: Capacity, vocab_size: int, bad_per_mille: int, model: str) -> None:
        self.runner = SoiledRunner(
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            num_slots=capacity.num_slots,
            max_model_len=capacity.max_model_len,
            vocab_size=vocab_size,
            max_step_tokens=capacity.max_step_tokens,
            is_bad=lambda context: is_bad(context, bad_per_mille),
            model=model,
        )
        self.hello = self.runner.hello(epoch)
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult | StepError | None] = deque()  # None: its death
        self.broken = False  # a step failed: it computes nothing more
