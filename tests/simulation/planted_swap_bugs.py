"""Bugs to plant in host blocks: which blocks are swapped, where to, and who owns them. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, always, drop, off_by_one, replace, twice

from lineclear.scheduler.core.core_state import LiveRequests
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.swap_space import SwapSpace

SWAP_BUGS: Bugs = {
    SwapSpace: {
        "the host blocks of another sequence are freed": replace(
            "self._held.pop(sequence, None)", "self._held.pop(next(iter(self._held), sequence), None)"
        ),
        "host blocks are freed twice": twice("self._dropped += held.blocks"),
        "a host block is not freed": replace("self._dropped += held.blocks", "self._dropped.extend(held.blocks[1:])"),
        "a host block is written by the plan that reads it": replace(
            "self._dropped += held.blocks", "self._free.extend(held.blocks)"
        ),
        "blocks are swapped in one block late": off_by_one("num_shared - held.first"),
        "blocks are swapped in behind a gap": replace("held is None or num_shared < held.first", "held is None"),
        "blocks are swapped out to the places of others": replace("blocks[first:]", "blocks"),
        "blocks that others use are swapped out": always("pool.is_free(block)"),
        "more blocks are swapped out than are free": replace(
            "min(len(blocks) - first, len(self._free))", "len(blocks) - first"
        ),
        "the way back takes no time": replace("2 * self._block_seconds * count", "self._block_seconds * count"),
        "blocks are swapped before steps are measured": always("model.is_fitted"),
        "the positions before do not cost": replace("start + stop + 1", "stop - start + 1"),
        "host blocks are not free again": drop("self._free += self._dropped"),
    },
    RunningBatch.confirmed_blocks: {
        "blocks with rows in flight are swapped out": replace("sequence.num_computed", "sequence.num_planned"),
        "positions that need a row are swapped out": replace(
            "min(sequence.num_computed, sequence.num_skippable)", "sequence.num_computed"
        ),
    },
    StepPlanner: {
        "swapped positions count as hits": replace("start - num_swapped", "start"),
        "a request that runs again keeps its host blocks": drop("state.drop_swapped(sequence)"),
        "blocks are swapped out for nobody": drop("self.copies += copies"),
    },
    LiveRequests._free: {"an ended request keeps its host blocks": drop("state.drop_swapped(sequence)")},
}
