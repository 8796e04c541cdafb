"""Compares continuous batching at 8 slots with static batches of 8: transformers' padded waves, and fixed_size.

    python -m bench.static_waves --model DIR [--model DIR ...] [--count 64] [--runs 3] [--threads N]

The same requests (w1: answers of skewed length) and the same number of threads for each contender, in float32, in
turns. Prints the ratios of the makespans and whether all answers are equal, token for token. Uses this environment, so
it needs none of `environments.sh`. Results are appended to `bench/results`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import compare, report, workloads
from bench.contenders import Contender, Task, lineclear
from bench.measure import Result

SLOTS = 8


def contenders(slots: int, threads: int) -> list[Contender]:
    """Return continuous batching first, then the two static ways."""
    batch = ("--max-batch-size", str(slots))
    worker = ("--dtype", "float32", "--threads", str(threads))

    def waves(task: Task) -> list[str]:
        options = ["--waves", str(slots), "--dtype", "float32", "--threads", str(threads)]
        return [sys.executable, "-m", "bench.peer_transformers", *task.arguments, *options]

    return [
        lineclear(f"lineclear, continuous, {slots} slots", batch, worker),
        lineclear(f"lineclear, fixed_size, {slots} slots", (*batch, "--batching-strategy", "fixed_size"), worker),
        Contender(f"transformers, padded waves of {slots}", "", waves),
    ]


def useful_share(workload: workloads.Workload, slots: int) -> float:
    """Return the share of the decode positions of static batches that are wanted, which no machine changes."""
    lengths = [job.max_tokens for job in workload.jobs]
    batches = [lengths[at : at + slots] for at in range(0, len(lengths), slots)]
    return sum(lengths) / sum(max(batch) * len(batch) for batch in batches)


def ratios(results: Sequence[Result]) -> list[str]:
    """Return a line for each contender after the first: its makespan in units of the first one's."""
    first, *others = report.lines(results)
    base = first.middle(lambda result: result.makespan_seconds) or 0.0
    found = []
    for line in others:
        makespan = line.middle(lambda result: result.makespan_seconds) or 0.0
        # Runs of one turn are neighbours in time, so their ratio suffers least from a drifting machine.
        turns = [b.makespan_seconds / a.makespan_seconds for a, b in zip(first.runs, line.runs, strict=False)]
        per_turn = ", ".join(f"{turn:.2f}" for turn in turns)
        found.append(f"{line.contender}: {makespan / base:.2f} times the makespan (turns: {per_turn})")
    return found


def answers_are_equal(results: Sequence[Result]) -> bool:
    """Return whether all runs gave the same tokens."""
    return len({result.settings["answers_sha256"] for result in results}) == 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison for each model; return 1 if a contender failed or answers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--count", type=int, default=64, help="requests, a multiple of the slots")
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=0, help="most disturbed runs made again, for each contender")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each contender")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    o = parser.parse_args(arguments)
    if o.count % o.slots:
        parser.error(f"--count {o.count} is no multiple of --slots {o.slots}: fixed_size waits for full batches")
    workload = workloads.make("w1", o.count)
    o.results.mkdir(parents=True, exist_ok=True)
    failed = False
    for model in o.model:
        # Named by its folder: the demo model's is "model".
        name = f"{model.resolve().parent.name}-model" if model.name == "model" else model.name
        out = o.results / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-static-waves-{name}.jsonl"
        chosen = contenders(o.slots, o.threads)
        results = compare.compare(
            chosen, workload, home=compare.HOME, model=model.resolve(), out=out, runs=o.runs, repeats=o.repeats
        )
        if len({result.contender for result in results}) < len(chosen):
            failed = True
            continue
        equal = answers_are_equal(results)
        failed |= not equal
        share = f"{useful_share(workload, o.slots):.0%} of the decode positions of static batches are wanted"
        lines = [*ratios(results), f"answers {'equal' if equal else 'NOT EQUAL'}, token for token", share]
        page = report.page(report.read(out), f"static-waves-{name}")
        out.with_suffix(".md").write_text("\n".join([page, *(f"* {line}" for line in lines)]) + "\n")
        print("\n".join([report.table(results), *lines]))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
