"""Memory of the KV pools: mapped at first use, prefaulted in idle time, or all at start."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import tiny_model
from support.kernel_variants import needs_kernels
from torch import Tensor
from worker.settings_runner import runner_with

from lineclear.exit_codes import ExitCode
from lineclear.process.settings_base import ConfigurationError
from lineclear.wire.messages import Row, Sampling, SlotInit, StepPlan
from lineclear.worker.app import serve
from lineclear.worker.attention.base import AttentionBackend
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kv_cache.kv_prefault import KvPrefaulter
from lineclear.worker.model.loaded_model import ModelRefused
from lineclear.worker.model.loader import wrap_model
from lineclear.worker.runner.model_runner import ModelRunner, RunnerOptions

MANY = 1 << 40


class Touched:
    """Stands in for a backend: which blocks were asked for, call by call."""

    block_size = 16

    def __init__(self, num_blocks: int, device: str = "cpu") -> None:
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.calls: list[tuple[int, int]] = []

    def prefault(self, first: int, end: int) -> None:
        self.calls.append((first, end))


def memory_of(backend: Touched, *, ahead_blocks: int = 0, free: int = MANY, block_bytes: int = 1 << 20) -> KvPrefaulter:
    """Slices of two blocks."""
    stand_in: AttentionBackend = backend  # type: ignore[assignment]
    return KvPrefaulter(
        stand_in, block_bytes, ahead_tokens=ahead_blocks * backend.block_size, free_memory=lambda device: free
    )


@pytest.fixture
def no_free_memory_resident() -> None:
    """Give the memory that malloc keeps after a `free` back to the system: a pool may be put there."""
    ctypes.CDLL(None).malloc_trim(0)


def resident(tensor: Tensor) -> tuple[int, int]:
    """Return how many pages inside the tensor's memory are resident, and how many exist."""
    storage, size = tensor.untyped_storage(), mmap.PAGESIZE
    first, last = -(-storage.data_ptr() // size), (storage.data_ptr() + storage.nbytes()) // size
    flags = (ctypes.c_ubyte * (last - first))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first * size), ctypes.c_size_t(len(flags) * size), flags) == 0
    return sum(flag & 1 for flag in flags), len(flags)


@pytest.mark.skipif(sys.platform != "linux", reason="asks mincore(2) of Linux")
@pytest.mark.usefixtures("no_free_memory_resident")
@pytest.mark.parametrize("backend", ["auto", "torch_paged"])
@pytest.mark.parametrize("preallocate", [False, True])
def test_preallocation_makes_the_pools_resident(tmp_path: Path, backend: str, preallocate: bool) -> None:
    tiny_model("llama", head_dim=64, num_hidden_layers=2).save_pretrained(tmp_path)
    runner = runner_with(tmp_path, attention_backend=backend, num_blocks=4096, preallocate_kv_cache=preallocate)
    pools = runner._backend._keys  # type: ignore[attr-defined]
    given, there = (sum(counts) for counts in zip(*map(resident, pools), strict=True))
    assert there * mmap.PAGESIZE >= 2**26
    assert given == there if preallocate else given < there / 2


def test_prefaults_slices_up_to_the_limit() -> None:
    backend = Touched(100)
    memory = memory_of(backend, ahead_blocks=5)
    assert [memory.prefault_ahead(0) for _ in range(5)] == [True, True, False, False, False]
    assert backend.calls == [(0, 2), (2, 4), (4, 5)]


def test_touched_blocks_are_never_prefaulted() -> None:
    backend = Touched(100)
    memory = memory_of(backend, ahead_blocks=4)
    memory.prefault_ahead(0)
    assert [memory.prefault_ahead(7) for _ in range(3)] == [True, False, False]
    assert backend.calls == [(0, 2), (7, 9), (9, 11)]
    assert not memory.prefault_ahead(3), "a new epoch begins with the first block, whose memory is there"
    assert [memory.prefault_ahead(97) for _ in range(2)] == [True, False], "the pool has an end"
    assert backend.calls[3:] == [(97, 99), (99, 100)]


@pytest.mark.parametrize(("free_blocks", "given"), [(31, 0), (95, 2), (640, 20), (32_000, 64)])
def test_prefaulted_memory_is_a_share_of_free_memory(free_blocks: int, given: int) -> None:
    backend = Touched(100)
    memory = memory_of(backend, ahead_blocks=64, free=free_blocks << 20)
    while memory.prefault_ahead(0):
        pass
    assert sum(end - first for first, end in backend.calls) == given


def test_no_prefault_without_known_memory_or_on_a_gpu() -> None:
    def silent(device: torch.device) -> int:
        raise FileNotFoundError("/proc/meminfo")

    backend, elsewhere = Touched(100), Touched(100, "meta")
    stand_in: AttentionBackend = backend  # type: ignore[assignment]
    memory = KvPrefaulter(stand_in, 1 << 20, ahead_tokens=64, free_memory=silent)
    assert not memory.prefault_ahead(0)
    assert not memory_of(elsewhere, ahead_blocks=4).prefault_ahead(0)
    memory_of(elsewhere, free=0).prefault_all()
    assert not backend.calls + elsewhere.calls
    memory.prefault_all()
    assert backend.calls[-1] == (98, 100), "all of it was asked for by name"


def test_preallocation_beyond_free_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = Touched(100)
    with pytest.raises(ConfigurationError, match=r"100 blocks need 104857600 bytes, and 99614720 .*num-blocks.* 90,"):
        memory_of(backend, free=95 << 20).prefault_all()
    assert not backend.calls
    tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("lineclear.worker.device.memory_budget._available_bytes", lambda: 1_000_000)
    flags = ["--model", str(tmp_path), "--socket-directory", str(tmp_path), "--device", "cpu", "--num-blocks", "4096"]
    assert serve([*flags, "--preallocate-kv-cache"], supervised=False) == ExitCode.CONFIGURATION
    assert "--preallocate-kv-cache: 4096 blocks need" in capfd.readouterr().err


@needs_kernels
def test_refused_allocation_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: object) -> Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(HugePageArena, "allocate", take)
    with pytest.raises(ModelRefused, match=r"8 blocks.*Cannot allocate memory.*num-blocks"):
        ModelRunner(wrap_model(tiny_model("llama", head_dim=64)), RunnerOptions(num_blocks=8))


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="asks mincore(2) of Linux")
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("ahead", [False, True])
def test_prefaulted_steps_have_no_page_faults(
    ahead: bool, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[Tensor] = []
    allocate = HugePageArena.allocate

    def noted(*arguments: Any) -> Tensor:
        pools.append(allocate(*arguments))
        return pools[-1]

    monkeypatch.setattr(HugePageArena, "allocate", noted)
    runner = ModelRunner(
        wrap_model(tiny_model("llama", head_dim=64, num_hidden_layers=2, max_position_embeddings=4096)),
        RunnerOptions(num_blocks=8192, kv_prefault_tokens=4096 if ahead else 0, kv_dtype=kv_dtype),
    )
    (pool,) = pools
    while runner.idle_work():
        pass
    before, there = resident(pool)
    assert before < there / 2, "not all of it"
    tokens = tuple(5 + n % 50 for n in range(2000))
    blocks = tuple(range(125))
    runner.launch(StepPlan(1, 1, (Row(0, 0, 2000, True, blocks),), (SlotInit(0, tokens, 2000, (), Sampling()),)))
    assert (resident(pool)[0] == before) is ahead
