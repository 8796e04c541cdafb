"""Measures matrix products and memory bandwidth, and computes the ideal makespan of a workload from them.

    python -m bench.limits --model DIR [--work w1 w4]

The ideal makespan has steps of at most `slots` sequences. A step costs its matrix products and one read of its keys and
values, without norms, sampling or Python. Products are oneDNN's, which all peers can use, and lineclear's. Each
measurement walks the weights of all layers, so that they come from memory as in service.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.figures import Figure, arguments, main, seconds_per_call_of_wall
from bench.workloads import Workload, make
from lineclear.worker.cpu.linear import Packer, pack
from lineclear.worker.cpu.quantized_linear import pack_int8
from lineclear.worker.device.huge_pages import HugePageArena

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BUDGETS = (64, 128, 256, 512)
SLOTS = 64
_ROUNDS = 5
_READ_BYTES = 1 << 28


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that determine its matrix products."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, model: Path) -> Shape:
        """Read the config.json of a model built like Llama."""
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
        )

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each product of a layer, with those of one input fused."""
        wide = (self.heads + 2 * self.kv_heads) * self.head_dim
        return [
            (wide, self.hidden),
            (self.hidden, self.heads * self.head_dim),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Return the KV bytes of one position in all layers."""
        return 2 * self.kv_heads * self.head_dim * self.layers * dtype.itemsize


Product = Callable[[tuple[int, int], torch.dtype], Callable[[torch.Tensor], torch.Tensor]]
"""Makes a product from (outputs, inputs) and a dtype."""


class Costs:
    """Seconds of the products for any number of rows, interpolated between measurements."""

    def __init__(self, body: dict[int, float], head: dict[int, float], bytes_per_second: float, kv_bytes: int) -> None:
        self._body, self._head = body, head
        self._bytes_per_second, self._kv_bytes = bytes_per_second, kv_bytes

    def step(self, tokens: int, samples: int, context: int) -> float:
        """Return the seconds of a step of `tokens` with `samples` sampled rows and `context` cached positions."""
        read = context * self._kv_bytes / self._bytes_per_second
        return _between(self._body, tokens) + (_between(self._head, samples) if samples else 0.0) + read


def _between(costs: dict[int, float], rows: int) -> float:
    known = sorted(costs)
    if rows >= known[-1]:
        return costs[known[-1]] * rows / known[-1]
    place = bisect.bisect_left(known, rows)
    high = known[place]
    if high == rows or place == 0:
        return costs[high]
    low = known[place - 1]
    return costs[low] + (costs[high] - costs[low]) * (rows - low) / (high - low)


def makespan(workload: Workload, costs: Costs, slots: int, budget: int, prefix: int = 0, fixed: bool = False) -> float:
    """Return the seconds with perfect packing: decodes first, then prompts, at most `budget` tokens per step.

    `prefix`: number of leading tokens that all prompts share, computed once. `fixed`: static batching without padding,
    where a batch starts together and no request joins it.
    """
    waiting = deque(workload.jobs)
    running: list[list[int]] = []  # [prompt tokens left, positions held, output tokens left]
    seconds, shared = 0.0, False
    while waiting or running:
        for _ in range(0 if fixed and running else min(slots - len(running), len(waiting))):
            job = waiting.popleft()
            known = prefix if shared else 0
            shared = shared or prefix > 0
            running.append([len(job.prompt) - known, known, job.max_tokens])
        room = budget - sum(not left for left, _, _ in running)
        tokens = samples = context = 0
        for state in running:
            count = 1 if not state[0] else max(0, min(room, state[0]))
            if state[0]:
                room -= count
                state[0] -= count
            if not count:
                continue
            state[1] += count
            tokens += count
            context += state[1]
            if not state[0]:
                samples += 1
                state[2] -= 1
        running = [state for state in running if state[0] or state[2]]
        seconds += costs.step(tokens, samples, context)
    return seconds


def onednn(shape: tuple[int, int], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a product with a random matrix [outputs, inputs] in oneDNN's layout."""
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(shape).to(dtype), 64)
    none: list[float] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", none, "")
        return result

    return product


