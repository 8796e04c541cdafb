"""Runs a workload through llama.cpp's llama-server, streamed over HTTP.

    python -m bench.peer_llama --home DIR --model DIR/models/llama-110m-shape --work w1.json [--quantize q8_0]

`--home` is the directory of environments.sh. Weights are converted to GGUF once, beside the model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.http_load import free_port, llama_server, load, serving
from bench.measure import Result, write
from bench.workloads import Workload, read


def _source(home: Path) -> Path:
    return next((home / "llama" / "source").glob("*/vendor/llama.cpp"))


def gguf(home: Path, model: Path, quantize: str) -> Path:
    """Return the model as a GGUF file: bf16, or quantized from it."""
    plain = model / "model.bf16.gguf"
    if not plain.exists():
        part = plain.with_suffix(".part")
        command = [sys.executable, "-m", "bench.to_gguf", str(_source(home)), str(model), str(part)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        part.rename(plain)
    if quantize == "bf16":
        return plain
    path = model / f"model.{quantize}.gguf"
    if not path.exists():
        tool = home / "llama" / "build" / "bin" / "llama-quantize"
        part = path.with_suffix(".part")
        subprocess.run([str(tool), str(plain), str(part), quantize], check=True, stdout=subprocess.DEVNULL)
        part.rename(path)
    return path


async def run(
    home: Path,
    model: Path,
    workload: Workload,
    *,
    quantize: str = "bf16",
    slots: int = 32,
    threads: int = 0,
    concurrency: int = 0,
) -> Result:
    """Run the workload through a new server with one KV cache for all slots."""
    weights = gguf(home, model, quantize)
    threads = threads or len(os.sched_getaffinity(0))
    port = free_port()
    longest = max(len(job.prompt) + job.max_tokens for job in workload.jobs)
    context = 768 * slots if longest <= 768 else (longest + 64) * slots
    options = ["-np", str(slots), "-c", str(context), "-cb", "-t", str(threads), "-tb", str(threads)]
    options += ["-b", "2048", "-ub", "512", "--kv-unified", "--no-webui"]
    command = [str(home / "llama" / "build" / "bin" / "llama-server"), "-m", str(weights), *options]
    async with serving([*command, "--port", str(port), "--log-disable"], port) as server:
        timed = await load(server, llama_server(cache_prompt=True), workload, concurrency)
        makespan = timed.now()
        return timed.end(
            f"llama-server {quantize}",
            model.name,
            {"options": options, "weights": quantize, "concurrency": concurrency, "sources": _source(home).parts[-3]},
            load_seconds=server.load_seconds,
            server=server.pid,
            makespan_seconds=makespan,
            # The server withholds tokens of an incomplete UTF-8 character, so a few are missing.
            notes="tokens of unfinished characters are not reported; compare makespans",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once and append the result to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--quantize", default="bf16", help="bf16, or what llama-quantize knows: f16, q8_0, q4_0 ...")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--convert-only", action="store_true", help="make the GGUF file and stop")
    parser.add_argument("--out", type=Path)
    o = parser.parse_args(arguments)
    if o.convert_only:
        print(gguf(o.home, o.model, o.quantize))
        return 0
    settings = {"quantize": o.quantize, "slots": o.slots, "threads": o.threads, "concurrency": o.concurrency}
    write(asyncio.run(run(o.home, o.model, read(o.work), **settings)), o.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
