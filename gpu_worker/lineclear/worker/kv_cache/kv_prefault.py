"""Prefaults the memory of a CPU's KV pools: all of it at start, or some ahead of use while the worker is idle.

The system maps pool memory at the first write to each page. Clearing a huge page takes time, and on a virtual machine
whose host must find the memory first, many times as long. A step that touches a new page waits for it, with all its
requests. So idle time is used to fault in the memory behind the blocks in use, in slices, with a check for plans
between.

The scheduler hands out the lowest blocks first, and used blocks before unused ones (cached prefixes aside). So the
blocks behind the highest one of any plan are the next to be used, and they hold no data yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lineclear.process.settings_base import ConfigurationError
from lineclear.worker.attention.base import AttentionBackend
from lineclear.worker.device.memory_budget import free_bytes

_SLICE_BYTES = 2 << 20
"""One huge page: a plan that arrives during idle work waits for one slice."""
_MAX_AHEAD_DIVISOR = 32
"""Prefault at most this part (1/32) of the free memory ahead of use, and leave the rest to other processes."""
_MAX_PERCENT = 95
"""Largest share of the free memory for all pools: steps need some too, and the free memory is an estimate."""


class KvPrefaulter:
    """Faults in the memory of unused blocks, by writing to them. Call it between steps only."""

    def __init__(
        self,
        backend: AttentionBackend,
        block_bytes: int,
        *,
        ahead_tokens: int,
        free_memory: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        self._backend, self._block_bytes = backend, block_bytes
        self._ahead_blocks = ahead_tokens // backend.block_size
        self._slice_blocks = max(1, _SLICE_BYTES // block_bytes)
        self._free_bytes = free_memory
        self._prefaulted = 0
        self._is_complete = backend.device.type != "cpu"  # GPU memory is allocated at once

    def prefault_all(self) -> None:
        """Fault in the memory of every block.

        Raises ConfigurationError before the first write if the free memory does not suffice: the system would promise
        the memory and then kill the process while it writes.
        """
        if self._is_complete:
            return
        num_blocks, free = self._backend.num_blocks, self._free_or_none()
        needed = num_blocks * self._block_bytes
        if free is not None and needed * 100 > free * _MAX_PERCENT:
            raise ConfigurationError(
                f"--preallocate-kv-cache: {num_blocks} blocks need {needed} bytes, and {free} bytes of memory are free,"
                f" of which {_MAX_PERCENT} % may be taken; set --num-blocks to at most"
                f" {free * _MAX_PERCENT // 100 // self._block_bytes}, lower --kv-cache-memory-fraction, or leave"
                " --preallocate-kv-cache away"
            )
        while self._prefaulted < num_blocks:
            self._prefault(num_blocks)

    def prefault_ahead(self, num_touched: int) -> bool:
        """Fault in one slice of the unused blocks, those from `num_touched` on. Returns whether work is left."""
        self._prefaulted = max(self._prefaulted, num_touched)
        end = min(num_touched + self._ahead_blocks, self._backend.num_blocks)
        if self._is_complete or self._prefaulted >= end:
            return False
        ahead, free = self._prefaulted - num_touched, self._free_or_none() or 0
        end = min(end, num_touched + (ahead + free // self._block_bytes) // _MAX_AHEAD_DIVISOR)
        if self._prefaulted >= end:
            return False
        self._prefault(end)
        return self._prefaulted < end

    def _prefault(self, end: int) -> None:
        first, self._prefaulted = self._prefaulted, min(self._prefaulted + self._slice_blocks, end)
        self._backend.prefault(first, self._prefaulted)

    def _free_or_none(self) -> int | None:
        """Return the free bytes; None where the system does not report them."""
        try:
            return self._free_bytes(self._backend.device)
        except (OSError, RuntimeError):
            return None
