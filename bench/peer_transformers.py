"""Runs a workload through transformers in this process: continuous batching, or `generate` in padded batches.

VENV/bin/python -m bench.peer_transformers --model DIR --work w1.json                 # continuous batching
VENV/bin/python -m bench.peer_transformers --model DIR --work w1.json --waves 8       # static batches of 8
python -m bench.peer_transformers --model DIR --work w1.json --device cuda --auto     # with transformers' own sizes
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from bench.measure import Result, Run, write
from bench.workloads import Job, Workload, read

_NO_TOKEN = -1
_PATIENCE_SECONDS = 1.0
_WARM_UP = (7,) * 32


def _load(model: Path, dtype: str, device: str = "cpu") -> tuple[Any, float]:
    began_at = time.perf_counter()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(model), dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    return loaded.eval().to(device), time.perf_counter() - began_at


def _greedy(max_tokens: int, eos: int | None) -> Any:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
    )


# --- continuous batching ---------------------------------------------------------------------------------------------


def continuous(
    model: Path, workload: Workload, dtype: str, device: str, sizes: dict[str, Any], concurrency: int
) -> Result:
    """Run jobs through continuous batching, at their arrival times or `concurrency` at a time.

    `sizes` are fields of ContinuousBatchingConfig; transformers chooses the others.
    """
    loaded, load_seconds = _load(model, dtype, device)
    config = ContinuousBatchingConfig(**sizes)
    generation = _greedy(256, _NO_TOKEN)
    with loaded.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=5
    ) as manager:
        manager.add_request(list(_WARM_UP), request_id="warm", max_new_tokens=8, eos_token_id=_NO_TOKEN)
        _next(manager, _PATIENCE_SECONDS, until_finished=True)
        timed = Run(workload)
        _feed(manager, timed, concurrency or len(workload.jobs), closed=bool(concurrency))
        makespan = timed.now()
    settings = {"attention": loaded.config._attn_implementation, "dtype": dtype, "device": device, **sizes}
    settings |= {"threads": torch.get_num_threads(), "concurrency": concurrency}
    name = "transformers continuous"
    return timed.end(name, model.name, settings, load_seconds=load_seconds, makespan_seconds=makespan)


def _feed(manager: Any, timed: Run, most: int, *, closed: bool) -> None:
    """Submit jobs when they are due and collect results until all are finished."""
    todo = deque(timed.workload.jobs)
    running = 0
    while todo or running:
        while todo and running < most and todo[0].arrival_seconds <= timed.now():
            job = todo.popleft()
            running += 1
            if closed:
                timed.arrived(job.id)
            manager.add_request(
                list(job.prompt),
                request_id=job.id,
                max_new_tokens=job.max_tokens,
                record_timestamps=True,
                eos_token_id=_NO_TOKEN,
            )
        wait = _PATIENCE_SECONDS
        if todo and running < most:
            wait = min(wait, max(0.001, todo[0].arrival_seconds - timed.now()))
        result = _next(manager, wait)
        if result is not None:
            running -= 1
            timed.times[result.request_id] = [at - timed.began_at for at in result.timestamps]


def _next(manager: Any, wait_seconds: float, *, until_finished: bool = False) -> Any:
    """Return the next finished request, or None after a timeout. Raises RuntimeError."""
    while True:
        result = manager.get_result(timeout=wait_seconds)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' generation thread died")
        if result is not None and result.error:
            raise RuntimeError(f"transformers failed {result.request_id}: {result.error}")
        if result is not None and result.is_finished():
            return result
        if result is None and not until_finished:
            return None


# --- static waves ----------------------------------------------------------------------------------------------------


class _Clock(StoppingCriteria):
    """Records the time of each token; never stops generation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def waves(model: Path, workload: Workload, dtype: str, size: int) -> Result:
    """Run padded batches of `size` in order of arrival, each until its longest answer ends."""
    loaded, load_seconds = _load(model, dtype)
    loaded.generation_config.eos_token_id = None  # it would replace the None of each call
    with torch.inference_mode():
        _wave(loaded, [Job("warm", _WARM_UP, 4)])
        timed = Run(workload)
        todo = list(workload.jobs)
        while todo:
            due = [job for job in todo if job.arrival_seconds <= timed.now()][:size]
            if not due:
                time.sleep(max(0.0, todo[0].arrival_seconds - timed.now()))
                continue
            todo = todo[len(due) :]
            times, answers = _wave(loaded, due)
            for job, token_ids in zip(due, answers, strict=True):  # tokens after a job's own end do not count
                timed.times[job.id] = [at - timed.began_at for at in times[: job.max_tokens]]
                timed.answer(job.id, token_ids[: job.max_tokens])
        makespan = timed.now()
    settings = {"attention": "sdpa", "wave": size, "dtype": dtype, "threads": torch.get_num_threads()}
    name = f"transformers waves of {size}"
    return timed.end(name, model.name, settings, load_seconds=load_seconds, makespan_seconds=makespan)


def _wave(model: Any, jobs: Sequence[Job]) -> tuple[list[float], list[list[int]]]:
    """Return the time of each token of the batch, and the tokens of each row, padding at the end included."""
    width = max(len(job.prompt) for job in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.long)
    mask = torch.zeros(len(jobs), width, dtype=torch.long)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    clock = _Clock()
    longest = max(job.max_tokens for job in jobs)
    config = _greedy(longest, None)
    stopping = StoppingCriteriaList([clock])
    found = model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=stopping)
    return clock.times, found[:, width:].tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once and append the result to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--waves", type=int, default=0, help="static batches of so many; 0: continuous batching")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--page", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu", help="of continuous batching")
    parser.add_argument(
        "--auto", action="store_true", help="transformers chooses its sizes, and flash attention if it can"
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads or len(os.sched_getaffinity(0)))
    workload = read(o.work)
    if o.waves:
        # For padded batches, the concurrency is the batch size.
        o.waves = min(o.waves, o.concurrency or o.waves)
        result = waves(o.model, workload, o.dtype, o.waves)
    else:
        known = signature(ContinuousBatchingConfig).parameters  # transformers 5.17 has other names, and fewer
        page = "page_size" if "page_size" in known else "block_size"
        fixed = {page: o.page, "num_blocks": o.blocks, "max_batch_tokens": o.batch_tokens}
        fixed |= {"default_compile_level": 0, "scheduler_type": "fifo", "auto_switch_to_flash": False}
        fixed = {name: value for name, value in fixed.items() if name in known}
        result = continuous(o.model, workload, o.dtype, o.device, {} if o.auto else fixed, o.concurrency)
    write(result, o.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
