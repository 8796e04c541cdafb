"""Has a worker record what its steps do. All methods run on the engine's thread."""

from __future__ import annotations

from concurrent.futures import Future

from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import Lost
from lineclear.wire.messages import Profile, Profiled


class StepProfiles:
    """At most one recording at a time."""

    def __init__(self, link: WorkerLink, workers: WorkerRegistry) -> None:
        self._link, self._workers = link, workers
        self._done: Future[Profiled] | None = None
        self._epoch = 0
        self.ending: set[int] = set()
        """Epochs of workers that are to end their recording, until they are told. See `send_end`."""

    def ask(self, num_steps: int, worker: int, done: Future[Profiled], now: float) -> None:
        """Record the next steps of the worker with this index; `done` gets its answer, or the problem.

        With 0 steps, have the worker answer at once if it records for `done`.
        """
        if not num_steps:
            self.ending.update([self._epoch] if self._done is done else [])
            return
        epoch = next((session.epoch for session in self._workers.joined if session.index == worker), None)
        if self._done is not None:
            problem = "steps are being recorded for another call"
        elif epoch is None:
            problem = f"worker {worker} is not joined"
        elif not self._link.send_control(Profile(epoch, num_steps)):
            problem = f"worker {worker} cannot be reached now"
        else:
            self._done, self._epoch = done, epoch
            self.ending.discard(epoch)  # of the recording before
            return
        done.set_result(Profiled(0, problem=problem))

    def send_end(self, now: float) -> None:
        """Tell the workers in `ending`. One that has no room for a message stays for the next call."""
        self.ending &= self._workers.joined_epochs
        for epoch in sorted(self.ending):
            if self._link.send_control(Profile(epoch, 0)):
                self.ending.remove(epoch)

    def answered(self, profiled: Profiled, now: float) -> None:
        """Hand over the answer of a worker."""
        if profiled.epoch == self._epoch:
            self._answer(profiled)

    def worker_lost(self, lost: Lost, now: float) -> None:
        """Wait no longer for a worker."""
        if lost.hello.epoch == self._epoch:
            self._answer(Profiled(self._epoch, problem=f"the worker was lost: {lost.reason}"))

    def _answer(self, profiled: Profiled) -> None:
        done, self._done, self._epoch = self._done, None, 0
        if done is not None:
            done.set_result(profiled)
