"""Which worker may join, without sockets: scripts of what happens to several workers, with the outputs below."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.worker_peer import hello

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.engine_stats import WorkerStatus
from lineclear.scheduler.engine.worker_events import Joined, JoinRefused, JoinRejected, Lost, Output, Send
from lineclear.scheduler.engine.worker_registry import MAX_SESSIONS, WorkerRegistry
from lineclear.scheduler.engine.worker_session import WorkerState
from lineclear.scheduler.engine.worker_timeouts import WorkerTimeouts
from lineclear.wire.messages import Goodbye, Heartbeat, Rejoin, StepError, StepErrorKind, StepResult, Stopping

SCRIPTS = {
    "the place goes to the waiting workers": """
        7.1 hello        |
        7.1 reachable    | joined 7
        9.2 hello        |
        9.2 reachable    | Goodbye 9 · refused 9
        11.3 hello       |
        11.3 reachable   | Goodbye 11 · refused 11
        7.1 unreachable  | Rejoin 9 · Rejoin 11
        7.1 goodbye      | lost 7: it left: done · Rejoin 7
        13.3 hello       |
        13.3 reachable   | joined 13
        15.2 hello       |
        15.2 reachable   | Goodbye 15 · refused 15
    """,
    "a worker that asks again is refused silently": """
        7.1 hello        |
        7.1 reachable    | joined 7
        9.2 hello        |
        9.2 reachable    | Goodbye 9 · refused 9
        11.2 hello       |
        11.2 reachable   | Goodbye 11
        13.2 hello       |
        13.2 reachable   | Goodbye 13
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
        7.1 hello        |
        7.1 reachable    | joined 7
        7.1 unreachable  |
        9.1 hello        |
        9.1 reachable    | lost 7: its connection closed · Rejoin 7 · joined 9
        7.1 result       | Rejoin 7
    """,
    "a hung worker that wakes joins again": """
        7.1 hello        |
        7.1 reachable    | joined 7
        silence          | lost 7: it was silent for 5.0 s, kill
        7.1 spared       | Rejoin 7
        7.1 heartbeat    | Rejoin 7
        9.1 hello        |
        9.1 reachable    | joined 9
    """,
    "a condemned process never joins again": """
        7.1 hello        |
        7.1 reachable    | joined 7
        9.1 hello        |
        7.1 exception    | StepError 7 · lost 7: a step failed: exception, kill
        7.1 condemned    | Goodbye 7 · Goodbye 9
        9.1 reachable    |
        11.1 hello       | Goodbye 11
        7.1 heartbeat    | Goodbye 7
        13.2 hello       |
        13.2 reachable   | joined 13
        15.1 hello       | Goodbye 15
    """,
    "an exited process never joins again": """
        7.1 hello        |
        7.1 reachable    | joined 7
        7.1 memory       | StepError 7 · lost 7: a step failed: out_of_memory · Rejoin 7
        9.1 hello        |
        exit 1           | Goodbye 7 · Goodbye 9
        9.1 reachable    |
        exit 1           |
        11.2 hello       |
        11.2 reachable   | joined 11
        exit 1           |
        exit 2           | lost 11: its process ended · Goodbye 11
    """,
    "a process that never joined is not known by its pid": """
        7.1 hello        |
        exit 1           |
        7.1 reachable    | joined 7
    """,
}


def described(output: Output) -> str:
    match output:
        case Send(message):
            return f"{type(message).__name__} {message.epoch}"
        case Joined(of):
            return f"joined {of.epoch}"
        case JoinRefused(of):
            return f"refused {of.epoch}"
        case JoinRejected(of):
            return f"rejected {of.epoch}"
        case Lost():
            return f"lost {output.hello.epoch}: {output.reason}{', kill' if output.must_kill else ''}"
    return f"{type(output).__name__} {output.epoch}"


class Player:
    """Carries out the left side of a line, a millisecond after the one before."""

    def __init__(self) -> None:
        self.workers = WorkerRegistry(WorkerTimeouts(), lambda num_tokens: 0.0, text_fingerprint="ours")
        self.now = 100.0

    def play(self, line: str) -> list[Output]:
        self.now += 0.001
        workers = self.workers
        match line.split():
            case ["silence"]:
                self.now += 5.0
                return workers.check(self.now)
            case ["exit", instance]:
                return workers.on_process_exit(int(instance), WorkerLoss.KILLED, self.now)
        name, what = line.split()
        epoch, instance = map(int, name.split("."))
        match what:
            case "hello":
                return workers.on_message(hello(epoch, instance=instance, pid=instance), self.now)
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_transcript(player: Player, name: str) -> None:
    lines = [line.strip().partition("|") for line in SCRIPTS[name].strip().splitlines()]
    played = [(left, " · ".join(map(described, player.play(left)))) for left, _, _ in lines]
    assert played == [(left, right.strip()) for left, _, right in lines]


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


def test_hung_worker_is_gone_with_its_connection(player: Player) -> None:
    for line in ("7.1 hello", "7.1 reachable", "7.1 exception", "7.1 condemned"):
        player.play(line)
    assert player.workers.status.is_unhealthy
    assert player.workers.next_check(200.0) == 200.5
    (session,) = player.workers.to_probe(have_connections_changed=False)
    player.workers.on_probe(session, False, 200.5)
    assert not player.workers.status.is_unhealthy
    assert player.workers.to_probe(have_connections_changed=False) == []


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


def test_bad_result_is_a_clean_loss(player: Player) -> None:
    player.play("7.1 hello"), player.play("7.1 reachable")
    (output,) = player.workers.on_bad_result("9 tokens", 101.0)
    reason = "it sent a result that cannot be: 9 tokens"
    assert output == Lost(hello(7, instance=1, pid=1), reason, WorkerLoss.CLEAN, True, False)


def test_unsent_plan_cuts_the_worker_off(player: Player) -> None:
    player.play("7.1 hello"), player.play("7.1 reachable")
    assert player.workers.on_unsent_plan(101.0) == []
    assert player.workers.joined is None
    assert player.workers.serving is not None


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
    assert len(player.workers.to_probe(have_connections_changed=True)) <= MAX_SESSIONS[WorkerState.CONNECTING] + 1


def test_rejoin_is_repeated_to_an_unknown_epoch(player: Player) -> None:
    assert [player.play("7.1 heartbeat") for _ in range(2)] == [[Send(Rejoin(7))]] * 2
