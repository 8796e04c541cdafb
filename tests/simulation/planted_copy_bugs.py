"""Bugs to plant in what concerns copies of partly equal blocks. See `mutations` for operators and patterns."""

from __future__ import annotations

from simulation.mutations import Bug, drop, never, off_by_one, replace

from lineclear.scheduler.core import child_blocks
from lineclear.scheduler.core.block_pool import BlockPool
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler

COPY_BUGS = (
    Bug(
        "one position too many is copied",
        child_blocks._num_common,
        off_by_one("(8 * length - differing.bit_length()) // (8 * TOKEN_BYTES)"),
    ),
    Bug(
        "the position of the last token is copied",
        RunningBatch.find_donor,
        replace("sequence.num_skippable", "len(tokens)"),
    ),
    Bug(
        "positions of the plan being made are copied",
        BlockPool.note_writes,
        replace("self._planned.append(_1)", "self._children.add(block, parent, tokens)"),
    ),
    Bug(
        "the block to copy from may follow another prefix",
        RunningBatch.find_donor,
        replace("self._keys(sequence)[len(shared)]", "self._keys(sequence)[0]"),
    ),
    Bug(
        "a copy of a block that is not confirmed is not noted",
        RunningBatch.admit,
        replace("[*shared, donor.block]", "shared"),
    ),
    Bug(
        "a request that copied from a reader of a bad row goes on",
        RunningBatch.add_readers,
        replace("found.get(writes.sequence)", "None"),
    ),
    Bug(
        "cached blocks are evicted before partial ones",
        BlockPool.take,
        replace("self._partial or self._cached", "self._cached or self._partial"),
    ),
    Bug("partial blocks are not kept", BlockPool.release, never("block in self._parts", role="test")),
    Bug("a block of few positions is partial", BlockPool.end_plan, replace("len(t) >= least", "True")),
    Bug("partial blocks outlive the cleared cache", BlockPool.clear_cache, drop("self._parts.clear()")),
    Bug(
        "an evicted or tainted block is copied",
        BlockPool._unpublish,
        drop("self._children.discard(block)"),
    ),
    Bug(
        "a partly filled block counts as confirmed when planned",
        BlockPool.note_writes,
        drop("self._unconfirmed[block] = writes"),
    ),
    Bug(
        "copied positions are computed again",
        RunningBatch.admit,
        replace("donor.num_positions", "0"),
    ),
    Bug("a copied block is zeroed", Scheduler.plan, never("copies and zero_blocks")),
    Bug(
        "the block that shares fewer positions is copied",
        child_blocks._neighbours,
        replace("children[max(0, index - 1) : index + 1]", "children[: index + 1][-1:]"),
    ),
    Bug(
        "a cleared prefix cache is copied from",
        BlockPool.clear_cache,
        drop("self._children = ChildBlocks(_, _)"),
    ),
    Bug("the copy is made to the wrong block", StepPlanner._start, replace("taken[0]", "taken[-1]")),
    Bug(
        "the partly filled block of a prompt is not offered",
        RunningBatch.publish_planned,
        replace("end % size", "0"),
    ),
)
