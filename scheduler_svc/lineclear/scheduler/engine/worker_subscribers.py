"""What follows the changes of workers: core and worker pool, adapters, grammars, log levels, stops.

A subscriber has a method for each change that it follows, called with the change and the time. It returns the core's
events, if there are any. Work that has to wait stays in a container, and the subscriber is called in each iteration
until that is empty. All on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import structlog

from lineclear.errors import PoisonRequest
from lineclear.scheduler.core.events import Event, Failed
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.engine.adapter_loads import AdapterLoads
from lineclear.scheduler.engine.grammar_preparation import GrammarPreparation
from lineclear.scheduler.engine.step_profiles import StepProfiles
from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import Change, Joined, JoinRefused, JoinRejected, Lost, Output
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.wire.messages import (
    AdapterLoaded,
    Goodbye,
    Heartbeat,
    Hello,
    LogLevel,
    Profiled,
    SetLogLevel,
    StepError,
    StepResult,
    Stopping,
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """What the engine calls on its thread. None of it may block."""

    publish: Callable[[Sequence[Event]], None]
    """Receives events in order; the plans of the same iteration are sent before."""
    on_rejected: Callable[[Hello], None] = lambda hello: None
    """A worker has read other files than this process."""
    on_adapter_failed: Callable[[bytes, str], object] = lambda key, problem: None
    """A worker that joins cannot load an adapter, as the problem says."""
    on_anomaly: Callable[[str], object] = lambda what: None
    """A worker is lost, a step is far too slow or the thread dies."""
    on_fatal: Callable[[BaseException], None] = lambda error: None
    """The thread dies; nothing is published after it, so the server must end."""


class WorkerSubscribers:
    """Passes each change of a worker to core, worker pool and step history, then to its other subscribers."""

    def __init__(
        self,
        core: Scheduler,
        link: WorkerLink,
        workers: WorkerRegistry,
        pool: WorkerPool,
        steps: StepHistory,
        callbacks: EngineCallbacks,
    ) -> None:
        self.adapters = adapters = AdapterLoads(core, link, workers, callbacks.on_adapter_failed)
        self.grammars = grammars = GrammarPreparation(link, workers)
        self.log_levels = levels = LogLevels(link, workers)
        self.profiles = profiles = StepProfiles(link, workers)
        self.stopping = stopping = StoppingWorkers(core, link, workers)
        self._core, self._link, self._workers = core, link, workers
        self._pool, self._steps, self._callbacks = pool, steps, callbacks
        self._subscribers: dict[type[Change], tuple[Callable[[Any, float], list[Event] | None], ...]] = {
            Joined: (self._worker_joined, adapters.worker_joined, grammars.worker_joined, levels.worker_joined),
            Lost: (self._worker_lost, adapters.worker_lost, grammars.worker_lost, profiles.worker_lost),
            JoinRefused: (self._join_refused,),
            JoinRejected: (lambda rejected, now: callbacks.on_rejected(rejected.hello),),
            StepError: (self._step_failed,),
            Stopping: (stopping.worker_stopping,),
            AdapterLoaded: (adapters.answered,),
            Profiled: (profiles.answered,),
            Heartbeat: (grammars.answered,),
        }
        self.waiting_work: tuple[tuple[Sized, Callable[[float], list[Output] | None]], ...] = (
            (levels.unsent, levels.send),
            (profiles.ending, profiles.send_end),
            (adapters.unloading, adapters.drop_unused),
            (grammars.unsent, grammars.send),
            (stopping.epochs, stopping.release),
        )
        """Work to call in each iteration while its container has entries. The outputs are to be carried out."""

    def handle(self, change: Change, events: list[Event], now: float) -> None:
        """Pass a change to its subscribers; add their events."""
        for subscriber in self._subscribers[type(change)]:
            events += subscriber(change, now) or ()

    def carry_out(self, outputs: Iterable[Output], events: list[Event], now: float) -> None:
        """Send the messages among `outputs` and handle the changes."""
        for fact in self._link.perform(outputs):
            assert not isinstance(fact, StepResult), "a result comes from the link"
            self.handle(fact, events, now)

    def _worker_joined(self, joined: Joined, now: float) -> list[Event]:
        hello = joined.hello
        events = self._core.worker_joined(hello, now)
        self._steps.worker_joined(hello, self._workers[hello.epoch].index)
        log_join(hello, self._core.limits)
        self._pool.worker_joined(hello)
        return events

    def _join_refused(self, refused: JoinRefused, now: float) -> None:
        hello = refused.hello
        hint = f"{refused.reason}; this one may join after it"
        log.warning("join_refused", epoch=hello.epoch, pid=hello.pid, hint=hint)
        self._pool.worker_waits(hello)  # or its start would count as failed

    def _step_failed(self, error: StepError, now: float) -> list[Event]:
        log.error("step_failed", step=error.step, kind=error.kind.name.lower(), summary=error.summary)
        return self._core.on_step_error(error, now)

    def _worker_lost(self, lost: Lost, now: float) -> list[Event]:
        hello, is_draining = lost.hello, self._core.state.draining
        events = self._core.drain_events()
        # A stopping worker may be killed because it takes too long: no request is a suspect then.
        is_expected = is_draining or (lost.was_stopping and lost.loss is WorkerLoss.KILLED)
        loss = WorkerLoss.CLEAN if is_expected else lost.loss
        ended = self._core.worker_lost(hello.epoch, now, loss)
        self._steps.worker_lost(hello.epoch)
        if any(isinstance(event, Failed) and isinstance(event.error, PoisonRequest) for event in ended):
            log.error("poison_request_failed", epoch=hello.epoch)
            self._pool.crashes_explained()
        if loss is not WorkerLoss.CLEAN:
            self._callbacks.on_anomaly(lost.reason)
        write = log.info if is_draining else log.warning  # a server that drains stops its worker
        write("worker_lost", epoch=hello.epoch, pid=hello.pid, reason=lost.reason, num_live=self._core.num_live)
        if lost.must_kill:
            is_being_killed = self._pool.worker_broken(hello, lost.reason)
            self._link.perform(self._workers.on_kill_answer(hello.epoch, is_being_killed, now))
        return events + ended


class LogLevels:
    """Has each worker log from the level that was set, also those that join later."""

    def __init__(self, link: WorkerLink, workers: WorkerRegistry) -> None:
        self._link, self._workers = link, workers
        self._level: LogLevel | None = None  # None: workers keep the one they start with
        self.unsent: set[int] = set()
        """Epochs of workers to send the level to."""

    def set(self, level: LogLevel, now: float) -> None:
        """Send the level to all joined workers."""
        self._level = level
        self.unsent.update(self._workers.joined_epochs)

    def worker_joined(self, joined: Joined, now: float) -> None:
        """Send the level to a worker, if one was set."""
        if self._level is not None:
            self.unsent.add(joined.hello.epoch)

    def send(self, now: float) -> None:
        """Send the level to workers that do not have it. One whose socket is full stays for the next call."""
        assert self._level is not None
        self.unsent &= self._workers.joined_epochs
        for epoch in sorted(self.unsent):
            if self._link.send_control(SetLogLevel(epoch, self._level)):
                self.unsent.remove(epoch)


class StoppingWorkers:
    """Lets workers that have received SIGTERM exit when they are not needed any more."""

    def __init__(self, core: Scheduler, link: WorkerLink, workers: WorkerRegistry) -> None:
        self._core, self._link, self._workers = core, link, workers
        self._is_released = False
        self.epochs: set[int] = set()
        """Workers that are stopping and have not been released."""

    def worker_stopping(self, stopping: Stopping, now: float) -> None:
        """Note that a worker finishes its requests and takes no further ones."""
        log.info("worker_stopping", epoch=stopping.epoch, num_live=self._core.num_live)
        self.epochs.add(stopping.epoch)

    def release_all(self, now: float) -> None:
        """Let a stopping worker exit at once: its results are not needed any longer."""
        self._is_released = True

    def release(self, now: float) -> list[Output]:
        """Release those whose requests can continue on others, or all once no request is left. Returns the changes."""
        outputs = [] if self._core.state.draining else self._workers.retire(now)
        self.epochs &= self._workers.joined_epochs
        if self._is_released or not self._core.num_live:
            for epoch in sorted(self.epochs):
                if self._link.send_control(Goodbye(epoch, "no request is left to run")):
                    self.epochs.remove(epoch)
        return outputs


def log_join(hello: Hello, limits: CoreLimits) -> None:
    """Log the worker, and each limit that a step of it does not reach: a step is held to the smaller one."""
    log.info(
        "worker_joined",
        epoch=hello.epoch,
        pid=hello.pid,
        model_id=hello.model_id,
        device=hello.device,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        num_slots=hello.num_slots,
    )
    if hello.has_recurrent_state:
        hint = "drafts and --swap-memory-bytes have no effect; without snapshots, neither has the prefix cache"
        figures = {"pid": hello.pid, "num_state_snapshots": hello.num_state_snapshots, "hint": hint}
        if limits.speculative_method != "none":
            log.warning("worker_has_recurrent_state", **figures)
        else:
            log.info("worker_has_recurrent_state", **figures)
    caps = (
        ("--max-batch-size", limits.max_batch_size, hello.num_slots),
        ("--target-batch-tokens", limits.target_batch_tokens, hello.max_step_tokens),
    )
    if (wants_draft_model := limits.speculative_method == "draft_model") != bool(hello.draft_model):
        hint = (
            "drafts come from the request's own text; start the worker with --draft-model DIR"
            if wants_draft_model
            else f"the worker holds {hello.draft_model}; start the scheduler with --speculative-method draft_model"
        )
        log.warning("worker_differs_in_drafts", pid=hello.pid, draft_model=hello.draft_model, hint=hint)
    for flag, asked, has in caps:
        if asked > has:
            hint = f"start the worker with {flag} {asked}, or lower the scheduler's"
            log.warning("worker_caps_batches", flag=flag, value=asked, worker_value=has, hint=hint)
