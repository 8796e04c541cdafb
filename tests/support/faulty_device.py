"""A worker whose device fails as a GPU does: `python -m support.faulty_device FILE [FLAGS OF A WORKER]`.

Its first process runs out of memory in a step of several requests. The step behind the first blocks that went to host
memory has a device-side assert, and so has whatever uses the device after it. FILE has a line for each of these.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lineclear.wire.messages import Hello, StepPlan
from lineclear.worker.main import main
from lineclear.worker.runner.launched_step import StepTimer
from lineclear.worker.runner.model_runner import ModelRunner


class FaultyDevice:
    """Replaces methods of the runner."""

    def __init__(self, file: Path) -> None:
        self._file, self._step, self._reset, self._hello = file, ModelRunner._step, ModelRunner.reset, ModelRunner.hello
        self._stop, self._wait = StepTimer.stop, StepTimer.wait
        self._serves = self._is_full = self._has_swapped = self._fails = False
        file.write_text("")

    def plant(self) -> None:
        """Let this process fail."""
        for kind, names in ((ModelRunner, ("_step", "reset", "hello")), (StepTimer, ("stop", "wait"))):
            for name in names:
                method = getattr(type(self), name.strip("_"))
                setattr(kind, name, lambda *arguments, method=method: method(self, *arguments))

    def step(self, runner: ModelRunner, plan: StepPlan, *drafts: Any) -> Any:
        """Run a step, or lack the memory for it."""
        if self._serves and not self._is_full and len(plan.rows) > 1:
            self._is_full = True
            self._note("out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self._fails = self._fails or self._has_swapped
        self._has_swapped = any(copy.target >= runner.capacity.num_blocks for copy in plan.copy_blocks)
        return self._step(runner, plan, *drafts)

    def stop(self, timer: StepTimer) -> bool:
        """Return whether the step is complete: as on a GPU, one that fails is not."""
        return self._stop(timer) and not self._fails

    def wait(self, timer: StepTimer) -> float:
        """Wait for a step."""
        if self._fails:
            self._note("assert")
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return self._wait(timer)

    def reset(self, runner: ModelRunner) -> None:
        """Begin an epoch."""
        if self._fails:
            self._note("another epoch")
        self._reset(runner)

    def hello(self, runner: ModelRunner, epoch: int) -> Hello:
        """Return a Hello with which blocks are always swapped: the self-test is done."""
        self._serves = True
        return replace(self._hello(runner, epoch), swap_seconds=0.0)

    def _note(self, fault: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{fault}\n")


if __name__ == "__main__":
    noted = Path(sys.argv.pop(1))
    if not noted.exists():
        FaultyDevice(noted).plant()
    sys.exit(main())
