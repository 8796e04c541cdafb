"""The interface between the worker's step loop and the code that computes plans.

The loop owns sockets and threads and never sees a tensor. A runner owns the device and never sees a socket. This module
is free of torch, so that tests can replace the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lineclear.wire.messages import Hello, StepErrorKind, StepPlan, StepResult


class StepFailed(Exception):
    """A step failed. `summary` holds a type and a source location, never content: it is sent and logged."""

    def __init__(self, kind: StepErrorKind, summary: str) -> None:
        super().__init__(summary)
        self.kind, self.summary = kind, summary


class InflightStep(Protocol):
    @property
    def is_complete(self) -> bool:
        """The device has finished, so `result` returns at once."""

    def result(self) -> StepResult:
        """Wait for the device and return the step's result. Raises StepFailed. Call it once, from any thread."""


class StepRecorder(Protocol):
    """Records what launched steps do. One thread calls all methods."""

    def launch(self, plan: StepPlan) -> InflightStep:
        """Launch a plan on the runner. Raises what Runner.launch raises."""

    def write(self) -> int:
        """Between two steps: write those so far, where it is time for that. Return the bytes of the trace."""

    def stop(self) -> bytes:
        """Stop, once, and return the steps as a Chrome trace that gzip has compressed."""


class Runner(Protocol):
    """Computes plans. One thread calls all methods; another may wait for the in-flight steps."""

    def hello(self, epoch: int) -> Hello:
        """Return the capacities and versions of this worker, for `epoch`."""

    def reset(self) -> None:
        """Free every slot and block for a new epoch. Weights stay."""

    def prepare(self, grammar: str, done: Callable[[], None]) -> None:
        """Compile a grammar for later plans without delaying them, and call `done()` from any thread."""

    def launch(self, plan: StepPlan) -> InflightStep:
        """Queue `plan` on the device behind all launched plans; may return before it has run.

        Raises StepFailed, here or from the result, for a plan that contradicts the slots or that the device refuses.
        The slots are then undefined: the caller ends the epoch and calls reset.
        """

    def load_adapter(self, index: int, key: bytes, path: str) -> None:
        """Hold the adapter in directory `path` as `index`, in place of another one, for later plans.

        Raises AdapterFilesRefused if its files cannot be used, or have another digest than `key`, and StepFailed if the
        device has failed, in a step before as a rule.
        """

    def unload_adapter(self, index: int) -> None:
        """Drop an adapter, which no later plan uses. Nothing happens without one of this index."""

    def idle_work(self) -> bool:
        """Do some milliseconds of preparation for later steps, while no plan is queued.

        Returns whether work is left. Once it returns False, none is left until the next launch.
        """
