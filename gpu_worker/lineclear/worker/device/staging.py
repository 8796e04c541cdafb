"""The arrays of a step on their way to the device and back: one copy from pinned memory, whatever a step has.

Everything that a step reads is `put` first and gets its place on the device at once; `send` then queues one copy. The
places start at the same address in each step, so that equal steps use equal addresses (CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Put = Callable[[npt.NDArray[np.generic]], Tensor]
"""Returns an array on the device, whose values may arrive later."""

_ALIGNMENT = 16
_NUM_BUFFERS = 4
"""Pinned buffers. A buffer is filled again when the copies of three later steps are queued; two steps are in flight."""


class Staging:
    """The staging buffers of one device. On a CPU the arrays themselves are used.

    Outside of `begin` and `send`, and for an array that does not fit, `put` queues a copy of its own.
    """

    def __init__(
        self, device: torch.device, num_bytes: int, num_buffers: int = _NUM_BUFFERS, *, is_direct: bool | None = None
    ) -> None:
        """`num_bytes`: of a step. `is_direct`: arrays are used where they are; None: on a CPU."""
        self.device = device
        self.is_direct = device.type == "cpu" if is_direct is None else is_direct
        """Arrays are used where they are."""
        self._is_cuda = device.type == "cuda"
        size = 0 if self.is_direct else num_bytes
        self._on_device = torch.empty(size, dtype=torch.uint8, device=device)
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(num_buffers)]
        self._bytes = [buffer.numpy() for buffer in self._buffers]
        self._copied: list[Any] = [None] * num_buffers  # CUDA events
        self._current = 0
        self._end: int | None = None  # bytes in use; None outside of a step
        self.num_copies = 0
        """Copies to the device so far."""

    def begin(self) -> None:
        """Collect the arrays of the following calls of `put`."""
        if self.is_direct:
            return
        self._current = (self._current + 1) % len(self._buffers)
        if (event := self._copied[self._current]) is not None:
            event.synchronize()
        self._end = 0

    def put(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Return the array on the device. During a step its values arrive with `send`."""
        if self.is_direct:
            return torch.from_numpy(array)
        if self._end is None or self._end + array.nbytes > len(self._on_device):
            self.num_copies += 1
            return to_device(array, self.device)
        start, end = self._end, self._end + array.nbytes
        self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._bytes[self._current][start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        found: Tensor = self._on_device[start:end].view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        return found.view(array.shape)

    def send(self) -> None:
        """Queue the copy of all that was put since `begin`."""
        end, self._end = self._end, None
        if not end:
            return
        self._on_device[:end].copy_(self._buffers[self._current][:end], non_blocking=True)
        self.num_copies += 1
        if self._is_cuda:
            event = self._copied[self._current] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._copied[self._current] = event


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy a host array to `device` at once, without waiting for the device. On a CPU the array itself is used."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(value: Any) -> Any:
    """Copy the tensors in a (named) tuple or alone to the host, complete when the step is; on a CPU they stay."""
    if isinstance(value, tuple):
        copied = [to_host(part) for part in value]
        return type(value)(*copied) if hasattr(value, "_fields") else tuple(copied)
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return value
    if value.device.type != "cuda":
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def fetch(tensor: Tensor) -> Callable[[], list[int]]:
    """Queue a copy of integers [count] to the host; return a function that waits for it, and not for later work."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    host, copied = to_host(tensor), torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> list[int]:
        copied.synchronize()
        return [int(value) for value in host.tolist()]

    return wait
