"""Model of the host blocks of a worker: whose they are, and which copies to and from them a plan has."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from simulation.invariant_error import require
from simulation.model_blocks import ModelBlocks
from simulation.model_sequence import ModelSequence

from lineclear.scheduler.core.stats import WorkerSnapshot
from lineclear.wire.messages import BlockCopy, Hello


class ModelSwap:
    """The host blocks of one worker."""

    def __init__(self, hello: Hello) -> None:
        self._first, self._seconds = hello.num_blocks, hello.swap_seconds
        self._numbers = range(hello.num_blocks, hello.num_blocks + hello.num_swap_blocks)
        self._held: dict[ModelSequence, tuple[int, list[int]]] = {}  # index of the first block, and host blocks
        self._reading: set[int] = set()  # host blocks that were dropped since the plan before, or by this one
        self._outs: deque[BlockCopy] = deque()

    def begin_plan(self, copies: Sequence[BlockCopy]) -> list[BlockCopy]:
        """Keep the copies to host blocks of a plan to be checked; return the others."""
        self._reading.clear()
        self._outs = deque(copy for copy in copies if copy.target >= self._first)
        return [copy for copy in copies if copy.target < self._first]

    def end_plan(self) -> None:
        require(not self._outs, "I31", "only preempted sequences are swapped out")

    def wanted(self, victim: ModelSequence, blocks: ModelBlocks, measured: WorkerSnapshot) -> tuple[int, list[int]]:
        """Return which blocks of a running sequence a preemption swaps out, behind how many others."""
        num_final = min(victim.num_computed, victim.num_cacheable) // blocks.size
        if not self._numbers or blocks.reads_unconfirmed(victim):
            num_final = 0
        first = next((i for i in range(num_final) if blocks.users(victim.blocks[i]) == {victim}), num_final)
        taken = {block for _, held in self._held.values() for block in held} | self._reading
        end = min(num_final, first + len(self._numbers) - len(taken))
        token, kv = measured.step_time[1:]
        positions = range(first * blocks.size, end * blocks.size)
        seconds = sum(token + kv * (position + 1) for position in positions)
        is_cheaper = measured.is_fitted and 2 * self._seconds * (end - first) < seconds * (1 - 1e-9)
        return first, victim.blocks[first:end] if is_cheaper else []

    def swap_out(self, victim: ModelSequence, first: int, wanted: list[int], size: int) -> None:
        """Check the copies of a victim, which come next."""
        held: list[int] = []
        for block in wanted:
            require(bool(self._outs), "I31", "a preempted sequence is swapped out if that is cheaper")
            copy = self._outs.popleft()
            require(copy.source == block, "I31", "the confirmed blocks of a victim are swapped out, in order")
            require(copy.num_positions == size, "I31", "whole blocks are swapped out")
            taken = {block for _, blocks in self._held.values() for block in blocks} | {*held} | self._reading
            require(copy.target in self._numbers and copy.target not in taken, "I31", "a host block that is free")
            held.append(copy.target)
        if held:
            self._held[victim] = first, held

    def find(self, sequence: ModelSequence, num_shared: int) -> list[int]:
        """Return the host blocks that continue the `num_shared` cached blocks of a waiting sequence."""
        first, held = self._held.get(sequence, (0, []))
        return held[num_shared - first :] if num_shared >= first else []

    def drop(self, sequence: ModelSequence) -> None:
        """Note that a sequence starts or ends."""
        self._reading |= {*self._held.pop(sequence, (0, []))[1]}
