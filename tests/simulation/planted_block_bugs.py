"""Bugs to plant in blocks, slots, the prefix cache, and the positions of a sequence. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, always, drop, never, off_by_one, replace, twice, without

from lineclear.scheduler.core import block_pool, running_batch
from lineclear.scheduler.core.block_pool import BlockPool
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.prefix_keys import BlockHasher
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.sequence import Request, Sequence

BLOCK_BUGS: Bugs = {
    BlockHasher: {
        "a block key leaves out the salt": replace("cache_salt", 'b""', times=3),
        "a block key leaves out the block before": always("parent is None"),
    },
    BlockPool: {
        "the newest block is evicted": replace("_1.popitem(last=False)", "_1.popitem()"),
        "cached blocks go before empty ones": replace("self._empty", "self._empty and not self._cached", role="test"),
        "a pending block is handed out without zeros": without("block in self._pending"),
        "cached blocks are evicted before partial ones": replace(
            "self._partial or self._cached", "self._cached or self._partial"
        ),
        "a shared block is not counted": drop("self._references[block] += 1"),
        "a shared block stays evictable": drop("self._cached.pop(block, None)"),
        "the head of a prefix is evicted first": replace("reversed(blocks)", "blocks"),
        "a released block stays in the prefix cache with its row in flight": never("block in self._unconfirmed"),
        "partial blocks are not kept": never("block in self._parts", role="test"),
        "a tainted block is not zeroed": drop("self._tainted.add(block)", after="self._unconfirmed.pop(block, None)"),
        "a tainted block stays in the prefix cache": replace(
            "self._taint(block)", "self._unconfirmed.pop(block, None) or self._tainted.add(block)"
        ),
        "a block is never confirmed": drop("del self._unconfirmed[block]"),
        "pending writes that were non-finite are forgotten": never("tainted", role="test"),
        "positions of the plan being made are copied": replace(
            "self._planned.append(_1)", "self._children.add(block, parent, tokens)"
        ),
        "a partly filled block counts as confirmed when planned": drop("self._unconfirmed[block] = writes"),
        "a block of few positions is partial": replace("len(t) >= least", "True"),
        "an evicted or tainted block is copied": drop("self._children.discard(block)"),
        "an emptied prefix cache keeps unused blocks": drop("self._cached.clear()"),
        "partial blocks outlive the cleared cache": drop("self._parts.clear()"),
    },
    BlockPool.take: {"an evicted block stays published": drop("self._unpublish(block)")},
    BlockPool.release_pending: {
        "a shared block is free when its writer is removed": replace(
            "self._references[block] -= 1", "self._references[block] = 0"
        )
    },
    BlockPool.clear_cache: {"a cleared prefix cache is copied from": drop("self._children = ChildBlocks(_, _)")},
    block_pool: {
        "the block that shares fewer positions is copied": replace(
            "children[max(0, index - 1) : index + 1]", "children[: index + 1][-1:]"
        ),
        "one position too many is copied": off_by_one("(8 * length - differing.bit_length()) // (8 * TOKEN_BYTES)"),
    },
    RunningBatch: {
        "a random slot": replace(
            "heapq.heappop(self.unused_slots)",
            "self.unused_slots.pop(__import__('random').randrange(len(self.unused_slots)))",
        ),
        "sharing a block that is not confirmed is not noted": drop(
            "writes.readers[sequence] = sequence.admission_count"
        ),
        "a copy of a block that is not confirmed is not noted": replace(
            "[*shared, *(donor.block for donor in donors)]", "shared"
        ),
        "copied positions are computed again": replace("donor.num_positions", "0"),
        "blocks are not released": drop("self.pool.release(sequence.blocks)"),
        "blocks are released twice": twice("self.pool.release(sequence.blocks)"),
        "an ended request stays among the last rows": drop("del self.finishing[sequence]"),
        "the block that a row in flight fills is not pending": replace(
            "sequence.num_computed // self.pool.block_size", "-(-sequence.num_computed // self.pool.block_size)"
        ),
        "blocks with rows in flight are not pending": never("sequence.num_planned > sequence.num_computed"),
        "the blocks of a last row are freed with the slot": replace(
            "self.finishing[sequence] = None",
            "self.pool.release(sequence.blocks) or self.finishing.__setitem__(sequence, None)",
        ),
        "a slot is not released": drop("heapq.heappush(self.unused_slots, sequence.slot)"),
        "a slot is handed on twice": twice("heapq.heappush(self.unused_slots, sequence.slot)"),
        "blocks of sequences that are computed again are not tainted": drop("bad |= found"),
        "a request that copied from a reader of a bad row goes on": replace("found.get(writes.sequence)", "None"),
        "pending writes are never resolved": never("_.last_step <= step", role="test"),
        "a lost worker takes the sequences with their last row in flight": replace(
            "(*self.running, *self.finishing)", "self.running"
        ),
        "the block to copy from may follow another prefix": replace(
            "self._keys(sequence)[len(shared)]", "self._keys(sequence)[0]"
        ),
        "admission leaves too little headroom": off_by_one("-(-len(self.running) // 4)", -1),
        "blocks are published before they are planned": replace("min(sequence.num_planned, num_known)", "num_known"),
        "a block whose last token is in flight is published": replace(
            "min(sequence.num_planned, num_known)", "sequence.num_planned"
        ),
        "a block whose last position may be deferred is published": replace(
            "int(sequence.request.is_constrained)", "0"
        ),
        "the partly filled block of a prompt is not offered": replace("end % size", "0"),
        "block keys outlive the block size": replace(
            "sequence.leading_blocks.setdefault(self.pool.block_size, _1)", "sequence.leading_blocks.setdefault(0, _1)"
        ),
    },
    RunningBatch.num_free_slots: {"fewer slots are not kept to": replace("max(0, _)", "len(self.unused_slots)")},
    RunningBatch.by_age: {"running sequences are not sorted by age": replace("sorted(...)", "list(self.running)")},
    RunningBatch.num_held_positions: {"positions of last rows are not held": replace("self.finishing", "()")},
    RunningBatch.cached_prefix: {
        "the last prompt token is a hit": replace("sequence.num_skippable", "len(sequence.tokens)"),
        "the prefix cache never hits": never("self._prefix_cache"),
    },
    RunningBatch.find_donors: {
        "the position of the last token is copied": replace("sequence.num_skippable", "len(tokens)")
    },
    RunningBatch.publish: {
        "a block that is not full is published": replace(
            "range(_1, _2)", "range(_1, -(-sequence.num_computed // size))"
        ),
        "blocks are published when planned": replace(
            "sequence.num_computed", "min(sequence.num_planned, len(sequence.tokens))", times=3
        ),
    },
    running_batch: {
        "a preempted sequence keeps its drafts": drop("sequence.num_drafts = 0"),
        "a recovered request keeps its planned positions": replace("sequence.num_planned = _1 = _2 = 0", "_1 = _2 = 0"),
    },
    DecodeBatch: {
        "the keys and values of a decode step are not counted": without("self._sum_of_offsets"),
        "a joining sequence has no row": drop(
            "self._cached_rows = None", after="self._by_last_step.setdefault(_, {})[sequence] = None"
        ),
        "the tokens of a decode step are one index late": off_by_one("offset + 1 - sequence.prompt_len"),
        "a sequence rests after it left the decode batch": drop("self.resting.pop(sequence, None)"),
        "a sequence that left the decode batch counts as a member": drop("sequence.in_decode_batch = False"),
        "a sequence leaves the decode batch without sync": drop("self.sync(sequence)"),
        "the decode batch gets no further block": never("s.decode_offset + _ == len(s.blocks) * size"),
        "the decode batch gets a block that is there already": always("s.decode_offset + _ == len(s.blocks) * size"),
        "one decode step too many": replace("self._by_last_step.get(...)", "()"),
        "a sequence that rejoined counts as one that stayed": without("sequence.decode_joined_at > decode_step"),
        "changed members are taken for the current rows": always("rows is self._cached_rows"),
    },
    DecodeBatch.leave: {"the cached rows outlive a member": drop("self._cached_rows = None")},
    DecodeBatch.completing_block: {"full blocks of a decode step are not published": replace("list(_)", "[]")},
    Request: {"a prefix is shared across adapters": replace("self.cache_salt + self.adapter", "self.cache_salt")},
    Request.expected_len: {"an expected length is taken for the whole length": replace("len(self.prompt) + _1", "_1")},
    Request.max_len: {"the last position of a vector is not computed": off_by_one("1", -1)},
    Sequence: {
        "a sequence is planned behind a void sample": without("self.num_void"),
        "one position too many is planned": off_by_one("self.max_len - 1"),
        "a stop token is missed at min_tokens + 1": off_by_one("self.request.sampling.min_tokens"),
        "a row scores the last prompt token, too": replace("min(end, last)", "end"),
        "a row scores positions before the first": never("self.num_planned < self.num_scored"),
        "the vector is that of the last position of each row": always("end == self.prompt_len"),
    },
    Sequence.num_unplanned: {"a sequence is planned on while its drafts are in flight": never("self.num_drafts")},
    Sequence.num_skippable: {
        "a scored position is a cache hit": never("self.has_scores_left"),
        "the mean leaves out cached positions": never("pooling.kind is PoolingKind.MEAN"),
    },
    Sequence.next_row: {"reported positions are scored again": replace("self.num_scored", "0", times=2)},
}
