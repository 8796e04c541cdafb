"""Measures tokens per second beside busy processes, for lineclear with automatic and fixed threads, and for peers.

    python -m bench.neighbour --model DIR [--contenders auto 1 2 vllm llama] [--neighbours 0 1 2] [--streams 1 8]
    python -m bench.neighbour --model DIR --contenders auto before --before CHECKOUT --out FILE

Contenders: `auto` (default settings), a number (`--threads`), `before` (another checkout with built kernels, under this
Python), or a peer with an environment by `environments.sh`. A neighbour is a process that computes without end. One
service of lineclear runs through all numbers of neighbours, so that `auto` must adapt; a peer restarts for each.

Contenders alternate. Every turn is appended to `--out`, and the table has medians over the whole file, so that a long
comparison can run in parts. Disturbed turns count only without others. A turn of lineclear takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import compare, report
from bench.contenders import CONTENDERS, Task
from bench.lineclear_serve import Service, serving
from bench.measure import DISTURBED_SHARE, commit, cpu_times, machine, median, num_cores, versions
from bench.workloads import Job, Workload, save

PEERS = ("vllm", "llama", "transformers")
SECONDS, SETTLING_SECONDS = 4.0, 2.0
_BUSY = (sys.executable, "-S", "-c", "while True: pass")
_PROMPT = tuple(range(100, 132))
_MAX_TOKENS = 384
_PEER_TOKENS = 128
_ROOTS = ("protos", "common", "scheduler_svc", "gpu_worker", "client")


@dataclass(frozen=True)
class Case:
    """One case: streams and neighbours."""

    model: str
    streams: int
    neighbours: int


@dataclass(frozen=True)
class Rate:
    """One measurement."""

    contender: str
    case: Case
    tokens_per_second: float
    foreign_share: float
    """Share of the machine's CPU time taken by the host and by unrelated processes."""

    @property
    def disturbed(self) -> bool:
        """Return whether the measurement is disturbed."""
        return self.foreign_share > DISTURBED_SHARE

    def to_json(self) -> str:
        """Return the measurement as a JSON line."""
        facts = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
        }
        return json.dumps(asdict(self) | facts)

    @classmethod
    def from_json(cls, line: str) -> Rate:
        """Parse a line of `to_json`."""
        raw = json.loads(line)
        return cls(raw["contender"], Case(**raw["case"]), raw["tokens_per_second"], raw["foreign_share"])


