"""Runs plans that a test makes by hand."""

from __future__ import annotations

from collections.abc import Sequence

from lineclear.wire.messages import Row, RowOutput, SlotInit, StateCopy, StepPlan, StepResult
from lineclear.worker.runner.model_runner import ModelRunner


class Steps:
    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.outputs: dict[int, list[int]] = {}
        """Sampled tokens by slot."""
        self._ends: dict[int, int] = {}
        self._step = 0

    def run(self, *rows: Row, inits: Sequence[SlotInit] = (), copies: Sequence[StateCopy] = ()) -> StepResult:
        self._step += 1
        plan = StepPlan(1, self._step, rows, tuple(inits), copy_states=tuple(copies))
        result = self.runner.launch(plan).result()
        for row, token in zip((row for row in rows if row.sample), result.tokens, strict=True):
            self.outputs.setdefault(row.slot, []).append(token)
        for row in rows:
            self._ends[row.slot] = row.start + row.num_tokens
        return result

    def decode(self, *slots: int) -> None:
        self.run(*(Row(slot, self._ends[slot], 1, RowOutput.SAMPLE) for slot in slots))
