"""Memory of the KV cache: given as it is first used, or all of it before the first request."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
from support.families import tiny_model
from torch import Tensor

from lineclear.worker.settings import WorkerSettings
from lineclear.worker.start import make_runner


def resident(tensor: Tensor) -> tuple[int, int]:
    """How many of the pages wholly in the tensor's memory the system has given, and how many there are."""
    storage, size = tensor.untyped_storage(), mmap.PAGESIZE
    first, last = -(-storage.data_ptr() // size), (storage.data_ptr() + storage.nbytes()) // size
    flags = (ctypes.c_ubyte * (last - first))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first * size), ctypes.c_size_t(len(flags) * size), flags) == 0
    return sum(flag & 1 for flag in flags), len(flags)


@pytest.mark.skipif(sys.platform != "linux", reason="asks mincore(2) of Linux")
@pytest.mark.parametrize("backend", ["auto", "torch_paged"])
@pytest.mark.parametrize("preallocate", [False, True])
def test_the_pools_are_resident_at_start_only_where_that_is_asked_for(
    tmp_path: Path, backend: str, preallocate: bool
) -> None:
    tiny_model("llama", head_dim=64, num_hidden_layers=2).save_pretrained(tmp_path)
    settings = WorkerSettings(
        model=str(tmp_path),
        directory="unused",
        device="cpu",
        attention_backend=backend,
        num_blocks=4096,
        preallocate_kv_cache=preallocate,
    )
    pools = make_runner(settings)._backend._keys  # type: ignore[attr-defined]
    given, there = (sum(counts) for counts in zip(*map(resident, pools), strict=True))
    assert there * mmap.PAGESIZE >= 2**26
    assert given == there if preallocate else given < there / 2