class Watch:
    """Measures the CPU time of unrelated processes."""

    def __init__(self) -> None:
        self._before, self._began_at = cpu_times(), time.perf_counter()

    def foreign_share(self) -> float:
        """Return the share since the creation of this object."""
        stolen, busy_seconds, own = (b - a for a, b in zip(self._before, cpu_times(), strict=True))
        seconds = time.perf_counter() - self._began_at
        return max(0.0, busy_seconds - own + stolen) / (seconds * num_cores())


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` busy processes during the block."""
    processes = [subprocess.Popen(_BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def tokens_per_second(service: Service, streams: int, seconds: float, settling_seconds: float) -> float:
    """Return tokens per second of `streams` concurrent requests, after `settling_seconds`."""
    begin = time.perf_counter() + settling_seconds
    end, tokens = begin + seconds, 0

    async def stream(number: int) -> None:
        nonlocal tokens
        prompt = (*_PROMPT, 200 + number)
        while True:
            async with service.client.stream(
                prompt, max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True, omit_text=True
            ) as answer:
                async for delta in answer:
                    now = time.perf_counter()
                    if now >= end:
                        return
                    tokens += len(delta.token_ids) if now >= begin else 0

    await asyncio.gather(*map(stream, range(streams)))
    return tokens / seconds


async def of_lineclear(
    contender: str, options: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> list[Rate]:
    """Measure one service beside all numbers of neighbours."""
    worker_flags = ("--threads", contender) if contender.isdigit() else ()
    rates = []
    async with serving(str(options.model), worker_flags=worker_flags, environment=environment) as service:
        for neighbours in options.neighbours:
            with busy(neighbours):
                for streams in options.streams:
                    watch, case = Watch(), Case(options.model.resolve().name, streams, neighbours)
                    rate = await tokens_per_second(service, streams, options.seconds, options.settling_seconds)
                    rates.append(Rate(contender, case, rate, watch.foreign_share()))
    return rates


def of_peer(peer: str, options: argparse.Namespace) -> list[Rate]:
    """Measure a new process of the peer for each case."""
    contender = CONTENDERS[peer]
    rates = []
    with tempfile.TemporaryDirectory(prefix="lineclear-bench-") as folder:
        for neighbours in options.neighbours:
            for streams in options.streams:
                jobs = tuple(Job(f"r{i:04d}", (*_PROMPT, 200 + i), _PEER_TOKENS) for i in range(streams))
                work = Path(folder) / "work.json"
                save(Workload("w1", 0, 0, 0.0, jobs), work)
                task = Task(options.home, options.model.resolve(), work, "w1", streams, Path(folder) / "result.jsonl")
                watch = Watch()
                with busy(neighbours):
                    result = compare.run(contender, task, compare.environment_of(contender, options.home, None))
                case = Case(options.model.resolve().name, streams, neighbours)
                rates.append(Rate(peer, case, result.output_tokens_per_second, watch.foreign_share()))
    return rates


def measure(contender: str, options: argparse.Namespace) -> list[Rate]:
    """Run one turn of a contender. Raises compare.Failed."""
    if contender in PEERS:
        return of_peer(contender, options)
    roots = [str(options.before / root) for root in _ROOTS] if contender == "before" else []
    environment = {"PYTHONPATH": os.pathsep.join(roots)} if roots else None
    return asyncio.run(of_lineclear(contender, options, environment))


def table(rates: Sequence[Rate]) -> str:
    """Return a Markdown table of medians, and of `auto` against the best fixed number of threads."""
    names = list(dict.fromkeys(rate.contender for rate in rates))
    found: dict[tuple[Case, str], list[Rate]] = {}
    for rate in rates:
        found.setdefault((rate.case, rate.contender), []).append(rate)
    rows = [
        f"| model | streams | neighbours | {' | '.join(names)} | turns | auto / best fixed | auto / before |",
        "|" + "---|" * (len(names) + 6),
    ]
    starred = False
    for case in dict.fromkeys(rate.case for rate in rates):
        middle, shown, turns = dict[str, float](), [], []
        for name in names:
            all_turns = found.get((case, name), [])
            clean = [rate for rate in all_turns if not rate.disturbed]
            if not all_turns:
                shown.append("-")
                continue
            middle[name] = median([rate.tokens_per_second for rate in clean or all_turns])
            shown.append(f"{middle[name]:.1f}" + " \\*" * (not clean))
            turns.append(len(clean or all_turns))
            starred |= not clean
        best = max((value for name, value in middle.items() if name.isdigit()), default=None)
        ratios = f"{_ratio(middle.get('auto'), best)} | {_ratio(middle.get('auto'), middle.get('before'))}"
        rows.append(
            f"| {case.model} | {case.streams} | {case.neighbours} | {' | '.join(shown)} | {min(turns)} | {ratios} |"
        )
    if starred:
        rows += ["", "\\* every turn was disturbed by other processes or by the host: not to be quoted."]
    return "\n".join(rows)


def _ratio(value: float | None, of: float | None) -> str:
    return f"{value / of:.2f}" if value is not None and of else "-"


def parser() -> argparse.ArgumentParser:
    """Parse the options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--contenders", nargs="+", default=["auto", "1", str(num_cores())])
    found.add_argument("--before", type=Path, help="the checkout of the contender `before`")
    found.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    found.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    found.add_argument("--seconds", type=float, default=SECONDS, help="measured in each case")
    found.add_argument("--settling-seconds", type=float, default=SETTLING_SECONDS, help="before that")
    found.add_argument("--turns", type=int, default=1)
    found.add_argument("--home", type=Path, default=compare.HOME, help="environments of the peers")
    found.add_argument("--out", type=Path, help="default: bench/results/DATE-neighbour.jsonl, and a page beside it")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a contender gave no result."""
    arguments_parser = parser()
    options = arguments_parser.parse_args(arguments)
    if "before" in options.contenders and options.before is None:
        arguments_parser.error("the contender `before` needs --before CHECKOUT")
    options.home = options.home.resolve()
    out = options.out or report.RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-neighbour.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for _ in range(options.turns):
        for contender in options.contenders:
            try:
                rates = measure(contender, options)
            except (compare.Failed, RuntimeError) as error:
                print(f"FAILED {contender}: {error}", file=sys.stderr)
                failed = True
                continue
            for rate in rates:
                print(
                    f"{contender}, {rate.case}: {rate.tokens_per_second:.1f} tok/s" + " DISTURBED" * rate.disturbed,
                    flush=True,
                )
            with out.open("a") as file:
                file.writelines(rate.to_json() + "\n" for rate in rates)
    if out.exists():
        shown = table([Rate.from_json(line) for line in out.read_text().splitlines()])
        out.with_suffix(".md").write_text(f"# neighbour\n\nTokens a second beside busy processes.\n\n{shown}\n")
        print(f"\n{shown}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
