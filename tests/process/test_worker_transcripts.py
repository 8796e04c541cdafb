"""A worker's life through real sockets, as scripts: lines with `>` happen to the scheduler, lines with `<` follow.

A worker is named by its epoch, `7`, and says Hello as `7 sends hello INSTANCE`: the instance names its process. With
`7 asks as INSTANCE` it connects before. All processes have the pid 7, as in separate containers. Lines that follow one
`>` may come in any order, because they come through several sockets.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from support.engine_harness import EngineHarness, Stream, eventually, request
from support.time_limits import PATIENCE_SECONDS
from support.worker_peer import Peer, hello, peers

from lineclear.scheduler.core.limits import CoreLimits
from lineclear.wire.messages import (
    Goodbye,
    Heartbeat,
    Message,
    StepError,
    StepErrorKind,
    StepPlan,
    StepResult,
    Stopping,
)

EVENTS = ("worker_joined", "worker_lost", "worker_stopping", "join_refused")

SCRIPTS = {
    "a Hello waits until a plan can reach the worker": """
        > 7 connects its result socket
        > 7 sends hello 1
        > 7 sends heartbeat
        > 7 connects its plan socket
        < worker_joined 7
    """,
    "a second worker waits for the place": """
        > 7 asks as 1
        < worker_joined 7
        > 9 asks as 2
        < 9 gets Goodbye: 1 workers are joined to this scheduler, and --max-workers is 1
        < join_refused 9
        > 7 sends goodbye
        < worker_lost 7: it left: done
        < 7 gets Rejoin
        < 9 gets Rejoin
        > 11 asks as 2
        < worker_joined 11
    """,
    "a failed step condemns the process": """
        > the supervisor kills
        > submit
        > 7 asks as 1
        < worker_joined 7
        < 7 gets StepPlan 1
        > 7 sends exception
        < worker_lost 7: a step failed: exception
        < anomaly: a step failed: exception
        < broken: a step failed: exception
        < hung
        < 7 gets Goodbye: this process is being killed, or taken for dead; it cannot join again
        > 9 asks as 1
        < 9 gets Goodbye: this process is being killed, or taken for dead; it cannot join again
        > 7 closes
        < not hung
        > 11 asks as 2
        < worker_joined 11
        < 11 gets StepPlan 1
    """,
    "a failed step of a worker without a supervisor": """
        > submit
        > 7 asks as 1
        < worker_joined 7
        < 7 gets StepPlan 1
        > 7 sends bad result
        < worker_lost 7: it sent a result that cannot be
        < broken: it sent a result that cannot be
        < hung
        < 7 gets Rejoin
        > 9 asks as 1
        < worker_joined 9
        < not hung
        < 9 gets StepPlan 1
    """,
    "a closed connection is a loss": """
        > 7 asks as 1
        < worker_joined 7
        > 7 closes
        < worker_lost 7: its connection closed
        < anomaly: its connection closed
    """,
    "last messages count after the plan socket closed": """
        > submit
        > 7 asks as 1
        < worker_joined 7
        < 7 gets StepPlan 1
        > 7 closes its plan socket and 7 sends result and 7 sends goodbye
        < tokens 1
        < worker_lost 7: it left: done
    """,
    "the exit code of a process explains its closed connection": """
        > submit
        > 7 asks as 1
        < worker_joined 7
        < 7 gets StepPlan 1
        > 7 closes and process 7 exits 70
        < worker_lost 7: its process ended
        < anomaly: its process ended
    """,
    "a stopping worker is released when the server ends": """
        > submit
        > 7 asks as 1
        < worker_joined 7
        < 7 gets StepPlan 1
        > 7 sends stopping
        < worker_stopping 7
        > release
        < 7 gets Goodbye: no request is left to run
    """,
    "a request that comes too late for a stopping worker": """
        > 7 asks as 1
        < worker_joined 7
        > 7 sends stopping
        < worker_stopping 7
        < 7 gets Goodbye: no request is left to run
        > submit
        < 7 gets StepPlan 1
        > 7 sends goodbye
        < worker_lost 7: it left: done
        < 7 gets Rejoin
        > 9 asks as 2
        < worker_joined 9
        < 9 gets StepPlan 1
    """,
}


MESSAGES: dict[str, Callable[[int], Message]] = {
    "heartbeat": lambda epoch: Heartbeat(epoch, 0),
    "result": lambda epoch: StepResult(epoch, 1, (1,)),
    "bad result": lambda epoch: StepResult(epoch, 1, (1,) * 9),
    "exception": lambda epoch: StepError(epoch, 1, StepErrorKind.EXCEPTION),
    "goodbye": lambda epoch: Goodbye(epoch, "done"),
    "stopping": lambda epoch: Stopping(epoch),
}


def received(epoch: int, message: Message) -> str:
    detail = {
        Goodbye: lambda m: f": {m.reason}",
        StepPlan: lambda m: f" {m.step}",
    }.get(type(message), lambda m: "")
    return f"{epoch} gets {type(message).__name__}{detail(message)}"


class Player:
    """Carries out the lines of a script and collects messages, log events and losses."""

    def __init__(
        self, harness: EngineHarness, peer: Callable[[int], Peer], lines: list[Any], anomalies: list[str]
    ) -> None:
        self._harness, self._peer, self._lines = harness, peer, lines
        self._peers: dict[int, Peer] = {}
        self._closed: set[int] = set()
        self._num_logged = self._num_broken = 0
        self._is_hung = False
        self._anomalies = anomalies
        self._stream: Stream | None = None
        self._num_tokens = 0

    def play(self, line: str) -> None:
        for part in line.split(" and "):
            self._play(part)

    def _play(self, line: str) -> None:
        match line.split():
            case ["submit"]:
                self._stream = self._harness.submit(request(0, prompt_len=4, max_tokens=4))
            case ["release"]:
                self._harness.engine.release_worker()
            case ["the", "supervisor", "kills"]:
                self._harness.is_killing = True
            case ["process", pid, "exits", code]:
                self._harness.engine.worker_exited(int(pid), int(code))
            case [epoch, "connects", *which]:
                self._connect(int(epoch), " ".join(which))
            case [epoch, "asks", "as", instance]:
                self.play(f"{epoch} connects and {epoch} sends hello {instance}")
            case [epoch, "closes"]:
                self._peers[int(epoch)].close()
                self._closed.add(int(epoch))
            case [epoch, "closes", "its", "plan", "socket"]:
                self._peers[int(epoch)].plans.close()
            case [epoch, "sends", "hello", instance]:
                self._peers[int(epoch)].send(hello(int(epoch), instance=int(instance), pid=7))
            case [epoch, "sends", *what]:
                self._peers[int(epoch)].send(MESSAGES[" ".join(what)](int(epoch)))
            case _:
                raise AssertionError(line)

    def _connect(self, epoch: int, which: str) -> None:
        if which == "its plan socket":
            self._peers[epoch].connect_plans()
            return
        self._peers[epoch] = self._peer(epoch)
        if which == "its result socket":
            self._peers[epoch].plans.close()
            return
        answers: list[bool] = []

        def is_reachable() -> bool:
            ask = self._harness.link.is_reachable
            self._harness.engine.call_on_engine_thread(lambda: answers.append(ask(epoch)))
            return any(answers)

        eventually(is_reachable)

    def follows(self) -> list[str]:
        """The lines since the last call."""
        found = []
        for epoch, peer in self._peers.items():
            while epoch not in self._closed and not peer.plans.closed and (message := peer.poll()) is not None:
                found.append(received(epoch, message))
        logged, self._num_logged = self._lines[self._num_logged :], len(self._lines)
        for line in logged:
            if line["event"] in EVENTS:
                reason = f": {line['reason'].partition(': more')[0]}" if "reason" in line else ""
                found.append(f"{line['event']} {line['epoch']}{reason}")
        broken, self._num_broken = self._harness.broken[self._num_broken :], len(self._harness.broken)
        found += [f"broken: {reason}" for reason in broken]
        anomalies, self._anomalies[:] = self._anomalies[:], []
        found += [f"anomaly: {what}" for what in anomalies]
        if self._stream is not None and len(self._stream.tokens) > self._num_tokens:
            self._num_tokens = len(self._stream.tokens)
            found.append(f"tokens {self._num_tokens}")
        if self._is_hung != self._harness.engine.worker_status.is_unhealthy:
            self._is_hung = not self._is_hung
            found.append("hung" if self._is_hung else "not hung")
        return [line.partition("cannot be: ")[0] + "cannot be" if "cannot be: " in line else line for line in found]


def acts(script: str) -> list[tuple[str, list[str]]]:
    """Return each `>` line with its `<` lines."""
    found: list[tuple[str, list[str]]] = []
    for line in filter(None, map(str.strip, script.splitlines())):
        if line.startswith(">"):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line[2:])
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_transcript(name: str) -> None:
    anomalies: list[str] = []
    harness = EngineHarness(core=CoreLimits(pipeline_depth=1), max_workers=1, on_anomaly=anomalies.append)
    with structlog.testing.capture_logs() as lines, harness, peers(harness.directory) as peer:
        player = Player(harness, peer, lines, anomalies)
        for event, expected in acts(SCRIPTS[name]):
            player.play(event)
            found: list[str] = []
            deadline = time.monotonic() + PATIENCE_SECONDS
            while Counter(found) != Counter(expected) and time.monotonic() < deadline:
                found += player.follows()
                extra = Counter(found) - Counter(expected)
                assert not extra, f"after `{event}`: {sorted(extra)}"
                time.sleep(0.002)
            assert sorted(found) == sorted(expected), f"after `{event}`"
            time.sleep(0.03)
            assert player.follows() == [], f"after `{event}`"
