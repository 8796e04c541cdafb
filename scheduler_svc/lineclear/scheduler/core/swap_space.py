"""Host blocks: worker memory beside the pool that keeps keys and values of preempted sequences (swapping, as in vLLM).

A worker numbers its host blocks behind those of the pool, so a BlockCopy swaps a block out or in. Each host block
belongs to one waiting sequence of this worker. A sequence keeps only blocks whose values are confirmed. So nothing that
happens while it waits changes them, and the loss of the worker drops them all.
"""

from __future__ import annotations

from typing import NamedTuple

from lineclear.scheduler.core.block_pool import BlockPool, Donor
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import BlockCopy, Hello


class _Held(NamedTuple):
    """What a waiting sequence keeps: its blocks from block `first` of its table on."""

    first: int
    blocks: list[int]


class SwapSpace:
    """The host blocks of one worker."""

    def __init__(self, hello: Hello) -> None:
        self._block_size = hello.block_size
        self._block_seconds = hello.swap_seconds
        self._first, self._end = hello.num_blocks, hello.num_blocks + hello.num_swap_blocks
        self._free = [*reversed(range(self._first, self._end))]
        # The worker swaps out before it swaps in, so a plan never writes the host blocks that it reads.
        self._dropped: list[int] = []
        self._held: dict[Sequence, _Held] = {}

    def begin_plan(self) -> None:
        """Let the next plan write the host blocks that earlier plans have read."""
        self._free += self._dropped
        self._dropped.clear()

    def swap_out(self, sequence: Sequence, blocks: list[int], pool: BlockPool, model: StepTimeModel) -> list[BlockCopy]:
        """Keep the leading `blocks` of a sequence that was just preempted, as many as host blocks are free.

        Only if it takes less time to copy them there and back than to compute them again. Those that other sequences
        use too are left out: they stay in the prefix cache.
        """
        first = next((index for index, block in enumerate(blocks) if pool.is_free(block)), len(blocks))
        count = min(len(blocks) - first, len(self._free))
        if not count or 2 * self._block_seconds * count >= self._recompute_seconds(first, first + count, model):
            return []
        taken = [self._free.pop() for _ in range(count)]
        self._held[sequence] = _Held(first, taken)
        size = self._block_size
        return [BlockCopy(source, target, size) for source, target in zip(blocks[first:], taken, strict=False)]

    def _recompute_seconds(self, first: int, end: int, model: StepTimeModel) -> float:
        """Return what the positions of blocks [first, end) add to steps; 0 before the model can predict."""
        start, stop = first * self._block_size, end * self._block_size
        _, token, kv = model.coefficients
        return (stop - start) * (token + kv * (start + stop + 1) / 2) if model.is_fitted else 0.0

    def find(self, sequence: Sequence, num_shared: int) -> list[Donor]:
        """Return the host blocks that continue the first `num_shared` blocks of a waiting sequence."""
        held = self._held.get(sequence)
        if held is None or num_shared < held.first:
            return []
        return [Donor(block, self._block_size) for block in held.blocks[num_shared - held.first :]]

    def drop(self, sequence: Sequence) -> None:
        """Free the host blocks of a sequence that starts or ends, from the next plan on."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._dropped += held.blocks

    def check(self, epoch: int) -> None:
        """Check every invariant. Raises AssertionError."""
        held = [block for _, blocks in self._held.values() for block in blocks]
        found = sorted([*self._free, *self._dropped, *held])
        assert found == [*range(self._first, self._end)], "a host block twice, or lost"
        for sequence, (first, blocks) in self._held.items():
            assert sequence.state is State.WAITING, "a sequence that does not wait has host blocks"
            assert sequence.epoch == epoch, "a sequence has host blocks of another worker"
            end = (first + len(blocks)) * self._block_size
            assert end <= sequence.num_skippable, "host blocks with a position that needs a row"
