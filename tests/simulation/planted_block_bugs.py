"""Bugs to plant in blocks, slots and the prefix cache. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, always, boundary, drop, never, off_by_one, replace, twice, without

from lineclear.scheduler.core import result_applier
from lineclear.scheduler.core.block_pool import BlockHasher, BlockPool
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.running_batch import RunningBatch

_BLOCKS = (
    Bug("blocks are not released", RunningBatch.free, drop("self.pool.release(sequence.blocks)")),
    Bug("blocks are released twice", RunningBatch.free, twice("self.pool.release(sequence.blocks)")),
    Bug("a shared block is not counted", BlockPool.share, drop("self._references[block] += 1")),
    Bug("a shared block stays evictable", BlockPool.share, drop("self._cached.pop(block, None)")),
    Bug("an evicted block stays published", BlockPool.take, drop("self._unpublish(block)")),
    Bug(
        "the newest block is evicted",
        BlockPool.take,
        replace("_1.popitem(last=False)", "_1.popitem()"),
    ),
    Bug(
        "cached blocks go before empty ones",
        BlockPool.take,
        replace("self._empty", "self._empty and not self._cached", role="test"),
    ),
    Bug("the head of a prefix is evicted first", BlockPool.release, replace("reversed(blocks)", "blocks")),
    Bug(
        "a slot is not released",
        RunningBatch._remove_from_slot,
        drop("heapq.heappush(self.unused_slots, sequence.slot)"),
    ),
    Bug(
        "a single decode takes its block one position late",
        StepPlanner._plan_decodes_one_by_one,
        boundary("sequence.num_planned < len(sequence.blocks) * size"),
    ),
    Bug(
        "a single decode takes its block one position early",
        StepPlanner._plan_decodes_one_by_one,
        off_by_one("sequence.num_planned"),
    ),
    Bug(
        "the decode batch gets no further block",
        DecodeBatch.needing_block,
        never("s.decode_offset + _ == len(s.blocks) * size"),
    ),
    Bug(
        "the decode batch gets a block that is there already",
        DecodeBatch.needing_block,
        always("s.decode_offset + _ == len(s.blocks) * size"),
    ),
    Bug(
        "the decode batch takes blocks that are not free",
        StepPlanner._plan_decodes,
        without("num_blocks > batch.pool.num_free"),
    ),
)

_SLOTS = (
    Bug("slots are handed on with the result", StepPlanner._release_slots, drop("self._batch.release_slot(sequence)")),
    Bug("a decode keeps its slot", StepPlanner._plan_decode_batch, drop("self._finishing += decode_batch.finishing()")),
    Bug(
        "a chunk keeps its slot",
        StepPlanner._add,
        never("sequence.num_planned == sequence.max_len - 1"),
    ),
    Bug(
        "a slot is handed on one row early",
        StepPlanner._add,
        replace("sequence.num_planned == sequence.max_len - 1", "sequence.num_planned >= sequence.max_len - 2"),
    ),
    Bug(
        "the blocks of a last row are freed with the slot",
        RunningBatch.release_slot,
        replace(
            "self.finishing[sequence] = None",
            "self.pool.release(sequence.blocks) or self.finishing.__setitem__(sequence, None)",
        ),
    ),
    Bug(
        "a lost worker takes the sequences with their last row in flight",
        RunningBatch.remove_all,
        replace("(*self.running, *self.finishing)", "self.running"),
    ),
    Bug(
        "a slot is handed on twice",
        RunningBatch._remove_from_slot,
        twice("heapq.heappush(self.unused_slots, sequence.slot)"),
    ),
    Bug(
        "an ended request stays among the last rows",
        RunningBatch.free,
        drop("del self.finishing[sequence]"),
    ),
    Bug(
        "a random slot",
        RunningBatch.admit,
        replace(
            "heapq.heappop(self.unused_slots)",
            "self.unused_slots.pop(__import__('random').randrange(len(self.unused_slots)))",
        ),
        is_random=True,
    ),
)

_PREFIX_CACHE = (
    Bug(
        "the last prompt token is a hit",
        RunningBatch.cached_prefix,
        replace("sequence.num_skippable", "len(sequence.tokens)"),
    ),
    Bug("a block key leaves out the salt", BlockHasher.__call__, replace("cache_salt", 'b""'), times=3),
    Bug("a block key leaves out the block before", BlockHasher.__call__, always("parent is None")),
    Bug(
        "a block that is not full is published",
        RunningBatch.publish,
        replace("range(_1, _2)", "range(_1, -(-sequence.num_computed // size))"),
    ),
    Bug(
        "blocks are published when planned",
        RunningBatch.publish,
        replace("sequence.num_computed", "min(sequence.num_planned, len(sequence.tokens))"),
        times=3,
    ),
    Bug("full blocks of a decode step are not published", DecodeBatch.completing_block, replace("list(_)", "[]")),
    Bug("the prefix cache never hits", RunningBatch.cached_prefix, never("self._prefix_cache")),
    Bug(
        "block keys outlive the block size",
        RunningBatch._leading_blocks,
        replace("self.pool.block_size", "0"),
    ),
    Bug("an emptied prefix cache keeps unused blocks", BlockPool.clear_cache, drop("self._cached.clear()")),
)

_SHARED_WHEN_PLANNED = (
    Bug(
        "prompt blocks are published with the result",
        StepPlanner._add,
        drop("self._batch.publish_planned(sequence, self._step, is_prompt=is_prompt)"),
    ),
    Bug(
        "blocks are published before they are planned",
        RunningBatch.publish_planned,
        replace("min(sequence.num_planned, num_known)", "num_known"),
    ),
    Bug(
        "a block whose last token is in flight is published",
        RunningBatch.publish_planned,
        replace("min(sequence.num_planned, num_known)", "sequence.num_planned"),
    ),
    Bug(
        "sequences that share a block of a bad row go on",
        ResultApplier._restart_readers,
        replace("worker.batch.add_readers(bad)", "()"),
    ),
    Bug(
        "sharing a block that is not confirmed is not noted",
        RunningBatch.admit,
        drop("writes.readers[sequence] = sequence.admission_count"),
    ),
    Bug(
        "blocks of sequences that are computed again are not tainted",
        RunningBatch.add_readers,
        drop("bad |= found"),
    ),
    Bug("void samples are delivered", ResultApplier._restart_readers, drop("sequence.num_void = sequence.in_flight")),
    Bug("a void sample stays known", ResultApplier._append_tokens, drop("sequence.num_known -= 1")),
    Bug(
        "a released block stays in the prefix cache with its row in flight",
        BlockPool.release,
        never("block in self._unconfirmed"),
    ),
    Bug("a block is never confirmed", BlockPool.resolve_pending, drop("del self._unconfirmed[block]")),
    Bug(
        "a shared block is free when its writer is removed",
        BlockPool.release_pending,
        replace("self._references[block] -= 1", "self._references[block] = 0"),
    ),
    Bug(
        "positions with void samples count as computed",
        ResultApplier._restart_readers,
        drop("sequence.max_computed_before = _"),
    ),
    Bug(
        "the block that a row in flight fills is not pending",
        RunningBatch.free,
        replace("sequence.num_computed // self.pool.block_size", "-(-sequence.num_computed // self.pool.block_size)"),
    ),
)

_NON_FINITE_VALUES = (
    Bug(
        "a bad row is delivered",
        result_applier._bad_rows,
        replace("result.bad_rows", "frozenset()"),
        times=2,
    ),
    Bug("a tainted block is not zeroed", BlockPool._taint, drop("self._tainted.add(block)")),
    Bug("a tainted block stays in the prefix cache", BlockPool._taint, drop("self._unpublish(block)")),
    Bug(
        "a token out of the vocabulary is delivered",
        result_applier._bad_rows,
        always("0 <= min(tokens) <= max(tokens) < vocab_size"),
    ),
    Bug(
        "a negative token is delivered",
        result_applier._bad_rows,
        replace("not 0 <= token < vocab_size", "token >= vocab_size"),
    ),
    Bug(
        "blocks with rows in flight are not pending",
        RunningBatch.free,
        never("sequence.num_planned > sequence.num_computed"),
    ),
    Bug("pending writes that were non-finite are forgotten", BlockPool.resolve_pending, never("tainted", role="test")),
    Bug("pending writes are never resolved", RunningBatch.resolve_pending, never("_.last_step <= step", role="test")),
    Bug("a pending block is handed out without zeros", BlockPool.take, without("block in self._pending")),
)

BLOCK_BUGS = (*_BLOCKS, *_SLOTS, *_PREFIX_CACHE, *_SHARED_WHEN_PLANNED, *_NON_FINITE_VALUES)
