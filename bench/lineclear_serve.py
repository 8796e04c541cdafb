"""Runs a workload through the real service, both processes, with the bundled client.

    python -m bench.lineclear_serve --model DIR --work w1.json -- --max-batch-size 64 -- --dtype bfloat16
    python -m bench.lineclear_serve --model DIR --work w1.json --gguf q4_0 --home build/bench

Flags after the first `--` are the scheduler's, after the second the worker's. Every run starts a new service, so that
no prefix is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.measure import Result, Run, write
from bench.peer_llama import gguf
from bench.workloads import Job, Workload, read
from lineclear.client import AsyncClient, HealthStatus
from lineclear.errors import LineclearError

START_SECONDS = 300.0
REQUEST_SECONDS = 1800.0
_WARM_UP = (7,) * 32
_WARM_UP_STREAMS = 8  # fills one fixed batch


@dataclass(frozen=True)
class Service:
    """A running service. `load_seconds`: from its start to SERVING."""

    pid: int
    client: AsyncClient
    load_seconds: float


@contextlib.asynccontextmanager
async def serving(
    model: str,
    flags: Sequence[str] = (),
    worker_flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Service]:
    """Run a service on a Unix socket during the block. Raises RuntimeError if it does not start.

    `environment` is added to that of this process.
    """
    with tempfile.TemporaryDirectory(prefix="lineclear-bench-") as folder:
        target = f"unix:{folder}/api.sock"
        command = [sys.executable, "-m", "lineclear.scheduler.main", "--model", model, "--listen", target]
        command += ["--spawn-worker", "--log-level", "error", *flags, "--", "--log-level", "error", *worker_flags]
        began_at = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | (environment or {}))
        try:
            async with AsyncClient(target, timeout_seconds=REQUEST_SECONDS, max_attempts=1) as client:
                await _ready(client, process)
                yield Service(process.pid, client, time.perf_counter() - began_at)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _ready(client: AsyncClient, process: asyncio.subprocess.Process) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        if process.returncode is not None:
            raise RuntimeError(f"the service ended with exit code {process.returncode}")
        with contextlib.suppress(LineclearError):
            if await client.health(timeout_seconds=1.0) is HealthStatus.SERVING:
                return
        await asyncio.sleep(0.02)
    raise RuntimeError(f"the service was not ready within {START_SECONDS:.0f} s")


async def run(
    model: str,
    workload: Workload,
    flags: Sequence[str] = (),
    worker_flags: Sequence[str] = (),
    *,
    name: str = "lineclear",
    concurrency: int = 0,
) -> Result:
    """Run the workload through a new service. `concurrency` 0: jobs at their arrival times."""
    async with serving(model, flags, worker_flags) as service:
        await warm_up(service.client)
        settings = {"scheduler": list(flags), "worker": list(worker_flags), "concurrency": concurrency}
        return await timed(service, workload, name, Path(model).name, settings)


async def warm_up(client: AsyncClient) -> None:
    """Send requests that trigger one-time initialisation."""
    requests = (
        client.generate(_WARM_UP, max_tokens=8, temperature=0.0, ignore_eos=True) for _ in range(_WARM_UP_STREAMS)
    )
    await asyncio.gather(*requests)


async def timed(service: Service, workload: Workload, name: str, model: str, settings: dict[str, Any]) -> Result:
    """Run the workload through a service, at the concurrency of the settings."""
    client, concurrency = service.client, settings["concurrency"]
    places = asyncio.Semaphore(concurrency or len(workload.jobs))
    found = Run(workload)

    async def one(job: Job) -> None:
        await asyncio.sleep(max(0.0, job.arrival_seconds - found.now()))
        async with places:
            if concurrency:
                found.arrived(job.id)
            await _stream(client, job, found)

    await asyncio.gather(*(one(job) for job in workload.jobs))
    makespan = found.now()
    worker = (await client.stats()).worker
    return found.end(
        name,
        model,
        settings | {"dtype": worker.dtype, "attention": worker.attention_backend},
        load_seconds=service.load_seconds,
        server=service.pid,
        makespan_seconds=makespan,
    )


async def _stream(client: AsyncClient, job: Job, timed: Run) -> None:
    async with client.stream(
        job.prompt, max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True, omit_text=True
    ) as stream:
        async for delta in stream:
            if delta.token_ids:
                timed.tokens(job.id, len(delta.token_ids))
                timed.answer(job.id, delta.token_ids)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once and append the result to `--out`."""
    mine, *rest = _split(list(sys.argv[1:] if arguments is None else arguments))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--name", default="lineclear")
    parser.add_argument("--concurrency", type=int, default=0, help="a closed loop of so many; 0: by arrival")
    parser.add_argument("--gguf", help="serve the file that llama.cpp's tools make of the model: f16, q8_0 ...")
    parser.add_argument("--home", type=Path, default=Path(), help="the directory of environments.sh, for --gguf")
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(mine)
    model = str(gguf(o.home, Path(o.model), o.gguf)) if o.gguf else o.model
    flags: list[str] = rest[0] if rest else []
    worker_flags: list[str] = rest[1] if len(rest) > 1 else []
    result = asyncio.run(run(model, read(o.work), flags, worker_flags, name=o.name, concurrency=o.concurrency))
    write(replace(result, model=Path(o.model).name), o.out)
    return 0


def _split(arguments: list[str]) -> list[list[str]]:
    """Split the arguments at each `--`."""
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts


if __name__ == "__main__":
    raise SystemExit(main())
