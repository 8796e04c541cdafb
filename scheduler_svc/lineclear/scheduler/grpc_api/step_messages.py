"""Build the messages of WatchSteps from steps and states."""

from __future__ import annotations

from collections import OrderedDict

from google.protobuf.duration_pb2 import Duration

from lineclear.scheduler.steps.scheduler_state import NumberedWorker, SchedulerState
from lineclear.scheduler.steps.step_history import ExecutedStep
from lineclear.scheduler.steps.step_record import RowKind
from lineclear.v1 import steps_pb2 as pb

_KINDS = {
    RowKind.PREFILL: pb.ROW_KIND_PREFILL,
    RowKind.DECODE: pb.ROW_KIND_DECODE,
    RowKind.RECOMPUTE: pb.ROW_KIND_RECOMPUTE,
}


class StepMessages:
    """Builds the message of each step once for all watchers, and keeps the last `size`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._built: OrderedDict[int, pb.StepRecord] = OrderedDict()

    def of(self, step: ExecutedStep, wall_offset: float) -> pb.StepRecord:
        """Return the message of a step. `wall_offset` converts its time to that of the wall clock."""
        message = self._built.get(step.number)
        if message is None:
            message = self._built[step.number] = _step(step, wall_offset)
            if len(self._built) > self._size:
                self._built.popitem(last=False)
        return message


def _step(step: ExecutedStep, wall_offset: float) -> pb.StepRecord:
    found = step.record()
    rows = found.rows
    message = pb.StepRecord(
        number=found.number,
        worker=found.worker,
        epoch=found.epoch,
        step=found.step,
        planned_at=_duration(found.planned_at),
        step_time=_duration(found.step_seconds),
        total_time=_duration(found.total_seconds),
        rows=pb.StepRows(
            slot=rows.slot,
            request=rows.request,
            start=rows.start,
            num_tokens=rows.num_tokens,
            cached_tokens=rows.cached_tokens,
            kind=[_KINDS[kind] for kind in rows.kind],
            samples=rows.samples,
        ),
        started=found.started,
        ended=found.ended,
        preempted=found.preempted,
        num_waiting=found.num_waiting,
        num_running=found.num_running,
        num_slots=found.num_slots,
        blocks_used=found.blocks_used,
        blocks_cached=found.blocks_cached,
        num_blocks=found.num_blocks,
    )
    message.planned_time.FromMicroseconds(round((found.planned_at + wall_offset) * 1e6))
    return message


def state_message(state: SchedulerState, *, with_block_map: bool) -> pb.SchedulerState:
    """Build the message of a state."""
    core, counters = state.core, state.core.counters
    return pb.SchedulerState(
        taken_at=_duration(state.taken_at),
        draining=core.draining,
        num_waiting=core.num_waiting,
        num_tokens_waiting=core.num_tokens_waiting,
        waiting=[
            pb.WaitingRequest(
                request=waiting.number,
                prompt_tokens=waiting.prompt_len,
                max_tokens=waiting.max_tokens,
                waited=_duration(state.taken_at - waiting.arrival),
                is_resuming=waiting.is_resuming,
            )
            for waiting in core.waiting
        ],
        running=[
            pb.RunningRequest(
                request=running.number,
                worker=worker.index,
                slot=running.slot,
                prompt_tokens=running.prompt_len,
                max_tokens=running.max_tokens,
                position=running.position,
                cached_tokens=running.cached_tokens,
                preemptions=running.preemptions,
            )
            for worker in state.workers
            for running in worker.view.running
        ],
        workers=[_worker(worker, with_block_map) for worker in state.workers],
        generation_tokens=counters.generation_tokens,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        preemptions=counters.preemptions,
        num_workers_wanted=state.num_workers_wanted,
    )


def _worker(worker: NumberedWorker, with_block_map: bool) -> pb.WatchedWorker:
    view = worker.view
    return pb.WatchedWorker(
        worker=worker.index,
        epoch=view.epoch,
        device=view.device,
        num_slots=view.num_slots,
        num_running=len(view.running),
        steps_in_flight=view.steps_in_flight,
        steps=view.steps,
        num_blocks=len(view.references),
        block_size=view.block_size,
        blocks_used=worker.blocks_used,
        blocks_shared=worker.blocks_shared,
        blocks_cached=len(view.cached),
        block_map=worker.block_map if with_block_map else b"",
    )


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
