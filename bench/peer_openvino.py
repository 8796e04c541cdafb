"""Runs a workload through OpenVINO GenAI's continuous batching in this process, with its defaults.

    VENV/bin/python -m bench.peer_openvino --model DIR --work w1.json [--weights int4]

Needs the environment of environments.sh. optimum-intel converts the weights once, beside the model: as they are, or
compressed with its defaults.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Result, Run, write
from bench.workloads import Job, Workload, read

WEIGHTS = ("auto", "int8", "int4")


def converted(model: Path, weights: str) -> Path:
    """Return the directory of the converted model, after making it."""
    path = model / f"model.openvino.{weights}"
    if not path.exists():
        part = path.with_name(path.name + ".part")
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
        command += ["--task", "text-generation-with-past", *(["--weight-format", weights] * (weights != "auto"))]
        subprocess.run([*command, str(part)], check=True)
        part.rename(path)
    return path


def run(model: Path, workload: Workload, weights: str, threads: int, concurrency: int) -> Result:
    """Run the jobs at their arrival times, or `concurrency` at a time."""
    openvino: Any = importlib.import_module("openvino")  # noqa: TID251
    genai: Any = importlib.import_module("openvino_genai")  # noqa: TID251
    folder = converted(model, weights)
    began_at = time.perf_counter()
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(str(folder), genai.SchedulerConfig(), "CPU", properties)
    load_seconds = time.perf_counter() - began_at
    numbers = count()

    def add(job: Job) -> Any:
        config = genai.GenerationConfig(max_new_tokens=job.max_tokens, ignore_eos=True, do_sample=False)
        return pipeline.add_request(next(numbers), openvino.Tensor(np.array([job.prompt])), config)

    feed(pipeline, add, Run(Workload("warm", 0, 0, 0.0, (Job("warm", (7,) * 32, 8),))), 0)
    timed = Run(workload)
    feed(pipeline, add, timed, concurrency)
    makespan = timed.now()
    settings = {"weights": weights, "threads": threads, "concurrency": concurrency}
    return timed.end("openvino", model.name, settings, load_seconds=load_seconds, makespan_seconds=makespan)


def feed(pipeline: Any, add: Callable[[Job], Any], timed: Run, concurrency: int) -> None:
    """Add jobs when they are due, and step until all are finished."""
    todo = deque(timed.workload.jobs)
    running: list[tuple[Job, Any]] = []
    while todo or pipeline.has_non_finished_requests():
        while todo and len(running) < (concurrency or len(timed.times)) and todo[0].arrival_seconds <= timed.now():
            job = todo.popleft()
            if concurrency:
                timed.arrived(job.id)
            running.append((job, add(job)))
        if not running:
            time.sleep(max(0.0, todo[0].arrival_seconds - timed.now()))
            continue
        pipeline.step()
        for job, handle in running:
            while handle.can_read():
                for output in handle.read().values():
                    timed.tokens(job.id, len(output.generated_ids))
                    timed.answer(job.id, output.generated_ids)
        running = [(job, handle) for job, handle in running if len(timed.times[job.id]) < job.max_tokens]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once and append the result to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--weights", choices=WEIGHTS, default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(arguments)
    threads = o.threads or len(os.sched_getaffinity(0))
    write(run(o.model, read(o.work), o.weights, threads, o.concurrency), o.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
