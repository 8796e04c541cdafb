"""Blocks that are copied to host memory and back hold the same bits, in every backend's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import WIDE, tiny_model
from support.kernel_variants import needs_kernels
from worker.test_attention import CPU, Story

from lineclear.wire.messages import BlockCopy
from lineclear.worker.attention.base import AttentionBackend
from lineclear.worker.attention.registry import BACKENDS
from lineclear.worker.kv_cache.host_blocks import HostBlocks
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.runner import model_runner
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

CASES = [
    ("torch_paged", torch.float32, None),
    ("torch_paged", torch.float16, None),
    ("reference", torch.bfloat16, None),
    pytest.param("native", torch.float32, None, marks=needs_kernels),
    pytest.param("native", torch.bfloat16, None, marks=needs_kernels),
    pytest.param("native", torch.bfloat16, torch.int8, marks=needs_kernels),
]


def backend_with_noise(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, num_blocks: int) -> Any:
    story = Story(3, dtype, CPU, native=name == "native", kv_dtype=kv_dtype)
    story.num_blocks = num_blocks
    backend = story.backend(BACKENDS[name], 0.0)
    for view in backend.block_views:
        view.copy_(torch.randint(-99, 99, view.shape).to(view.dtype))
    return backend


def contents(backend: AttentionBackend, block: int) -> list[bytes]:
    return [view[block].contiguous().view(torch.uint8).numpy().tobytes() for view in backend.block_views]


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), CASES)
def test_block_comes_back_as_it_was(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Of 40 blocks, more than are staged at once, and in another order."""
    backend = backend_with_noise(name, dtype, kv_dtype, 40)
    size = backend.block_size
    host = HostBlocks(backend, 40, 40)
    assert host.block_seconds > 0
    before = [contents(backend, block) for block in range(40)]
    host.copy([BlockCopy(block, 79 - block, size) for block in range(40)])
    backend.zero(range(40))
    host.copy([BlockCopy(79 - block, (block + 7) % 40, size) for block in range(40)])
    assert [contents(backend, (block + 7) % 40) for block in range(40)] == before


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), CASES)
def test_copies_of_a_plan_read_before_they_write(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Block 1 is swapped out and block 2 copied, while both are replaced."""
    backend = backend_with_noise(name, dtype, kv_dtype, 4)
    size = backend.block_size
    host = HostBlocks(backend, 4, 2)
    first, second, kept = contents(backend, 1), contents(backend, 2), contents(backend, 3)
    host.copy([BlockCopy(3, 4, size)])
    host.copy([BlockCopy(4, 2, size), BlockCopy(2, 1, size), BlockCopy(1, 5, size)])
    assert (contents(backend, 1), contents(backend, 2)) == (second, kept)
    host.copy([BlockCopy(5, 0, size)])
    assert contents(backend, 0) == first


def test_measuring_changes_no_block() -> None:
    backend = backend_with_noise("torch_paged", torch.float32, None, 4)
    before = [contents(backend, block) for block in range(4)]
    HostBlocks(backend, 4, 9)
    assert [contents(backend, block) for block in range(4)] == before


def test_memory_becomes_blocks_of_the_hello() -> None:
    loaded = wrap_model(tiny_model("llama", **WIDE))
    size = model_runner.block_bytes(loaded.layers, 16, loaded.dtype)
    runner = ModelRunner(loaded, RunnerOptions(num_blocks=8, swap_memory_bytes=5 * size + 1))
    hello = runner.hello(1)
    assert (hello.num_blocks, hello.num_swap_blocks) == (8, 5)
    assert 0 < hello.swap_seconds < 1
    plain = ModelRunner(loaded, RunnerOptions(num_blocks=8)).hello(1)
    assert (plain.num_swap_blocks, plain.swap_seconds) == (0, 0.0)


@pytest.mark.parametrize(("count", "reason"), [(1, "does not hold one KV block"), (1 << 50, "are free; lower it")])
def test_memory_that_cannot_be_used_is_refused(count: int, reason: str) -> None:
    loaded = wrap_model(tiny_model("llama", **WIDE))
    with pytest.raises(ModelRefused, match=reason):
        ModelRunner(loaded, RunnerOptions(num_blocks=8, swap_memory_bytes=count))
