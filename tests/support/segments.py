"""Torch's caching allocator in figures: which pieces of a GPU's memory a program holds, and which it could return.

Modelled on large blocks of c10/cuda/CUDACachingAllocator.cpp: the smallest free block that is large enough is split,
free neighbours are merged, and only a segment that is free as a whole returns to the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(eq=False)
class Block:
    num_bytes: int
    segment: list[Block]
    is_free: bool = False


class Allocator:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.most_reserved = capacity, 0
        self._segments: list[list[Block]] = []

    @property
    def reserved(self) -> int:
        """Return the bytes that the device has given away."""
        return sum(block.num_bytes for segment in self._segments for block in segment)

    def allocate(self, num_bytes: int) -> Block:
        """Return a block. Raises torch.OutOfMemoryError."""
        fitting = [x for segment in self._segments for x in segment if x.is_free and x.num_bytes >= num_bytes]
        if not fitting and self.reserved + num_bytes > self.capacity:
            self.empty_cache()
            if self.reserved + num_bytes > self.capacity:
                raise torch.OutOfMemoryError(f"{num_bytes} bytes beside {self.reserved}")
        if not fitting:
            segment: list[Block] = []
            segment.append(Block(num_bytes, segment))
            self._segments.append(segment)
            self.most_reserved = max(self.most_reserved, self.reserved)
            return segment[0]
        block = min(fitting, key=lambda x: x.num_bytes)
        if rest := block.num_bytes - num_bytes:
            block.segment.insert(block.segment.index(block) + 1, Block(rest, block.segment, is_free=True))
        block.num_bytes, block.is_free = num_bytes, False
        return block

    def free(self, block: Block) -> None:
        """Free a block and merge it with its free neighbours."""
        block.is_free, segment = True, block.segment
        for place in range(len(segment) - 2, -1, -1):
            if segment[place].is_free and segment[place + 1].is_free:
                segment[place].num_bytes += segment.pop(place + 1).num_bytes

    def empty_cache(self) -> None:
        self._segments = [segment for segment in self._segments if not all(block.is_free for block in segment)]


class Card(TorchDispatchMode):
    """Notes the memory of all tensors as that of a device, but of copies to the device `cpu` without a number."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.allocator = Allocator(capacity)
        self._blocks: dict[StorageWeakRef, Block] = {}
        self._on_host = set[StorageWeakRef]()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self.allocator.free(self.allocator.allocate(sum(tensor.nbytes for tensor in tensors)))
        for tensor in tensors:
            self._note(tensor)

    def free_bytes(self) -> int:
        self.empty_cache()
        return self.allocator.capacity - self.allocator.reserved

    def empty_cache(self) -> None:
        self._sweep()
        self.allocator.empty_cache()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        if isinstance(found, Tensor) and kwargs.get("device") == torch.device("cpu"):
            self._on_host.add(StorageWeakRef(found.untyped_storage()))
        elif isinstance(found, Tensor):
            self._note(found)
        return found

    def _note(self, tensor: Tensor) -> None:
        self._sweep()
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in self._blocks and storage not in self._on_host:
            self._blocks[storage] = self.allocator.allocate(tensor.untyped_storage().nbytes())

    def _sweep(self) -> None:
        for storage in [storage for storage in self._blocks if storage.expired()]:
            self.allocator.free(self._blocks.pop(storage))
