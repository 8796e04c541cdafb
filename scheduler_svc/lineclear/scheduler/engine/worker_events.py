"""Events and outputs of the worker state machine (`worker_session`), as frozen values."""

from __future__ import annotations

from typing import NamedTuple

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.wire.messages import AdapterLoaded, Goodbye, Heartbeat, Hello, Rejoin, StepError, StepResult, Stopping

EpochMessage = StepResult | Heartbeat | Stopping | StepError | Goodbye | AdapterLoaded
"""Messages of a worker after its Hello."""

# --- events ----------------------------------------------------------------------------------------------------------


class Accepted(NamedTuple):
    """A plan can reach the worker, and the place is free."""


class Refused(NamedTuple):
    """The workers that are joined leave no place for this one, as `reason` says."""

    reason: str


class Rejected(NamedTuple):
    """The process may not join: it is being killed, has exited, or has read other files."""


class Replaced(NamedTuple):
    """The same process said Hello with a newer epoch."""


class PlaceFreed(NamedTuple):
    """A joined worker is lost, and the waiting one may join."""


class Superseded(NamedTuple):
    """A worker joins that takes the place: the same process, another model, or the last free place."""


class Retired(NamedTuple):
    """The worker is stopping, and its requests continue on other workers."""


class Received(NamedTuple):
    """A message that does not end the epoch."""

    message: EpochMessage


class EpochEnded(NamedTuple):
    """The worker ended the epoch itself, and did nothing wrong."""

    reason: str


class WorkerFailed(NamedTuple):
    """The worker has to be killed."""

    reason: str
    loss: WorkerLoss


class Disconnected(NamedTuple):
    """No plan can reach the worker."""


class TimedOut(NamedTuple):
    """The worker has been connecting, or cut off, for too long."""


class Condemned(NamedTuple):
    """The supervisor kills the process."""


class Spared(NamedTuple):
    """No supervisor kills the process, so it may join again."""


class ProcessExited(NamedTuple):
    """The process has exited; `loss` follows from its exit code."""

    loss: WorkerLoss


Event = (
    Accepted
    | Refused
    | Rejected
    | Replaced
    | PlaceFreed
    | Superseded
    | Retired
    | Received
    | EpochEnded
    | WorkerFailed
    | Disconnected
    | TimedOut
    | Condemned
    | Spared
    | ProcessExited
)

# --- outputs ---------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send a message to the worker of its epoch, if that is possible now."""

    message: Rejoin | Goodbye


class Joined(NamedTuple):
    """The worker runs plans from now on."""

    hello: Hello


class JoinRefused(NamedTuple):
    """A worker waits until it may join."""

    hello: Hello
    reason: str


class JoinRejected(NamedTuple):
    """A worker has read other tokenizer files than the scheduler."""

    hello: Hello


class Lost(NamedTuple):
    """The worker runs plans no longer. `must_kill`: its process has to be killed."""

    hello: Hello
    reason: str
    loss: WorkerLoss
    must_kill: bool
    was_stopping: bool


Change = Heartbeat | Joined | JoinRefused | JoinRejected | Lost | StepError | Stopping | AdapterLoaded
"""Outputs that change what workers there are or what they run, among them messages as received."""
Fact = Change | StepResult
"""Outputs for the engine."""
Output = Send | Fact
