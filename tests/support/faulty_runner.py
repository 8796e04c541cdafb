"""The toy runner with delays and planned faults."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path

from support.toy_runner import ToyRunner, ToyStep
from support.toy_worker import ToyOptions

from lineclear.wire.messages import Hello, StepErrorKind, StepPlan, StepResult
from lineclear.worker.loop.runner_interface import StepFailed


class _FaultyStep:
    is_complete = False

    def __init__(self, flight: ToyStep, seconds: float, fault: str) -> None:
        self._step, self._seconds, self._fault = flight, seconds, fault

    def result(self) -> StepResult:
        result = self._step.result()
        match self._fault:
            case "exception":
                raise StepFailed(StepErrorKind.EXCEPTION, "ToyFailure at toy_worker.py")
            case "memory":
                raise StepFailed(StepErrorKind.OUT_OF_MEMORY, "ToyOutOfMemory at toy_worker.py")
            case "hang":
                time.sleep(3600)
            case "exit":
                os._exit(3)
            case "tokens":
                result = replace(result, tokens=(*result.tokens, 1))
        time.sleep(self._seconds)
        return result


class FaultyRunner(ToyRunner):
    """A toy runner with delays that fails on demand."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(
            *(options.num_blocks, options.block_size, options.num_slots, options.max_model_len, options.vocab_size),
            model=Path(options.model_file).read_text() if options.model_file else options.model,
            num_state_snapshots=options.num_state_snapshots,
        )
        self._options = options
        self._random = random.Random(options.seed)

    def hello(self, epoch: int) -> Hello:
        """Return the toy's Hello with the fingerprint of tokenizer files from the options."""
        return replace(super().hello(epoch), text_fingerprint=self._options.text_fingerprint)

    def launch(self, plan: StepPlan) -> _FaultyStep:  # type: ignore[override]
        """Run the plan at once; its result takes the time of a step, or never arrives."""
        options = self._options
        fault = options.fault if plan.step == options.fault_step and self._may_fail() else ""
        if options.max_rows and len(plan.rows) > options.max_rows:
            fault = "memory"
        assert fault != "assertion", "the toy's own"
        if fault == "launch":
            raise StepFailed(StepErrorKind.OUT_OF_MEMORY, "ToyOutOfMemory at faulty_runner.py")
        seconds = self._random.uniform(options.min_step_seconds, options.max_step_seconds)
        flight = super().launch(plan)
        if any(self.slots[row.slot].tokens[0] == options.poison_token for row in plan.rows):
            fault = "exit"
        return _FaultyStep(flight, seconds, fault)

    def load_adapter(self, index: int, key: bytes, path: str = "") -> None:
        """Hold an adapter, unless the device fails."""
        if self._options.fault == "adapter" and self._may_fail():
            raise StepFailed(StepErrorKind.EXCEPTION, "ToyFailure at faulty_runner.py")
        super().load_adapter(index, key, path)

    def _may_fail(self) -> bool:
        if not self._options.fault_once:
            return True
        try:
            os.close(os.open(self._options.fault_once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
