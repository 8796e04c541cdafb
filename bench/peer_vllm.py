"""Runs a workload through vLLM on CPUs: `LLM.generate` in this process, or its server over HTTP.

    VENV/bin/python -m bench.peer_vllm --model DIR --work w1.json               # offline: all requests at once
    VENV/bin/python -m bench.peer_vllm --model DIR --work w3.json --server      # requests arrive over time

Needs vLLM's environment. Offline mode has no server and no client on the same cores, which favours vLLM. It reports no
time per token: the gaps of an answer are its mean gap.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.http_load import free_port, load, openai, serving
from bench.measure import Result, Run, write
from bench.workloads import Workload, read

PACKAGE = "vllm"
"""Installed only in the environment of this script."""


def environment(kv_gib: int) -> dict[str, str]:
    """Return variables for vLLM's threads and KV cache."""
    cores = len(os.sched_getaffinity(0))
    return {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib), "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}"}


def offline(model: Path, workload: Workload, dtype: str, seqs: int, batch_tokens: int, max_len: int) -> Result:
    """Run all jobs in one call."""
    vllm: Any = importlib.import_module(PACKAGE)  # noqa: TID251
    began_at = time.perf_counter()
    llm = vllm.LLM(
        model=str(model),
        dtype=dtype,
        max_num_seqs=seqs,
        max_num_batched_tokens=batch_tokens,
        max_model_len=max_len,
        disable_log_stats=False,
    )
    load_seconds = time.perf_counter() - began_at

    def params(max_tokens: int) -> Any:
        return vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    llm.generate([{"prompt_token_ids": [7] * 32}], params(8), use_tqdm=False)
    prompts = [{"prompt_token_ids": list(job.prompt)} for job in workload.jobs]
    timed = Run(workload)
    answers = llm.generate(prompts, [params(job.max_tokens) for job in workload.jobs], use_tqdm=False)
    makespan = timed.now()
    for job, answer in zip(workload.jobs, answers, strict=True):
        timed.times[job.id] = _times(len(answer.outputs[0].token_ids), getattr(answer, "metrics", None), makespan)
    settings = {
        "mode": "offline",
        "dtype": dtype,
        "seqs": seqs,
        "batch_tokens": batch_tokens,
        "max_len": max_len,
        **_environment(),
    }
    notes = "gaps between tokens are means of each answer"
    return timed.end("vllm", model.name, settings, load_seconds=load_seconds, makespan_seconds=makespan, notes=notes)


def _times(count: int, metrics: Any, makespan: float) -> list[float]:
    if metrics is None or not getattr(metrics, "first_token_ts", 0):
        return [makespan] * count
    gap = (metrics.last_token_ts - metrics.first_token_ts) / max(1, count - 1)
    return [metrics.first_token_latency + index * gap for index in range(count)]


async def served(
    model: Path, workload: Workload, dtype: str, seqs: int, batch_tokens: int, max_len: int, concurrency: int
) -> Result:
    """Run the jobs through the OpenAI server."""
    port = free_port()
    # `vllm serve` fails in vllm-cpu: it reads the metadata of a distribution with another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", dtype, "--max-model-len", str(max_len), "--max-num-seqs", str(seqs)]
    command += ["--max-num-batched-tokens", str(batch_tokens), "--port", str(port)]
    async with serving(command, port) as server:
        timed = await load(server, openai(str(model)), workload, concurrency)
        makespan = timed.now()
        settings = {"mode": "server", "dtype": dtype, "seqs": seqs, "batch_tokens": batch_tokens, "max_len": max_len}
        return timed.end(
            "vllm server",
            model.name,
            settings | {"concurrency": concurrency} | _environment(),
            load_seconds=server.load_seconds,
            server=server.pid,
            makespan_seconds=makespan,
        )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_CPU_")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once and append the result to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--kv-gib", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(arguments)
    for name, value in environment(o.kv_gib).items():
        os.environ.setdefault(name, value)
    workload = read(o.work)
    longest = max(len(job.prompt) + job.max_tokens for job in workload.jobs)
    max_len = max(o.max_len, longest + 8)
    if o.server:
        result = asyncio.run(served(o.model, workload, o.dtype, o.seqs, o.batch_tokens, max_len, o.concurrency))
    else:
        seqs = o.concurrency or o.seqs
        result = offline(o.model, workload, o.dtype, seqs, max(o.batch_tokens, seqs), max_len)
    write(result, o.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
