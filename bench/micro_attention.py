"""Measures one layer of paged attention for every backend, in milliseconds.

    python -m bench.micro_attention [--backends native torch_paged] [--kv-dtype int8] [--context 2048]

Cases: decodes at 256 cached positions (or `--context`) plus or minus a quarter, on blocks in random order, and a prompt
chunk after as many positions. `start_step`, once a step, is timed separately from `attend`, once a layer.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import numpy as np
import torch

from bench.figures import Figure, arguments, main, seconds_per_call_of_wall
from lineclear.worker.attention.base import AttentionBackend, Batch, Chunk, LayerSpec, pack_chunks
from lineclear.worker.attention.registry import BACKENDS

BATCHES = (1, 8, 32, 64)
CONTEXT = 256
CHUNK = 256
BLOCK_SIZE = 16
# (query heads, KV heads, head size) of one layer.
SHAPES = {"qwen3-0.6b": (16, 8, 128), "llama-110m": (12, 4, 64)}
_CALLS, _ROUNDS = 10, 7


def decoding(count: int, source: random.Random, context: int = CONTEXT) -> Batch:
    """Return a batch of `count` decodes, the shortest first."""
    lengths = sorted(source.randint(context * 3 // 4, context * 5 // 4) for _ in range(count))
    pages = source.sample(range(_pool(count, context)), _pool(count, context))
    chunks = []
    for index, length in enumerate(lengths):
        blocks = [pages.pop() for _ in range(-(-length // BLOCK_SIZE))]
        chunks.append(Chunk(index, 1, length - 1, np.array(blocks, np.int64)))
    return pack_chunks(chunks, BLOCK_SIZE)


def prompt(source: random.Random, context: int = CONTEXT) -> Batch:
    """Return a batch of one chunk of CHUNK queries after `context` positions."""
    count = -(-(context + CHUNK) // BLOCK_SIZE)
    blocks = np.array(source.sample(range(_pool(2, context)), count), np.int64)
    return pack_chunks([Chunk(0, CHUNK, context, blocks)], BLOCK_SIZE)


def _pool(count: int, context: int) -> int:
    """Return the blocks for `count` sequences, at least those of a prompt."""
    return max(count * (context * 5 // 4 // BLOCK_SIZE + 1), -(-(context + CHUNK) // BLOCK_SIZE))


def measure(backend: AttentionBackend, batch: Batch, spec: LayerSpec, name: str, case: str) -> Iterator[Figure]:
    """Time `start_step` and `attend` for one batch."""
    torch.manual_seed(0)
    tokens = len(batch.cells)
    query = torch.randn(tokens, spec.num_heads, spec.head_dim).to(backend.dtype)
    key, value = torch.randn(2, tokens, spec.num_kv_heads, spec.head_dim).to(backend.dtype)
    backend.start_step(batch)
    # All blocks are filled, so that timings do not depend on old memory contents.
    backend.zero(range(backend.num_blocks))
    attend = seconds_per_call_of_wall(lambda: backend.attend(0, query, key, value), calls=_CALLS, rounds=_ROUNDS)
    begin = seconds_per_call_of_wall(lambda: backend.start_step(batch), calls=_CALLS, rounds=_ROUNDS)
    yield Figure(f"attention: {name}, attend", case, attend * 1e3, "ms a layer")
    yield Figure(f"attention: {name}, begin", case, begin * 1e3, "ms a step")


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure every usable backend with every batch."""
    dtype, kv_dtype = getattr(torch, options.dtype), getattr(torch, options.kv_dtype or options.dtype)
    cpu, kept = torch.device("cpu"), f"KV {options.kv_dtype or options.dtype}"
    with torch.inference_mode():
        for shape, (heads, kv_heads, head_dim) in SHAPES.items():
            spec = LayerSpec(heads, kv_heads, head_dim, head_dim**-0.5)
            batches = {
                f"{count} decodes": decoding(count, random.Random(count), options.context) for count in options.batches
            }
            batches[f"a chunk of {CHUNK} at {options.context}"] = prompt(random.Random(0), options.context)
            for name in options.backends:
                try:
                    backend = BACKENDS[name](
                        [spec], _pool(max(options.batches), options.context), BLOCK_SIZE, dtype, cpu, kv_dtype
                    )
                except ValueError as error:
                    print(f"{name}: {error}")
                    continue
                for case, batch in batches.items():
                    yield from measure(backend, batch, spec, name, f"{shape}, {kept}, {case}")


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    # The reference is slow: only if named.
    fast = sorted(set(BACKENDS) - {"reference"})
    found.add_argument("--backends", nargs="+", choices=sorted(BACKENDS), default=fast)
    found.add_argument("--context", type=int, default=CONTEXT)
    found.add_argument("--kv-dtype", choices=("int8",), help="keys and values; as --dtype if not given")
    found.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
