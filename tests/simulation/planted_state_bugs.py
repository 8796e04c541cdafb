"""Bugs to plant in recurrent states: what a request begins with, and which states are kept where. See `mutations`."""

from __future__ import annotations

from simulation.mutations import Bugs, always, boundary, drop, never, replace, without

from lineclear.scheduler.core.block_pool import BlockPool
from lineclear.scheduler.core.core_state import WorkerState
from lineclear.scheduler.core.drafts import DraftPlan
from lineclear.scheduler.core.planner import StepPlanner
from lineclear.scheduler.core.result_applier import ResultApplier
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.core.state_pool import StatePool

_LAST = "blocks[count - 1] not in "

STATE_BUGS: Bugs = {
    StatePool: {
        "snapshots have the numbers of slots": replace(
            "range(num_slots, num_slots + num_snapshots)", "range(num_snapshots)"
        ),
        "no state is kept where a prompt leaves a cached prefix": replace("{num_cached, num_full}", "{num_full}"),
        "no state is kept behind the last full block": replace("{num_cached, num_full}", "{num_cached}"),
        "the state that a request begins with is kept again": boundary("count > num_shared"),
        "rows end where no state can be kept": always("self.num_snapshots", role="test"),
        "a prefix is used beyond its last state": never(
            f"count and {_LAST}self._snapshots and {_LAST}self._reached", role="test"
        ),
        "the state in a slot is not used": without(f"{_LAST}self._reached"),
        "no snapshot is used": without(f"{_LAST}self._snapshots"),
        "a use of a snapshot is not noted": drop("self._snapshots.move_to_end(block)"),
        "the most recently used snapshot gives way": replace(
            "self._snapshots.popitem(last=False)", "self._snapshots.popitem()"
        ),
        "a snapshot gives way while others are free": replace(
            "self._free", "self._free and not self._snapshots", role="test"
        ),
        "a plan keeps more states than there are snapshots": replace("islice(_1, self.num_snapshots)", "list(_1)"),
        "a state is kept before its row": replace("self._reached.items()", "self._planned.items()", role="args"),
        "a state is kept again behind later rows": replace(
            "self._reached, self._planned = self._planned, {}",
            "self._reached, self._planned = self._reached | self._planned, {}",
        ),
        "a state that a plan leaves is forgotten": replace(
            "self._reached, self._planned = self._planned, {}", "self._reached, self._planned = {}, {}"
        ),
        "the place of a dropped snapshot is lost": drop("self._free.append(number)"),
        "the state in a slot outlives its block": drop("self._reached.pop(block, None)"),
        "two sequences leave the state behind one block": without("block in self._planned"),
    },
    BlockPool: {
        "a snapshot outlives its block": drop("self.states.drop(block)"),
        "a block with a state gives way": without("self.states.has_state(block)"),
        "a block that gives way stays evictable": drop("del self._cached[block]"),
        "a block that gives way is lost": drop("self._empty.append(block)", after="del self._cached[block]"),
        "the state is kept behind the block of another sequence": replace(
            "self.states is None or self.states.has_state(block)", "True"
        ),
        "part of a block is copied beside its state": always("states is None", role="test"),
    },
    RunningBatch: {
        "the state of a slot is kept for its next sequence": drop("self.pool.states.leave(sequence.slot)"),
        "a boundary lies behind the last token": replace(
            "self.pool.states.boundaries(len(shared), num_cached, sequence.num_skippable // size)",
            "self.pool.states.boundaries(len(shared), num_cached, len(sequence.tokens) // size)",
        ),
        "a cached prefix is used without its state": never("self.pool.states is not None and with_state"),
        "outputs of one prompt do not wait for its state": always("states is None or not states.has_coming"),
        "the state of an answer is kept behind a block that another one stands for": always(
            "end > sequence.num_offered or self.pool.is_published(block)"
        ),
        "a row at a boundary leaves no state": never("sequence.boundaries and sequence.boundaries[0] == end"),
        "the state is kept behind the block before": replace(
            "sequence.blocks[end // self.pool.block_size - 1]",
            "sequence.blocks[max(0, end // self.pool.block_size - 2)]",
        ),
        "the state of a tainted or replaced block is kept": replace(
            "self.pool.states is not None and self.pool.is_published(block)", "self.pool.states is not None"
        ),
        "the states of answers take every snapshot": never("4 * len(self.running) > states.num_snapshots"),
        "a long answer keeps all its states": drop("states.drop(sequence.blocks[old // size - 1])"),
        "the state of an answer is kept behind the block before": replace(
            "sequence.blocks[end // size - 1]", "sequence.blocks[end // size - 2]"
        ),
        "a preemption loses the whole answer": drop("sequence.state_at = end"),
    },
    Sequence: {
        "a row goes on behind a boundary": never("self.boundaries and end > self.boundaries[0]"),
        "positions without a state count as kept": always("self.state_at is None"),
    },
    StepPlanner: {
        "no state of an answer is kept": never("batch.pool.states is not None", role="test"),
        "the state of an answer is that before its row": replace(
            "sequence.decode_offset + decode_step + 1", "sequence.decode_offset + decode_step"
        ),
        "a request begins with the zero state": drop("self.state_copies.append(_)"),
        "the state of a prefix is that of its first block": replace(
            "states.load(shared[-1])", "states.load(shared[0])"
        ),
        "the state is copied to another new slot": replace(
            "StateCopy(_1, sequence.slot)", "StateCopy(_1, self.inits[-1].slot if self.inits else sequence.slot)"
        ),
        "states are kept twice": replace("pool.states.end_plan()", "pool.states.end_plan() * 2"),
    },
    DraftPlan: {"drafts are verified with recurrent state": never("batch.pool.states is not None")},
    WorkerState: {
        "host blocks keep sequences without their state": without("states is None"),
        "states are kept without a prefix cache": always("self._limits.prefix_cache"),
    },
    ResultApplier: {
        "a late mask leaves states behind its position": drop("worker.batch.drop_later_states(sequence)"),
    },
    Scheduler._make_plan: {"copies of states are not sent": replace("tuple(planner.state_copies)", "()")},
}
