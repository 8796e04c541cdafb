"""Use a server for hours and check that nothing grows, is lost or stands still: `python -m campaigns.soak --seconds
3600`.

Three tenants at the same time use Generate, Session, and Submit with Attach. Others cancel answers midway, read slowly,
send large prompts, submit without reading, or lose their network (`support.blackhole`). The worker is killed in the
first half only, since a young worker cannot show growth. Each answer is compared with the expected one. Memory, threads
and descriptors of both processes are sampled once a second (`growth`), and a canary process times its tokens.

Prints a line of JSON. Exits with 1 if an answer was lost, repeated, changed or refused, the canary stood still, a kind
of client never did anything, something is held at the end, or a slope is above its bound. A short run cannot prove
small slopes: `--judge no` only prints figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from campaigns.answers import CheckingReader, Tally, differences
from campaigns.growth import SHORT, Bounds, Sample, growth, look, too_much
from campaigns.pauses import quantiles
from campaigns.questions import ROUTES, Answer, Question, toy_answer, toy_questions
from campaigns.server import BOUND_SECONDS, TENANTS, Server, write_tokens
from fuzz.canary import Canary
from support.blackhole import BlackHole
from support.small_tokenizers import byte_level, save
from support.toy_service import VOCABULARY

from lineclear.client import Client, Sampling
from lineclear.errors import LineclearError

_TOY = {"vocab_size": VOCABULARY, "num_blocks": 8192, "max_model_len": 8192, "min_step_seconds": 0.001}
_SAMPLE_SECONDS = 1.0
_LARGE_PROMPT = 4000
_STANDSTILL_SECONDS = 30.0  # longest time without a token; a killed worker is replaced far sooner
WORK = ("cancel_midway", "read_slowly", "send_large_prompt", "submit_only", "vanish", "kill")
"""Kinds of clients, apart from readers."""
CODE = "import sys; from campaigns.memory_probe import main; sys.exit(main(sys.argv[1:]))"
"""Python code that runs the scheduler with the probe."""


class _Soak:
    def __init__(self, server: Server, tokens: dict[str, str], seed: int, memory: Path) -> None:
        self.server, self.tokens, self.seed, self.memory = server, tokens, seed, memory
        self.target = server.wait_for("listening")["address"]
        self.tally = Tally()
        self.stopped = threading.Event()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._holes: list[BlackHole] = []
        self._last_kill_at = 0.0

    def client(self, number: int, *, sessions: bool, target: str = "") -> Client:
        return Client(target or self.target, token=self.tokens[TENANTS[number % len(TENANTS)]], sessions=sessions)

    def thread(
        self, work: Callable[[random.Random, int], None], number: int, pause_seconds: float = 0.0
    ) -> threading.Thread:
        """Return a thread that repeats `work` until the end and collects its exceptions as problems."""
        rng = random.Random(f"{self.seed} {work.__name__} {number}")

        def run() -> None:
            while not self.stopped.wait(pause_seconds):
                try:
                    work(rng, number)
                    self.counts[work.__name__] += 1
                except Exception as error:
                    self.problems.append(f"{work.__name__}: {type(error).__name__}: {error}")

        return threading.Thread(target=run, daemon=True, name=work.__name__)

    # --- clients ----------------------------------------------------------------------------------------------------

    def cancel_midway(self, rng: random.Random, number: int) -> None:
        """Cancel answers midway; their tokens so far must be right."""
        ask = toy_questions(rng.getrandbits(31))
        with self.client(number, sessions=rng.random() < 0.5) as client:
            for question in (ask() for _ in range(20)):
                until, tokens = rng.randrange(20), list[int]()
                with client.stream(list(question.prompt), question.sampling) as stream:
                    for delta in stream:
                        tokens += delta.token_ids
                        if len(tokens) >= until:
                            break
                self._compare_tokens(tokens, question.right.token_ids[: len(tokens)])
                if self.stopped.is_set():
                    return

    def read_slowly(self, rng: random.Random, number: int) -> None:
        """Read an answer with long pauses between its messages."""
        question = self._question(rng, length=20, max_tokens=400)
        with (
            self.client(number, sessions=rng.random() < 0.5) as client,
            client.stream(list(question.prompt), question.sampling, **question.params) as stream,
        ):
            for _ in stream:
                self.stopped.wait(0.05)
        self._compare(question, Answer.of(stream.result))

    def send_large_prompt(self, rng: random.Random, number: int) -> None:
        """Request an answer to a prompt of thousands of tokens."""
        question = self._question(rng, length=_LARGE_PROMPT, max_tokens=20)
        with self.client(number, sessions=rng.random() < 0.5) as client:
            got = client.generate(list(question.prompt), question.sampling, **question.params)
        self._compare(question, Answer.of(got))

    def submit_only(self, rng: random.Random, number: int) -> None:
        """Submit a request, and read its answer later or never."""
        question = self._question(rng, length=20, max_tokens=100)
        with self.client(number, sessions=False) as client:
            kept = client.submit(list(question.prompt), question.sampling, **question.params)
            if rng.random() < 0.5:
                end = time.monotonic() + BOUND_SECONDS
                while not kept.poll().is_over and time.monotonic() < end:
                    self.stopped.wait(0.2)
                self._compare(question, Answer.of(kept.result()))

    def vanish(self, rng: random.Random, number: int) -> None:
        """Lose the network in the middle of an answer, without closing the connection."""
        hole = BlackHole(self.target)
        self._holes.append(hole)
        client = self.client(number, sessions=rng.random() < 0.5, target=hole.target)
        stream = client.stream([5, 6, 7], max_tokens=8000, ignore_eos=True)
        stream.__enter__()
        next(stream)
        hole.vanish()
        with contextlib.suppress(LineclearError):
            client.close()
        while len(self._holes) > 64:  # the server has dropped these
            self._holes.pop(0).close()

    def kill(self, rng: random.Random, number: int) -> None:
        """Kill the worker, in the first half of the run."""
        started_at = time.monotonic()
        if started_at > self._last_kill_at:
            self.stopped.wait()
            return
        os.kill(self.server.worker_pids()[-1], signal.SIGKILL)
        self.server.wait_for("worker_joined", after=started_at)

    def _question(self, rng: random.Random, *, length: int, max_tokens: int) -> Question:
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(length))
        sampling = Sampling(seed=rng.getrandbits(31), max_tokens=max_tokens, ignore_eos=True, temperature=0.7)
        top = rng.choice((None, 2))
        return Question(prompt, sampling, toy_answer(prompt, sampling, top), top)

    def _compare(self, question: Question, got: Answer) -> None:
        self._compare_tokens(got.token_ids, question.right.token_ids)
        with self.tally.lock:
            self.tally.wrong.update(differences(question.right, got, 0.0))

    def _compare_tokens(self, tokens: Sequence[int], right: Sequence[int]) -> None:
        with self.tally.lock:
            self.tally.answers += 1
            self.tally.tokens += len(tokens)
            self.tally.altered += tuple(tokens) != tuple(right)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(
        self, seconds: float, streams: int, kill_seconds: float, vanish_seconds: float, samples_file: Path | None
    ) -> dict[str, Any]:
        """Run all clients for `seconds`. Return the figures. Write each sample as a line of JSON to `samples_file`."""
        with contextlib.ExitStack() as stack:
            clients = [
                {route: stack.enter_context(self.client(n, sessions=route == "session")) for route in ROUTES}
                for n in range(len(TENANTS))
            ]
            ask = toy_questions(self.seed, ROUTES)
            readers = [CheckingReader(clients[n % len(clients)], ask, self.tally) for n in range(streams)]
            threads = [self.thread(self.cancel_midway, n) for n in range(2)]
            threads += [self.thread(self.read_slowly, 0), self.thread(self.send_large_prompt, 1, 0.5)]
            threads += [self.thread(self.submit_only, n, 0.2) for n in range(2)]
            threads += [self.thread(self.vanish, 0, vanish_seconds), self.thread(self.kill, 0, kill_seconds)]
            canary = stack.enter_context(Canary(self.target, token=self.tokens[TENANTS[0]]))
            self._last_kill_at = time.monotonic() + seconds / 2
            for thread in (*readers, *threads):
                thread.start()
            samples = self._watch(seconds)
            self.stopped.set()
            for reader in readers:
                reader.stop()
            for thread in (*readers, *threads):
                thread.join(BOUND_SECONDS)
                if thread.is_alive():
                    self.problems.append(f"{thread.name} did not finish")
            gaps, longest = list[float](), 0.0
            try:
                gaps, longest = canary.end()
            except AssertionError as error:  # print the figures of an hour in any case
                self.problems.append(str(error))
        if samples_file is not None:
            lines = (json.dumps({"process": name, **asdict(each)}) for name, of in samples.items() for each in of)
            samples_file.write_text("".join(f"{line}\n" for line in lines))
        with self.client(0, sessions=False) as client:
            held = _held(client)
        for hole in self._holes:  # not earlier: closing informs the server that these clients are gone
            hole.close()
        tally = self.tally
        return {
            "answers": tally.answers,
            "tokens": tally.tokens,
            "did": dict(self.counts),
            "missing": [
                *(work for work in WORK if not self.counts[work]),
                *(route for route in ROUTES if not tally.routes[route]),
            ],
            "routes": dict(tally.routes),
            "ends": dict(tally.ends),
            **{name: getattr(tally, name) for name in ("lost", "duplicated", "altered")},
            "wrong": dict(tally.wrong),
            "failed": dict(tally.failed),
            "problems": self.problems[:10],
            "held_at_end": held,
            "canary_tokens": len(gaps),
            "canary_gap_seconds": quantiles(gaps),
            "canary_longest_seconds": round(longest, 3),
            "canary_stood_still": longest > _STANDSTILL_SECONDS,
            **{name: growth(of) for name, of in samples.items()},
        }

    def _watch(self, seconds: float) -> dict[str, list[Sample]]:
        samples: dict[str, list[Sample]] = {"scheduler": [], "worker": []}
        end = time.monotonic() + seconds
        every = min(_SAMPLE_SECONDS, seconds / 40)
        while time.monotonic() < end:
            samples["scheduler"].append(look(self.server.popen.pid, self.tally.answers, self.memory))
            with contextlib.suppress(OSError, KeyError):  # a worker that has just been killed
                samples["worker"].append(look(self.server.worker_pids()[-1], self.tally.answers))
            time.sleep(every)
        return samples


def _held(client: Client) -> int:
    """Return the number of blocks and streams still held once no client is left."""
    end = time.monotonic() + BOUND_SECONDS
    while (g := client.stats().gauges).blocks_used + g.open_streams and time.monotonic() < end:
        time.sleep(0.05)
    return g.blocks_used + g.open_streams


def soak(
    folder: Path,
    *,
    seconds: float,
    streams: int,
    seed: int,
    kill_seconds: float = 120.0,
    vanish_seconds: float = 10.0,
    samples_file: Path | None = None,
    flags: Sequence[str] = (),
) -> dict[str, Any]:
    path, tokens = write_tokens(folder)
    flags = ["--model", str(save(folder, byte_level())), "--token-file", str(path), *flags]
    memory = folder / "memory"
    server = Server("127.0.0.1:0", flags, toy=_TOY, code=CODE, variables={"MEMORY_FILE": str(memory)})
    server.wait_for("worker_joined")
    found = _Soak(server, tokens, seed, memory).run(seconds, streams, kill_seconds, vanish_seconds, samples_file)
    found["exit_code"] = server.stop(signal.SIGTERM)
    return found


def faults(found: dict[str, Any], bounds: Bounds, *, certain: bool = False) -> list[str]:
    wrong = ("lost", "duplicated", "altered", "wrong", "failed", "problems", "missing")
    wrong += ("canary_stood_still", "held_at_end", "exit_code")
    grown = [f"{of} {name}" for of in ("scheduler", "worker") for name in too_much(found[of], bounds, certain=certain)]
    return [name for name in wrong if found[name]] + grown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-seconds", type=float, default=120.0, help="seconds between two kills of the worker")
    parser.add_argument(
        "--vanish-seconds", type=float, default=10.0, help="seconds between two clients that lose their network"
    )
    parser.add_argument("--samples-file", type=Path, help="write memory, threads and descriptors of each second here")
    parser.add_argument("--judge", choices=("yes", "short", "no"), default="yes")
    chosen = parser.parse_args(argv)
    options = {name: value for name, value in vars(chosen).items() if name not in ("judge", "samples_file")}
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        found = soak(Path(folder), **options, samples_file=chosen.samples_file)
    is_short = chosen.judge == "short"
    named = faults(found, SHORT if is_short else Bounds(), certain=is_short)
    print(json.dumps({**options, "faults": named, **found}))
    return 1 if named and chosen.judge != "no" else 0


if __name__ == "__main__":
    sys.exit(main())
