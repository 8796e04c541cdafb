"""Grammars are sent to workers a few at a time, so that plans always find room in the socket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from support.worker_peer import hello

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.grammar_preparation import MAX_SENT, GrammarPreparation
from lineclear.scheduler.engine.worker_session import Joined, Lost
from lineclear.wire.messages import Heartbeat, PrepareGrammar


class Fixture:
    """Two workers whose sockets are recorded."""

    def __init__(self) -> None:
        self.sent: list[PrepareGrammar] = []
        self.done: list[str] = []
        self.is_full = False
        self.workers = SimpleNamespace(joined=[SimpleNamespace(epoch=1), SimpleNamespace(epoch=2)])
        link = SimpleNamespace(send_control=self._send)
        self.preparation = GrammarPreparation(cast("Any", link), cast("Any", self.workers))

    def _send(self, message: PrepareGrammar) -> bool:
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full

    def prepare(self, *grammars: str) -> None:
        for grammar in grammars:
            self.preparation.prepare(grammar, lambda grammar=grammar: self.done.append(grammar), 0.0)  # type: ignore[misc]

    def answer(self, message: PrepareGrammar) -> None:
        self.preparation.answered(Heartbeat(message.epoch, 0, prepared=(message.number,)), 0.0)

    def of(self, epoch: int) -> list[str]:
        return [message.grammar for message in self.sent if message.epoch == epoch]


GRAMMARS = [f"grammar {number}" for number in range(3 * MAX_SENT)]


def test_worker_has_a_few_grammars_at_a_time() -> None:
    f = Fixture()
    f.prepare(*GRAMMARS)
    assert (f.of(1), f.of(2)) == (GRAMMARS[:MAX_SENT], GRAMMARS[:MAX_SENT])
    for message in list(f.sent):
        f.answer(message)
    assert f.done == GRAMMARS[:MAX_SENT]
    answered = 0
    while answered < len(f.sent):
        f.answer(f.sent[answered])
        answered += 1
    assert (f.of(1), f.of(2)) == (GRAMMARS, GRAMMARS)
    assert f.done == GRAMMARS


def test_grammar_that_a_full_socket_refused_is_sent_later() -> None:
    f = Fixture()
    f.is_full = True
    f.prepare("a")
    assert (f.sent, f.done) == ([], [])
    f.is_full = False
    f.preparation.send(0.0)
    for message in list(f.sent):
        f.answer(message)
    assert f.done == ["a"]


def test_lost_worker_holds_nothing_back() -> None:
    f = Fixture()
    f.prepare(*GRAMMARS)
    del f.workers.joined[1]
    f.preparation.worker_lost(Lost(hello(2), "it left", WorkerLoss.CLEAN, False, False), 0.0)
    answered = 0
    while answered < len(f.sent):
        if f.sent[answered].epoch == 1:
            f.answer(f.sent[answered])
        answered += 1
    assert f.done == GRAMMARS
    assert len(f.of(2)) == MAX_SENT


def test_worker_that_joins_is_sent_the_last_grammars_first() -> None:
    f = Fixture()
    f.prepare(*GRAMMARS)
    f.workers.joined.append(SimpleNamespace(epoch=3))
    f.preparation.worker_joined(Joined(hello(3)), 0.0)
    assert f.of(3) == GRAMMARS[: -MAX_SENT - 1 : -1]
