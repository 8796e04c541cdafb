"""Runs W1, W2, W3 (arrivals at random) and W4 through one real server on the device, and measures its start.

    python -m bench.gpu_load --device cuda --model DIR --out FILE --runs FILE

The first start compiles the kernels; the second is what a server of an installation takes. Each workload has prompts of
its own, so that no prefix is cached from another.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, arguments
from bench.gpu_device import Device, main
from bench.lineclear_serve import serving, timed, warm_up
from bench.measure import Result, write

_SHARE_OF_CAPACITY = 0.6
"""Rate of the arrivals of W3, as a share of the requests a second of W1."""


async def load_and_run(model: Path, device: Device, runs: Path, loads: list[float], results: list[Result]) -> None:
    """Append the seconds of each start and the result of each workload, also to `runs`, as soon as it is there."""
    flags = ("--max-batch-size", str(device.sizes.slots))
    worker_flags = ("--device", str(device.torch_device), "--max-batch-size", str(device.sizes.slots))
    settings = {"scheduler": list(flags), "worker": list(worker_flags), "concurrency": 0}
    async with serving(str(model), flags, worker_flags) as service:
        loads.append(service.load_seconds)
    async with serving(str(model), flags, worker_flags) as service:
        loads.append(service.load_seconds)
        await warm_up(service.client)
        rate = 0.0
        for seed, kind in enumerate(("w1", "w4", "w2", "w3")):
            workload = device.sizes.workload(kind, seed, rate * _SHARE_OF_CAPACITY)
            result = await timed(service, workload, "lineclear", model.name, settings)
            write(result, runs)
            rate = rate or device.sizes.requests / result.makespan_seconds
            results.append(result)


def figures(device: Device, options: argparse.Namespace) -> Iterator[Figure]:
    """Measure starts, then the workloads."""
    loads, results = list[float](), list[Result]()
    try:
        asyncio.run(load_and_run(options.model, device, options.runs, loads, results))
    finally:
        for which, seconds in zip(("first start, which compiles kernels", "second start"), loads, strict=False):
            yield Figure(f"load: {which}", options.model.name, seconds, "s")
        for result in results:
            missing = result.workload["wanted_tokens"] - result.output_tokens
            yield Figure("served: tokens missing", str(result.workload["kind"]), missing, "tokens", 0)


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument(
        "--runs", type=Path, required=True, help="file that the results of the workloads are appended to"
    )
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
