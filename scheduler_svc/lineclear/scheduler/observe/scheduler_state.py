"""The scheduler at one moment, for observers: queue, slots and KV blocks as a message. There is no content in it."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration

from lineclear.scheduler.core.core_state import SharedState, WorkerState
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.sequence import Sequence
from lineclear.v1 import steps_pb2 as pb

MAX_WAITING = 64
"""Waiting requests in a state."""

_OF_START = ("load_seconds", "weight_bytes", "kv_cache_bytes", "step_memory_bytes")
"""Figures that a worker joins with."""

# The code of a block with this many references: see WatchedWorker.block_map in steps.proto.
_CODES = bytes([0, *range(2, 256), 255])


class TakenState(NamedTuple):
    """A state without the maps of blocks, and what the maps are made of: the engine's thread only copies it."""

    message: pb.SchedulerState
    blocks: tuple[tuple[bytes, tuple[int, ...]], ...] = ()
    """Of each worker: the reference counts, and the free blocks that keep a prefix."""

    def with_block_maps(self) -> pb.SchedulerState:
        """Return a copy of the message with the map of each worker."""
        message = pb.SchedulerState()
        message.CopyFrom(self.message)
        for worker, (references, cached) in zip(message.workers, self.blocks, strict=True):
            codes = bytearray(references.translate(_CODES))
            for block in cached:
                codes[block] = 1
            worker.block_map = bytes(codes)
        return message


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def take_state(core: SharedState, indices: dict[int, int], now: float, num_workers_wanted: int) -> TakenState:
    """Return the state of the core. `indices`: the small number of each worker, by epoch. On the engine's thread.

    It takes about two microseconds for each running request, and one for 100 blocks.
    """
    workers = [(indices[epoch], worker) for epoch, worker in core.workers.items()]
    pools = [worker.batch.pool for _, worker in workers]
    blocks = tuple((pool.reference_counts(), pool.cached_blocks()) for pool in pools)
    counters = core.counters
    message = pb.SchedulerState(
        taken_at=duration(now),
        draining=core.draining,
        num_waiting=len(core.fresh) + len(core.resuming),
        num_tokens_waiting=core.fresh.num_tokens + core.resuming.num_tokens,
        waiting=_waiting(core, now),
        running=[_running(index, sequence, w.batch) for index, w in workers for sequence in w.batch.running],
        workers=[_worker(index, w, counts) for (index, w), (counts, _) in zip(workers, blocks, strict=True)],
        generation_tokens=counters.generation_tokens,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        preemptions=counters.preemptions,
        num_workers_wanted=num_workers_wanted,
    )
    return TakenState(message, blocks)


def _waiting(core: SharedState, now: float) -> list[pb.WaitingRequest]:
    """Return the requests that are served next, in their order."""
    heads = chain(islice(core.fresh, MAX_WAITING), islice(core.resuming, MAX_WAITING))
    return [
        pb.WaitingRequest(
            request=sequence.number,
            prompt_tokens=sequence.prompt_len,
            max_tokens=sequence.request.max_tokens,
            waited=duration(now - sequence.arrival),
            is_resuming=sequence.started_at is not None,
        )
        for sequence in sorted(heads, key=lambda s: s.queue_key)[:MAX_WAITING]
    ]


def _running(worker: int, sequence: Sequence, batch: RunningBatch) -> pb.RunningRequest:
    position = sequence.num_planned
    if sequence.in_decode_batch:  # its own fields are as of the last sync
        position = sequence.decode_offset + batch.decode_batch.decode_step + 1
    return pb.RunningRequest(
        request=sequence.number,
        worker=worker,
        slot=sequence.slot,
        prompt_tokens=sequence.prompt_len,
        max_tokens=sequence.request.max_tokens,
        position=position,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
    )


def _worker(index: int, worker: WorkerState, references: bytes) -> pb.WatchedWorker:
    batch, pool = worker.batch, worker.batch.pool
    num_used = len(references) - references.count(0)
    states = pool.states
    of_states: dict[str, Any] = (
        {}
        if states is None
        else {
            "num_state_snapshots": states.num_snapshots,
            "state_snapshots_used": states.num_used,
            "state_snapshot_hits": states.num_hits,
        }
    )
    return pb.WatchedWorker(
        worker=index,
        epoch=worker.epoch,
        device=worker.hello.device,
        num_slots=batch.num_slots,
        num_running=len(batch.running),
        steps_in_flight=len(worker.inflight),
        steps=worker.step,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        blocks_used=num_used,
        blocks_shared=num_used - references.count(1),
        blocks_cached=pool.num_cached,
        **{name: getattr(worker.hello, name) for name in _OF_START},
        **of_states,
    )
