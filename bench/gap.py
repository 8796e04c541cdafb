"""Measures the gap in a stream when its worker is killed in the middle of an answer, with and without a standby.

    python -m bench.gap [--model DIR] [--kills 20] [--standby] [--dtype float32]

The gap is the largest time between two messages of the client's stream. Every answer is compared with an uninterrupted
one: in float32 all tokens must be equal. In bfloat16 ties may differ, because the new worker computes in one chunk. The
next kill waits until the standby is ready, or without a standby until the worker has joined.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from bench.figures import Figure, arguments, main, scaled
from bench.measure import percentile
from lineclear.client import Client, LocalServer

_GOAL_MILLISECONDS = 1000.0  # with a standby, on the demo model
_MAX_TOKENS = 900
_LEAST, _SPREAD = 50, 400  # tokens before the kill
_REST_SECONDS = 1.0
_WAIT_SECONDS = 120.0


class Events:
    """The log of the server."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def pids(self, event: str) -> list[int]:
        """Return the log lines of an event so far."""
        lines = self._log.read_text().splitlines()
        found = [json.loads(line) for line in lines if f'"{event}"' in line and line.endswith("}")]
        return [int(each["pid"]) for each in found if each["event"] == event]

    def wait(self, event: str, count: int) -> int:
        """Wait for the `count`-th event and return its process id."""
        give_up_at = time.monotonic() + _WAIT_SECONDS
        while len(pids := self.pids(event)) < count:
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"{event} number {count} did not come within {_WAIT_SECONDS:g} s")
            time.sleep(0.05)
        return pids[count - 1]


def answer(client: Client, kill: int | None = None, after: int = 0) -> tuple[list[int], list[float]]:
    """Return the tokens of one answer and the times of its messages; kill process `kill` after some tokens."""
    tokens: list[int] = []
    moments: list[float] = []
    with client.stream("Once upon a time", max_tokens=_MAX_TOKENS, ignore_eos=True, temperature=0.0) as stream:
        for delta in stream:
            moments.append(time.perf_counter())
            tokens += delta.token_ids
            if kill is not None and len(tokens) >= after:
                os.kill(kill, signal.SIGKILL)
                kill = None
    if kill is not None or len(tokens) != _MAX_TOKENS:
        raise RuntimeError("the answer ended before its worker was killed, or is not whole")
    return tokens, moments


def gaps(model: Path, kills: int, *, standby: bool, dtype: str) -> tuple[list[float], int]:
    """Return the largest gap of each stream in seconds, and the number of correct answers."""
    found, num_right = [], 0
    flags = ["--model", str(model), "--log-level", "info", *(["--standby-worker"] if standby else [])]
    flags += ["--", "--dtype", dtype]
    with LocalServer(*flags) as server, Client(server.target, max_attempts=1) as client:
        events = Events(server.log)
        right, _ = answer(client)
        for number in range(1, kills + 1):
            worker = events.wait("worker_joined", number)
            if standby:
                events.wait("standby_ready", number)
            time.sleep(_REST_SECONDS)
            tokens, moments = answer(client, worker, _LEAST + number * 37 % _SPREAD)
            num_right += tokens == right
            found.append(max(b - a for a, b in pairwise(moments)))
    return found, num_right


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Return percentiles over the kills; with few kills, p99 is the longest gap."""
    found, num_right = gaps(options.model, options.kills, standby=options.standby, dtype=options.dtype)
    goal = _GOAL_MILLISECONDS if options.standby else None
    case = f"{options.model.resolve().name}, {options.kills} kills, {'a' if options.standby else 'no'} standby worker"
    case += "" if options.dtype == "auto" else f", {options.dtype}"
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        yield Figure(f"gap: {name}", case, scaled(percentile(found, share), 1e3), "ms", goal)
    yield Figure("gap: shortest", case, min(found) * 1e3, "ms")
    least = options.kills if options.dtype == "float32" else None
    yield Figure("gap: answers with every token the same", case, num_right, "", least, more_is_better=True)


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "demo" / "model")
    found.add_argument("--kills", type=int, default=20)
    found.add_argument("--dtype", default="auto", help="of the worker")
    found.add_argument("--standby", action="store_true", help="keep a standby worker (--standby-worker)")
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
