"""Kill, again and again, under load, and count what the callers noticed: `python -m campaigns.chaos --help`.

    python -m campaigns.chaos --of worker --kills 500                     the torch-free worker over the real wire
    python -m campaigns.chaos --of worker --kills 30 --model ../demo/model  the torch worker on a model
    python -m campaigns.chaos --of scheduler --kills 50                   seen through the client library

The moments are random in progress, not in time: a kill comes after so many more tokens, so that it falls into
prefills, decodes and recoveries alike. Prints a line of JSON; exits 1 unless every index of every answer was there once
and right, no answer failed, and no process stayed behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from campaigns.answers import Question, Reader, Tally
from campaigns.server import BOUND_SECONDS, Server, is_running
from service.small_tokenizers import byte_level, save
from support.toy import expected

from lineclear.client import Client, Sampling
from lineclear.wire.types import Sampling as WireSampling

_VOCABULARY = 512
_TOY = {"vocab_size": _VOCABULARY, "min_step_seconds": 0.002, "max_step_seconds": 0.006, "num_blocks": 2048}
_MAX_TOKENS_BETWEEN = 400
_ORPHAN_SECONDS = 2.0


@dataclass
class Campaign:
    """A server, its readers, and the figures."""

    target: str
    make_server: Callable[[], Server]
    ask: Callable[[], Question]
    num_streams: int
    dice: random.Random
    tally: Tally = field(default_factory=Tally)
    detected: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    orphans: int = 0

    def run(self, of: str, kills: int) -> None:
        """Kill so often, then let every answer end."""
        server = self.make_server()
        server.wait_for("worker_joined")
        with Client(self.target) as client:
            readers = [Reader(client, self.ask, self.tally) for _ in range(self.num_streams)]
            for reader in readers:
                reader.start()
            for _ in range(kills):
                self._wait_for_tokens(readers, self.dice.randrange(_MAX_TOKENS_BETWEEN))
                server = self._kill_worker(server, readers) if of == "worker" else self._kill_server(server, readers)
            for reader in readers:
                reader.stop()
            for reader in readers:
                reader.join(BOUND_SECONDS)
                assert not reader.is_alive(), "an answer did not end"
        pids = server.worker_pids()
        code = server.end(signal.SIGTERM)
        assert code == 0, f"the server left with {code}"
        self._count_orphans(pids)

    def _kill_worker(self, server: Server, readers: Sequence[Reader]) -> Server:
        began = time.monotonic()
        os.kill(server.worker_pids()[-1], signal.SIGKILL)
        self.detected.append(server.wait_for("worker_lost", began)[0] - began)
        self._wait_until_all_go_on(readers, server.wait_for("worker_joined", began)[0], began)
        return server

    def _kill_server(self, server: Server, readers: Sequence[Reader]) -> Server:
        pids = server.worker_pids()
        began = time.monotonic()
        server.end(signal.SIGKILL)
        self._count_orphans(pids)
        replacement = self.make_server()
        self._wait_until_all_go_on(readers, replacement.wait_for("worker_joined")[0], began)
        return replacement

    def _wait_for_tokens(self, readers: Sequence[Reader], number: int) -> None:
        goal = sum(reader.num_tokens for reader in readers) + number
        _wait(lambda: sum(reader.num_tokens for reader in readers) >= goal, "progress")

    def _wait_until_all_go_on(self, readers: Sequence[Reader], joined_at: float, began: float) -> None:
        """Recovered is when every reader has got a token from the new worker."""
        _wait(lambda: all(reader.last_at > joined_at for reader in readers), "a token for every stream")
        self.recovered.append(max(reader.last_at for reader in readers) - began)

    def _count_orphans(self, pids: Sequence[int]) -> None:
        end = time.monotonic() + _ORPHAN_SECONDS
        while any(map(is_running, pids)) and time.monotonic() < end:
            time.sleep(0.01)
        self.orphans += sum(map(is_running, pids))

    def figures(self) -> dict[str, Any]:
        """All that was counted."""
        tally = self.tally
        names = ("answers", "tokens", "lost", "duplicated", "altered", "resumes")
        return {
            **{name: getattr(tally, name) for name in names},
            "failed": dict(tally.failed),
            "orphans": self.orphans,
            "detection_seconds": _quantiles(self.detected),
            "recovery_seconds": _quantiles(self.recovered),
        }

    @property
    def is_clean(self) -> bool:
        """Nobody noticed anything but a pause."""
        tally = self.tally
        return not (tally.lost or tally.duplicated or tally.altered or tally.failed or self.orphans)


def _wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + BOUND_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {BOUND_SECONDS:g} s"
        time.sleep(0.002)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    pick = lambda share: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)  # noqa: E731
    return {"p50": pick(0.5), "p99": pick(0.99), "max": round(ordered[-1], 4)}


# --- questions -------------------------------------------------------------------------------------------------------


def toy_questions(seed: int) -> Callable[[], Question]:
    """Endlessly many, seeded, of many lengths; some begin alike. Safe to call from many threads."""
    numbers, lock = count(), threading.Lock()

    def ask() -> Question:
        with lock:
            number = next(numbers)
        dice = random.Random(seed << 32 | number)
        shared = [7 * (number % 3) + i for i in range(32)]
        prompt = (*shared, *(dice.randrange(_VOCABULARY) for _ in range(dice.randrange(1, 60))))
        max_tokens = dice.randrange(20, 160)
        right = expected(prompt, WireSampling(seed=number), max_tokens, _VOCABULARY)
        return Question(prompt, Sampling(seed=number, max_tokens=max_tokens, ignore_eos=True), tuple(right))

    return ask


def model_questions(target: str, make_server: Callable[[], Server], num: int, seed: int) -> Callable[[], Question]:
    """`num` of them, answered beforehand by the same server, one at a time and undisturbed."""
    dice = random.Random(seed)
    server = make_server()
    server.wait_for("worker_joined")
    known: list[Question] = []
    with Client(target) as client:
        vocabulary = client.model().vocab_size
        for number in range(num):
            prompt = tuple(dice.randrange(vocabulary) for _ in range(dice.randrange(8, 60)))
            sampling = Sampling(seed=number, temperature=0.8 * (number % 2), max_tokens=96, ignore_eos=True)
            known.append(Question(prompt, sampling, client.generate(list(prompt), sampling).token_ids))
    server.end(signal.SIGTERM)
    lock = threading.Lock()

    def ask() -> Question:
        with lock:
            return dice.choice(known)

    return ask


# --- the command -----------------------------------------------------------------------------------------------------


def campaign(folder: Path, *, of: str, kills: int, streams: int, seed: int, model: str = "") -> Campaign:
    """Run one. What it does not forgive is in `is_clean`."""
    target = f"unix:{folder}/api.sock"

    def make_server() -> Server:
        if model:
            return Server(target, ["--model", model, "--", "--dtype", "float32"])
        return Server(target, ["--model", str(save(folder, byte_level()))], toy=_TOY)

    ask = model_questions(target, make_server, streams, seed) if model else toy_questions(seed)
    chosen = Campaign(target, make_server, ask, streams, random.Random(seed))
    chosen.run(of, kills)
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=("worker", "scheduler"), default="worker")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="", help="a model directory: kills the torch worker")
    chosen = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        done = campaign(Path(folder), **vars(chosen))
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({**vars(chosen), "clean": done.is_clean, **done.figures(), "seconds": seconds}))
    return 0 if done.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
