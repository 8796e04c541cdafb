"""Runs contenders on one workload in alternation (A B C, A B C, ...) and prints medians and ratios.

    python -m bench.compare lineclear vllm --home DIR --model llama-110m-shape --work w1 [--count 32] [--runs 3]
    python -m bench.compare lineclear --also 'depth-1=--pipeline-depth 1' --home DIR --model ... --work w1
    python -m bench.compare lineclear vllm --home DIR --model ... --work w1 --concurrency 1 2 4 8 16 32 64

Contenders alternate because the speed of a machine drifts over minutes. Every run is a new process that loads its
model. Disturbed runs are repeated up to `--repeats` times and count only if there is no undisturbed one. Results are
appended to `bench/results`, one JSON object per line, with a page beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import report, workloads
from bench.contenders import CONTENDERS, Contender, Task, custom
from bench.measure import Result, summary

REPOSITORY = Path(__file__).resolve().parents[1]
HOME = REPOSITORY / "build" / "bench"
_RUN_SECONDS = 1800.0
_LINES_OF_A_FAILURE = 30


class Failed(Exception):
    """The run gave no result."""


def run(contender: Contender, task: Task, environment: dict[str, str]) -> Result:
    """Run a contender once in a new process. Raises Failed."""
    task.out.unlink(missing_ok=True)
    command = contender.command(task)
    said = task.out.with_suffix(".log")
    try:
        with said.open("w") as log:
            done = subprocess.run(
                command, cwd=REPOSITORY, env=os.environ | environment, stdout=log, stderr=log, timeout=_RUN_SECONDS
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{contender.name}: {error}") from error
    if done.returncode or not task.out.exists():
        last = "\n".join(said.read_text(errors="replace").splitlines()[-_LINES_OF_A_FAILURE:])
        raise Failed(f"{contender.name}: {' '.join(command)} ended with exit code {done.returncode}:\n{last}")
    raw = json.loads(task.out.read_text().splitlines()[-1])
    # Names of files, not where they lie on this machine.
    named = {key: ":".join(part.rpartition("/")[2] for part in value.split(":")) for key, value in environment.items()}
    settings = raw["settings"] | {"environment": named, "concurrency": task.concurrency}
    return Result(**(raw | {"contender": contender.name, "settings": settings}))


def environment_of(contender: Contender, home: Path, preload: Path | None) -> dict[str, str]:
    """Return equal variables for all contenders, plus those that a contender's authors recommend."""
    libraries = [*([preload] if preload else []), *contender.libraries(home)]
    found = {"THP_MEM_ALLOC_ENABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return found | ({"LD_PRELOAD": ":".join(map(str, libraries))} if libraries else {})


def compare(
    contenders: Sequence[Contender],
    workload: workloads.Workload,
    *,
    home: Path,
    model: Path,
    out: Path,
    runs: int = 3,
    repeats: int = 2,
    concurrencies: Sequence[int] = (0,),
    preload: Path | None = None,
    seconds: float = math.inf,
) -> list[Result]:
    """Run all contenders and append results to `out`. A contender that fails is skipped afterwards.

    No run begins after `seconds`, in the middle of a turn if need be.
    """
    give_up = time.monotonic() + seconds
    results: list[Result] = []
    failed: set[str] = set()
    repeats_left = {(c.name, level): repeats for c in contenders for level in concurrencies}
    with tempfile.TemporaryDirectory(prefix="lineclear-bench-") as folder:
        work = Path(folder) / "work.json"
        workloads.save(workload, work)
        for level in concurrencies:
            task = Task(home, model, work, workload.kind, level, Path(folder) / "result.jsonl")
            turn = 0
            missing = {c.name: runs for c in contenders}
            while time.monotonic() < give_up and any(missing[c.name] > 0 and c.name not in failed for c in contenders):
                turn += 1
                print(f"--- {workload.kind}, {level or 'by arrival'}, turn {turn}", flush=True)
                for contender in contenders:
                    if missing[contender.name] <= 0 or contender.name in failed or time.monotonic() >= give_up:
                        continue
                    try:
                        result = run(contender, task, environment_of(contender, home, preload))
                    except Failed as error:
                        print(f"FAILED {error}", file=sys.stderr)
                        failed.add(contender.name)
                        continue
                    print(summary(result), flush=True)
                    with out.open("a") as file:
                        file.write(result.to_json() + "\n")
                    results.append(result)
                    key = (contender.name, level)
                    if result.disturbed and repeats_left[key]:
                        repeats_left[key] -= 1
                    else:
                        missing[contender.name] -= 1
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return 1 if a contender gave no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "contenders", nargs="+", choices=sorted(CONTENDERS), metavar="CONTENDER", help="of: %(choices)s"
    )
    parser.add_argument("--also", action="append", default=[], help="NAME=SCHEDULER FLAGS [-- WORKER FLAGS]")
    parser.add_argument("--home", type=Path, default=HOME, help="environments and models; default build/bench")
    parser.add_argument("--model", required=True, help="a directory, or a name bench.models knows")
    parser.add_argument("--work", choices=workloads.KINDS, default="w1")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=workloads.SEED)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second, w3 only")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="most disturbed runs made again, for each contender")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[0], help="closed loops; 0: by arrival")
    parser.add_argument("--preload", type=Path, help="a malloc for all contenders, such as libtcmalloc_minimal.so.4")
    parser.add_argument("--nice", type=int, default=0, help="priority of everything that is run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run begins later; default: no limit")
    parser.add_argument("--what", default="", help="name of the results; default: workload and model")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    o = parser.parse_args(arguments)
    home = o.home.resolve()
    model = Path(o.model) if Path(o.model).exists() else home / "models" / o.model
    if not model.exists():
        parser.error(f"{model} is not there; make it with `python -m bench.models --out {o.home}/models`")
    chosen = [*(CONTENDERS[name] for name in o.contenders), *map(custom, o.also)]
    workload = workloads.make(o.work, o.count, seed=o.seed, rate=o.rate)
    if o.nice:
        with contextlib.suppress(PermissionError):
            os.nice(o.nice)
    o.results.mkdir(parents=True, exist_ok=True)
    what = o.what or f"{o.work}-{len(workload.jobs)}-{model.name}"
    out = o.results / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{what}.jsonl"
    compare(
        chosen,
        workload,
        home=home,
        model=model.resolve(),
        out=out,
        runs=o.runs,
        repeats=o.repeats,
        concurrencies=o.concurrency,
        preload=o.preload,
        seconds=o.seconds,
    )
    # The page is of all that the file holds: a comparison may be made in several calls.
    results = report.read(out) if out.exists() else []
    if results:
        out.with_suffix(".md").write_text(report.page(results, what))
        if svg := report.curve(results):
            out.with_suffix(".svg").write_text(svg)
        print(report.table(results))
    return 0 if {c.name for c in chosen} <= {r.contender for r in results} else 1


if __name__ == "__main__":
    raise SystemExit(main())
