"""A worker that computes nothing: every sample is the same token, at once. Isolates the cost of lineclear itself.

    python -m bench.instant --socket-directory DIR [--max-batch-size N] [--step-seconds S]    # ignores other flags

Uses the real step loop, sockets and codec, without torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lineclear.process.parent_death import die_with_parent
from lineclear.wire.messages import Hello, StepPlan, StepResult

TOKEN = 100
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096


class InstantStep:
    """A complete step."""

    def __init__(self, result: StepResult, seconds: float) -> None:
        self._result = result
        self._seconds = seconds
        self.is_complete = not seconds

    def result(self) -> StepResult:
        """Return the result after the step time."""
        if self._seconds:
            time.sleep(self._seconds)
        return self._result


class InstantRunner:
    """A Runner (lineclear.worker.loop.runner_interface) without state."""

    def __init__(self, num_slots: int = 1024, vocab_size: int = 1 << 17, step_seconds: float = 0.0) -> None:
        self._num_slots, self._vocab_size, self._step_seconds = num_slots, vocab_size, step_seconds

    def hello(self, epoch: int) -> Hello:
        """Return large capacities."""
        return Hello(
            epoch=epoch,
            num_blocks=self._num_slots * MAX_MODEL_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_slots=self._num_slots,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=self._vocab_size,
            eos_token_ids=(),
            max_step_tokens=1 << 16,
            model_id="instant",
            family="instant",
            dtype="none",
            device="none",
            attention_backend="none",
        )

    def reset(self) -> None:
        """Do nothing."""

    def prepare(self, grammar: str, done: Callable[[], None]) -> None:
        """Call `done()`: nothing is compiled."""
        done()

    def launch(self, plan: StepPlan) -> InstantStep:
        """Return a token for each sampling row."""
        return InstantStep(StepResult(plan.epoch, plan.step, (TOKEN,) * plan.num_samples), self._step_seconds)

    def load_adapter(self, index: int, key: bytes, path: str) -> None:
        """Do nothing."""

    def unload_adapter(self, index: int) -> None:
        """Do nothing."""

    def idle_work(self) -> bool:
        """Return False: no work is left."""
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    supervised = die_with_parent()
    from lineclear.process.logging_setup import configure
    from lineclear.worker.loop.step_loop import run

    configure("worker", "warning")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket-directory", type=Path, required=True)
    parser.add_argument("--max-batch-size", type=int, default=1024)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="what a step takes")
    options, _ = parser.parse_known_args(arguments)
    return run(
        InstantRunner(options.max_batch_size, step_seconds=options.step_seconds),
        options.socket_directory,
        supervised=supervised,
    )


if __name__ == "__main__":
    sys.exit(main())
