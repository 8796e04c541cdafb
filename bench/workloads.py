"""Makes the requests of a workload from a seed: prompts of token ids, lengths, arrival times.

    python -m bench.workloads w1 --count 64 --out w1.json

w1  offline: prompts of 32 to 256 ids, answers of skewed length (lognormal around 56, from 8 to 256)
w2  w1 behind one common prefix of 512 ids
w3  w1 arriving at random (Poisson), `--rate` requests a second
w4  a single stream: 128 ids in, 128 out
w5  `count` streams decode (64 in, 256 out); at second 3 a prompt of 2,000 ids arrives

Request i depends on the seed and on i only, so a smaller count is a prefix of a larger one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KINDS = ("w1", "w2", "w3", "w4", "w5")
SEED = 1234
VOCABULARY = 4000
"""Ids are drawn below this, so that one workload suits every model."""
FIRST_ID = 64
"""Most tokenizers have their special tokens below this."""
PREFIX_TOKENS = 512
INTRUDER_TOKENS = 2000
INTRUDER_SECONDS = 3.0


@dataclass(frozen=True)
class Job:
    """One request for exactly `max_tokens` tokens: greedy, end-of-sequence ignored."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival_seconds: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Jobs in order of arrival, and their parameters."""

    kind: str
    seed: int
    vocabulary: int
    rate: float
    jobs: tuple[Job, ...]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all jobs."""
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def wanted_tokens(self) -> int:
        """Output tokens of all jobs."""
        return sum(job.max_tokens for job in self.jobs)

    def describe(self) -> dict[str, int | float | str]:
        """Return the description for results."""
        return {
            "kind": self.kind,
            "count": len(self.jobs),
            "seed": self.seed,
            "vocabulary": self.vocabulary,
            "rate": self.rate,
            "prompt_tokens": self.prompt_tokens,
            "wanted_tokens": self.wanted_tokens,
        }


def make(kind: str, count: int = 64, *, seed: int = SEED, vocabulary: int = VOCABULARY, rate: float = 0.0) -> Workload:
    """Make a workload. Raises ValueError for an unknown kind and for w3 without a rate."""
    if kind not in KINDS:
        raise ValueError(f"there is no workload {kind!r}; there are {', '.join(KINDS)}")
    if kind == "w3" and rate <= 0:
        raise ValueError("w3 needs a rate of arrivals, in requests a second")
    if kind == "w4":
        jobs = [Job("r0000", _ids(random.Random(f"{seed}/0"), 128, vocabulary, skip=True), 128)]
    elif kind == "w5":
        jobs = _with_intruder(count, seed, vocabulary)
    else:
        jobs = _skewed(kind, count, seed, vocabulary, rate)
    return Workload(kind, seed, vocabulary, rate if kind == "w3" else 0.0, tuple(jobs))


def _skewed(kind: str, count: int, seed: int, vocabulary: int, rate: float) -> list[Job]:
    arrivals = random.Random(f"{seed}/arrivals")
    prefix = _ids(random.Random(f"{seed}/prefix"), PREFIX_TOKENS, vocabulary) if kind == "w2" else ()
    jobs, now = [], 0.0
    for index in range(count):
        source = random.Random(f"{seed}/{index}")
        prompt_len, max_tokens = _lengths(source)
        if kind == "w3":
            now += arrivals.expovariate(rate)
        jobs.append(Job(f"r{index:04d}", prefix + _ids(source, prompt_len, vocabulary), max_tokens, round(now, 4)))
    return jobs


def _with_intruder(count: int, seed: int, vocabulary: int) -> list[Job]:
    jobs = [Job(f"r{i:04d}", _ids(random.Random(f"{seed}/{i}"), 64, vocabulary), 256) for i in range(count)]
    long = _ids(random.Random(f"{seed}/intruder"), INTRUDER_TOKENS, vocabulary)
    return [*jobs, Job("intruder", long, 8, INTRUDER_SECONDS)]


def _lengths(source: random.Random) -> tuple[int, int]:
    """Draw (prompt tokens, output tokens). The order of the two draws is part of the definition."""
    prompt_len = source.randint(32, 256)
    return prompt_len, min(256, max(8, round(source.lognormvariate(math.log(56), 0.9))))


def _ids(source: random.Random, count: int, vocabulary: int, *, skip: bool = False) -> tuple[int, ...]:
    if skip:
        _lengths(source)
    return tuple(source.randrange(FIRST_ID, vocabulary) for _ in range(count))


def save(workload: Workload, path: Path) -> None:
    """Write the workload as JSON."""
    path.write_text(json.dumps(asdict(workload)))


def read(path: Path) -> Workload:
    """Read a workload written by `save`."""
    raw = json.loads(path.read_text())
    jobs = tuple(Job(j["id"], tuple(j["prompt"]), j["max_tokens"], j["arrival_seconds"]) for j in raw.pop("jobs"))
    return Workload(jobs=jobs, **raw)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a workload and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second, w3 only")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args(arguments)
    workload = make(o.kind, o.count, seed=o.seed, vocabulary=o.vocabulary, rate=o.rate)
    save(workload, o.out)
    print(json.dumps(workload.describe()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
