"""Does memory grow with the requests served? `python -m campaigns.soak --seconds 3600`

Answers for hours, a fifth of them given up on the way; meanwhile the private memory of both processes, RssAnon and
VmSwap (a leak that is swapped out is a leak), is read once a second, with their threads and descriptors. After a
warm-up of a tenth a line is fitted to memory over requests. Prints a line of JSON; exits 1 when the upper end of the
95 % interval of a slope is more than 1 MiB per 100,000 requests, an answer is wrong, or something is still held at the
end. A short run has a wide interval, so it fails for want of evidence: `--judge no` only shows figures.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.answers import Tally
from campaigns.chaos import toy_questions
from campaigns.server import BOUND_SECONDS, Server
from service.small_tokenizers import byte_level, save

from lineclear.client import Client

_TOY = {"vocab_size": 512, "num_blocks": 2048}
_MAX_SLOPE_BYTES = 2**20
_PER_REQUESTS = 100_000
_SAMPLE_SECONDS = 1.0
_CANCELLED = 0.2


@dataclass(frozen=True)
class Sample:
    """One look at a process."""

    requests: int
    private_bytes: int
    threads: int
    descriptors: int


def look(pid: int, requests: int) -> Sample:
    """At the process, now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    private = sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))
    return Sample(requests, private, int(status["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir())))


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: how much y grows with x, and the half-width of the 95 % interval. Infinite for too few points."""
    n = len(points)
    mean_x, mean_y = (sum(p[i] for p in points) / max(1, n) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if n < 3 or spread == 0:
        return 0.0, math.inf
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return rise, 1.96 * math.sqrt(rest / (n - 2) / spread)


class _Caller(threading.Thread):
    """One answer after another, some of them given up on the way."""

    def __init__(self, client: Client, seed: int, tally: Tally, stopped: threading.Event) -> None:
        super().__init__(daemon=True)
        self._client, self._tally, self._stopped = client, tally, stopped
        self._dice, self._ask = random.Random(seed), toy_questions(seed)

    def run(self) -> None:
        while not self._stopped.is_set():
            question = self._ask()
            until = self._dice.randrange(20) if self._dice.random() < _CANCELLED else math.inf
            tokens: list[int] = []
            with self._client.stream(list(question.prompt), question.sampling, omit_text=True) as stream:
                for delta in stream:
                    tokens += delta.token_ids
                    if len(tokens) >= until:
                        break
            with self._tally.lock:
                self._tally.answers += 1
                self._tally.tokens += len(tokens)
                self._tally.altered += tokens != list(question.right[: len(tokens)])


def soak(folder: Path, *, seconds: float, streams: int, seed: int) -> dict[str, Any]:
    """Run, and say what grew."""
    target = f"unix:{folder}/api.sock"
    server = Server(target, ["--model", str(save(folder, byte_level())), "--log-level", "warning"], toy=_TOY)
    tally, stopped = Tally(), threading.Event()
    # The first calls come before it listens.
    with Client(target, max_attempts=64) as client:
        client.generate([5], max_tokens=1)
        pids = {"scheduler": server.process.pid, "worker": client.stats().worker.pid}
        callers = [_Caller(client, seed << 16 | n, tally, stopped) for n in range(streams)]
        for caller in callers:
            caller.start()
        samples: dict[str, list[Sample]] = {name: [] for name in pids}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, pid in pids.items():
                samples[name].append(look(pid, tally.answers))
            stopped.wait(_SAMPLE_SECONDS)
        stopped.set()
        for caller in callers:
            caller.join(BOUND_SECONDS)
            assert not caller.is_alive(), "an answer did not end"
        held = _held(client)
    code = server.end(signal.SIGTERM)
    assert code == 0, f"the server left with {code}"
    return {
        "answers": tally.answers,
        "tokens": tally.tokens,
        "wrong": tally.altered,
        "held_at_end": held,
        **{name: _growth(of) for name, of in samples.items()},
    }


def _held(client: Client) -> int:
    """Blocks and streams that are still held, once nothing is asked any more."""
    end = time.monotonic() + BOUND_SECONDS
    while (g := client.stats().gauges).blocks_used + g.streams_open and time.monotonic() < end:
        time.sleep(0.05)
    return g.blocks_used + g.streams_open


def _growth(samples: Sequence[Sample]) -> dict[str, float]:
    settled = samples[len(samples) // 10 :]
    rise, error = slope([(s.requests, s.private_bytes) for s in settled])
    return {
        "first_bytes": settled[0].private_bytes,
        "last_bytes": settled[-1].private_bytes,
        "slope_bytes_per_100k": round(rise * _PER_REQUESTS),
        "upper_bytes_per_100k": round(min(1e15, (rise + error) * _PER_REQUESTS)),
        "threads": settled[-1].threads - settled[0].threads,
        "descriptors": settled[-1].descriptors - settled[0].descriptors,
    }


def is_steady(found: dict[str, Any]) -> bool:
    """Whether the evidence says that nothing grows."""
    uppers = [found[name]["upper_bytes_per_100k"] for name in ("scheduler", "worker")]
    return not found["wrong"] and not found["held_at_end"] and max(uppers) <= _MAX_SLOPE_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judge", choices=("yes", "no"), default="yes")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        found = soak(Path(folder), seconds=chosen.seconds, streams=chosen.streams, seed=chosen.seed)
    print(json.dumps({"seconds": chosen.seconds, "steady": is_steady(found), **found}))
    return 0 if chosen.judge == "no" or is_steady(found) else 1


if __name__ == "__main__":
    sys.exit(main())
