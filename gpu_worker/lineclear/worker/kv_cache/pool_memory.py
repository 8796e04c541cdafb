"""The memory of a runner's pools: how many KV blocks, recurrent states and snapshots of such states fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lineclear.process.settings_base import ConfigurationError
from lineclear.worker.attention.base import block_bytes
from lineclear.worker.device.memory_budget import blocks_that_fit
from lineclear.worker.model.loaded_model import LoadedModel, ModelRefused

from .slot_table import Capacity

LESS_PER_STEP = "lower --target-batch-tokens, --max-batch-size or --max-model-len"
"""What to do if a step takes too much memory."""
_SNAPSHOT_DIVISOR = 4
"""Snapshots of recurrent states take at most this part (1/4) of the memory for KV blocks."""
_MAX_SNAPSHOTS_BY_SLOT = 16


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    num_blocks: int = 0
    """Of KV memory. 0: as many as fit in `kv_cache_memory_fraction` of the free memory."""
    kv_cache_memory_fraction: float = 0.0
    num_workers: int = 1
    """Workers of this device, which divide that memory."""
    step_memory_bytes: int = 0
    """That the largest step takes of it; see memory_profile.py."""
    block_size: int = 16
    kv_prefault_tokens: int = 0
    swap_memory_bytes: int = 0
    """Of host blocks."""
    num_slots: int = 64
    num_state_snapshots: int | None = None
    """Recurrent states beside those of the slots. None: as many as fit in a share of the memory for KV blocks."""
    max_step_tokens: int = 2048
    attention_backend: str = "auto"
    kv_dtype: torch.dtype | None = None
    """None: the model's."""
    prompt_lookup_ngrams: tuple[int, int] = (4, 2)
    """The longest and the shortest n-gram."""


def capacity_of(loaded: LoadedModel, options: RunnerOptions, draft: LoadedModel | None, size: int) -> Capacity:
    """Return the capacities with blocks of `size` bytes. Raises ConfigurationError or ModelRefused."""
    if loaded.recurrent and options.swap_memory_bytes:
        raise ModelRefused(
            f"--swap-memory-bytes keeps KV blocks, and {loaded.family} has a recurrent state beside them; set it to 0"
        )
    return Capacity(
        *(options.num_slots, options.num_blocks or fitting_blocks(loaded, options, draft), options.block_size),
        *(loaded.max_model_len, options.max_step_tokens, loaded.vocab_size, options.swap_memory_bytes // size),
        *(bool(loaded.recurrent), options.num_state_snapshots or 0),
    )


def fitting_blocks(loaded: LoadedModel, options: RunnerOptions, draft: LoadedModel | None) -> int:
    """Return how many blocks fit in free memory, at most two for each that slots fill. Raises ConfigurationError."""
    states = states_bytes(loaded, options)
    size, reserved = max(1, _block_bytes(loaded, options, draft)), options.step_memory_bytes + states
    max_blocks = 2 * options.num_slots * -(-loaded.max_model_len // options.block_size)
    fraction, num_workers = options.kv_cache_memory_fraction, options.num_workers
    count = blocks_that_fit(size, max_blocks, fraction, loaded.device, num_workers, reserved)
    if count < 1:
        advice = f"{LESS_PER_STEP}, or raise --kv-cache-memory-fraction"
        largest = f"the {reserved} bytes of the largest step"
        if states:
            largest = f"the {states} bytes of recurrent states and {reserved - states} of the largest step"
        beside = f" beside {largest}; {advice}" if reserved else ""
        raise ConfigurationError(f"after loading, the free memory does not hold one KV block of {size} bytes{beside}")
    return count


def fitting_snapshots(loaded: LoadedModel, options: RunnerOptions) -> int:
    """Return how many recurrent states to keep beside the slots': as given, or as fit in a share of memory."""
    if not loaded.recurrent or options.num_state_snapshots is not None:
        return (options.num_state_snapshots or 0) if loaded.recurrent else 0
    rest = options.step_memory_bytes + states_bytes(loaded, replace(options, num_state_snapshots=0))
    shared = options.kv_cache_memory_fraction, loaded.device, options.num_workers, rest
    return blocks_that_fit(_SNAPSHOT_DIVISOR * loaded.state_bytes, _MAX_SNAPSHOTS_BY_SLOT * options.num_slots, *shared)


def states_bytes(loaded: LoadedModel, options: RunnerOptions) -> int:
    """Return the bytes of all recurrent states: of slots, padding rows and snapshots."""
    if not loaded.recurrent:
        return 0
    return loaded.state_bytes * (options.num_slots + 1 + fitting_snapshots(loaded, options))


def memory_figures(
    loaded: LoadedModel, options: RunnerOptions, draft: LoadedModel | None, capacity: Capacity
) -> dict[str, int]:
    """Return the bytes of weights, pools, steps and host blocks, by field of Hello."""
    return {
        "weight_bytes": loaded.weight_bytes + (0 if draft is None else draft.weight_bytes),
        "kv_cache_bytes": capacity.num_blocks * _block_bytes(loaded, options, draft) + states_bytes(loaded, options),
        "step_memory_bytes": options.step_memory_bytes,
        "swap_memory_bytes": capacity.num_swap_blocks * _block_bytes(loaded, options, None),
    }


def _block_bytes(loaded: LoadedModel, options: RunnerOptions, draft: LoadedModel | None) -> int:
    size = block_bytes(loaded.layers, options.block_size, options.kv_dtype or loaded.dtype)
    return size + (0 if draft is None else block_bytes(draft.layers, options.block_size, draft.dtype))
