"""A worker process around the toy runner: `python -m support.toy_worker DIRECTORY [OPTIONS AS JSON]`.

Real sockets, threads, signals and exit codes; no torch, so it is up in a quarter of a second.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from support.toy import ToyFlight, ToyRunner

from lineclear.lifeline import hold
from lineclear.logs import configure
from lineclear.wire.types import StepErrorKind, StepPlan, StepResult
from lineclear.worker.loop import LoopLimits, run
from lineclear.worker.protocol import StepFailed


@dataclass(frozen=True)
class ToyOptions:
    """How the toy behaves."""

    num_blocks: int = 512
    block_size: int = 4
    num_slots: int = 64
    max_model_len: int = 512
    vocab_size: int = 97
    seed: int = 0
    min_step_seconds: float = 0.0
    max_step_seconds: float = 0.0
    load_seconds: float = 0.0
    """Between the start of the process and its first Hello."""
    fail_step: int = 0
    """The step that fails, in the first epoch; 0: none."""
    fail_kind: str = "EXCEPTION"
    out_of_memory_rows: int = 0
    """A step with this many rows or more runs out of memory; 0: none does."""
    heartbeat_seconds: float = 0.1

    def arguments(self, directory: Path) -> list[str]:
        """The command line of such a worker."""
        return [sys.executable, "-m", "support.toy_worker", str(directory), json.dumps(asdict(self))]


class _SlowFlight:
    def __init__(self, flight: ToyFlight, seconds: float, failure: StepFailed | None) -> None:
        self._flight, self._seconds, self._failure = flight, seconds, failure

    def result(self) -> StepResult:
        time.sleep(self._seconds)
        if self._failure is not None:
            raise self._failure
        return self._flight.result()


class MoodyRunner(ToyRunner):
    """A toy that takes its time and can fail on demand."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(
            options.num_blocks, options.block_size, options.num_slots, options.max_model_len, options.vocab_size
        )
        self._options = options
        self._random = random.Random(options.seed)
        self._failed_once = False

    def launch(self, plan: StepPlan) -> _SlowFlight:  # type: ignore[override]
        options = self._options
        failure = None
        if plan.step == options.fail_step and not self._failed_once:
            self._failed_once = True
            failure = StepFailed(StepErrorKind[options.fail_kind], "ToyFailure at toy_worker.py")
        if options.out_of_memory_rows and len(plan.rows) >= options.out_of_memory_rows:
            failure = StepFailed(StepErrorKind.OUT_OF_MEMORY, "ToyOutOfMemory at toy_worker.py")
        seconds = self._random.uniform(options.min_step_seconds, options.max_step_seconds)
        return _SlowFlight(super().launch(plan), seconds, failure)


def main() -> int:
    """Run until told to stop."""
    supervised = hold()
    options = ToyOptions(**json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    configure("worker", form="json")
    time.sleep(options.load_seconds)
    limits = LoopLimits(heartbeat_seconds=options.heartbeat_seconds, standby_seconds=0.2)
    return run(MoodyRunner(options), Path(sys.argv[1]), supervised=supervised, limits=limits)


if __name__ == "__main__":
    sys.exit(main())
