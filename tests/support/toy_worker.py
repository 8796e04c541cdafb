"""A worker process around the toy runner: `python -m support.toy_worker DIRECTORY [OPTIONS AS JSON]`.

Real sockets, threads, signals and exit codes; no torch, so it is up in a quarter of a second.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
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
    fault: str = ""
    """What goes wrong in step `fault_step`: "exception", "assertion", "memory", "hang", "exit", or "tokens": a result
    that cannot be."""
    fault_step: int = 0
    fault_once: str = ""
    """A file that is made by the first fault and prevents further ones, also in later processes."""
    max_rows: int = 0
    """A step with more rows runs out of memory; 0: none does."""
    heartbeat_seconds: float = 0.1

    def arguments(self, directory: Path) -> list[str]:
        """The command line of such a worker."""
        return [sys.executable, "-m", "support.toy_worker", str(directory), json.dumps(asdict(self))]


class _MoodyFlight:
    def __init__(self, flight: ToyFlight, seconds: float, fault: str) -> None:
        self._flight, self._seconds, self._fault = flight, seconds, fault

    def result(self) -> StepResult:
        result = self._flight.result()
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


class MoodyRunner(ToyRunner):
    """A toy that takes its time and can fail on demand."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(
            options.num_blocks, options.block_size, options.num_slots, options.max_model_len, options.vocab_size
        )
        self._options = options
        self._random = random.Random(options.seed)

    def launch(self, plan: StepPlan) -> _MoodyFlight:  # type: ignore[override]
        """Run the plan at once; its result takes the time of a step, or does not come."""
        options = self._options
        fault = options.fault if plan.step == options.fault_step and self._may_fail() else ""
        if options.max_rows and len(plan.rows) > options.max_rows:
            fault = "memory"
        assert fault != "assertion", "the toy's own"
        seconds = self._random.uniform(options.min_step_seconds, options.max_step_seconds)
        return _MoodyFlight(super().launch(plan), seconds, fault)

    def _may_fail(self) -> bool:
        if not self._options.fault_once:
            return True
        try:
            os.close(os.open(self._options.fault_once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


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
