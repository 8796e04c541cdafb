"""Carries out what `WorkerRegistry` decides about workers: joins, losses, refusals and the release of stopping ones.

Results are the engine's. All methods run on its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from lineclear.errors import PoisonRequest
from lineclear.scheduler.core.events import Event, Failed
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.engine.adapter_loads import AdapterLoads
from lineclear.scheduler.engine.grammar_preparation import GrammarPreparation
from lineclear.scheduler.engine.join_log import log_join
from lineclear.scheduler.engine.supervisor_interface import Supervisor
from lineclear.scheduler.engine.worker_events import Change, Joined, JoinRefused, JoinRejected, Lost, Output
from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import WorkerSession
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.wire.messages import (
    AdapterLoaded,
    Goodbye,
    Heartbeat,
    Hello,
    LogLevel,
    SetLogLevel,
    StepError,
    StepResult,
    Stopping,
)

log = structlog.get_logger()


class WorkerChanges:
    """Passes each change of a worker to core, link, supervisor and step history. Adds the core's events to a list."""

    def __init__(
        self,
        core: Scheduler,
        link: WorkerLink,
        workers: WorkerRegistry,
        adapters: AdapterLoads,
        supervisor: Supervisor,
        steps: StepHistory,
        on_rejected: Callable[[Hello], None],
        on_anomaly: Callable[[str], object],
    ) -> None:
        self._core, self._link, self._workers = core, link, workers
        self._adapters = adapters
        self._supervisor, self._steps = supervisor, steps
        self._on_rejected, self._on_anomaly = on_rejected, on_anomaly
        self._grammars = GrammarPreparation(link, workers)
        self._log_level: LogLevel | None = None  # that workers are sent; None: they keep the one they start with
        self._draining = False
        self._is_released = False  # a stopping worker may exit at once: its results are not needed any longer

    # --- commands ---------------------------------------------------------------------------------------------------

    def drain(self, now: float) -> None:
        """Refuse new requests. A worker that stops from now on finishes its requests."""
        self._draining = True
        self._core.drain(now)

    def release(self, now: float) -> None:
        """Let a stopping worker exit at once."""
        self._is_released = True

    def set_log_level(self, level: LogLevel, now: float) -> None:
        """Have each worker log from `level` upwards, also those that join later."""
        self._log_level = level

    def prepare_grammar(self, grammar: str, done: Callable[[], None], now: float) -> None:
        """Call `done()` once each joined worker has compiled the grammar, or is lost."""
        self._grammars.prepare(grammar, done)

    # --- changes ----------------------------------------------------------------------------------------------------

    def carry_out(self, outputs: Iterable[Output], events: list[Event], now: float) -> None:
        """Send the messages among `outputs` and handle the changes."""
        for fact in self._link.perform(outputs):
            assert not isinstance(fact, StepResult), "a result comes from the link"
            self.handle(fact, events, now)

    def handle(self, change: Change, events: list[Event], now: float) -> None:
        """Handle a change of a worker."""
        match change:
            case StepError():
                log.error("step_failed", step=change.step, kind=change.kind.name.lower(), summary=change.summary)
                events += self._core.on_step_error(change, now)
            case AdapterLoaded():
                events += self._adapters.answered(change, now)
            case Joined(hello):
                self._on_joined(hello, events, now)
            case Lost():
                self._on_lost(change, events, now)
            case Heartbeat():
                self._grammars.on_heartbeat(change)
            case Stopping():
                log.info("worker_stopping", epoch=change.epoch, num_live=self._core.num_live)
            case JoinRefused(hello, reason):
                hint = f"{reason}; this one may join after it"
                log.warning("join_refused", epoch=hello.epoch, pid=hello.pid, hint=hint)
                self._supervisor.worker_waits(hello)
            case JoinRejected(hello):
                self._on_rejected(hello)

    def _on_joined(self, hello: Hello, events: list[Event], now: float) -> None:
        events += self._core.worker_joined(hello, now)
        self._adapters.worker_joined(hello.epoch)
        self._steps.worker_joined(hello, self._workers[hello.epoch].index)
        log_join(hello, self._core.limits)
        self._supervisor.worker_joined(hello)
        self._grammars.worker_joined(hello.epoch)

    def _on_lost(self, lost: Lost, events: list[Event], now: float) -> None:
        """Put the requests of a lost worker back into the queue and have its process killed if necessary."""
        hello = lost.hello
        events += self._core.drain_events()
        # A stopping worker may be killed because it takes too long: no request is a suspect then.
        is_expected = self._draining or (lost.was_stopping and lost.loss is WorkerLoss.KILLED)
        loss = WorkerLoss.CLEAN if is_expected else lost.loss
        ended = self._core.worker_lost(hello.epoch, now, loss)
        self._adapters.worker_lost(hello.epoch)
        self._steps.worker_lost(hello.epoch)
        events += ended
        if any(isinstance(event, Failed) and isinstance(event.error, PoisonRequest) for event in ended):
            log.error("poison_request_failed", epoch=hello.epoch)
            self._supervisor.crashes_explained()
        if loss is not WorkerLoss.CLEAN:
            self._on_anomaly(lost.reason)
        write = log.info if self._draining else log.warning  # a server that drains stops its worker
        write("worker_lost", epoch=hello.epoch, pid=hello.pid, reason=lost.reason, num_live=self._core.num_live)
        if lost.must_kill:
            is_being_killed = self._supervisor.worker_broken(hello, lost.reason)
            self.carry_out(self._workers.on_kill_answer(hello.epoch, is_being_killed, now), events, now)

    # --- in each iteration ------------------------------------------------------------------------------------------

    def report_progress(self, worker: WorkerSession, now: float) -> None:
        """Report to the supervisor that a worker makes progress, now and then."""
        if worker.take_progress(now) and worker.hello is not None:
            self._supervisor.worker_progressed(worker.hello)

    def check_grammars(self) -> None:
        """Do not wait for lost workers to compile grammars."""
        self._grammars.check()

    def send_log_level(self) -> None:
        """Send the log level to each worker that does not have it."""
        level = self._log_level
        if level is None:
            return
        for worker in self._workers.joined:
            if worker.log_level is not level and self._link.send_control(SetLogLevel(worker.epoch, level)):
                worker.log_level = level

    def release_stopping(self, events: list[Event], now: float) -> None:
        """Release stopping workers: those whose requests can continue on others, or all once no request is left."""
        if not self._draining:
            self.carry_out(self._workers.retire(now), events, now)
        if not self._is_released and self._core.num_live:
            return
        for worker in self._workers.joined:
            if worker.is_stopping and not worker.is_released:
                worker.is_released = self._link.send_control(Goodbye(worker.epoch, "no request is left to run"))