def int8_onednn(shape: tuple[int, int], _: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an int8 product by oneDNN, without the quantization of the activations."""
    weight = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 128, shape, dtype=torch.int8), [64, shape[1]])
    scale, zeros, none = torch.rand(shape[0]), torch.zeros(shape[0], dtype=torch.int32), list[float]()
    call = torch.ops.onednn.qlinear_pointwise

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = call(x, 1.0, 128, weight, scale, zeros, None, 1.0, 0, torch.bfloat16, "none", none, "")
        return result

    return product


def ours(shape: tuple[int, int], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a product with the worker's packing for this machine."""
    return _through(pack, shape, dtype)


def int8_ours(shape: tuple[int, int], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the worker's int8 product, with the quantization of the activations."""
    return _through(pack_int8, shape, dtype)


def _through(packer: Packer, shape: tuple[int, int], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    linear = packer([torch.nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)], HugePageArena())
    buffers: dict[int, torch.Tensor] = {}  # kept between calls, as in the worker

    def product(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in buffers:
            buffers[len(x)] = torch.empty(len(x), shape[0], dtype=dtype)
        return linear(x, buffers[len(x)])

    return product


def _activations(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.uint8:
        return torch.randint(0, 256, (rows, width), dtype=torch.uint8)
    return torch.randn(rows, width).to(dtype)


def measure(
    shape: Shape, dtype: torch.dtype, rows: Sequence[int], make_product: Product
) -> tuple[dict[int, float], dict[int, float]]:
    """Measure the products of all layers and of the head for each number of rows."""
    layers = [[(k, make_product((n, k), dtype)) for n, k in shape.matrices] for _ in range(shape.layers)]
    head = make_product((shape.vocabulary, shape.hidden), dtype)
    body_costs, head_costs = {}, {}
    for count in rows:
        inputs = {k: _activations(count, k, dtype) for _, k in shape.matrices}

        def walk(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for k, product in itertools.chain.from_iterable(layers):
                product(inputs[k])

        def walk_head(x: torch.Tensor = inputs[shape.hidden]) -> None:
            head(x)

        body_costs[count] = seconds_per_call_of_wall(walk, rounds=_ROUNDS)
        head_costs[count] = seconds_per_call_of_wall(walk_head, rounds=_ROUNDS)
    return body_costs, head_costs


def bandwidth() -> float:
    """Return the bytes per second that all threads read together."""
    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / seconds_per_call_of_wall(lambda: data.sum(), rounds=_ROUNDS)


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure bandwidth, products and ideal makespans for each kind of product."""
    int8 = options.dtype == "int8"
    dtype = torch.bfloat16 if int8 else getattr(torch, options.dtype)
    shape = Shape.of(options.model)
    with torch.inference_mode():
        speed = bandwidth()
    yield Figure("limit: memory, read", f"{torch.get_num_threads()} threads", speed / 1e9, "GB/s")
    for way in options.products:
        name = f"{options.model.resolve().name}, {options.dtype} {way}"
        with torch.inference_mode():
            if way == "ours":
                body, head = measure(shape, dtype, options.rows, int8_ours if int8 else ours)
            elif int8:  # oneDNN needs unsigned activations
                body, head = measure(shape, torch.uint8, options.rows, int8_onednn)
            else:
                body, head = measure(shape, dtype, options.rows, onednn)
        for rows in options.rows:
            yield Figure("limit: products of all layers", f"{name}, {rows} rows", body[rows] * 1e3, "ms")
            yield Figure("limit: product of the head", f"{name}, {rows} rows", head[rows] * 1e3, "ms")
        costs = Costs(body, head, speed, shape.kv_bytes(dtype))
        for kind in options.work:
            workload = make(kind, options.count)
            prefix = 512 if kind == "w2" else 0
            for fixed in (False, True) if options.fixed else (False,):
                best = min(makespan(workload, costs, options.slots, budget, prefix, fixed) for budget in BUDGETS)
                case = f"{name}, {kind}, {len(workload.jobs)} requests, {options.slots} slots" + ", fixed" * fixed
                yield Figure("limit: ideal makespan", case, best, "s")
                yield Figure("limit: ideal rate", case, workload.wanted_tokens / best, "tokens/s")


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--work", nargs="+", choices=("w1", "w2", "w4"), default=["w1", "w4"])
    found.add_argument("--count", type=int, default=64)
    found.add_argument("--slots", type=int, default=SLOTS)
    found.add_argument("--fixed", action="store_true", help="besides, with batches of a fixed size that end together")
    found.add_argument("--dtype", choices=("bfloat16", "float32", "int8"), default="bfloat16")
    found.add_argument("--products", nargs="+", choices=("onednn", "ours"), default=["onednn", "ours"])
    found.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
