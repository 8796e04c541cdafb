"""Runs a workload through CTranslate2 in this process: padded batches, whose rows end with their answers.

    VENV/bin/python -m bench.peer_ctranslate2 --model DIR --work w1.json [--weights int8]

Needs the environment of environments.sh. Its own converter makes the weights once, beside the model. It has no
continuous batching: requests that arrive over time are refused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measure import Result, Run, write
from bench.workloads import Job, Workload, read

WEIGHTS = ("auto", "int8")


def converted(model: Path, weights: str) -> Path:
    """Return the directory of the converted model, after making it."""
    path = model / f"model.ctranslate2.{weights}"
    if not path.exists():
        part = path.with_name(path.name + ".part")
        command = [str(Path(sys.executable).with_name("ct2-transformers-converter")), "--model", str(model), "--force"]
        command += ["--output_dir", str(part), *(["--quantization", weights] * (weights != "auto"))]
        subprocess.run(command, check=True)
        part.rename(path)
    return path


def run(model: Path, workload: Workload, weights: str, threads: int, size: int) -> Result:
    """Run all jobs in batches of `size` with prompts of similar length."""
    ctranslate2: Any = importlib.import_module("ctranslate2")  # noqa: TID251
    folder = converted(model, weights)
    names: list[str] = json.loads((folder / "vocabulary.json").read_text())
    began_at = time.perf_counter()
    generator = ctranslate2.Generator(str(folder), device="cpu", inter_threads=1, intra_threads=threads)
    load_seconds = time.perf_counter() - began_at
    generate(generator, names, Run(Workload("warm", 0, 0, 0.0, (Job("warm", (7,) * 32, 8),))), size)
    timed = Run(workload)
    generate(generator, names, timed, size)
    makespan = timed.now()
    settings = {"weights": weights, "compute": generator.compute_type, "threads": threads, "batch": size}
    return timed.end("ctranslate2", model.name, settings, load_seconds=load_seconds, makespan_seconds=makespan)


def generate(generator: Any, names: Sequence[str], timed: Run, size: int) -> None:
    """Run all jobs in one call; `names` are the strings of token ids, which stand for them in its interface."""
    jobs = timed.workload.jobs

    def received(step: Any) -> bool:
        job: Job = jobs[step.batch_id]
        timed.tokens(job.id, 1)
        timed.answer(job.id, [step.token_id])
        return len(timed.times[job.id]) == job.max_tokens

    longest = max(job.max_tokens for job in jobs)
    generator.generate_batch(
        [[names[token_id] for token_id in job.prompt] for job in jobs],
        max_batch_size=size,
        max_length=longest,
        min_length=longest,  # end-of-sequence is no choice before
        include_prompt_in_result=False,
        callback=received,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once and append the result to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--weights", choices=WEIGHTS, default="auto")
    parser.add_argument("--size", type=int, default=32, help="most rows of a batch")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(arguments)
    workload = read(o.work)
    if any(job.arrival_seconds for job in workload.jobs):
        parser.error("CTranslate2 has no continuous batching; use w1, w2 or w4")
    threads = o.threads or len(os.sched_getaffinity(0))
    # For padded batches, the concurrency is the batch size.
    write(run(o.model, workload, o.weights, threads, min(o.size, o.concurrency or o.size)), o.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
