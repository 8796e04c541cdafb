"""Lets the device's memory run out in a step, then kills the worker under load: the streams' answers must not change.

    python -m bench.gpu_faults --device cuda --model DIR --out FILE

In float32, where equal tokens are promised, on a small model and through the real server. The memory runs out because
this process takes the rest of the card's; on a CPU, because the worker's address space may not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.figures import Figure, arguments
from bench.gpu_device import Device, each, main
from bench.workloads import make
from lineclear.client import Client, LocalServer
from lineclear.errors import LineclearError

MAX_TOKENS = 64
_VOCABULARY = 1000  # of the ids in prompts
_SPARE_BYTES = 2 << 20  # that the worker may still take
_PIECE_BYTES, _LEAST_PIECE_BYTES, _ROUND_BYTES = 256 << 20, 10 << 20, 2 << 20
"""torch takes memory of a card in multiples of 2 MiB, but 20 MiB for a tensor of up to 10 MiB: no piece is so small."""
_PATIENCE_SECONDS = 45.0


class Load:
    """Streams with the same prompts each time, through one server."""

    def __init__(self, server: LocalServer, client: Client, num_streams: int) -> None:
        self.client, self._log = client, server.log
        self._prompts = [job.prompt[:64] for job in make("w1", num_streams, vocabulary=_VOCABULARY).jobs]
        self.num_tokens, self.case = num_streams * MAX_TOKENS, f"{num_streams} streams"

    def answers(self) -> list[list[int]]:
        """Return the tokens of all streams."""
        found = self.client.generate_batch(self._prompts, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        return [list(answer.token_ids) for answer in found]

    def generated(self) -> int:
        """Return the tokens that the server has generated so far."""
        return self.client.stats().counters.generation_tokens

    def failed_steps(self) -> list[str]:
        """Return the kinds of the failed steps in the log, where worker and scheduler both write them."""
        lines = [line for line in self._log.read_text().splitlines() if '"step_failed"' in line and line.endswith("}")]
        steps = {entry["step"]: str(entry["kind"]) for entry in map(json.loads, lines)}
        return list(steps.values())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll the condition. Raises RuntimeError after some time."""
    give_up_at = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"{what} did not happen within {_PATIENCE_SECONDS:g} s")
        time.sleep(0.01)


def kill(load: Load, right: list[list[int]]) -> Iterator[Figure]:
    """Kill the worker when a quarter of the tokens is there."""
    wait_until(lambda: load.client.stats().worker.pid > 0, "the join of a worker")  # a step before may have ended it
    before, worker = load.generated(), load.client.stats().worker
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(load.answers)
        wait_until(lambda: load.generated() - before > load.num_tokens // 4, "a quarter of the answers")
        os.kill(worker.pid, signal.SIGKILL)
        killed_at = time.perf_counter()
        wait_until(lambda: load.client.stats().worker.joins > worker.joins, "the join of a new worker")
        yield Figure("kill: until the new worker joined", "no standby worker", time.perf_counter() - killed_at, "s")
        changed = sum(a != b for a, b in zip(found.result(), right, strict=True))
    yield Figure("kill: streams whose tokens changed", load.case, changed, "streams", 0)


@contextlib.contextmanager
def memory_taken(device: Device, pid: int) -> Iterator[None]:
    """Leave nearly no memory for more tensors of process `pid`."""
    if device.is_cuda:
        taken, spare = [], _SPARE_BYTES
        while (left := torch.cuda.mem_get_info(device.torch_device)[0] - spare) > _LEAST_PIECE_BYTES:
            size = _PIECE_BYTES if left >= 2 * _PIECE_BYTES else left // _ROUND_BYTES * _ROUND_BYTES
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device=device.torch_device))
            except torch.OutOfMemoryError:
                spare += _ROUND_BYTES
        try:
            yield
        finally:
            taken.clear()
            torch.cuda.empty_cache()
        return
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limits = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + _SPARE_BYTES, limits[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, limits)


def out_of_memory(device: Device, load: Load, right: list[list[int]]) -> Iterator[Figure]:
    """Score a long text beside the streams while there is no memory for its logits."""
    text = [5 + place * 7 % _VOCABULARY for place in range(load.client.model().context_length - 8)]
    before = load.generated()

    def score() -> str:
        try:
            load.client.score(text[:1], [text[1:]], top_logprobs=20)
        except LineclearError as error:
            return type(error).__name__
        return "answered"

    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(load.answers)
        wait_until(lambda: load.generated() > before, "the first token")
        with memory_taken(device, load.client.stats().worker.pid):
            scored = pool.submit(score)
            with contextlib.suppress(RuntimeError):  # counted below
                wait_until(lambda: bool(load.failed_steps()) or scored.done(), "a failed step")
        changed = sum(a != b for a, b in zip(found.result(), right, strict=True))
        outcome = scored.result()
    kinds, case = load.failed_steps(), f"beside {load.case}"
    num_failed = kinds.count("out_of_memory")
    yield Figure("out of memory: failed steps", case, num_failed, "steps", 1, more_is_better=True)
    yield Figure("out of memory: steps that failed otherwise", case, len(kinds) - num_failed, "steps", 0)
    yield Figure("out of memory: streams whose tokens changed", f"the long score: {outcome}", changed, "streams", 0)
    again = sum(a != b for a, b in zip(load.answers(), right, strict=True))
    yield Figure("out of memory: streams that differ afterwards", load.case, again, "streams", 0)


def figures(device: Device, options: argparse.Namespace) -> Iterator[Figure]:
    """Run both faults on one server."""
    flags = ["--model", str(options.model), "--max-batch-size", str(device.sizes.streams + 1)]
    worker_flags = ["--device", str(device.torch_device), "--dtype", "float32", "--num-blocks", "1024"]
    with LocalServer(*flags, "--", *worker_flags) as server, Client(server.target, max_attempts=1) as client:
        load = Load(server, client, device.sizes.streams)
        right = load.answers()
        yield from each((out_of_memory(device, load, right), kill(load, right)))


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
