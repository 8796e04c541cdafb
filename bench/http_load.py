"""Runs a workload through a server that streams over HTTP: llama-server's API, or OpenAI completions.

Uses the standard library only, because it shares the cores with the server: one connection per request, minimal
parsing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.measure import Run
from bench.workloads import Job, Workload

START_SECONDS = 600.0
_STOP_SECONDS = 20.0
_LONGEST_LINE = 1 << 20
_WARM_UP = Job("warm", (7,) * 32, 4)


@dataclass(frozen=True)
class Dialect:
    """The API of a server. `count(event)`: the number of tokens in one streamed event."""

    path: str
    body: Callable[[Job], dict[str, Any]]
    count: Callable[[dict[str, Any]], int]


def llama_server(cache_prompt: bool) -> Dialect:
    """Return the dialect of llama-server's /completion."""

    def body(job: Job) -> dict[str, Any]:
        return {
            "prompt": job.prompt,
            "n_predict": job.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": cache_prompt,
            "return_tokens": True,
            "stream": True,
        }

    def count(event: dict[str, Any]) -> int:
        return 0 if event.get("stop") else len(event.get("tokens") or ())

    return Dialect("/completion", body, count)


def openai(model: str) -> Dialect:
    """Return the dialect of /v1/completions, with one token per event."""

    def body(job: Job) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }

    return Dialect("/v1/completions", body, lambda event: len(event.get("choices") or ()))


@dataclass(frozen=True)
class Server:
    """A running server."""

    pid: int
    port: int
    load_seconds: float


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def serving(
    command: Sequence[str], port: int, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Server]:
    """Run the server during the block, which starts when /health returns 200."""
    began_at = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | (environment or {}), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        while not await _healthy(port):
            if process.returncode is not None:
                raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}")
            if time.perf_counter() - began_at > START_SECONDS:
                raise RuntimeError(f"{command[0]} was not ready within {START_SECONDS:.0f} s")
            await asyncio.sleep(0.05)
        yield Server(process.pid, port, time.perf_counter() - began_at)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
    await process.wait()


async def _healthy(port: int) -> bool:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in await reader.readline()
        finally:
            writer.close()
    return False


async def load(server: Server, dialect: Dialect, workload: Workload, concurrency: int = 0) -> Run:
    """Send all jobs, at their arrival times or `concurrency` at a time, and return the timed run."""
    await _stream(server.port, dialect, _WARM_UP, Run(Workload("warm", 0, 0, 0.0, (_WARM_UP,))))
    places = asyncio.Semaphore(concurrency or len(workload.jobs))
    timed = Run(workload)

    async def one(job: Job) -> None:
        await asyncio.sleep(max(0.0, job.arrival_seconds - timed.now()))
        async with places:
            if concurrency:
                timed.arrived(job.id)
            await _stream(server.port, dialect, job, timed)

    await asyncio.gather(*(one(job) for job in workload.jobs))
    return timed


async def _stream(port: int, dialect: Dialect, job: Job, timed: Run) -> None:
    """Stream one job. Raises RuntimeError if the server refuses it."""
    body = json.dumps(dialect.body(job)).encode()
    fields = ("Host: localhost", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join((f"POST {dialect.path} HTTP/1.1", *fields, "", ""))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LONGEST_LINE)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            answer = await reader.read(2000)
            raise RuntimeError(f"the server said {status!r} to {job.id}: {answer!r}")
        while line := await reader.readline():
            # Chunk sizes and empty lines of the framing are skipped with everything else that is no event.
            if line.startswith(b"data: {"):
                count = dialect.count(json.loads(line[len(b"data: ") :]))
                if count:
                    timed.tokens(job.id, count)
    finally:
        writer.close()
