"""What `bench.gpu` measures with: the device and its rates.

The rehearsal takes the same path on a CPU. Only what a CPU lacks is replaced: events by the host's clock, graphs by
eager steps.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.figures import Figure, arguments
from bench.gpu_sizes import Sizes, sizes_of
from bench.measure import median

_ROUNDS = 5


@dataclass(frozen=True)
class Device:
    """A device of torch. `kind`: which functions of torch it has, "cuda" or "cpu"."""

    kind: str
    torch_device: torch.device
    sizes: Sizes

    @classmethod
    def named(cls, name: str) -> Device:
        """Return the device that torch calls `name`. Raises RuntimeError if torch cannot use it."""
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        return cls(device.type, device, sizes_of(device.type))

    @property
    def is_cuda(self) -> bool:
        """It is a card."""
        return self.kind == "cuda"

    def facts(self) -> dict[str, Any]:
        """Return the name of the device and what else its figures depend on."""
        if not self.is_cuda:
            return {"name": "cpu", "threads": torch.get_num_threads()}
        properties = torch.cuda.get_device_properties(self.torch_device)
        return {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "free_gib": round(torch.cuda.mem_get_info(self.torch_device)[0] / 2**30, 1),
        }

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def peak_bytes(self) -> int:
        """Return the most memory that torch has held for tensors in this process; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.torch_device) if self.is_cuda else 0

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of `work` on the device, after three runs that do not count."""
        for _ in range(3):
            work()
        return median([self._timed(work) for _ in range(_ROUNDS)])

    def _timed(self, work: Callable[[], object]) -> float:
        if not self.is_cuda:
            began_at = time.perf_counter()
            work()
            return time.perf_counter() - began_at
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def copy_rate(self, num_bytes: int) -> float:
        """Return the bytes read and written a second by a copy of `num_bytes` within the device."""
        source = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device).random_()
        target = torch.empty_like(source)
        return 2 * num_bytes / self.seconds(lambda: target.copy_(source))

    def matmul_rate(self, size: int) -> float:
        """Return the floating-point operations a second of a bfloat16 product of square matrices of random numbers."""
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=self.torch_device) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * size**3 / self.seconds(lambda: torch.mm(a, b, out=out))

    def idle_share(self, work: Callable[[], object]) -> float:
        """Return the share of time, from the first kernel or copy of `work` to the last, in which none runs."""
        activity, kind = (
            (ProfilerActivity.CUDA, DeviceType.CUDA) if self.is_cuda else (ProfilerActivity.CPU, DeviceType.CPU)
        )
        with profile(activities=[activity]) as profiler:
            work()
            self.synchronize()
        events = (e for e in profiler.events() or () if e.device_type == kind)
        return idle_share(sorted((e.time_range.start, e.time_range.end) for e in events))


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of time that none of these spans (begin, end), in order of their begins, covers."""
    if not spans:
        raise RuntimeError("the profiler saw nothing that ran on the device")
    busy, covered = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return 1 - busy / max(covered - spans[0][0], 1e-9)


def figures(device: Device) -> Iterator[Figure]:
    """Measure the rates that floors are made of."""
    sizes = device.sizes
    yield Figure(
        "device: copy, read and written",
        f"{sizes.copy_bytes >> 20} MiB",
        device.copy_rate(sizes.copy_bytes) / 1e12,
        "TB/s",
    )
    rate = device.matmul_rate(sizes.matmul_size)
    yield Figure("device: matrix product", f"bfloat16, {sizes.matmul_size} squared", rate / 1e12, "TFLOP/s")


def each(parts: Iterable[Iterator[Figure]]) -> Iterator[Figure]:
    """Yield the figures of all parts. A part that fails does not end the others; its error is raised behind them."""
    errors = []
    for part in parts:
        try:
            yield from part
        except Exception as error:
            traceback.print_exc()
            errors.append(error.with_traceback(None))  # which holds the memory of what failed
    if errors:
        raise ExceptionGroup("not measured", errors)


def main(make: Callable[[Device, argparse.Namespace], Iterator[Figure]], parser: argparse.ArgumentParser) -> int:
    """Measure and append each figure to `--out` at once, so that a part that fails keeps its first figures."""
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = Device.named(options.device)
    with options.out.open("a") as file:
        for figure in make(device, options):
            print(f"{figure.name}, {figure.case}: {figure.shown} {figure.verdict}", flush=True)
            file.write(json.dumps(asdict(figure)) + "\n")
            file.flush()
    return 0


def _with_facts(device: Device, options: argparse.Namespace) -> Iterator[Figure]:
    options.facts.write_text(json.dumps(device.facts()))
    yield from figures(device)


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--facts", type=Path, required=True, help="file for the name of the device and so on")
    return found


if __name__ == "__main__":
    raise SystemExit(main(_with_facts, parser()))
