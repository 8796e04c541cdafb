"""Times decode steps of a model runner against their floor, and prompts against the rate of matrix products.

    python -m bench.gpu_steps --device cuda --out FILE

The model has random weights, made on the device. The floor of a decode step is the time to copy as many bytes as it has
to read: all weights, and keys and values of all positions (bytes read and written a second, as a copy within the device
reaches). Steps run with two in flight, as in the worker, first as graphs, then one launch after the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from bench.figures import Figure, arguments
from bench.gpu_device import Device, each, main
from bench.measure import median
from bench.models import SHAPES, random_model
from bench.slots import Slots
from lineclear.process.logging_setup import configure
from lineclear.worker.attention.base import block_bytes
from lineclear.worker.model.decode_graphs import DecodeGraphs, cuda_capture
from lineclear.worker.model.loader import build_cuda, wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 2048
WARM_UP_STEPS = 4
PROFILED_STEPS = 8
GOAL_OVER_FLOOR = 1.25
GOAL_IDLE = 3.0
GOAL_PREFILL = 60.0
_GOAL_BATCHES = (1, 32, 256)


class StepBench:
    """The model on its device, and the rates that its floors are made of."""

    def __init__(self, device: Device) -> None:
        self.device, self.sizes = device, device.sizes
        loaded = wrap_model(random_model(SHAPES[self.sizes.step_shape], str(device.torch_device)))
        self.loaded = build_cuda(loaded) if device.is_cuda else loaded
        self.copy_rate = device.copy_rate(self.sizes.copy_bytes)
        self.matmul_rate = device.matmul_rate(self.sizes.matmul_size)
        self.position_bytes = block_bytes(self.loaded.layers, BLOCK_SIZE, self.loaded.dtype) / BLOCK_SIZE

    def slots(self, batches: Sequence[int], *, graphs: bool) -> Slots:
        """Return the slots of a new runner with room for all steps of these batches. Graphs need a card."""
        num_steps = len(batches) * (WARM_UP_STEPS + self.sizes.steps + PROFILED_STEPS)
        options = RunnerOptions(
            num_blocks=max(batches) * -(-(self.sizes.context + num_steps + 1) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            num_slots=max(batches),
            max_step_tokens=MAX_STEP_TOKENS,
        )
        made = DecodeGraphs(batches, cuda_capture(self.device.torch_device)) if graphs and self.device.is_cuda else None
        return Slots(ModelRunner(self.loaded, options, graphs=made))

    def steps(self, mode: str, batches: Sequence[int]) -> Iterator[Figure]:
        """Measure prompts, with graphs, and then decodes of all batches."""
        slots = self.slots(batches, graphs=mode == "graphs")
        if mode == "graphs":
            yield from self.prefill(slots, max(batches))
        else:
            slots.open(self.prompts(max(batches)))
        yield from each(self.decodes(slots, count, mode) for count in batches)
        yield Figure("memory: most held for tensors", mode, self.device.peak_bytes() / 2**30, "GiB")

    def prompts(self, count: int) -> list[tuple[int, ...]]:
        """Return prompts that have no token in common at the same place."""
        length, most = self.sizes.context, self.loaded.vocab_size - 3
        return [tuple(3 + (slot * 31 + place * 7) % most for place in range(length)) for slot in range(count)]

    def prefill(self, slots: Slots, count: int) -> Iterator[Figure]:
        """Fill `count` slots, after a first step that compiles kernels."""
        slots.open(self.prompts(min(count, max(1, MAX_STEP_TOKENS // self.sizes.context))))
        began_at = time.perf_counter()
        slots.open(self.prompts(count))
        rate = count * self.sizes.context / (time.perf_counter() - began_at)
        case = f"{count} prompts of {self.sizes.context}"
        yield Figure("prefill: rate", case, rate, "tokens/s")
        # Nothing is multiplied with the table of embeddings, and with the head only behind the last token of a prompt.
        layers = getattr(self.loaded.model, self.loaded.model.base_model_prefix)
        weights = sum(p.numel() for p in layers.parameters()) - layers.get_input_embeddings().weight.numel()
        share = rate * 2 * weights / self.matmul_rate
        yield Figure("prefill: of the matrix product's rate", case, share * 100, "%", GOAL_PREFILL, more_is_better=True)

    def decodes(self, slots: Slots, count: int, mode: str) -> Iterator[Figure]:
        """Measure steps of `count` decodes. The bytes that the floor counts are those of the middle step."""
        slots.decode(count, WARM_UP_STEPS)
        before = sum(slots.positions[:count])
        steps = slots.decode(count, self.sizes.steps)
        positions = (before + sum(slots.positions[:count])) / 2
        floor = (self.loaded.weight_bytes + positions * self.position_bytes) / self.copy_rate
        seconds = steps.seconds / self.sizes.steps
        case = f"{count} decodes at {round(positions / count)}, {mode}"
        has_goal = mode == "graphs" and count in _GOAL_BATCHES
        yield Figure("decode: floor", case, floor * 1e3, "ms")
        yield Figure("decode: step", case, seconds * 1e3, "ms")
        yield Figure("decode: step over its floor", case, seconds / floor, "", GOAL_OVER_FLOOR if has_goal else None)
        yield Figure("decode: step on the device", case, median([r.step_seconds for r in steps.results]) * 1e3, "ms")
        yield Figure("decode: launch on the host", case, median(steps.launch_seconds) * 1e3, "ms")
        bad = sum(len(result.bad_rows) for result in steps.results)
        yield Figure("decode: rows that are not finite", case, bad, "rows", 0)
        idle = self.device.idle_share(lambda: slots.decode(count, PROFILED_STEPS))
        yield Figure("decode: device idle", case, idle * 100, "%", GOAL_IDLE if has_goal else None)


def figures(device: Device, options: argparse.Namespace) -> Iterator[Figure]:
    """Measure all batches with graphs, then some without."""
    configure("worker", "warning")
    bench = StepBench(device)
    yield Figure("model: weights", bench.sizes.step_shape, bench.loaded.weight_bytes / 1e9, "GB")
    modes = ("graphs", bench.sizes.batches), ("eager", bench.sizes.eager_batches)
    yield from each(bench.steps(mode, batches) for mode, batches in modes)


if __name__ == "__main__":
    raise SystemExit(main(figures, arguments(__doc__)))
