"""Has workers compile grammars before the requests that need them are queued, so that no step waits for it.

All methods run on the engine's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import count

from lineclear.scheduler.engine.worker_link import WorkerLink
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import Joined, Lost
from lineclear.wire.messages import Heartbeat, PrepareGrammar

_MAX_RECENT = 64
"""Grammars that are not sent again. Workers keep at least as many."""
MAX_SENT = 4
"""Grammars that a worker has to compile at a time. Plans share its socket, which holds few messages: a worker that a
plan cannot be sent to is lost."""


class GrammarPreparation:
    """Sends grammars to the joined workers and waits for their answers.

    A worker that joins later is sent the recent grammars, because it may continue the requests of another one.
    """

    def __init__(self, link: WorkerLink, workers: WorkerRegistry) -> None:
        self._link, self._workers = link, workers
        self._numbers = count(1)
        self._recent: OrderedDict[str, set[int]] = OrderedDict()  # and the epochs that have compiled it
        self._waiting: dict[int, tuple[int, str]] = {}  # epoch and grammar by number, sent or not
        self.unsent: list[int] = []
        """Numbers of the grammars that a worker has no room for yet. See `send`."""
        self._calls: dict[str, list[Callable[[], None]]] = {}

    def prepare(self, grammar: str, done: Callable[[], None], now: float) -> None:
        """Call `done()` once each worker that is joined now has compiled the grammar, or is lost."""
        epochs = self._recent.setdefault(grammar, set())
        self._recent.move_to_end(grammar)
        while len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)
        asked = {epoch for epoch, text in self._waiting.values() if text == grammar}
        for worker in self._workers.joined:
            if worker.epoch not in epochs and worker.epoch not in asked:
                self._add(worker.epoch, grammar)
        self.send(now)
        self._calls.setdefault(grammar, []).append(done)
        self._call_done({grammar})

    def worker_joined(self, joined: Joined, now: float) -> None:
        """Send a worker the recent grammars, the last first."""
        for grammar in reversed(self._recent):
            self._add(joined.hello.epoch, grammar)
        self.send(now)

    def worker_lost(self, lost: Lost, now: float) -> None:
        """Do not wait for a worker any longer."""
        numbers = [number for number, (epoch, _) in self._waiting.items() if epoch == lost.hello.epoch]
        self._call_done({self._waiting.pop(number)[1] for number in numbers})

    def answered(self, heartbeat: Heartbeat, now: float) -> None:
        """Note which grammars a worker has compiled."""
        done = set()
        for number in heartbeat.prepared:
            epoch, grammar = self._waiting.pop(number, (0, ""))
            if epoch and grammar in self._recent:
                self._recent[grammar].add(epoch)
            done.add(grammar)
        self.send(now)
        self._call_done(done)

    def send(self, now: float) -> None:
        """Send what workers have room for. What cannot be sent stays until the next call."""
        if not self.unsent:
            return
        unsent = set(self.unsent)
        sent = Counter(epoch for number, (epoch, _) in self._waiting.items() if number not in unsent)
        rest = []
        for number in self.unsent:
            if number not in self._waiting:  # its worker is lost
                continue
            epoch, grammar = self._waiting[number]
            if sent[epoch] < MAX_SENT and self._link.send_control(PrepareGrammar(epoch, number, grammar)):
                sent[epoch] += 1
            else:
                rest.append(number)
        self.unsent[:] = rest

    def _add(self, epoch: int, grammar: str) -> None:
        number = next(self._numbers)
        self._waiting[number] = epoch, grammar
        self.unsent.append(number)

    def _call_done(self, grammars: set[str]) -> None:
        if not self._calls:
            return
        waiting = {grammar for _, grammar in self._waiting.values()}
        for grammar in sorted(grammars - waiting):
            for done in self._calls.pop(grammar, ()):
                done()
