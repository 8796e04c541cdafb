"""Which worker may join, without sockets: scripts of what happens to several workers, with the outputs beside it.

`7.1` is epoch 7 of process 1. A worker that `asks` says Hello and is reachable.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.worker_peer import hello

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.engine_stats import WorkerStatus
from lineclear.scheduler.engine.worker_registry import MAX_SESSIONS, WorkerRegistry
from lineclear.scheduler.engine.worker_session import (
    LAST_MESSAGES_SECONDS,
    Joined,
    JoinRefused,
    JoinRejected,
    Lost,
    Output,
    Send,
    SessionState,
    WorkerTimeouts,
)
from lineclear.wire.messages import Goodbye, Heartbeat, StepError, StepErrorKind, StepResult, Stopping

SCRIPTS = {
    "a worker that asks again is refused silently": """
        7.1 asks         | joined 7
        9.2 asks         | Goodbye 9 · refused 9
        11.2 asks        | Goodbye 11
        13.2 asks        | Goodbye 13
        7.1 goodbye      | lost 7: it left: done · Rejoin 7 · Rejoin 13
    """,
    "the newer Hello of a process counts": """
        7.1 hello        |
        9.1 hello        |
        7.1 reachable    |
        9.1 reachable    | joined 9
        7.1 heartbeat    | Rejoin 7
    """,
    "a new worker supersedes the one that is cut off": """
        7.1 asks         | joined 7
        7.1 unreachable  |
        9.1 asks         | lost 7: its connection closed · Rejoin 7 · joined 9
        7.1 result       | Rejoin 7
    """,
    "a hung worker that wakes joins again": """
        7.1 asks         | joined 7
        silence          | lost 7: it was silent for 5.0 s, kill
        7.1 spared       | Rejoin 7
        7.1 hello        |
        7.1 heartbeat    | Rejoin 7
        9.1 asks         | joined 9
        9.1 hello        |
    """,
    "a condemned process never joins again": """
        7.1 asks         | joined 7
        9.1 hello        |
        7.1 exception    | StepError 7 · lost 7: a step failed: exception, kill
        7.1 condemned    | Goodbye 7 · Goodbye 9
        9.1 reachable    |
        11.1 hello       | Goodbye 11
        7.1 heartbeat    | Goodbye 7
        13.2 asks        | joined 13
        15.1 hello       | Goodbye 15
    """,
    "an exited process never joins again": """
        7.1 asks         | joined 7
        7.1 memory       | StepError 7 · lost 7: a step failed: out_of_memory · Rejoin 7
        9.1 hello        |
        exit 1           | Goodbye 7 · Goodbye 9
        9.1 reachable    |
        exit 1           |
        11.2 asks        | joined 11
        exit 1           |
        exit 2           | lost 11: its process ended · Goodbye 11
    """,
    "a process that never joined is not known by its pid": """
        7.1 hello        |
        exit 1           |
        7.1 reachable    | joined 7
    """,
}
SEVERAL = {
    "another model waits until all have left": """
        7.1 asks         | joined 7
        9.2 asks         | joined 9
        11.3 other asks  | Goodbye 11 · refused 11
        7.1 goodbye      | lost 7: it left: done · Rejoin 7
        13.4 asks        | joined 13
        9.2 goodbye      | lost 9: it left: done · Rejoin 9
        13.4 goodbye     | lost 13: it left: done · Rejoin 13 · Rejoin 11
        15.3 other asks  | joined 15
        17.1 asks        | Goodbye 17 · refused 17
    """,
    "another model supersedes the last one that is cut off": """
        7.1 asks         | joined 7
        7.1 unreachable  |
        9.2 other asks   | lost 7: its connection closed · Rejoin 7 · joined 9
    """,
    "a worker of the same model leaves the one that is cut off alone": """
        7.1 asks         | joined 7
        7.1 unreachable  |
        9.2 asks         | joined 9
        7.1 result       | StepResult 7
        a moment         | lost 7: its connection closed · Rejoin 7
    """,
    "a process joins once": """
        7.1 asks         | joined 7
        9.2 asks         | joined 9
        11.1 asks        | Goodbye 11 · refused 11
        9.2 goodbye      | lost 9: it left: done · Rejoin 9
        7.1 goodbye      | lost 7: it left: done · Rejoin 7 · Rejoin 11
    """,
    "each worker is lost for itself": """
        7.1 asks         | joined 7
        9.2 asks         | joined 9
        11.3 asks        | joined 11
        exit 2           | lost 9: its process ended · Goodbye 9
        7.1 result       | StepResult 7
        7.1 exception    | StepError 7 · lost 7: a step failed: exception, kill
        11.3 result      | StepResult 11
        9.2 result       | Goodbye 9
        7.1 spared       | Rejoin 7
        13.1 asks        | joined 13
        silence          | lost 11: it was silent for 5.0 s, kill · lost 13: it was silent for 5.0 s, kill
    """,
}


def described(output: Output) -> str:
    match output:
        case Send(message):
            return f"{type(message).__name__} {message.epoch}"
        case Joined(of):
            return f"joined {of.epoch}"
        case JoinRefused(of, _):
            return f"refused {of.epoch}"
        case JoinRejected(of):
            return f"rejected {of.epoch}"
        case Lost():
            return f"lost {output.hello.epoch}: {output.reason}{', kill' if output.must_kill else ''}"
    return f"{type(output).__name__} {output.epoch}"


class Player:
    """Carries out the left side of a line, a millisecond after the one before."""

    def __init__(self, max_workers: int = 1) -> None:
        self.workers = WorkerRegistry(WorkerTimeouts(), max_workers=max_workers, text_fingerprint="ours")
        self.now = 100.0

    def play(self, line: str) -> list[Output]:
        self.now += 0.001
        workers = self.workers
        match line.split():
            case ["silence"]:
                self.now += 5.0
                return workers.check(self.now)
            case ["a", "moment"]:
                self.now += LAST_MESSAGES_SECONDS
                return workers.check(self.now)
            case ["exit", instance]:
                return workers.on_process_exit(int(instance), WorkerLoss.KILLED, self.now)
        name, what = line.strip().split(maxsplit=1)
        if what.endswith("asks"):
            return [*self.play(line.replace("asks", "hello")), *self.play(f"{name} reachable")]
        epoch, instance = map(int, name.split("."))
        match what:
            case "hello" | "other hello":
                model = what.removesuffix("hello")
                said = replace(hello(epoch, instance=instance, pid=instance), model_fingerprint=model)
                return workers.on_message(said, self.now)
            case "reachable" | "unreachable":
                probed = [s for s in workers.to_probe(have_connections_changed=True) if s.epoch == epoch]
                return [o for s in probed for o in workers.on_probe(s, what == "reachable", self.now)]
            case "spared" | "condemned":
                return workers.on_kill_answer(epoch, what == "condemned", self.now)
        messages = {
            "heartbeat": Heartbeat(epoch, 0),
            "goodbye": Goodbye(epoch, "done"),
            "stopping": Stopping(epoch),
            "result": StepResult(epoch, 1, (1,)),
            "exception": StepError(epoch, 1, StepErrorKind.EXCEPTION),
            "memory": StepError(epoch, 1, StepErrorKind.OUT_OF_MEMORY),
        }
        return workers.on_message(messages[what], self.now)


@pytest.fixture
def player() -> Player:
    return Player()


def check(script: str, player: Player) -> None:
    lines = [line.strip().partition("|") for line in script.strip().splitlines()]
    played = [(left, " · ".join(map(described, player.play(left)))) for left, _, _ in lines]
    assert played == [(left, right.strip()) for left, _, right in lines]


@pytest.mark.parametrize("name", SCRIPTS)
def test_transcript_of_one_place(name: str) -> None:
    check(SCRIPTS[name], Player(max_workers=1))


@pytest.mark.parametrize("name", SEVERAL)
def test_transcript_of_several_workers(name: str) -> None:
    check(SEVERAL[name], Player(max_workers=64))


def test_index_is_the_smallest_that_is_free() -> None:
    player = Player(max_workers=64)

    def indices() -> list[tuple[int, int | None, int, str]]:
        return [(f.hello.epoch, f.index, f.joins, f.state) for f in player.workers.figures(player.now)]

    for epoch in (7, 9, 11):
        player.play(f"{epoch}.{epoch} asks")
    assert indices() == [(7, 0, 1, "joined"), (9, 1, 1, "joined"), (11, 2, 1, "joined")]
    for line in ("9.9 goodbye", "13.13 asks", "15.15 other asks", "7.7 stopping"):
        player.play(line)
    assert indices() == [
        *((7, 0, 1, "stopping"), (13, 1, 2, "joined"), (11, 2, 1, "joined")),
        (15, None, 0, "waiting"),
    ]
    player.play("11.11 exception")
    assert indices()[2] == (11, 2, 1, "unhealthy")
    assert not player.workers.status.is_unhealthy  # the others serve
    assert player.workers.has_hung


def test_status_follows_the_worker(player: Player) -> None:
    first, second = hello(7, instance=1, pid=1), hello(9, instance=2, pid=2)

    def status(*lines: str) -> WorkerStatus:
        for line in lines:
            player.play(line)
        return player.workers.status

    assert status("7.1 hello") == WorkerStatus()
    assert status("7.1 reachable") == WorkerStatus(first, first, num_joins=1)
    assert status("7.1 stopping") == WorkerStatus(first, first, num_joins=1, is_stopping=True)
    assert status("7.1 unreachable").hello == first
    assert status("7.1 exception") == WorkerStatus(None, first, num_joins=1, is_unhealthy=True)
    assert status("7.1 spared").is_unhealthy
    assert status("9.2 hello", "9.2 reachable") == WorkerStatus(second, second, num_joins=2)


def test_hung_worker_is_looked_at_until_its_connection_closes(player: Player) -> None:
    for line in ("7.1 asks", "7.1 exception", "7.1 condemned"):
        player.play(line)
    assert player.workers.status.is_unhealthy
    assert player.workers.next_check(200.0) == 200.5
    (session,) = player.workers.to_probe(have_connections_changed=False)
    player.workers.on_probe(session, False, 200.5)
    assert not player.workers.status.is_unhealthy


def test_worker_with_other_files_is_rejected(player: Player) -> None:
    other = replace(hello(7, instance=1), text_fingerprint="other")
    player.workers.on_message(other, 100.0)
    (session,) = player.workers.to_probe(have_connections_changed=True)
    assert [described(o) for o in player.workers.on_probe(session, True, 100.1)] == ["Goodbye 7", "rejected 7"]
    assert described(player.workers.on_message(replace(other, epoch=9), 100.2)[0]) == "Goodbye 9"
    same = replace(hello(11, instance=2), text_fingerprint="ours")
    player.workers.on_message(same, 100.3)
    (session,) = player.workers.to_probe(have_connections_changed=True)
    assert [described(o) for o in player.workers.on_probe(session, True, 100.4)] == ["joined 11"]


def test_stale_messages_are_counted(player: Player) -> None:
    for line in ("7.1 heartbeat", "9.1 hello", "9.1 heartbeat", "9.1 reachable", "9.1 result", "9.1 hello"):
        player.play(line)
    assert player.workers.counters.stale_messages == 2  # the first and the last
    for line in ("9.1 unreachable", "9.1 result", "9.1 heartbeat"):
        player.play(line)
    assert player.workers.counters.stale_messages == 3


def test_old_sessions_are_forgotten(player: Player) -> None:
    for epoch in range(1000):
        player.play(f"{epoch}.{epoch + 1} hello")
        player.play(f"{epoch + 10_000}.1 heartbeat")
    assert len(player.workers) <= sum(MAX_SESSIONS.values()) + 2
    assert len(player.workers.to_probe(have_connections_changed=True)) <= MAX_SESSIONS[SessionState.CONNECTING] + 1
