"""Runs the Triton attention in Triton's interpreter on a CPU and prints a JSON line for each case: shape and error.

    TRITON_INTERPRET=1 python -m support.interpret_attention FIRST_SEED END_SEED

The variable has to be set before triton is imported, hence the process. No bfloat16: the interpreter multiplies its bit
patterns.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lineclear.worker.attention import triton_paged
from lineclear.worker.attention.base import AttentionBackend, Chunk, LayerSpec, pack_chunks
from lineclear.worker.attention.reference import ReferenceAttention

CPU = torch.device("cpu")


class Case:
    """Sequences of random lengths with one layer of a random shape; `contexts` are (start, number of queries)."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.float32 if seed % 2 else torch.float16
        heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 7, 8, 16])
        self.dim, self.block_size = rng.choice([64, 80, 96, 128, 256]), rng.choice([1, 4, 16, 32, 48])
        sinks = self.normal(heads * group) if rng.random() < 0.4 else None
        window, softcap = rng.choice([0, 0, 1, 7, 16, 40]), rng.choice([0.0, 0.0, 2.5])
        chunk = rng.choice([0, 5, 16, 40]) if not window else 0
        value_dim = self.dim - 32 if rng.random() < 0.3 else 0
        sizes = heads * group, heads, self.dim, self.dim**-0.5
        self.layer = LayerSpec(*sizes, window, softcap, sinks, chunk, value_dim)
        decodes = [(rng.randint(0, 90), 1) for _ in range(rng.randint(0, 3))]
        prompts = [(rng.choice([0, rng.randint(0, 60)]), rng.randint(2, 40)) for _ in range(rng.randint(0, 2))]
        self.contexts = [*decodes, *prompts] or [(50, 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def describe(self) -> dict[str, Any]:
        x = self.layer
        shape = {"heads": x.num_heads, "kv_heads": x.num_kv_heads, "dim": x.head_dim, "block_size": self.block_size}
        features = {
            "window": x.window,
            "chunk": x.chunk,
            "latent": x.value_dim > 0,
            "softcap": x.softcap,
            "sinks": x.sinks is not None,
        }
        return {"dtype": str(self.dtype), **shape, **features, "contexts": self.contexts}

    def error(self) -> float:
        """Return the largest difference from the reference, with NaN in all cells that no sequence wrote."""
        counts = [-(-(start + count) // self.block_size) for start, count in self.contexts]
        free = list(range(sum(counts) + 3))
        self.rng.shuffle(free)
        tables = [np.array([free.pop() for _ in range(count)], np.int64) for count in counts]
        size = sum(counts) + 3, self.block_size, self.dtype, CPU
        backends = triton_paged.TritonPagedAttention([self.layer], *size), ReferenceAttention([self.layer], *size)
        for pool in [pool for backend in backends for pool in pools(backend)]:
            pool.fill_(float("nan"))
        for (start, _), table in zip(self.contexts, tables, strict=True):
            if start:
                steps = [pack_chunks([Chunk(0, start, 0, table)], self.block_size)]
                cells = torch.from_numpy(steps[0].cells)
                history = [self.normal(start, self.layer.num_kv_heads, self.dim) for _ in range(2)]
                for backend in backends:
                    for pool, values in zip(pools(backend), history, strict=True):
                        pool[cells] = values
        first = np.cumsum([0, *(count for _, count in self.contexts)])
        rows = zip(first, self.contexts, tables, strict=False)
        batch = pack_chunks(
            [Chunk(int(at), count, start, table) for at, (start, count), table in rows], self.block_size
        )
        heads = self.layer.num_heads, self.layer.num_kv_heads, self.layer.num_kv_heads
        qkv = [self.normal(x, int(first[-1]), self.dim).transpose(0, 1) for x in heads]  # as transformers lays them out
        if self.layer.value_dim:
            qkv[2] = qkv[1][..., : self.layer.value_dim]
        outputs = []
        for backend in backends:
            backend.start_step(batch)
            outputs.append(backend.attend(0, *qkv).float())
        return float((outputs[0] - outputs[1]).abs().max())


def pools(backend: AttentionBackend) -> tuple[Tensor, Tensor]:
    """Return keys and values of the layer by cell."""
    keys, values = (vars(backend)[name][0].flatten(0, 1) for name in ("_keys", "_values"))
    return keys, values


def main(first: int, end: int) -> None:
    triton_paged.SPLIT_KEYS = 32  # so that short contexts have several splits
    for seed in range(first, end):
        case = Case(seed)
        print(json.dumps({"seed": seed, **case.describe(), "error": case.error()}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
