"""What the worker's loop asks of whatever computes: a Runner makes Flights out of plans.

The seam between the two halves of the worker. The loop owns sockets and threads and never sees a tensor; a runner owns
the device and never sees a socket. Free of torch, so that a toy can stand in for a model.
"""

from __future__ import annotations

from typing import Protocol

from lineclear.wire.messages import Hello, StepErrorKind, StepPlan, StepResult


class StepFailed(Exception):
    """A step gave no result. `summary` is a type and a place, never content: it travels and it is logged."""

    def __init__(self, kind: StepErrorKind, summary: str) -> None:
        super().__init__(summary)
        self.kind = kind
        self.summary = summary


class InflightStep(Protocol):
    """A launched plan."""

    @property
    def is_over(self) -> bool:
        """There is nothing left to wait for: `result` returns at once."""
        ...

    def result(self) -> StepResult:
        """Wait for the device and return what the plan gave. Raises StepFailed. Called once, from any one thread."""
        ...


class Runner(Protocol):
    """Computes plans. One thread calls everything here; another may wait on the flights."""

    def hello(self, epoch: int) -> Hello:
        """What this worker is and can hold, as the opening of `epoch`."""
        ...

    def reset(self) -> None:
        """Forget every slot and block: a new epoch begins. Weights stay."""
        ...

    def launch(self, plan: StepPlan) -> InflightStep:
        """Put `plan` on the device behind everything launched before it; may return before it has run.

        A plan that cannot be launched (it contradicts the slots, the device refuses) raises StepFailed, here or from
        the flight. The slots are then in no promised state: the caller ends the epoch and calls reset.
        """
        ...

    def idle_work(self) -> bool:
        """Do some milliseconds of what would else be a later step's, because nothing is asked for now.

        Whether there is more of it. If not, there is none until another plan has been launched.
        """
        ...
