"""When the system gives a CPU's KV pools their memory: all of it at start, or some ahead of its first use in idle time.

A pool is promised at start and given page by page as it is first written to. A huge page takes as long as the system
needs to clear it, and on a virtual machine whose host has to find it first many times that: a step that begins one
waits, and everybody in it. Where nobody waits it costs nothing, so while no plan comes the memory behind the blocks in
use is asked for, in slices between which a plan is looked for.

The scheduler hands blocks out from the lowest up, and those that were used before one that never was (a cached prefix
apart). So what lies behind the highest block of any plan is what is begun next, and it holds nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lineclear.process.settings_base import ConfigurationError

from .attention import AttentionBackend
from .memory_budget import free_bytes

_SLICE_BYTES = 2 << 20
"""A huge page. What a plan that comes meanwhile waits for."""
_AHEAD_SHARE = 32
"""Memory ahead of its use is at most one part in so many of what is free: an idle process leaves it to others."""
_ALL_PERCENT = 95
"""Of the free memory, for all of the pools: a step needs some besides, and what is free is an estimate."""


class KvPrefaulter:
    """Blocks [0, given) have their memory. Called between steps only: it writes to the blocks it asks for."""

    def __init__(
        self,
        backend: AttentionBackend,
        block_bytes: int,
        *,
        ahead_tokens: int,
        free: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        self._backend = backend
        self._block_bytes = block_bytes
        self._ahead_blocks = ahead_tokens // backend.block_size
        self._slice_blocks = max(1, _SLICE_BYTES // block_bytes)
        self._free = free
        self._prefaulted = 0
        self._is_complete = backend.device.type != "cpu"  # a GPU's pools have theirs from the start

    def prefault_all(self) -> None:
        """Have the system give the memory of every block now.

        Raises ConfigurationError, and asks for nothing, where there is less than the blocks need: the system would
        promise it, and end the process in the middle.
        """
        if self._is_complete:
            return
        num_blocks, free = self._backend.num_blocks, self._known_free()
        needed = num_blocks * self._block_bytes
        if free is not None and needed * 100 > free * _ALL_PERCENT:
            raise ConfigurationError(
                f"--preallocate-kv-cache: {num_blocks} blocks need {needed} bytes, and {free} bytes of memory are free,"
                f" of which {_ALL_PERCENT} % may be taken; set --num-blocks to at most"
                f" {free * _ALL_PERCENT // 100 // self._block_bytes}, lower --kv-cache-memory-fraction, or leave"
                " --preallocate-kv-cache away"
            )
        while self._prefaulted < num_blocks:
            self._prefault(num_blocks)

    def prefault_ahead(self, num_begun: int) -> bool:
        """One slice of what lies behind block `num_begun`, from which on no plan has named any.

        Whether there is more to be asked for.
        """
        self._prefaulted = max(self._prefaulted, num_begun)
        end = min(num_begun + self._ahead_blocks, self._backend.num_blocks)
        if self._is_complete or self._prefaulted >= end:
            return False
        ahead, free = self._prefaulted - num_begun, self._known_free() or 0
        end = min(end, num_begun + (ahead + free // self._block_bytes) // _AHEAD_SHARE)
        if self._prefaulted >= end:
            return False
        self._prefault(end)
        return self._prefaulted < end

    def _prefault(self, end: int) -> None:
        first, self._prefaulted = self._prefaulted, min(self._prefaulted + self._slice_blocks, end)
        self._backend.prefault(first, self._prefaulted)

    def _known_free(self) -> int | None:
        """None where the system does not say."""
        try:
            return self._free(self._backend.device)
        except (OSError, RuntimeError):
            return None
